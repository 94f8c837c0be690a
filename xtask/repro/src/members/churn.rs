//! Loses a member at any time within a step.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use farflung::base::Nanos;
use farflung::comm::simulated::Faults;
use farflung::config::choice::SyncKind;
use farflung::optim::sync::DILOCO;
use farflung::train::{Failure, Job, Moment};

use super::injected_fault::InjectedFault;
use super::{
    DEADLINE, after_leaving, churn_pipelines, churn_pools, job, longest_wait, moments, processes,
    report as report_of, run as run_once, times,
};
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "churn-anywhere",
    claim: "one of five members is killed, frozen or cut off whenever something reaches a rank in a step \
            (in pipelines, at many of these moments; with --long at all of them): the others continue \
            within the deadline plus one second, with the same bits as a run that this member left in an \
            orderly way just before or just after the step; with DiLoCo, with the bits of a round without \
            its contribution; a pipeline of four continues from a replica of the lost part, or, if there is \
            none, from a step that all members have copied; with DiLoCo, a pipeline that loses a member gives \
            nothing to the round; in pools, each microbatch counts once and the \
            others keep what they have computed; the same with real processes, where frozen \
            members join again, and with ddp the weights after each step are those of ordinary jobs of as many \
            workers, in which no one is lost; in pipelines and pools, all report the same loss and tokens of \
            each step",
    source: "the design of farflung (issue 22); torchft, PCCL and Psyche lose more",
    seed: 1337,
    run,
};

const MEMBERS: usize = 5;

#[derive(Debug, Default)]
struct FaultTally {
    runs: u32,
    stuck: u32,
    apart: u32,
    other_bits: u32,
    lost_tokens: u32,
    slowest: f64,
}

/// Injects all faults at these moments. Survivors must end with one of the `allowed` hashes.
fn inject_faults(
    job: &Job,
    member: u32,
    moments: &[Nanos],
    allowed: &BTreeSet<String>,
) -> Result<FaultTally> {
    let mut seen = FaultTally::default();
    for fault in InjectedFault::ALL {
        for &at in moments {
            let ended = run_once(job, MEMBERS, &[], &fault.on(member, MEMBERS, at))?;
            seen.runs += 1;
            let others = ended.iter().enumerate().filter(|(n, _)| *n != member as usize);
            let survivors: Vec<_> = others.filter_map(|(_, ended)| report_of(ended)).collect();
            seen.stuck += u32::from(survivors.len() != MEMBERS - 1);
            let Some(first) = survivors.first() else { continue };
            seen.apart += u32::from(survivors.iter().any(|report| report.hash != first.hash));
            seen.other_bits += u32::from(!allowed.contains(&first.hash));
            // Every sequence of a step counts: those of five members before the loss, and of four after it.
            let context = job.model.context as u64;
            let rows = survivors.iter().flat_map(|report| report.rows.windows(2));
            let next = rows.filter(|pair| pair[1].step == pair[0].step + 1);
            let counts: Vec<u64> = next.map(|pair| (pair[1].tokens - pair[0].tokens) / context).collect();
            let all = MEMBERS as u64;
            seen.lost_tokens += u32::from(counts.iter().any(|count| ![all, all - 1].contains(count)));
            let waits = survivors.iter().map(|report| longest_wait(report));
            seen.slowest = waits.fold(seen.slowest, f64::max);
        }
    }
    Ok(seen)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (members, most): (&[u32], usize) =
        if options.quick { (&[0, 3], 4) } else { (&[0, 1, 2, 3, 4], usize::MAX) };
    let ddp = job(report.seed(), MEMBERS, |_| {})?;
    let diloco = job(report.seed(), MEMBERS, |config| {
        config.sync = SyncKind::of(&DILOCO);
        config.sync_every = 2;
    })?;
    for (name, job) in [("ddp", &ddp), ("diloco", &diloco)] {
        let calm = run_once(job, MEMBERS, &[], &Faults::new())?;
        let calm = times(report_of(&calm[0]).context("the run without faults has no report")?);
        let at = |step: usize| Nanos((calm[step] * 1e9) as u64);
        let mut all = FaultTally::default();
        // The fault is in the fourth step, or in the round of the third and fourth steps.
        let from = if name == "ddp" { at(2) } else { at(1) };
        let moments = moments::events(job, MEMBERS, (from, at(3)), most)?.chosen;
        report.row(&format!("{name}: moments of the fault"), moments.len() as f64, "1", Threshold::None)?;
        for &member in members {
            let allowed =
                if name == "ddp" { after_leaving(job, member, 3..=4)? } else { rounds_without(job, member)? };
            let seen = inject_faults(job, member, &moments, &allowed)?;
            all.runs += seen.runs;
            all.stuck += seen.stuck;
            all.apart += seen.apart;
            all.other_bits += seen.other_bits;
            all.lost_tokens += seen.lost_tokens;
            all.slowest = all.slowest.max(seen.slowest);
            report.progress(&format!(
                "{name}: member {member}: {} runs, slowest {:.3} s",
                all.runs, all.slowest
            ))?;
        }
        let none = Threshold::AtMost(0.0);
        report.row(&format!("{name}: runs"), f64::from(all.runs), "1", Threshold::None)?;
        report.row(
            &format!("{name}: runs in which a survivor did not continue"),
            f64::from(all.stuck),
            "1",
            none,
        )?;
        report.row(&format!("{name}: runs whose survivors differ"), f64::from(all.apart), "1", none)?;
        let metric = format!("{name}: runs whose bits are not among the allowed ones");
        report.row(&metric, f64::from(all.other_bits), "1", none)?;
        let metric =
            format!("{name}: runs with a step that has the sequences of neither five nor four members");
        report.row(&metric, f64::from(all.lost_tokens), "1", none)?;
        let most = DEADLINE.as_secs_f64() + 1.0;
        let metric = format!("{name}: longest time between two steps");
        report.row(&metric, all.slowest, "s", Threshold::AtMost(most))?;
    }
    churn_pipelines::run(report, options)?;
    churn_pools::run(report, options)?;
    processes::run(report, options)
}

/// Returns the hashes of runs in which one of three rounds has no contribution of a member, and of a run that
/// the member left after the second round.
fn rounds_without(job: &Job, member: u32) -> Result<BTreeSet<String>> {
    let mut hashes = after_leaving(job, member, 4..=4)?;
    for round in 0..3 {
        let mut ways = BTreeSet::new();
        for (step, moment) in [(2 * round + 1, Moment::Begun), (2 * round + 2, Moment::Prepared)] {
            let lost = Job { failure: Some(Failure { rank: member, step, moment }), ..job.clone() };
            let ended = run_once(&lost, MEMBERS, &[], &Faults::new())?;
            ways.insert(ended.iter().find_map(report_of).context("no member is left")?.hash.clone());
        }
        anyhow::ensure!(
            ways.len() == 1,
            "the result after a loss within a round depends on the moment of the loss"
        );
        hashes.append(&mut ways);
    }
    Ok(hashes)
}
