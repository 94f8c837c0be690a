//! Checks a round without one member: neither its values nor its weight may count.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use farflung::base::{Link, Nanos};
use farflung::comm::Transport;
use farflung::comm::simulated::{Faults, cluster_with};
use farflung::config::choice::BalanceKind;
use farflung::optim::sync::{METHODS, OnMemberLoss, SyncMethod};
use farflung::parallel::Plan;
use farflung::train::{Failure, Job, Moment, Quiet, Report as Ended, connections, elastic, run_workers};
use farflung::{Error, Existing, RunDir, TrainConfig};

use super::{ROUNDED, STEPS, Shared, UNEVEN, all};
use crate::harness::{Report, Threshold};
use crate::workers::{JobTransport, again, on_all, relative_l2};

/// The rank that is lost, before it has contributed to the first round.
const LOST: u32 = 1;

/// Outcome of each member.
type Fates = Vec<farflung::Result<Option<Ended>>>;

fn link() -> Result<Link> {
    Ok("100mbit,1ms".parse()?)
}

/// Returns the microbatches of the remaining members in the round in which one is lost.
fn remaining_microbatches() -> Vec<u32> {
    let stays = |(rank, count): (usize, u32)| (rank != LOST as usize).then_some(count);
    UNEVEN.into_iter().enumerate().filter_map(stays).collect()
}

/// Microbatches in the steps after the loss. When members change, shares start equal again.
const AFTER: [u32; 3] = [2, 2, 2];

/// Returns a job whose replicas have these numbers of microbatches.
fn job(base: &Job, config: TrainConfig, microbatches: &[u32]) -> Result<Job> {
    let (workers, balance) = (microbatches.len(), BalanceKind::Equal);
    let deadline = Nanos::from_millis(2000);
    let config = TrainConfig { workers, balance, deadline, eval_batches: 1, ..config };
    let job = again(base, config, JobTransport::Simulated(link()?));
    let plan = Plan { microbatches: microbatches.to_vec(), ..Plan::from(&job.plan) };
    Ok(job.with_plan(plan)?)
}

/// Runs a job whose members join and leave, and loses one member in the first round. Each member's folder is
/// `folder/RANK`.
fn without(job: &Job, folder: &Path) -> Result<Fates> {
    let job = Job { failure: Some(Failure { rank: LOST, step: 1, moment: Moment::Begun }), ..job.clone() };
    let ends = cluster_with(&job.topology()?, &Faults::new());
    let ends = ends.into_iter().map(|end| end as Arc<dyn Transport>).collect();
    let mut connections = elastic::connections(&job, ends, &[], true)?;
    for (rank, connection) in connections.iter_mut().enumerate() {
        let run = RunDir::open(&folder.join(rank.to_string()), Existing::Refuse)?;
        connection.place = connection.place.take().map(|place| place.saves_in(run));
    }
    Ok(run_workers(&job, connections, &mut Quiet))
}

/// Returns the hashes of the remaining members' parameters.
fn hashes(fates: &Fates) -> Result<Vec<&str>> {
    let left = fates.iter().enumerate().filter(|(rank, _)| *rank != LOST as usize);
    left.map(|(rank, fate)| match fate {
        Ok(Some(report)) => Ok(report.hash.as_str()),
        Ok(None) => anyhow::bail!("member {rank} has no report"),
        Err(error) => anyhow::bail!("member {rank}: {error}"),
    })
    .collect()
}

/// Adds rows for every method without one member.
pub(super) fn rows(report: &mut Report<'_>, base: &Job, shared: &Shared<'_>) -> Result<()> {
    let folder = shared.folder.join("missing");
    for (number, flags) in all().iter().enumerate() {
        let config = shared.config(flags)?;
        let (row, folder) = (config.sync.row(), folder.join(number.to_string()));
        match row.on_member_loss {
            OnMemberLoss::Unsupported(reason) => refused(report, (base, config), (flags, reason), &folder)?,
            OnMemberLoss::MeanOfOthers if row.each_step => each_step(report, (base, config), flags, &folder)?,
            // Codecs and outer steps after the mean are the same as in any round. The mean itself is checked
            // below.
            OnMemberLoss::MeanOfOthers => {}
        }
    }
    let local = |row: &&SyncMethod| row.on_member_loss == OnMemberLoss::MeanOfOthers && !row.each_step;
    let names: Vec<&str> = METHODS.iter().filter(local).map(|row| row.name).collect();
    ensure!(
        names == ["diloco", "des-loc"],
        "a method with local steps is not checked for a lost member: {names:?}"
    );
    let diloco = "--sync diloco --sync-every 2 --outer-lr 1 --outer-momentum 0 --clip 0";
    mean_of_others(report, (base, shared), (diloco, 2), &folder.join("diloco"))?;
    let moments = "--first-moment-every 1 --second-moment-every 1";
    let des_loc = format!("--sync des-loc --sync-every 1 {moments} --clip 0");
    mean_of_others(report, (base, shared), (&des_loc, 1), &folder.join("des-loc"))
}

/// Checks that a method that does not support such runs gives its reason.
fn refused(
    report: &mut Report<'_>,
    (base, config): (&Job, TrainConfig),
    (flags, reason): (&str, &str),
    folder: &Path,
) -> Result<()> {
    let fates = without(&again(base, config, JobTransport::Simulated(link()?)), folder)?;
    let says = |error: &Error| error.to_string().contains(reason);
    let taken = fates.iter().filter(|fate| !fate.as_ref().is_err_and(says)).count();
    let metric =
        format!("{flags}: members that train in a run whose members join and leave, although {reason}");
    report.row(&metric, taken as f64, "of 4", Threshold::AtMost(0.0))
}

