//! Compares the time from a loss to the next step with the sum of its parts: deadline, links and state.

use anyhow::{Context, Result};
use farflung::base::{Nanos, PeerId};
use farflung::comm::simulated::Faults;
use farflung::train::Job;

use super::{DEADLINE, Notes, job, report as report_of, run as run_once, times, watched};
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "recovery-time",
    claim: "the time from the moment when a rank of two pipelines stops responding to the next step, in \
            which a spare has replaced it, is the sum of the deadline, the roll call, the messages of a \
            view, the transfer of its part's state on one link, and a step: within 5% for 10 MB and 500 MB \
            of state",
    source: "the design of farflung (issue 22); torchft took 948 s",
    seed: 1337,
    run,
};

/// Ranks of two pipelines of two. A spare joins them first.
const MEMBERS: usize = 4;
/// Seconds for which a silent member is asked to answer.
const ROLL_CALL: f64 = 0.8;
/// Sequential messages from the loss to the next step: presence, promises, votes and the view; then votes, the
/// tensors that each member holds and hashes, each around a ring of four; then the groups of the next plan.
const MESSAGES: f64 = 32.0;

/// Returns two pipelines whose parts have a state of 12 bytes per parameter.
fn pipelines(seed: u64, width: usize) -> Result<Job> {
    job(seed, MEMBERS, |config| {
        config.layers = Some(2);
        config.heads = Some(8);
        config.dim = Some(width);
        config.stages = 2;
        config.microbatches = Some(2);
        config.steps = 6;
        config.eval_every = 100;
        config.copy_share = 0.0;
        // The averages of a large model take longer than two seconds, so its deadline is longer.
        config.deadline = if width > 1000 { Nanos::from_millis(60_000) } else { DEADLINE };
    })
}

/// Returns the bytes of state that were moved, from the note that reports them.
fn moved(notes: &Notes) -> Option<f64> {
    let mut change = notes.0.iter().filter(|note| note.contains(" lost"));
    let text = change.find_map(|note| note.split_once(" of state"))?.0;
    let mut words = text.rsplit(' ');
    let (unit, number) = (words.next()?, words.next()?);
    let scale = match unit {
        "B" => 1.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * scale)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let sizes: &[(&str, usize, f64)] = &[("10 MB", 256, 10e6), ("500 MB", 1856, 500e6)];
    for &(name, width, nominal) in if options.quick { &sizes[..1] } else { sizes } {
        let job = pipelines(report.seed(), width)?;
        let spare = [(PeerId(MEMBERS as u32), Nanos(1))];
        let calm = run_once(&job, MEMBERS + 1, &spare, &Faults::new())?;
        let calm = times(calm.iter().find_map(report_of).context("the run without faults has no report")?);
        let step = calm[4] - calm[3];
        // The member is silent from the beginning of the fifth step on.
        let lost = Nanos((calm[3] * 1e9) as u64);
        let faults = Faults::new().at(lost).freeze(PeerId(2), Nanos::MAX);
        let mut notes = Notes::default();
        let ended = watched(&job, MEMBERS + 1, &spare, &faults, &mut notes)?;
        let found = ended.iter().find_map(report_of).with_context(|| format!("{:?}", notes.0))?;
        let bytes = moved(&notes).with_context(|| format!("no state moved: {:?}", notes.0))?;
        let next = times(found).into_iter().find(|&at| at > calm[3] + 1e-6).context("no step follows")?;
        let measured = next - calm[3];
        let link = job.config.link;
        let transfer = bytes * 8.0 / link.bandwidth.0 as f64;
        let detection = job.config.deadline.as_secs_f64() + ROLL_CALL;
        let view = MESSAGES * link.latency.as_secs_f64();
        let closed = detection + view + transfer + step;
        report.row(
            &format!("{name}: state that was moved, relative to {name}"),
            bytes / nominal,
            "1",
            Threshold::AtLeast(0.8),
        )?;
        report.row(&format!("{name}: detection"), detection, "s", Threshold::None)?;
        report.row(&format!("{name}: view"), view, "s", Threshold::None)?;
        report.row(&format!("{name}: transfer"), transfer, "s", Threshold::None)?;
        report.row(&format!("{name}: step"), step, "s", Threshold::None)?;
        report.row(
            &format!("{name}: time from the loss to the next step"),
            measured,
            "s",
            Threshold::None,
        )?;
        let off = (measured / closed - 1.0).abs() * 100.0;
        report.row(
            &format!("{name}: time from the loss to the next step, difference from the sum of its parts"),
            off,
            "%",
            Threshold::AtMost(5.0),
        )?;
    }
    Ok(())
}
