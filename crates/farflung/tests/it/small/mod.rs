//! A GPT small enough to be trained in a test, with its ranks as threads.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use farflung::config::choice::{LrScheduleKind, TransportKind};
use farflung::train::{Job, WorkerConnection, connections};
use farflung::transports::MEMORY;
use farflung::{Stop, TrainConfig};

/// Returns settings of a GPT of four layers on a text of its own, which is in the returned folder.
pub(crate) fn config(steps: u64) -> (tempfile::TempDir, TrainConfig) {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text.txt");
    let text = (0..4000).map(|i| format!("{} is the square of {i}.", i * i)).collect::<Vec<_>>().join(" ");
    std::fs::write(&data, text).unwrap();
    let config = TrainConfig {
        data: Some(data),
        layers: Some(4),
        heads: Some(2),
        dim: Some(16),
        context: Some(16),
        batch: 2,
        steps,
        warmup: 0,
        lr: 0.01,
        lr_schedule: LrScheduleKind::Constant,
        codec: "none".parse().unwrap(),
        eval_batches: 4,
        transport: TransportKind::of(&MEMORY),
        threads: 1,
        ..TrainConfig::default()
    };
    (folder, config)
}

/// Returns the job of these settings.
pub(crate) fn job(config: &TrainConfig) -> Job {
    Job::new(config.clone(), config.workers, Stop::manual()).unwrap()
}

/// Runs `work` as each rank, one thread per rank.
pub(crate) fn on_all<T: Send>(job: &Job, work: impl Fn(WorkerConnection) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = connections(job, None)
            .unwrap()
            .into_iter()
            .map(|connection| scope.spawn(move || work(connection)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
