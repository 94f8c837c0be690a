//! Trains runs that together contain every pair of choices that can be combined, and checks that each other
//! pair is rejected with its reason.

use std::collections::BTreeMap;

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::{Link, Rank};
use farflung::config::choice::TransportKind;
use farflung::train::combination::{AXES, covering, refusal_of};
use farflung::train::{Job, Trainer};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, config, job, on_all};
use farflung::transports::SIMULATED;

pub(crate) const BENCH: Bench = Bench {
    name: "compositions",
    claim: "every pair of schedule, codec, boundary, method, optimizer, tensor and expert parallelism, paths, precision, \
            recompute, sampling, algorithm and transport trains three steps to finite losses with equal replicas, or is rejected \
            with the reason that the table gives",
    source: "ours; covering arrays: Cohen et al. 1997, AETG",
    seed: 1337,
    run,
};

const STEPS: u64 = 3;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let found = covering();
    let base = TrainConfig {
        layers: Some(4),
        heads: Some(2),
        dim: Some(8),
        context: Some(8),
        batch: 1,
        steps: STEPS,
        sync_every: 2,
        route_tokens: 4,
        ..config(report.seed(), false)
    };
    let whole = job(TrainConfig { workers: 1, ..base.clone() }, JobTransport::Simulated(Link::FREE))?;
    // Slices of sequences need a router that takes each token by itself.
    let mixture = TrainConfig {
        model: "mixtral-nano".to_owned(),
        heads: Some(4),
        balance_loss: Some(0.0),
        workers: 1,
        ..base.clone()
    };
    let mixture = job(mixture, JobTransport::Simulated(Link::FREE))?;
    let model = |config: &TrainConfig| if config.expert > 1 { &mixture } else { &whole };
    let each = if options.quick { 12 } else { 1 };
    let (mut runs, mut failed) = (0, 0);
    for values in found.runs.iter().step_by(each) {
        let mut config = base.clone();
        for (axis, value) in AXES.iter().zip(values) {
            (axis.set)(&mut config, value);
        }
        let trained = made(model(&config), config).and_then(|job| trains(&job));
        runs += 1;
        if let Err(error) = trained {
            failed += 1;
            report.row(&format!("{}: {error:#}", values.join(" ")), f64::NAN, "", Threshold::None)?;
        }
    }
    let mut wrong = 0;
    for pair in &found.refused {
        let mut config = base.clone();
        config.stages = 2;
        for (axis, value) in [&pair.a, &pair.b] {
            (axis.set)(&mut config, value);
        }
        let reason = refusal_of(&config).map(|refusal| refusal.to_string());
        let said = made(model(&config), config).err().map(|error| error.to_string());
        wrong += u32::from(said.is_none() || said != reason);
    }
    report.row("pairs of choices that can be combined", found.pairs as f64, "", Threshold::None)?;
    report.row(
        "runs that together contain all of these pairs",
        found.runs.len() as f64,
        "",
        Threshold::None,
    )?;
    report.row("runs that trained here", f64::from(runs), "", Threshold::None)?;
    report.row(
        "runs that failed, or ended with different replicas",
        f64::from(failed),
        "",
        Threshold::AtMost(0.0),
    )?;
    report.row("pairs that must be rejected", found.refused.len() as f64, "", Threshold::None)?;
    report.row(
        "pairs that were rejected for another reason, or accepted",
        f64::from(wrong),
        "",
        Threshold::AtMost(0.0),
    )
}

/// Returns a job of two replicas with the choices of `config`.
fn made(whole: &Job, mut config: TrainConfig) -> Result<Job> {
    let workers = 2 * config.stages * config.tensor;
    config.workers = workers;
    config.microbatches = (config.stages > 1).then_some(4);
    if config.transport == TransportKind::of(&SIMULATED) {
        config.link = Link::FREE;
    }
    Ok(whole.with_config(config, workers)?)
}

fn trains(job: &Job) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ranks = on_all(job, |rank: &mut Trainer| {
        let own = format!("rank-{}", rank.comm().rank());
        rank.keep_state_in(job, &folder.path().join(own))?;
        let losses = (0..STEPS).map(|_| Ok(rank.step(false)?.loss)).collect::<Result<Vec<f64>>>()?;
        Ok((losses, rank.hash()?))
    })?;
    anyhow::ensure!(
        ranks.iter().all(|(losses, _)| losses.iter().all(|loss| loss.is_finite())),
        "a loss is not finite"
    );
    let mut of_place = BTreeMap::new();
    let equal = (0..)
        .map(Rank)
        .zip(&ranks)
        .all(|(rank, (_, hash))| *of_place.entry(job.plan.place(rank)).or_insert(hash) == hash);
    anyhow::ensure!(equal, "replicas differ");
    Ok(())
}
