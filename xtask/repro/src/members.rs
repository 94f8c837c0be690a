//! Benches of runs whose members join and leave. On the virtual clock, each run follows a script that says
//! which member is lost or joins, and when.

mod injected_fault;
pub(crate) mod churn;
mod churn_pipelines;
mod churn_pools;
pub(crate) mod come_and_go;
pub(crate) mod eval_same;
pub(crate) mod hosted;
pub(crate) mod join;
mod join_parts;
pub(crate) mod launched;
mod moments;
mod processes;
pub(crate) mod recovery;
mod records;
mod replay;
mod shared_rows;
pub(crate) mod stop_together;
pub(crate) mod soaked;
mod throughput;

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result};
use farflung::base::{Link, Nanos, PeerId, Topology};
use farflung::comm::Transport;
use farflung::comm::simulated::{Faults, cluster_with};
use farflung::config::pools::Numbers;
use farflung::train::{Departure, Job, Quiet, Report, RunObserver, elastic, run_workers};
use farflung::{Error, StepMetrics, TrainConfig};

use crate::workers::{self, JobTransport};

/// Deadline of members that wait for each other.
const DEADLINE: Nanos = Nanos::from_millis(2_000);

/// Returns a job with a very small model, whose members wait for each other up to [`DEADLINE`].
fn job(seed: u64, members: usize, change: impl FnOnce(&mut TrainConfig)) -> Result<Job> {
    let mut config = TrainConfig {
        dim: Some(16),
        context: Some(8),
        batch: 1,
        steps: 6,
        eval_every: 3,
        eval_batches: 1,
        sample_tokens: 0,
        deadline: DEADLINE,
        workers: members,
        codec: "none".parse()?,
        ..workers::config(seed, false)
    };
    change(&mut config);
    workers::job(config, JobTransport::Simulated("100mbit,1ms".parse()?))
}

/// Returns a job whose members begin as pools of these sizes.
fn in_pools(job: &Job, pools: &[u32]) -> Result<Job> {
    let members = pools.iter().sum::<u32>() as usize;
    let pipelines = Some(Arc::new(TrainConfig { workers: 1, ..TrainConfig::clone(&job.given) }));
    let pools = Some(Numbers(pools.to_vec()));
    let config = TrainConfig { pools, stages: members, ..TrainConfig::clone(&job.given) };
    Ok(Job { pipelines, ..job.with_config(config, members)? })
}

/// Outcome of a member.
type Ended = farflung::Result<Option<Report>>;

/// Runs a job on a network of `ends` endpoints. The job's members start the run; those in `come` join it at the
/// given times.
fn run(job: &Job, ends: usize, come: &[(PeerId, Nanos)], faults: &Faults) -> Result<Vec<Ended>> {
    watched(job, ends, come, faults, &mut Quiet)
}

/// Does the same as [`run`], with an observer that receives the steps and notes of the first member.
fn watched(
    job: &Job,
    ends: usize,
    come: &[(PeerId, Nanos)],
    faults: &Faults,
    watch: &mut dyn RunObserver,
) -> Result<Vec<Ended>> {
    let link: Link = job.config.link;
    over(job, &Topology::uniform(ends, link), come, faults, watch)
}

/// Does the same as [`watched`], over a network with this topology.
fn over(
    job: &Job,
    topology: &Topology,
    come: &[(PeerId, Nanos)],
    faults: &Faults,
    watch: &mut dyn RunObserver,
) -> Result<Vec<Ended>> {
    let ends = cluster_with(topology, faults);
    let ends = ends.into_iter().map(|end| end as Arc<dyn Transport>).collect();
    Ok(run_workers(job, elastic::connections(job, ends, come, true)?, watch))
}

/// An observer that collects the notes of a run.
#[derive(Debug, Default)]
struct Notes(Vec<String>);

impl RunObserver for Notes {
    fn step(&mut self, _: &StepMetrics, _: Option<f64>) {}
    fn note(&mut self, note: &str) {
        self.0.push(note.to_owned());
    }
}

impl Notes {
    /// Returns the number before `word` in the first note that contains it.
    fn number(&self, word: &str) -> Option<f64> {
        let before = self.0.iter().find_map(|note| note.split_once(word))?.0;
        before.rsplit(' ').next()?.parse().ok()
    }

    /// Returns the number of steps done at the change of members of which the first note contains `text`.
    fn step(&self, text: &str) -> Option<u64> {
        let steps = |note: &str| note.strip_prefix("after step ")?.split_once(':')?.0.parse().ok();
        self.0.iter().filter(|note| note.contains(text)).find_map(|note| steps(note))
    }
}

fn report(ended: &Ended) -> Option<&Report> {
    ended.as_ref().ok().and_then(Option::as_ref)
}

/// Returns the times at which steps were done, by the run's clock, in seconds.
fn times(report: &Report) -> Vec<f64> {
    report.rows.iter().map(|row| row.time_s).collect()
}

/// Returns the longest time between two steps, in seconds.
fn longest_wait(report: &Report) -> f64 {
    let times = times(report);
    times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max)
}

/// Returns the hashes of runs that a member leaves by itself: one run for each of `steps`, after which it
/// leaves.
fn after_leaving(job: &Job, member: u32, steps: std::ops::RangeInclusive<u64>) -> Result<BTreeSet<String>> {
    let mut hashes = BTreeSet::new();
    for step in steps {
        let job = Job { departure: Some(Departure { rank: member, step }), ..job.clone() };
        let ended = run(&job, job.world, &[], &Faults::new())?;
        anyhow::ensure!(
            matches!(ended[member as usize], Err(Error::StoppedAt { .. })),
            "member {member} did not leave"
        );
        let left = ended.iter().find_map(report).context("no member is left")?;
        hashes.insert(left.hash.clone());
    }
    Ok(hashes)
}
