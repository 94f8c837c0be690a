//! farflung's trainer with a method of synchronisation of one's own: local SGD, which averages parameters
//! every few steps. The method is the value `LOCAL_SGD` in one file; checkpoints, plans, simulated links and
//! the report come from the trainer.

mod local_sgd;

use std::error::Error;

use farflung::config::choice::SyncKind;
use farflung::optim::sync::SyncMethod;
use farflung::train::{Quiet, run};
use farflung::{Stop, TrainConfig};

use local_sgd::LOCAL_SGD;

fn main() -> Result<(), Box<dyn Error>> {
    SyncMethod::register(&LOCAL_SGD)?;
    let folder = std::env::temp_dir().join(format!("farflung-method-{}", std::process::id()));
    let config = TrainConfig {
        layers: Some(1),
        heads: Some(2),
        dim: Some(32),
        context: Some(32),
        steps: 60,
        warmup: 5,
        batch: 4,
        workers: 4,
        sync: SyncKind::of(&LOCAL_SGD),
        sync_every: 10,
        codec: "int8".parse()?,
        sample_tokens: 0,
        quiet: true,
        out: Some(folder.clone()),
        ..TrainConfig::default()
    };
    let report = run(config, None, Stop::manual(), &mut Quiet)?.ok_or("rank 0 has a report")?;
    std::fs::remove_dir_all(folder)?;
    let (before, after) = (report.val_loss_before.ok_or("no loss")?, report.val_loss.ok_or("no loss")?);
    println!(
        "loss {before:.3} -> {after:.3}, {} bytes sent by a worker in {} steps",
        report.bytes_sent, report.steps
    );
    assert!(after < before - 1.0, "it did not learn");
    Ok(())
}
