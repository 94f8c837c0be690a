//! Runs the trainer for hours of virtual time, while machines join and are lost all the time.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use farflung::base::{Nanos, PeerId};
use farflung::comm::simulated::Faults;
use farflung::parallel::churn::{Change, Trace, daly, recorded};
use farflung::train::Job;

use super::{Ended, job, report as report_of, run as run_once, times};
use crate::harness::{Options, Report, Threshold};

const MACHINES: u32 = 16;
/// Mean life of a machine in seconds, and mean time until another replaces it.
const LIFE: f64 = 7200.0;
const ABSENCE: f64 = 600.0;
/// Seconds of a step.
const STEP: f64 = 20.0;
/// The recorded trace of spot machines.
const SPOT: &str = "ec2-p3";
/// For a job that restarts from checkpoints: seconds to write one, and seconds from a loss to the first step
/// after it.
const SAVE: f64 = 1.0;
const RESTART: f64 = 30.0;

/// The time from when a machine joins until it is lost.
#[derive(Debug, Clone, Copy)]
struct Lifetime {
    from: Nanos,
    /// `None` for a machine that is there at the end.
    to: Option<Nanos>,
}

/// Returns the lives of a trace's machines, beginning with those that are there at the start.
fn lives(trace: &Trace) -> Vec<Lifetime> {
    let mut lives: Vec<Lifetime> =
        (0..trace.machines).map(|_| Lifetime { from: Nanos::ZERO, to: None }).collect();
    let mut now: BTreeMap<u32, usize> =
        (0..trace.machines).map(|machine| (machine, machine as usize)).collect();
    for Change { at, lost, back } in &trace.changes {
        for machine in lost {
            if let Some(life) = now.remove(machine) {
                lives[life].to = Some(*at);
            }
        }
        for &machine in back {
            now.insert(machine, lives.len());
            lives.push(Lifetime { from: *at, to: None });
        }
    }
    lives
}

/// Returns a job whose steps take [`STEP`] seconds to compute, and which runs for as long as a trace.
fn steady(seed: u64, trace: &Trace) -> Result<Job> {
    let steps = (trace.time.as_secs_f64() / STEP) as u64;
    let change = |rate: f64| {
        job(seed, trace.machines as usize, |config| {
            config.steps = steps;
            config.eval_every = steps;
            config.compute_rate = rate;
            config.deadline = Nanos::from_millis(4 * (STEP * 1e3) as u64);
        })
    };
    // The operations of a step are those of one microbatch, which is one sequence.
    let first = change(1e9)?;
    let per_step = first.model.flops_per_token(first.model.context) as f64 * first.model.context as f64;
    change(per_step / STEP)
}

/// Results of a run.
struct ChurnResult {
    /// Tokens of committed steps.
    tokens: f64,
    /// Tokens that living machines could have trained on, if joins and losses took no time.
    ideal: f64,
    steps: u64,
    came: usize,
    lost: usize,
    hours: f64,
}

/// Returns the sum over all machines of the seconds for which each was alive until a given time.
fn alive(lives: &[Lifetime], until: Nanos) -> f64 {
    let of = |life: &Lifetime| {
        life.to.unwrap_or(until).min(until).saturating_sub(life.from.min(until)).as_secs_f64()
    };
    lives.iter().map(of).sum()
}

/// Runs a trace. All members at the end must have the same bits, and must report the same tokens for each step.
fn soak(seed: u64, trace: &Trace) -> Result<ChurnResult> {
    let (job, lives) = (steady(seed, trace)?, lives(trace));
    let mut faults = Faults::new();
    let mut come = Vec::new();
    for (peer, life) in (0..).map(PeerId).zip(&lives) {
        if let Some(to) = life.to {
            faults = faults.at(to).crash(peer);
        }
        if life.from > Nanos::ZERO {
            come.push((peer, life.from));
        }
    }
    let ended: Vec<Ended> = run_once(&job, lives.len(), &come, &faults)?;
    let left: Vec<_> = ended.iter().filter_map(report_of).collect();
    let first = left.iter().max_by_key(|report| report.rows.len()).context("no member is left")?;
    ensure!(left.iter().all(|report| report.hash == first.hash), "the members at the end differ");
    // Each member contributes one sequence to a step.
    let context = job.model.context as u64;
    let mut told: BTreeMap<u64, u64> = BTreeMap::new();
    for row in left.iter().flat_map(|report| &report.rows) {
        let tokens = *told.entry(row.step).or_insert(row.tokens);
        ensure!(
            tokens == row.tokens,
            "members report {tokens} and {} tokens after step {}",
            row.tokens,
            row.step
        );
    }
    for ((step, before), (next, after)) in told.iter().zip(told.iter().skip(1)) {
        let new = after - before;
        let whole = next - step == 1 && new.is_multiple_of(context);
        ensure!(
            whole && (1..=u64::from(trace.machines)).contains(&(new / context)),
            "step {next} has {new} tokens"
        );
    }
    ensure!(first.tokens == told.values().last().copied().unwrap_or(0), "samples are lost or count twice");
    let end = times(first).into_iter().fold(0.0, f64::max);
    let until = Nanos((end * 1e9) as u64);
    Ok(ChurnResult {
        tokens: first.tokens as f64,
        ideal: alive(&lives, until) / STEP * context as f64,
        steps: first.rows.last().map_or(0, |row| row.step),
        came: lives.iter().filter(|life| life.from > Nanos::ZERO && life.from < until).count(),
        lost: lives.iter().filter_map(|life| life.to).filter(|&to| to < until).count(),
        hours: end / 3600.0,
    })
}

