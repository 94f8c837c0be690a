//! Loses a member of a pool at any time within a step: the others keep what they have computed.

use anyhow::{Context, Result};
use farflung::base::Nanos;
use farflung::comm::simulated::Faults;
use farflung::config::choice::BalanceKind;
use farflung::train::Job;

use super::injected_fault::InjectedFault;
use super::{DEADLINE, Notes, in_pools, job, report as report_of, run as run_once, times, watched};
use crate::harness::{Options, Report, Threshold};
use crate::workers::plain_sgd;

const POOLS: [u32; 3] = [2, 3, 1];
const MEMBERS: usize = 6;
/// The step in which a member is lost.
const STEP: usize = 4;
/// Largest difference of a loss that rounding causes. A microbatch that counts twice changes a loss a
/// thousandfold more.
const ROUNDING: f64 = 2e-6;

/// Results of some runs.
#[derive(Debug, Default)]
struct FaultTally {
    runs: u32,
    stuck: u32,
    other: u32,
    /// Longest time of the step in which a member is lost, in seconds.
    longest: f64,
    /// Sum of the percentages of steps that were kept, over the runs in which a member was killed; number of
    /// these runs, and sum of their times until that step was done.
    kept: f64,
    killed: u32,
    until: f64,
}

/// Returns a job whose steps take about two seconds, almost all of it to compute.
fn pooled(seed: u64, keep_work: bool) -> Result<Job> {
    let job = job(seed, MEMBERS, |config| {
        config.layers = Some(3);
        config.stages = 3;
        config.microbatches = Some(12);
        config.steps = STEP as u64 + 2;
        config.check_every = 1;
        config.compute_rate = 4e6;
        config.balance = BalanceKind::Equal;
        config.pooled = true;
        config.keep_work = keep_work;
        *config = plain_sgd(config.clone(), 0.5);
    })?;
    in_pools(&job, &POOLS)
}

/// Injects all faults into these members at `moments` different times within a step.
fn inject_faults(job: &Job, members: &[u32], moments: u64, calm: &[(f64, f64)]) -> Result<FaultTally> {
    let (from, to) = ((calm[STEP - 2].0 * 1e9) as u64, (calm[STEP - 1].0 * 1e9) as u64);
    let mut seen = FaultTally::default();
    for &member in members {
        for fault in InjectedFault::ALL {
            for moment in 0..moments {
                // Not at the ends of the step, where nothing is computed yet, or all is.
                let at = Nanos(from + (to - from) * (2 * moment + 1) / (2 * moments));
                let mut notes = Notes::default();
                let ended = watched(job, MEMBERS, &[], &fault.on(member, MEMBERS, at), &mut notes)?;
                seen.runs += 1;
                let others = ended.iter().enumerate().filter(|(n, _)| *n != member as usize);
                let stuck = others.map(|(_, ended)| ended).any(Result::is_err);
                seen.stuck += u32::from(stuck);
                let Some(left) = ended.iter().find_map(report_of).filter(|_| !stuck) else { continue };
                let found = rows(left);
                let near = |(calm, found): (&(f64, f64), &(f64, f64))| (calm.1 - found.1).abs() < ROUNDING;
                let same = found.len() == calm.len() && calm.iter().zip(&found).all(near);
                seen.other += u32::from(!same);
                let step = found.get(STEP - 1).context("a run without that step")?.0;
                seen.longest = seen.longest.max(step - found[STEP - 2].0);
                if matches!(fault, InjectedFault::Kill) {
                    seen.kept += notes.number("% of the step in flight is kept").unwrap_or(0.0);
                    seen.killed += 1;
                    seen.until += step;
                }
            }
        }
    }
    Ok(seen)
}

/// Returns the time and the loss of each step.
fn rows(report: &farflung::train::Report) -> Vec<(f64, f64)> {
    times(report).into_iter().zip(report.rows.iter().map(|row| row.train_loss)).collect()
}

pub(super) fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    // Member 0 reports the run's notes.
    let (members, moments): (&[u32], u64) = if options.quick { (&[3], 6) } else { (&[1, 2, 4], 20) };
    let jobs = [pooled(report.seed(), true)?, pooled(report.seed(), false)?];
    let calm = run_once(&jobs[0], MEMBERS, &[], &Faults::new())?;
    let calm = rows(calm.iter().find_map(report_of).context("the run without faults has no report")?);
    let none = Threshold::AtMost(0.0);
    let mut cost = Vec::new();
    for (name, job) in ["pools of 2, 3, 1", "pools of 2, 3, 1, whole steps again"].iter().zip(&jobs) {
        let seen = inject_faults(job, members, moments, &calm)?;
        report.row(&format!("{name}: runs"), f64::from(seen.runs), "1", Threshold::None)?;
        let metric = format!("{name}: runs in which a survivor did not continue");
        report.row(&metric, f64::from(seen.stuck), "1", none)?;
        let metric = format!("{name}: runs in which a microbatch did not count exactly once");
        report.row(&metric, f64::from(seen.other), "1", none)?;
        let step = calm[STEP - 1].0 - calm[STEP - 2].0;
        // The rest of the step takes at most as long as a step of the remaining members: half of a pool does
        // the work of the other half, too.
        let most = DEADLINE.as_secs_f64() + 1.0 + 3.0 * step;
        let metric = format!("{name}: longest step in which a member is lost");
        report.row(&metric, seen.longest, "s", Threshold::AtMost(most))?;
        let runs = f64::from(seen.killed.max(1));
        let metric = format!("{name}: share of the step in flight that is kept, mean of kills");
        report.row(&metric, seen.kept / runs, "%", Threshold::None)?;
        cost.push(seen.until / runs - calm[STEP - 1].0);
    }
    report.row("pools of 2, 3, 1: time that a killed member costs, mean", cost[0], "s", Threshold::None)?;
    report.row(
        "pools of 2, 3, 1: the same, relative to doing the step again as a whole",
        cost[0] / cost[1],
        "1",
        Threshold::AtMost(0.75),
    )
}
