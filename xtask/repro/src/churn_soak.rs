//! Runs 16 machines with a mean life of two hours each: the membership rules for a day, and the trainer for two
//! hours.

use anyhow::Result;
use farflung::parallel::membership::check::{Churn, ChurnOutcome, churn};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::members::soaked;

pub(crate) const BENCH: Bench = Bench {
    name: "churn-soak",
    claim: "16 machines with a mean life of 2 hours, rounds of a minute, 24 hours: each epoch has one view, \
            rounds continue, newcomers are admitted, and at least 90% of what living machines could compute \
            is committed; the trainer itself for two hours: equal digests, each sample in one step, and, \
            with a recorded trace of spot machines, more work done than by restarting from checkpoints",
    source: "ours",
    seed: 0,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let seeds: u64 = if options.quick { 4 } else { 200 };
    let days: Vec<ChurnOutcome> = (0..seeds).map(|seed| churn(&Churn::day(report.seed() + seed))).collect();
    for (seed, day) in days.iter().enumerate() {
        if let Some(breach) = day.breaches.first() {
            report.progress(&format!("seed {seed}: {breach}"))?;
        }
    }
    let mean = |of: &dyn Fn(&ChurnOutcome) -> f64| days.iter().map(of).sum::<f64>() / seeds as f64;
    let most = |of: &dyn Fn(&ChurnOutcome) -> f64| days.iter().map(of).fold(0.0, f64::max);
    let least = |of: &dyn Fn(&ChurnOutcome) -> f64| days.iter().map(of).fold(f64::INFINITY, f64::min);
    report.row("days", seeds as f64, "", Threshold::None)?;
    report.row("rounds committed per day, mean", mean(&|day| f64::from(day.rounds)), "", Threshold::None)?;
    report.row("views per day, mean", mean(&|day| f64::from(day.views)), "", Threshold::None)?;
    report.row(
        "machines that crashed per day, mean",
        mean(&|day| f64::from(day.died)),
        "",
        Threshold::None,
    )?;
    report.row(
        "members that left in an orderly way per day, mean",
        mean(&|day| f64::from(day.left)),
        "",
        Threshold::None,
    )?;
    report.row(
        "newcomers admitted per day, fewest",
        least(&|day| f64::from(day.admitted)),
        "",
        Threshold::AtLeast(100.0),
    )?;
    let wait = most(&|day| day.longest_wait.as_secs_f64());
    report.row("longest wait of a newcomer that was ready", wait, "s", Threshold::AtMost(600.0))?;
    let view = most(&|day| day.slowest_view.as_secs_f64());
    report.row(
        "time from noticing a lost member to the view without it, longest",
        view,
        "s",
        Threshold::AtMost(60.0),
    )?;
    let gap = most(&|day| day.longest_gap.as_secs_f64());
    report.row("time between two commits, longest", gap, "s", Threshold::AtMost(180.0))?;
    let breaches = days.iter().map(|day| day.breaches.len()).sum::<usize>();
    report.row("violated rules: views, progress", breaches as f64, "", Threshold::AtMost(0.0))?;
    report.row("goodput of living machines, mean", 100.0 * mean(&|day| day.goodput), "%", Threshold::None)?;
    report.row(
        "goodput of living machines, worst day",
        100.0 * least(&|day| day.goodput),
        "%",
        Threshold::AtLeast(90.0),
    )?;
    report.row(
        "goodput relative to 16 machines that never fail, mean",
        100.0 * mean(&|day| day.of_all),
        "%",
        Threshold::None,
    )?;
    soaked::run(report, options)
}