/// Returns the goodput of a job that restarts from its newest checkpoint after each loss and accepts newcomers
/// only then. It is a fraction of the work that living machines could have done. Checkpoints have the interval
/// that [`daly`] computes.
fn restarting(trace: &Trace) -> f64 {
    let losses: Vec<Nanos> = trace.changes.iter().filter(|c| !c.lost.is_empty()).map(|c| c.at).collect();
    let between = trace.time.as_secs_f64() / losses.len().max(1) as f64;
    let every = daly(SAVE, between);
    let mut there: std::collections::BTreeSet<u32> = (0..trace.machines).collect();
    let (mut done, mut ideal, mut at) = (0.0, 0.0, 0.0);
    // Number of working machines, work since the newest checkpoint, and the time when the job works again.
    let (mut working, mut since, mut resumes) = (f64::from(trace.machines), 0.0, 0.0_f64);
    let ends = trace.changes.iter().map(|c| (c.at.as_secs_f64(), Some(c)));
    for (until, change) in ends.chain([(trace.time.as_secs_f64(), None)]) {
        ideal += there.len() as f64 * (until - at);
        let time = (until - resumes.max(at)).max(0.0) * every / (every + SAVE);
        let whole = ((since + time) / every).floor() * every;
        (done, since) = (done + whole * working, since + time - whole);
        at = until;
        let Some(change) = change else { break };
        there.retain(|machine| !change.lost.contains(machine));
        there.extend(&change.back);
        if !change.lost.is_empty() {
            (working, since, resumes) = (there.len() as f64, 0.0, until + RESTART);
        }
    }
    (done + since * working) / ideal
}

/// Adds the trainer's rows of `churn-soak`.
pub(crate) fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let hours = if options.quick { 0.25 } else { 2.0 };
    let time = Nanos((hours * 3.6e12) as u64);
    let seeds = if options.quick { 1 } else { 3 };
    let mut least = f64::INFINITY;
    let (mut came, mut lost, mut longest, mut steps) = (0, 0, 0.0_f64, u64::MAX);
    for seed in 0..seeds {
        let seed = report.seed() + seed;
        let soaked = soak(seed, &Trace::drawn(MACHINES, LIFE, ABSENCE, time, seed))?;
        let goodput = 100.0 * soaked.tokens / soaked.ideal;
        report.progress(&format!(
            "trainer, seed {seed}: {} steps in {:.2} h, {} joined, {} lost, goodput {goodput:.1}%",
            soaked.steps, soaked.hours, soaked.came, soaked.lost
        ))?;
        (came, lost) = (came + soaked.came, lost + soaked.lost);
        (least, longest, steps) = (least.min(goodput), longest.max(soaked.hours), steps.min(soaked.steps));
    }
    report.row(
        "trainer: seeds, each with equal digests and every sample in one step",
        seeds as f64,
        "",
        Threshold::None,
    )?;
    report.row("trainer: machines that joined", came as f64, "", Threshold::None)?;
    report.row("trainer: machines that were lost", lost as f64, "", Threshold::None)?;
    let all = (time.as_secs_f64() / STEP).floor();
    report.row("trainer: steps done, fewest", steps as f64, "", Threshold::AtLeast(all))?;
    report.row("trainer: virtual time, longest", longest, "h", Threshold::AtMost(1.15 * hours))?;
    report.row("trainer: goodput of living machines, worst seed", least, "%", Threshold::AtLeast(90.0))?;

    let trace = recorded(SPOT)?.until(time);
    let soaked = soak(report.seed(), &trace)?;
    let (goodput, restarts) = (100.0 * soaked.tokens / soaked.ideal, 100.0 * restarting(&trace));
    let row = |what: &str| format!("spot trace {SPOT}: {what}");
    report.row(&row("machines that were lost"), soaked.lost as f64, "", Threshold::None)?;
    report.row(&row("machines that joined"), soaked.came as f64, "", Threshold::None)?;
    report.row(&row("goodput of restarting from checkpoints"), restarts, "%", Threshold::None)?;
    report.row(&row("goodput of the trainer"), goodput, "%", Threshold::AtLeast(restarts))
}
