//! Checks that replicas with unequal numbers of tokens are weighted by their tokens.

use anyhow::{Context, Result, ensure};
use farflung::TrainConfig;
use farflung::base::Link;
use farflung::optim::sync::{DDP, DECOUPLED, EAGER, METHODS, ZERO_ONE};
use farflung::parallel::Plan;
use farflung::train::Job;

use super::{ROUNDED, STEPS, Shared, UNEVEN, ends, timed};
use crate::harness::{Report, Threshold};
use crate::workers::{JobTransport, again, on_all, relative_l2};

/// After one step of plain SGD, the common model of the replicas under these methods is the mean by tokens,
/// which is a step of ddp.
const BY_TOKENS: [&str; 19] = [
    "--sync diloco --outer-lr 1 --outer-momentum 0",
    "--sync des-loc",
    "--sync streaming --fragments 1 --sync-delay 0 --mixing 0 --outer-lr 1 --outer-momentum 0",
    "--sync cocktail --codec none",
    "--sync noloco --outer-lr 1 --outer-momentum 0",
    "--sync d-psgd",
    "--sync shift-one",
    "--sync exponential",
    "--sync sgp",
    "--sync random-pairs",
    "--sync event",
    "--sync moniqua",
    "--sync low-precision --codec none",
    "--sync choco --codec none",
    "--sync async --sync-every 1 --sync-delay 0 --outer-lr 1 --outer-momentum 0",
    "--sync parameter-server --servers sharded",
    "--sync bounded-stale --servers central",
    "--sync halos --sync-every 1 --sync-delay 0 --outer-lr 1 --outer-momentum 0 --topology regions.toml",
    "--sync async-average --average-interval 1s",
];

/// Flags for a step without momentum, weight decay or clipping.
const PLAIN: &str = "--optimizer sgd --momentum 0 --weight-decay 0 --clip 0 --lr 0.1";

/// Returns a job with some flags and an uneven plan.
fn uneven(base: &Job, shared: &Shared<'_>, flags: &str, steps: u64) -> Result<Job> {
    let config = TrainConfig { steps, ..shared.config(&format!("{flags} --accumulate 2"))? };
    let over = if timed(flags) { JobTransport::Simulated(Link::FREE) } else { JobTransport::Memory };
    let job = again(base, config, over);
    let plan = Plan { microbatches: UNEVEN.to_vec(), ..Plan::from(&job.plan) };
    Ok(job.with_plan(plan)?)
}

/// Returns the parameters after the last step of a run under an uneven plan.
fn trained(base: &Job, shared: &Shared<'_>, flags: &str, steps: u64) -> Result<Vec<f32>> {
    let ends = ends(&uneven(base, shared, flags, steps)?)?;
    ensure!(ends.windows(2).all(|pair| pair[0] == pair[1]), "{flags}: replicas differ after the last step");
    ends.into_iter().next().context("the job has no ranks")
}

/// Adds rows for replicas with unequal numbers of tokens.
pub(super) fn rows(report: &mut Report<'_>, base: &Job, shared: &Shared<'_>) -> Result<()> {
    // Checks that every row of the table of methods is covered. Not in the list: methods that have their own
    // check below, and ddp, which the others are compared with.
    let others = [EAGER.name, DECOUPLED.name, ZERO_ONE.name, DDP.name];
    for row in METHODS.iter().filter(|row| !others.contains(&row.name)) {
        let own = format!("--sync {} ", row.name);
        ensure!(
            BY_TOKENS.iter().any(|flags| format!("{flags} ").starts_with(&own)),
            "no flags in BY_TOKENS for {}",
            row.name
        );
    }
    let ddp = trained(base, shared, &format!("--sync ddp {PLAIN}"), 1)?;
    for flags in BY_TOKENS {
        let off = relative_l2(&trained(base, shared, &format!("{flags} {PLAIN}"), 1)?, &ddp);
        let metric = format!("{flags}: a step of replicas with {UNEVEN:?} microbatches compared with ddp");
        report.row(&metric, off, "", Threshold::AtMost(ROUNDED))?;
    }
    by_loops(report, base, shared)?;
    let adam = trained(base, shared, "--optimizer onebit-adam --codec none --codec-warmup 8", STEPS)?;
    let zero_one = trained(base, shared, "--optimizer zero-one-adam --codec-warmup 8", STEPS)?;
    let metric = format!(
        "--optimizer zero-one-adam --codec-warmup 8: replicas with unequal microbatches compared with \
         onebit-adam, {STEPS} steps"
    );
    report.row(&metric, relative_l2(&zero_one, &adam), "", Threshold::AtMost(ROUNDED))
}

/// Compares methods whose first step is not a mean by tokens with plain loops over the replicas' own results.
///
/// Decoupled `DiLoCo` weights by tokens times tokens of a step, as in its paper. With eager updates, a replica
/// applies its own weighted part of its own change at once, and nothing yet of the others' changes. The mean of
/// the replicas is by tokens.
fn by_loops(report: &mut Report<'_>, base: &Job, shared: &Shared<'_>) -> Result<()> {
    let local = uneven(base, shared, &format!("--sync diloco --sync-every 900 {PLAIN}"), 2)?;
    let alone = on_all(&local, |rank| {
        let start = rank.params().to_vec::<f32>()?;
        rank.step(false)?;
        Ok((start, rank.params().to_vec::<f32>()?))
    })?;
    let all: f64 = UNEVEN.map(f64::from).iter().sum();
    let squares: f64 = UNEVEN.map(|count| f64::from(count * count)).iter().sum();
    let summed = |weight: &dyn Fn(f64) -> f64, value: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f32> {
        let part = |rank: usize, i: usize| {
            let (tokens, (start, end)) = (f64::from(UNEVEN[rank]), &alone[rank]);
            weight(tokens) * value(tokens, f64::from(start[i]), f64::from(end[i]))
        };
        let sum = |i: usize| (0..UNEVEN.len()).map(|rank| part(rank, i)).sum::<f64>() as f32;
        (0..alone[0].0.len()).map(sum).collect()
    };
    let decoupled = summed(&|tokens| tokens * tokens / squares, &|_, _, end| end);
    let eager = summed(&|tokens| tokens / all, &|tokens, start, end| start - tokens / all * (start - end));
    let cases = [
        ("--sync decoupled --sync-every 1 --quorum 4", decoupled, "a mean by tokens squared"),
        ("--sync eager --sync-every 1", eager, "a mean by tokens of each replica's part of its own change"),
    ];
    for (flags, expected, what) in cases {
        let flags = format!("{flags} --outer-lr 1 --outer-momentum 0");
        let found = trained(base, shared, &format!("{flags} {PLAIN}"), 1)?;
        let metric = format!("{flags}: a step of replicas with {UNEVEN:?} microbatches compared with {what}");
        report.row(&metric, relative_l2(&found, &expected), "", Threshold::AtMost(ROUNDED))?;
    }
    Ok(())
}
