//! Tests the membership rules under faults: an epoch never has two views, and the run continues.

use std::thread;

use anyhow::{Context, Result};
use farflung::base::Nanos;
use farflung::parallel::membership::check::{Breach, Faults, FaultsOutcome, Flaw, faults};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "split-brain",
    claim: "2 to 7 members, with all kinds of network partitions, with lost, duplicated and delayed \
            messages, and with members and newcomers that crash between any two actions, restart with their \
            old promises, and leave: an epoch never has two views, and once the network is healed all living \
            members have the same view, if enough of them live; if a host also starts the run again from its \
            disk, one of the two incarnations continues, the older one if it has a majority",
    source: "Lamport 2001, \"Paxos made simple\"",
    seed: 0,
    run,
};

/// Numbers of members in the first view.
const MEMBERS: std::ops::RangeInclusive<u32> = 2..=7;

/// Sums over the trials of one size.
#[derive(Default)]
struct Sum {
    trials: u32,
    views: u32,
    cuts: u32,
    crashes: u32,
    restarts: u32,
    newcomers: u32,
    leaves: u32,
    stops: u32,
    can_go_on: u32,
    /// Trials in which a host started the run again.
    started_again: u32,
    /// Trials of these at whose end the run continues in its first incarnation.
    refused: u32,
    /// Trials of these at whose end the run continues in an incarnation that a host started.
    took_over: u32,
    /// Trials of these in which incarnations had no contact until the simulation gave them some.
    apart: u32,
    forks: usize,
    stuck: usize,
    /// Trials that end in two incarnations.
    two_incarnations: usize,
    breaches: usize,
    slowest: Nanos,
    /// The first trial that broke a rule, and the rule.
    first: Option<String>,
}

impl Sum {
    fn add(&mut self, trial: &Faults, outcome: &FaultsOutcome) {
        self.trials += 1;
        self.views += outcome.views;
        self.cuts += outcome.cuts;
        self.crashes += outcome.crashes;
        self.restarts += outcome.restarts;
        self.newcomers += outcome.newcomers;
        self.leaves += outcome.leaves;
        self.stops += outcome.stops;
        self.can_go_on += u32::from(outcome.can_go_on);
        self.started_again += u32::from(outcome.incarnations > 0);
        self.refused += u32::from(outcome.incarnations > 0 && outcome.survivor == Some(1));
        self.took_over += u32::from(outcome.survivor > Some(1));
        self.apart += u32::from(outcome.was_apart);
        self.forks += outcome.forks();
        let count = |is: fn(&Breach) -> bool| outcome.breaches.iter().filter(|breach| is(breach)).count();
        self.stuck += count(|breach| *breach == Breach::Stuck);
        self.two_incarnations += count(|breach| matches!(breach, Breach::Incarnations { .. }));
        self.breaches += outcome.breaches.len();
        self.slowest = self.slowest.max(outcome.recovery.filter(|_| outcome.can_go_on).unwrap_or_default());
        if let (None, Some(breach)) = (&self.first, outcome.breaches.first()) {
            self.first = Some(format!("{trial:?}: {breach}"));
        }
    }

