//! Lets a newcomer join at any moment of a step.

use anyhow::{Context, Result};
use farflung::base::{Nanos, PeerId};
use farflung::comm::simulated::Faults;
use farflung::config::choice::SyncKind;
use farflung::optim::sync::DILOCO;

use super::{job, longest_wait, report as report_of, run as run_once, times};
use crate::harness::{Bench, Mark, Options, Report};

pub(crate) const BENCH: Bench = Bench {
    name: "join-anywhere",
    claim: "a newcomer at any moment of a step of three members: all end with the same bits, a step takes its sequences too \
            within three steps, and nobody waits longer than a step and the time that its state takes on its link",
    source: "the design of farflung (issue 22)",
    seed: 1337,
    run,
};

const MEMBERS: usize = 3;
/// Enough steps for a newcomer to join and to train.
const STEPS: u64 = 12;
/// Sequential messages between the step before the newcomer and the step after it: presence, promises, votes,
/// the view, which step each member has reached, and hashes of the state; two of each for rings of four.
const MESSAGES: f64 = 24.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let moments = if options.quick { 6 } else { 60 };
    for (name, every) in [("ddp", 1), ("diloco", 2)] {
        let job = job(report.seed(), MEMBERS, |config| {
            config.steps = STEPS;
            if every > 1 {
                config.sync = SyncKind::of(&DILOCO);
                config.sync_every = every;
            }
        })?;
        let calm = run_once(&job, MEMBERS, &[], &Faults::new())?;
        let calm = report_of(&calm[0]).context("a run without newcomers ends")?;
        let (calm_times, usual) = (times(calm), longest_wait(calm));
        let (from, to) = (calm_times[1] * 1e9, calm_times[3] * 1e9);
        // State per parameter: the weight and two moments.
        let state = calm.parameters as f64 * 12.0;
        let link = job.config.link;
        let transfer = state * 8.0 / link.bandwidth.0 as f64;
        let bound = usual + transfer + MESSAGES * link.latency.as_secs_f64();
        let (mut runs, mut apart, mut late, mut slowest) = (0_u32, 0_u32, 0_u32, 0.0_f64);
        for moment in 0..moments {
            let at = Nanos((from + (to - from) * f64::from(moment) / f64::from(moments)) as u64);
            let ended = run_once(&job, MEMBERS + 1, &[(PeerId(MEMBERS as u32), at)], &Faults::new())?;
            runs += 1;
            let all: Vec<_> = ended.iter().filter_map(report_of).collect();
            let same = all.len() == MEMBERS + 1 && all.iter().all(|report| report.hash == all[0].hash);
            apart += u32::from(!same);
            let Some(first) = all.first() else { continue };
            slowest = slowest.max(longest_wait(first));
            // The first step after the newcomer joined that has the sequences of four members.
            let sequences = |n: usize| {
                let before = if n == 0 { 0 } else { first.rows[n - 1].tokens };
                (first.rows[n].tokens - before) / job.model.context as u64
            };
            let came = first.rows.iter().position(|row| row.time_s * 1e9 > at.0 as f64).unwrap_or(0);
            let full = (0..first.rows.len()).find(|&n| sequences(n) == MEMBERS as u64 + 1);
            late += u32::from(full.is_none_or(|full| full > came + 3));
        }
        report.row(&format!("{name}: newcomers"), f64::from(runs), "1", Mark::None)?;
        report.row(
            &format!("{name}: runs whose members differ"),
            f64::from(apart),
            "1",
            Mark::AtMost(0.0),
        )?;
        let metric = format!("{name}: newcomers whose sequences do not count within three steps");
        report.row(&metric, f64::from(late), "1", Mark::AtMost(0.0))?;
        report.row(&format!("{name}: a step without newcomers"), usual, "s", Mark::None)?;
        report.row(&format!("{name}: the state on one link"), transfer, "s", Mark::None)?;
        let metric = format!("{name}: longest time between two steps");
        report.row(&metric, slowest, "s", Mark::AtMost(bound))?;
    }
    Ok(())
}
