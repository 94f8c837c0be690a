//! Loses a rank of a pipeline at any time within a step, with and without a second pipeline.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use farflung::base::Nanos;
use farflung::comm::simulated::Faults;
use farflung::config::choice::SyncKind;
use farflung::optim::sync::DILOCO;
use farflung::train::{Failure, Job, Moment};
use farflung::{Stop, TrainConfig};

use super::injected_fault::InjectedFault;
use super::{
    DEADLINE, Notes, after_leaving, job, longest_wait, moments, report as report_of, run as run_once, times,
    watched,
};
use crate::harness::{Options, Report, Threshold};

const STAGES: usize = 4;

/// Fraction of a link that copies of parts may use.
const COPY_SHARE: f64 = 0.5;

#[derive(Debug, Default)]
struct FaultTally {
    runs: u32,
    stuck: u32,
    other: u32,
    slowest: f64,
    lost_steps: f64,
}

fn pipelines(seed: u64, members: usize, steps: u64) -> Result<Job> {
    job(seed, members, |config| {
        config.layers = Some(STAGES);
        config.stages = STAGES;
        config.microbatches = Some(STAGES);
        config.steps = steps;
        config.copy_share = COPY_SHARE;
    })
}

/// Injects all faults into these members, at `most` of the moments within a step at which something reaches a
/// rank. `same` checks whether a run ended as it should.
fn inject_faults(
    job: &Job,
    members: &[u32],
    step: usize,
    most: usize,
    same: &mut dyn FnMut(u32, &farflung::train::Report) -> Result<bool>,
) -> Result<FaultTally> {
    let calm = run_once(job, job.world, &[], &Faults::new())?;
    let calm = times(calm.iter().find_map(report_of).context("the run without faults has no report")?);
    let at = |step: usize| Nanos((calm[step] * 1e9) as u64);
    let moments = moments::events(job, job.world, (at(step - 2), at(step - 1)), most)?;
    let mut seen = FaultTally::default();
    for &member in members {
        for fault in InjectedFault::ALL {
            for &at in &moments {
                let mut notes = Notes::default();
                let ended = watched(job, job.world, &[], &fault.on(member, job.world, at), &mut notes)?;
                seen.runs += 1;
                let others = ended.iter().enumerate().filter(|(n, _)| *n != member as usize);
                let stuck = others.map(|(_, ended)| ended).any(Result::is_err);
                seen.stuck += u32::from(stuck);
                let Some(left) = ended.iter().find_map(report_of).filter(|_| !stuck) else { continue };
                seen.other += u32::from(!same(member, left)?);
                let lost = notes.number(" steps are lost").unwrap_or(0.0);
                seen.lost_steps = seen.lost_steps.max(lost);
                // Repeated steps do not count as waiting.
                let usual = (calm[step - 1] - calm[step - 2]) * (lost + 1.0);
                seen.slowest = seen.slowest.max(longest_wait(left) - usual);
            }
        }
    }
    Ok(seen)
}

pub(super) fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (two, one): (&[u32], &[u32]) =
        if options.quick { (&[0, 6], &[2]) } else { (&[0, 2, 5, 7], &[0, 1, 2, 3]) };
    let most = if options.quick { 3 } else { 24 };
    let job = pipelines(report.seed(), 2 * STAGES, 6)?;
    let mut allowed: Vec<(u32, BTreeSet<String>)> = Vec::new();
    for &member in two {
        allowed.push((member, after_leaving(&job, member, 2..=4)?));
    }
    let mut same = |member: u32, left: &farflung::train::Report| {
        Ok(allowed.iter().any(|(other, hashes)| *other == member && hashes.contains(&left.hash)))
    };
    let seen = inject_faults(&job, two, 4, most, &mut same)?;
    rows(report, "2 pipelines of 4", &seen, "runs whose bits are not among the allowed ones")?;
    local_steps(report, two, most)?;

    let job = pipelines(report.seed(), STAGES, 16)?;
    // All go back to a step of which the copy of every part is whole: the result is that of a member that
    // leaves after that step.
    let mut allowed: Vec<(u32, BTreeSet<String>)> = Vec::new();
    for &member in one {
        allowed.push((member, after_leaving(&job, member, 4..=12)?));
    }
    let mut same = |member: u32, left: &farflung::train::Report| {
        Ok(allowed.iter().any(|(other, hashes)| *other == member && hashes.contains(&left.hash)))
    };
    let seen = inject_faults(&job, one, 12, most, &mut same)?;
    rows(report, "1 pipeline of 4", &seen, "runs whose bits are not among the allowed ones")?;
    // Of 11 steps that are done. With a tenth of the link, a copy takes less than three steps, and the last
    // whole one may be two copies old.
    report.row("1 pipeline of 4: largest number of lost steps", seen.lost_steps, "1", Threshold::AtMost(6.0))
}

/// Two pipelines with rounds of two local steps. The pipeline that loses a member gives nothing to the round.
fn local_steps(report: &mut Report<'_>, members: &[u32], most: usize) -> Result<()> {
    let job = pipelines(report.seed(), 2 * STAGES, 6)?;
    let config = TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..job.config };
    let job = Job { elastic: true, ..Job::new(config, 2 * STAGES, Stop::manual())? };
    let mut allowed: Vec<(u32, BTreeSet<String>)> = Vec::new();
    for &member in members {
        let mut hashes = after_leaving(&job, member, 2..=2)?;
        hashes.extend(after_leaving(&job, member, 4..=4)?);
        for round in 0..3 {
            let mut ways = BTreeSet::new();
            for moment in [Moment::Begun, Moment::Prepared] {
                let failure = Some(Failure { rank: member, step: 2 * round + 2, moment });
                let ended = run_once(&Job { failure, ..job.clone() }, job.world, &[], &Faults::new())?;
                ways.insert(ended.iter().find_map(report_of).context("no member is left")?.hash.clone());
            }
            anyhow::ensure!(ways.len() == 1, "the result depends on the moment of the loss within a round");
            hashes.append(&mut ways);
        }
        allowed.push((member, hashes));
    }
    let mut same = |member: u32, left: &farflung::train::Report| {
        Ok(allowed.iter().any(|(other, hashes)| *other == member && hashes.contains(&left.hash)))
    };
    let mut seen = FaultTally::default();
    for step in [3, 4] {
        let all = inject_faults(&job, members, step, most, &mut same)?;
        seen.runs += all.runs;
        seen.stuck += all.stuck;
        seen.other += all.other;
        seen.slowest = seen.slowest.max(all.slowest);
    }
    rows(report, "2 pipelines of 4 with diloco", &seen, "runs whose bits are not among the allowed ones")
}

fn rows(report: &mut Report<'_>, name: &str, seen: &FaultTally, other: &str) -> Result<()> {
    let none = Threshold::AtMost(0.0);
    report.row(&format!("{name}: runs"), f64::from(seen.runs), "1", Threshold::None)?;
    report.row(
        &format!("{name}: runs in which a survivor did not continue"),
        f64::from(seen.stuck),
        "1",
        none,
    )?;
    report.row(&format!("{name}: {other}"), f64::from(seen.other), "1", none)?;
    let most = Threshold::AtMost(DEADLINE.as_secs_f64() + 1.0);
    report.row(
        &format!("{name}: longest time between two steps, without the time of the steps themselves"),
        seen.slowest,
        "s",
        most,
    )
}
