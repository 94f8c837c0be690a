//! Stages that are pools of members which come and leave: what a newcomer brings, what a loss costs, and where
//! measured rates and changes of stage lead.

use std::fmt::Write as _;
use std::sync::Arc;

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::{Link, Nanos, PeerId};
use farflung::comm::simulated::Faults;
use farflung::config::pools::Numbers;
use farflung::parallel::swarm::optimum;
use farflung::train::{Job, ReplicaSchedule, Report as Ended};

use super::{DEADLINE, Notes, report as report_of, times, watched};
use crate::harness::{Mark, Options, Report};
use crate::workers::{self, Over};

const MICROBATCHES: u32 = 24;
/// Floating point operations a second of a machine of speed 1.
const UNIT: f64 = 5e7;
/// Steps of a run in which somebody comes or is lost, and when.
const STEPS: u64 = 16;
const AT: Nanos = Nanos::from_millis(4_000);

/// A run that begins with pools of machines of these speeds; `later` come.
fn job(seed: u64, pools: &[&[f64]], later: &[f64], steps: u64) -> Result<Job> {
    let sizes: Vec<u32> = pools.iter().map(|pool| pool.len() as u32).collect();
    let ranks = sizes.iter().sum::<u32>() as usize;
    let members = TrainConfig {
        layers: Some(6),
        dim: Some(32),
        context: Some(16),
        batch: 1,
        steps,
        eval_every: 0,
        eval_batches: 1,
        sample_tokens: 0,
        deadline: Nanos(10 * DEADLINE.0),
        codec: "none".parse()?,
        boundary: "int8".parse()?,
        boundary_backward: "int8".parse()?,
        microbatches: Some(MICROBATCHES as usize),
        stages: pools.len(),
        workers: 1,
        pooled: true,
        ..workers::config(seed, false)
    };
    let (stages, workers) = (ranks, ranks);
    let config = TrainConfig { pools: Some(Numbers(sizes)), stages, workers, ..members.clone() };
    let link = Link { bandwidth: crate::swarm::LINE, latency: Nanos::from_millis(5) };
    let job = workers::job(config, Over::Simulated(link))?;
    let mut job = Job { elastic: true, pipelines: Some(Arc::new(members)), ..job };
    let mut text = "default = \"200mbit,5ms\"\n".to_owned();
    let first: Vec<f64> = pools.concat();
    let names = (0..).map(|n| if n < ranks { format!("worker.{n}") } else { format!("member.{n}") });
    for (name, speed) in names.zip(first.iter().chain(later)) {
        let flops = (speed * UNIT / 1e6).round();
        let _ = write!(text, "[[device]]\nname = \"{name}\"\nflops = \"{flops} MFLOPS\"\nmemory = \"8GB\"\n");
    }
    job.cluster = Some(text.parse()?);
    let plan = job.plan.clone();
    Ok(job.with_plan(plan)?)
}

/// What a microbatch takes a machine of speed 1 in each stage.
fn times_of_stages(job: &Job) -> Result<Vec<f64>> {
    let schedule = ReplicaSchedule::new(job, 0)?;
    let (cost, plan) = (&schedule.cost, &job.plan);
    let pools = plan.pools().context("the plan has pools")?;
    let rank = |stage: u32| schedule.placement().rank(farflung::base::StageId(stage)).index();
    let time = |stage: u32| {
        let each = cost.stages[stage as usize];
        (each.forward + each.backward()).as_secs_f64() * job.rates[rank(stage)] / UNIT
    };
    Ok((0..pools.stages()).map(time).collect())
}

/// What the slowest of pools of machines of speed 1 takes for a step.
fn bound(sizes: &[f64], times: &[f64]) -> f64 {
    sizes.iter().zip(times).map(|(size, time)| f64::from(MICROBATCHES) * time / size).fold(0.0, f64::max)
}

/// Runs a job; gives what the member that has the model at the end reports, and what the first one noted.
fn ended(job: &Job, come: &[(PeerId, Nanos)], faults: &Faults, lost: usize) -> Result<(Ended, Notes)> {
    let mut notes = Notes::default();
    let ends = job.world + come.len();
    let all = watched(job, ends, come, faults, &mut notes)?;
    let failed = all.iter().filter(|ended| ended.is_err()).count();
    anyhow::ensure!(failed == lost, "{failed} members failed, of which {lost} were lost");
    let ended = all.iter().find_map(report_of).context("nobody has the model at the end")?;
    Ok((ended.clone(), notes))
}