    fn join(&mut self, other: Self) {
        self.trials += other.trials;
        self.views += other.views;
        self.cuts += other.cuts;
        self.crashes += other.crashes;
        self.restarts += other.restarts;
        self.newcomers += other.newcomers;
        self.leaves += other.leaves;
        self.stops += other.stops;
        self.can_go_on += other.can_go_on;
        self.started_again += other.started_again;
        self.refused += other.refused;
        self.took_over += other.took_over;
        self.apart += other.apart;
        self.forks += other.forks;
        self.stuck += other.stuck;
        self.two_incarnations += other.two_incarnations;
        self.breaches += other.breaches;
        self.slowest = self.slowest.max(other.slowest);
        self.first = self.first.take().or(other.first);
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let seeds: u64 = match (options.quick, options.long) {
        (true, _) => 100,
        (_, true) => 100_000,
        // 100,000 trials over all sizes.
        _ => 16_667,
    };
    let mut all = Sum::default();
    for members in MEMBERS {
        let trial = Faults { members, seed: report.seed(), starts_again: false, flaw: None };
        let sum = trials(trial, seeds)?;
        if let Some(first) = &sum.first {
            report.progress(first)?;
        }
        let counts = [
            ("trials", sum.trials),
            ("views decided", sum.views),
            ("cuts", sum.cuts),
            ("crashes", sum.crashes),
            ("restarts with votes", sum.restarts),
            ("newcomers", sum.newcomers),
            ("leaves", sum.leaves),
            ("members without a majority that stopped", sum.stops),
            ("trials in which enough members live to continue", sum.can_go_on),
        ];
        for (metric, count) in counts {
            report.row(&format!("{members} members: {metric}"), f64::from(count), "", Threshold::None)?;
        }
        let slowest = sum.slowest.as_secs_f64();
        report.row(&format!("{members} members: slowest recovery"), slowest, "s", Threshold::AtMost(60.0))?;
        all.join(sum);
    }
    let rows = [
        ("second views of an epoch", all.forks),
        ("trials that do not continue", all.stuck),
        ("violated rules in total", all.breaches),
    ];
    for (metric, count) in rows {
        report.row(metric, count as f64, "", Threshold::AtMost(0.0))?;
    }
    let share = f64::from(all.can_go_on) / f64::from(all.trials);
    report.row(
        "trials in which enough members live to continue",
        100.0 * share,
        "%",
        Threshold::AtLeast(60.0),
    )?;
    second_incarnations(report, (seeds / 4).max(100))?;

    // A control that must fail: members that restart without their votes.
    let seeds = if options.quick { 1_200 } else { 5_000 };
    let flaw = Some(Flaw::ForgetsVotes);
    let flawed = trials(Faults { members: 3, seed: 0, starts_again: false, flaw }, seeds)?;
    let metric = "second views of an epoch, if members forget their votes";
    report.row(metric, flawed.forks as f64, "", Threshold::AtLeast(1.0))
}

/// Runs trials in which a host starts the run again, `seeds` for each number of members.
fn second_incarnations(report: &mut Report<'_>, seeds: u64) -> Result<()> {
    let mut all = Sum::default();
    for members in MEMBERS {
        let trial = Faults { members, seed: report.seed(), starts_again: true, flaw: None };
        all.join(trials(trial, seeds)?);
    }
    if let Some(first) = &all.first {
        report.progress(first)?;
    }
    let share = |count: u32| 100.0 * f64::from(count) / f64::from(all.trials);
    // Without these shares, the rows that must be 0 would say little.
    let counts = [
        ("trials in which a host starts", all.started_again, Threshold::AtLeast(80.0)),
        ("trials in which the older run continues", all.refused, Threshold::AtLeast(30.0)),
        ("trials in which the host's run continues", all.took_over, Threshold::AtLeast(10.0)),
        ("trials in which the two had no contact at first", all.apart, Threshold::None),
        ("trials in which enough members live to continue", all.can_go_on, Threshold::AtLeast(60.0)),
    ];
    report.row("run started again: trials", f64::from(all.trials), "", Threshold::None)?;
    for (metric, count, threshold) in counts {
        report.row(&format!("run started again: {metric}"), share(count), "%", threshold)?;
    }
    let rows = [
        ("second views of an epoch", all.forks),
        ("trials that do not continue", all.stuck),
        ("trials that end in two incarnations", all.two_incarnations),
        ("violated rules in total", all.breaches),
    ];
    for (metric, count) in rows {
        report.row(&format!("run started again: {metric}"), count as f64, "", Threshold::AtMost(0.0))?;
    }
    Ok(())
}

/// Runs trials with this trial's seed and those that follow, on all processors.
fn trials(first: Faults, seeds: u64) -> Result<Sum> {
    let seeds = first.seed..first.seed + seeds;
    let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut sum = Sum::default();
    thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|part| {
                let seeds = seeds.clone().skip(part).step_by(threads);
                scope.spawn(move || {
                    let mut sum = Sum::default();
                    for seed in seeds {
                        let trial = Faults { seed, ..first };
                        sum.add(&trial, &faults(&trial));
                    }
                    sum
                })
            })
            .collect();
        for part in parts {
            sum.join(part.join().ok().context("a trial panicked")?);
        }
        Ok(sum)
    })
}
