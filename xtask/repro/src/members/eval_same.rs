//! The validation loss does not depend on how a run is divided: workers, pipelines, batches, members that come
//! and go. The learning rate is so small that no parameter changes, so all evaluations are of one model.

use anyhow::{Context, Result, ensure};
use farflung::TrainConfig;
use farflung::base::{Nanos, PeerId};
use farflung::comm::simulated::Faults;
use farflung::parallel::pipeline::Method;
use farflung::train::{Departure, Job, Quiet, Report as Trained, connections, run_workers};

use super::run as run_members;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, job};

pub(crate) const BENCH: Bench = Bench {
    name: "eval-same",
    claim: "the validation loss is the same for any number of workers, any pipeline, any batch, and while members \
            come and go",
    source: "ours",
    seed: 1337,
    run,
};

/// Relative difference that rounding may make.
const MARK: f64 = 1e-6;

fn settings(seed: u64) -> TrainConfig {
    TrainConfig {
        layers: Some(4),
        dim: Some(16),
        context: Some(8),
        batch: 1,
        steps: 2,
        eval_every: 1,
        eval_batches: 3,
        sample_tokens: 0,
        lr: 1e-30,
        weight_decay: 0.0,
        ..crate::workers::config(seed, false)
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let seed = report.seed();
    let data = job(settings(seed), JobTransport::Memory)?;
    let alone = losses(&data)?;
    let expected = *alone.first().context("an evaluation before the first step")?;
    report.row("loss of one worker", expected, "nats", Threshold::None)?;
    let far = |losses: &[f64]| losses.iter().map(|loss| (loss / expected - 1.0).abs()).fold(0.0, f64::max);
    let batches: &[usize] = if options.quick { &[1, 5] } else { &[1, 2, 3, 4, 5, 6, 7] };

    let mut worst = (0.0_f64, 0);
    for workers in 1..=8 {
        for &batch in batches {
            let config = TrainConfig { workers, batch, ..settings(seed) };
            worst = (worst.0.max(far(&losses(&again(&data, config, JobTransport::Memory))?)), worst.1 + 1);
        }
    }
    report.row(
        "1 to 8 workers, batches of 1 to 7: relative difference",
        worst.0,
        "",
        Threshold::AtMost(MARK),
    )?;
    report.row("1 to 8 workers, batches of 1 to 7: runs", f64::from(worst.1), "", Threshold::None)?;

    for (workers, stages) in [(2, 2), (4, 2), (6, 2), (4, 4), (8, 4)] {
        let mut worst = 0.0_f64;
        for &batch in batches {
            for schedule in ["gpipe", "1f1b", "zb-h1"] {
                let schedule: Method = schedule.parse()?;
                let config =
                    TrainConfig { workers, stages, batch, schedule, microbatches: Some(4), ..settings(seed) };
                worst = worst.max(far(&losses(&again(&data, config, JobTransport::Memory))?));
            }
        }
        let what = format!("{workers} workers in pipelines of {stages}: relative difference");
        report.row(&what, worst, "", Threshold::AtMost(MARK))?;
    }

    // Two come, one leaves: the loss after each step, and at the end.
    for (name, stages) in [("members", 1), ("members of pipelines", 2)] {
        let (begin, ends) = (2 * stages, 2 * stages + 2);
        let job = super::job(seed, begin, |config| {
            let own = settings(seed);
            (config.layers, config.lr, config.weight_decay) = (own.layers, own.lr, own.weight_decay);
            (config.eval_batches, config.eval_every, config.steps) = (own.eval_batches, 1, 8);
            config.stages = stages;
            config.microbatches = (stages > 1).then_some(2);
        })?;
        let job = Job { departure: Some(Departure { rank: 1, step: 5 }), ..job };
        let come: Vec<_> = (begin..ends).map(|end| (PeerId(end as u32), Nanos::from_millis(40))).collect();
        let ended = run_members(&job, ends, &come, &Faults::new())?;
        let reports: Vec<Trained> = ended.into_iter().filter_map(|end| end.ok().flatten()).collect();
        ensure!(!reports.is_empty(), "{name}: no member has a report");
        let mut seen = Vec::new();
        for trained in &reports {
            seen.extend(trained.val_loss_before.into_iter().chain(trained.val_loss));
            seen.extend(trained.rows.iter().filter_map(|row| row.val_loss));
        }
        ensure!(!seen.is_empty(), "{name}: nothing was evaluated");
        report.row(
            &format!("{name} that come and go: relative difference"),
            far(&seen),
            "",
            Threshold::AtMost(MARK),
        )?;
    }
    Ok(())
}

/// Runs a job and returns the losses of its evaluations, before the first step and at the end.
fn losses(job: &Job) -> Result<Vec<f64>> {
    let trained = trained(job)?;
    let each = trained.rows.iter().filter_map(|row| row.val_loss);
    Ok(trained.val_loss_before.into_iter().chain(each).chain(trained.val_loss).collect())
}

fn trained(job: &Job) -> Result<Trained> {
    let mut reports = run_workers(job, connections(job, None)?, &mut Quiet).into_iter();
    let first = reports.next().context("a job has a worker")??;
    first.context("rank 0 has a report")
}
