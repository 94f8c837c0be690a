//! Compares the loss of one worker with PyTorch's, on the same text with the same settings.

use anyhow::{Result, ensure};
use farflung::TrainConfig;
use farflung::config::choice::{LrScheduleKind, OptimizerKind, SyncKind};
use farflung::corpus;
use farflung::optim::local::ADAMW;
use farflung::optim::sync::DDP;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "learn-nano",
    claim: "500 steps of nano on the default text end at most 0.02 nats above PyTorch's validation loss",
    source: "Karpathy, nanoGPT",
    seed: 1337,
    run,
};

/// Hash of the text on which the figures below were measured.
const TEXT: &str = "d931b6eae46e91ebeb028231f24af58fca469996698f04a80df6e27f93e4642f";

/// PyTorch's validation loss in nats, by number of steps. Measured by `torch_loss.py STEPS TEXT` (PyTorch 2,
/// one thread) with the bytes of [`corpus::default_text`] as TEXT. PyTorch's run starts from other weights and
/// draws other batches.
const PYTORCH: [(u64, f64); 2] = [(100, 2.4366), (500, 1.9897)];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    ensure!(corpus::EXPECTED == TEXT, "the default text has changed: measure PyTorch's losses on it again");
    let (steps, theirs) = PYTORCH[usize::from(!options.quick)];
    let config = TrainConfig {
        model: "nano".to_owned(),
        context: Some(64),
        batch: 12,
        accumulate: 1,
        steps,
        optimizer: OptimizerKind::of(&ADAMW),
        lr: 1e-3,
        min_lr: 1e-3,
        warmup: 50,
        lr_schedule: LrScheduleKind::Constant,
        weight_decay: 0.1,
        beta1: 0.9,
        beta2: 0.95,
        clip: 1.0,
        seed: report.seed(),
        workers: 1,
        sync: SyncKind::of(&DDP),
        eval_batches: 50,
        threads: 0,
        ..TrainConfig::default()
    };
    let job = job(config, JobTransport::Memory)?;
    let mut found = on_all(&job, |worker| {
        let before = worker.evaluate()?;
        let mut last = Vec::new();
        for step in 0..steps {
            let loss = worker.step(false)?.loss;
            if step + 50 >= steps {
                last.push(loss);
            }
        }
        Ok((before, last.iter().sum::<f64>() / last.len() as f64, worker.evaluate()?))
    })?;
    let (before, training, after) = found.remove(0);
    report.row("validation loss before training", before, "nats", Threshold::None)?;
    report.row("training loss, mean of the last 50 steps", training, "nats", Threshold::None)?;
    report.row(
        &format!("validation loss after {steps} steps"),
        after,
        "nats",
        Threshold::AtMost(theirs + 0.02),
    )?;
    report.row("PyTorch's validation loss", theirs, "nats", Threshold::None)?;
    report.row("validation loss above PyTorch's", after - theirs, "nats", Threshold::AtMost(0.02))
}