/// Seconds of a step, the mean of so many from one on.
fn pace(ended: &Ended, from: usize, steps: usize) -> f64 {
    let times = times(ended);
    (times[from + steps] - times[from]) / steps as f64
}

/// Sequences that are not in exactly one step.
fn unaccounted(ended: &Ended, job: &Job) -> u64 {
    let each = u64::from(MICROBATCHES) * job.model.context as u64;
    ended.rows.iter().map(|row| row.tokens.abs_diff(row.step * each)).sum()
}

pub(crate) fn measure(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let last = STEPS as usize - 4;
    // The first pool holds the others up until the newcomer has joined it.
    let come = job(report.seed(), &[&[1.0], &[1.0; 2], &[1.0; 2]], &[1.0], STEPS)?;
    let times = times_of_stages(&come)?;
    let (grown, notes) = ended(&come, &[(PeerId(5), AT)], &Faults::new(), 0)?;
    anyhow::ensure!(notes.0.iter().any(|note| note.contains("pools of 2, 2, 2 members")), "{:?}", notes.0);
    let faster = pace(&grown, 1, 3) / pace(&grown, last, 3);
    let expected = bound(&[1.0, 2.0, 2.0], &times) / bound(&[2.0; 3], &times);
    report.row("members: a newcomer to the slowest pool, tokens/s", faster, "x", Mark::None)?;
    report.row("members: of what its share of the pool brings", faster / expected, "", Mark::AtLeast(0.9))?;

    let lose = job(report.seed(), &[&[1.0; 2], &[1.0; 2], &[1.0; 2]], &[], STEPS)?;
    let (left, notes) = ended(&lose, &[], &Faults::new().at(AT).crash(PeerId(1)), 1)?;
    anyhow::ensure!(notes.0.iter().any(|note| note.contains("pools of 1, 2, 2 members")), "{:?}", notes.0);
    let kept = pace(&left, 1, 3) / pace(&left, last, 3);
    // It had a half of its pool's microbatches.
    report.row("members: one of two of a pool is lost, tokens/s", kept, "x", Mark::AtLeast(0.5))?;
    let moved = notes.0.iter().any(|note| note.contains("members lost") && note.contains("of state"));
    report.row("members: losses that moved state", f64::from(u8::from(moved)), "1", Mark::AtMost(0.0))?;

    // The machines of the first arm, begun badly: one slow machine in each of two pools.
    let steps = if options.quick { 60 } else { 100 };
    let bad = job(report.seed(), &[&[1.0], &[1.0], &[4.0, 3.0, 2.0, 2.0]], &[], steps)?;
    let (settled, notes) = ended(&bad, &[], &Faults::new(), 0)?;
    let best = job(report.seed(), &crate::swarm::POOLS, &[], STEPS)?;
    let (best, _) = ended(&best, &[], &Faults::new(), 0)?;
    let moves = notes.0.iter().filter(|note| note.contains("goes to stage")).count();
    let end = steps as usize - 8;
    report.row("members: changes of stage of a run begun badly", moves as f64, "1", Mark::AtMost(6.0))?;
    let gained = pace(&settled, 1, 3) / pace(&settled, end, 6);
    report.row("members: tokens/s after them over before", gained, "x", Mark::AtLeast(2.0))?;
    let share = pace(&best, last, 3) / pace(&settled, end, 6);
    report.row("members: of tokens/s in the best pools", share, "", Mark::AtLeast(0.75))?;
    let speeds = [4.0, 3.0, 2.0, 2.0, 1.0, 1.0];
    let equal: f64 = speeds.iter().sum::<f64>() / 3.0;
    report.row(
        "members: the best pools, over all machines shared",
        optimum(&speeds, 3) / equal,
        "",
        Mark::None,
    )?;
    let lost = unaccounted(&grown, &come) + unaccounted(&left, &lose) + unaccounted(&settled, &bad);
    report.row("members: tokens not in exactly one step", lost as f64, "1", Mark::AtMost(0.0))
}