/// Checks a method that averages at each step: after the loss, the run equals one that had only the other three
/// replicas from the start.
fn each_step(
    report: &mut Report<'_>,
    (base, config): (&Job, TrainConfig),
    flags: &str,
    folder: &Path,
) -> Result<()> {
    let others = job(base, config.clone(), &AFTER)?;
    let others = run_workers(&others, connections(&others, None)?, &mut Quiet);
    let others = others.into_iter().next().context("the job has no ranks")??;
    let others = others.context("the first rank has no report")?.hash;
    let fates = without(&job(base, config, &UNEVEN)?, folder)?;
    let apart = hashes(&fates)?.into_iter().filter(|hash| **hash != others).count();
    let metric = format!(
        "{flags}: members whose bits after the loss of one replica of {UNEVEN:?} microbatches differ from a \
         run of {AFTER:?} alone"
    );
    report.row(&metric, apart as f64, "of 3", Threshold::AtMost(0.0))
}

/// Parameters and gradients of a replica that trained alone.
struct Alone {
    params: BTreeMap<String, Vec<f32>>,
    grads: BTreeMap<String, Vec<f32>>,
}

/// Checks a method with local steps: parameters after the round are the others' mean by tokens. So are Adam's
/// moments if the method averages them.
fn mean_of_others(
    report: &mut Report<'_>,
    (base, shared): (&Job, &Shared<'_>),
    (flags, every): (&str, u64),
    folder: &Path,
) -> Result<()> {
    let config = TrainConfig { steps: every, ..shared.config(flags)? };
    let (beta1, beta2) = (config.beta1, config.beta2);
    let fates = without(&job(base, config, &UNEVEN)?, folder)?;
    let hashes = hashes(&fates)?;
    ensure!(hashes.iter().all(|hash| *hash == hashes[0]), "{flags}: members differ after the last step");
    let own = "--sync diloco --sync-every 900 --clip 0";
    let own = job(base, TrainConfig { steps: STEPS, ..shared.config(own)? }, &UNEVEN)?;
    let alone = on_all(&own, |rank| {
        for _ in 0..every {
            rank.step(false)?;
        }
        let by_name = |flat: &farflung::tensor::Tensor| -> Result<BTreeMap<String, Vec<f32>>> {
            let all = flat.to_vec::<f32>()?;
            let params = rank.stage().layout().params().iter();
            Ok(params.map(|p| (p.name.clone(), all[p.range()].to_vec())).collect())
        };
        Ok(Alone { params: by_name(rank.params())?, grads: by_name(rank.grads())? })
    })?;
    let weights: f64 = remaining_microbatches().into_iter().map(f64::from).sum();
    let mean = |of: &dyn Fn(&Alone, usize) -> f64, count: usize| -> Vec<f32> {
        let others = || alone.iter().enumerate().filter(|(rank, _)| *rank != LOST as usize);
        let sum = |i| others().map(|(rank, own)| f64::from(UNEVEN[rank]) * of(own, i)).sum::<f64>();
        (0..count).map(|i| (sum(i) / weights) as f32).collect()
    };
    let checkpoint = folder.join("0").join(format!("step-{every:08}"));
    let (params, states) = (
        tensors(&checkpoint.join("model.safetensors"))?,
        tensors(&checkpoint.join("optimizer.safetensors"))?,
    );
    let names = || alone[0].params.iter().map(|(name, values)| (name, values.len()));
    let mut off: BTreeMap<&str, (Vec<f32>, Vec<f32>)> = BTreeMap::new();
    for (name, count) in names() {
        let mut compare = |what, found: &[f32], expected: Vec<f32>| {
            let (all, wanted) = off.entry(what).or_default();
            all.extend_from_slice(found);
            wanted.extend(expected);
        };
        let value = |own: &Alone, i: usize| f64::from(own.params[name][i]);
        compare("parameters", params.get(name).context("no such tensor")?, mean(&value, count));
        if every > 1 {
            continue;
        }
        // After the first step, the moments follow from the gradient.
        let gradient = |own: &Alone, i: usize| f64::from(own.grads[name][i]);
        let first = |own: &Alone, i: usize| (1.0 - beta1) * gradient(own, i);
        let second = |own: &Alone, i: usize| (1.0 - beta2) * gradient(own, i) * gradient(own, i);
        let state = |kind: &str| {
            let tail = format!(".{kind}/{name}");
            let found = states.iter().find(|(key, _)| key.ends_with(&tail));
            found.map(|(_, values)| values).with_context(|| format!("no state {tail}: {:?}", states.keys()))
        };
        compare("first moments", state("m")?, mean(&first, count));
        compare("second moments", state("v")?, mean(&second, count));
    }
    for (what, (found, expected)) in off {
        let metric = format!(
            "{flags}: {what} after a round without one replica of {UNEVEN:?} microbatches compared with the \
             others' mean by tokens"
        );
        report.row(&metric, relative_l2(&found, &expected), "", Threshold::AtMost(ROUNDED))?;
    }
    Ok(())
}

/// Returns the f32 tensors of a file, by name.
fn tensors(path: &Path) -> Result<BTreeMap<String, Vec<f32>>> {
    let bytes = std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
    let (len, rest) = bytes.split_first_chunk::<8>().context("the file has no header")?;
    let (header, values) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header)?;
    let offset =
        |tensor: &serde_json::Value, i: usize| tensor["data_offsets"][i].as_u64().unwrap_or(0) as usize;
    let read = |tensor: &serde_json::Value| {
        let bytes = &values[offset(tensor, 0)..offset(tensor, 1)];
        bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    };
    let all = header.iter().filter(|(name, _)| *name != "__metadata__");
    Ok(all.map(|(name, tensor)| (name.clone(), read(tensor))).collect())
}
