//! A GPT small enough to be trained in a test, with its ranks as threads.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use farflung::config::choice::{LrScheduleKind, TransportKind};
use farflung::train::{Job, Prediction, Trainer, WorkerConnection, connections};
use farflung::transports::{MEMORY, SIMULATED};
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

/// Checks that a step of four microbatches on the virtual clock takes the time that was predicted, within 1%.
#[track_caller]
pub(crate) fn takes_the_predicted_time(config: TrainConfig, what: &str) {
    let job = job(&TrainConfig {
        microbatches: Some(4),
        transport: TransportKind::of(&SIMULATED),
        link: "200mbit,1ms".parse().unwrap(),
        compute_rate: 1e9,
        ..config
    });
    let all = on_all(&job, |connection| {
        let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
        let begun = rank.comm().now();
        rank.step(false).unwrap();
        (rank.comm().now() - begun).as_secs_f64()
    });
    let took = all.into_iter().fold(0.0, f64::max);
    let predicted = Prediction::of(&job).unwrap().step().as_secs_f64();
    let off = (took / predicted - 1.0).abs();
    assert!(off < 0.01, "{what}: {took} s, predicted {predicted} s");
}
