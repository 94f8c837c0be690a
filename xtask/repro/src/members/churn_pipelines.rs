//! Loses a rank of a pipeline at any time within a step, with and without a second pipeline.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

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

/// The hashes with which a run may end after a member is lost, for each member into which faults are injected.
type AllowedHashes = BTreeMap<u32, BTreeSet<String>>;

#[derive(Debug, Default)]
struct FaultTally {
    /// Number of moments within a step at which something reaches a rank, and of those of the faults.
    moments: usize,
    faulted: usize,
    /// Number of members that were lost, one in each run.
    members: usize,
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

/// Which members are lost, and when.
#[derive(Debug)]
struct Coverage {
    /// Members of two pipelines, and of one.
    two: Vec<u32>,
    one: Vec<u32>,
    /// Most moments of a step.
    most: usize,
}

impl Coverage {
    fn of(options: &Options) -> Self {
        if options.long {
            let (two, one) = ((0..2 * STAGES as u32).collect(), (0..STAGES as u32).collect());
            Self { two, one, most: usize::MAX }
        } else if options.quick {
            Self { two: vec![0, 6], one: vec![2], most: 3 }
        } else {
            Self { two: vec![0, 2, 5, 7], one: vec![0, 1, 2, 3], most: 24 }
        }
    }
}

/// Injects all faults into the members of which `allowed` has the hashes, at `most` of the moments within a
/// step at which something reaches a rank.
fn inject_faults(
    report: &mut Report<'_>,
    job: &Job,
    step: usize,
    most: usize,
    allowed: &AllowedHashes,
) -> Result<FaultTally> {
    let calm = run_once(job, job.world, &[], &Faults::new())?;
    let calm = times(calm.iter().find_map(report_of).context("the run without faults has no report")?);
    let at = |step: usize| Nanos((calm[step] * 1e9) as u64);
    let moments = moments::events(job, job.world, (at(step - 2), at(step - 1)), most)?;
    let mut seen = FaultTally {
        moments: moments.all,
        faulted: moments.chosen.len(),
        members: allowed.len(),
        ..FaultTally::default()
    };
    for (&member, allowed) in allowed {
        for fault in InjectedFault::ALL {
            for &at in &moments.chosen {
                let mut notes = Notes::default();
                let ended = watched(job, job.world, &[], &fault.on(member, job.world, at), &mut notes)?;
                seen.runs += 1;
                let others = ended.iter().enumerate().filter(|(n, _)| *n != member as usize);
                let stuck = others.map(|(_, ended)| ended).any(Result::is_err);
                seen.stuck += u32::from(stuck);
                let Some(left) = ended.iter().find_map(report_of).filter(|_| !stuck) else { continue };
                seen.other += u32::from(!allowed.contains(&left.hash));
                let lost = notes.number(" steps are lost").unwrap_or(0.0);
                seen.lost_steps = seen.lost_steps.max(lost);
                // Repeated steps do not count as waiting.
                let usual = (calm[step - 1] - calm[step - 2]) * (lost + 1.0);
                seen.slowest = seen.slowest.max(longest_wait(left) - usual);
            }
        }
        report.progress(&format!(
            "{} members, step {step}, member {member}: {} runs, {} stuck, {} with other bits, slowest {:.3} s",
            job.world, seen.runs, seen.stuck, seen.other, seen.slowest
        ))?;
    }
    Ok(seen)
}

pub(super) fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let coverage = Coverage::of(options);
    let job = pipelines(report.seed(), 2 * STAGES, 6)?;
    let allowed = leaving(&job, &coverage.two, 2..=4)?;
    let seen = inject_faults(report, &job, 4, coverage.most, &allowed)?;
    rows(report, "2 pipelines of 4", &seen)?;
    local_steps(report, &coverage)?;

    let job = pipelines(report.seed(), STAGES, 16)?;
    // All go back to a step of which the copy of every part is whole: the result is that of a member that
    // leaves after that step.
    let allowed = leaving(&job, &coverage.one, 4..=12)?;
    let seen = inject_faults(report, &job, 12, coverage.most, &allowed)?;
    rows(report, "1 pipeline of 4", &seen)?;
    // Of 11 steps that are done. With a tenth of the link, a copy takes less than three steps, and the last
    // whole one may be two copies old.
    report.row("1 pipeline of 4: largest number of lost steps", seen.lost_steps, "1", Threshold::AtMost(6.0))
}

/// Returns the hashes of runs that each of these members leaves by itself, after one of `steps`.
fn leaving(job: &Job, members: &[u32], steps: RangeInclusive<u64>) -> Result<AllowedHashes> {
    members.iter().map(|&member| Ok((member, after_leaving(job, member, steps.clone())?))).collect()
}

/// Two pipelines with rounds of two local steps. The pipeline that loses a member gives nothing to the round.
fn local_steps(report: &mut Report<'_>, coverage: &Coverage) -> Result<()> {
    let job = pipelines(report.seed(), 2 * STAGES, 6)?;
    let config = TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..TrainConfig::clone(&job.given) };
    let job = Job { elastic: true, ..Job::new(config, 2 * STAGES, Stop::manual())? };
    let mut allowed = AllowedHashes::new();
    for &member in &coverage.two {
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
        allowed.insert(member, hashes);
    }
    let mut seen = FaultTally::default();
    for step in [3, 4] {
        let all = inject_faults(report, &job, step, coverage.most, &allowed)?;
        seen.members = all.members;
        seen.moments += all.moments;
        seen.faulted += all.faulted;
        seen.runs += all.runs;
        seen.stuck += all.stuck;
        seen.other += all.other;
        seen.slowest = seen.slowest.max(all.slowest);
    }
    rows(report, "2 pipelines of 4 with diloco", &seen)
}

fn rows(report: &mut Report<'_>, name: &str, seen: &FaultTally) -> Result<()> {
    let none = Threshold::AtMost(0.0);
    let metric = format!("{name}: moments of a step, or of a round, at which something reaches a rank");
    report.row(&metric, seen.moments as f64, "1", Threshold::None)?;
    let metric = format!("{name}: moments of these at which members were lost");
    report.row(&metric, seen.faulted as f64, "1", Threshold::None)?;
    let metric = format!("{name}: members that were lost, one in each run");
    report.row(&metric, seen.members as f64, "1", Threshold::None)?;
    report.row(&format!("{name}: runs"), f64::from(seen.runs), "1", Threshold::None)?;
    report.row(
        &format!("{name}: runs in which a survivor did not continue"),
        f64::from(seen.stuck),
        "1",
        none,
    )?;
    let metric = format!("{name}: runs whose bits are not among the allowed ones");
    report.row(&metric, f64::from(seen.other), "1", none)?;
    let most = Threshold::AtMost(DEADLINE.as_secs_f64() + 1.0);
    report.row(
        &format!("{name}: longest time between two steps, without the time of the steps themselves"),
        seen.slowest,
        "s",
        most,
    )
}
