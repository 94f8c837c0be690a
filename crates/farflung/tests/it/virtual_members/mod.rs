//! Members that join and leave on the virtual clock: their settings, their network, and a record of a run's
//! notes.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use farflung::comm::Transport;
use farflung::comm::simulated::{Faults, cluster_with};
use farflung::config::choice::LrScheduleKind;
use farflung::config::pools::Numbers;
use farflung::train::{Job, Report, RunObserver, WorkerConnection, elastic};
use farflung::{Result, StepMetrics, Stop, TrainConfig};
use farflung_base::{Link, Nanos, PeerId, Topology};

/// The result of a worker.
pub(crate) type Ended = Result<Option<Report>>;

/// Returns the settings with a tiny model of a text, which is written to the folder.
pub(crate) fn tiny(folder: &Path, text: &str, config: TrainConfig) -> TrainConfig {
    let data = folder.join("text.txt");
    std::fs::write(&data, text).unwrap();
    TrainConfig {
        heads: Some(2),
        dim: Some(8),
        context: Some(8),
        batch: 1,
        warmup: 0,
        lr_schedule: LrScheduleKind::Constant,
        threads: 1,
        sample_tokens: 0,
        data: Some(data),
        ..config
    }
}

/// Writes a file of machines with these speeds in MFLOP/s into the folder, for the setting `topology`.
pub(crate) fn machines(folder: &Path, speeds: &[f64]) -> PathBuf {
    let mut machines = "default = \"1gbit,1ms\"\n".to_owned();
    for (n, speed) in speeds.iter().enumerate() {
        let device = format!("name = \"m{n}\"\nflops = \"{speed} MFLOPS\"\nmemory = \"8GB\"\n");
        write!(machines, "[[device]]\n{device}").unwrap();
    }
    let path = folder.join("machines.toml");
    std::fs::write(&path, machines).unwrap();
    path
}

/// Creates the job of members that begin as pools of these sizes, one for each stage of the settings.
pub(crate) fn in_pools(config: TrainConfig, pools: &[u32]) -> Job {
    let ranks = pools.iter().sum::<u32>() as usize;
    let pipelines = Some(Arc::new(TrainConfig { workers: 1, ..config.clone() }));
    let config =
        TrainConfig { pools: Some(Numbers(pools.to_vec())), stages: ranks, workers: ranks, ..config };
    Job { elastic: true, pipelines, ..Job::new(config, ranks, Stop::manual()).unwrap() }
}

/// Returns the text that most of these tests use.
pub(crate) fn fox() -> String {
    "the quick brown fox ".repeat(500)
}

/// Returns connections in a network of `ends` endpoints, a millisecond apart; those in `come` join at the given
/// times.
pub(crate) fn connections(
    job: &Job,
    ends: usize,
    come: &[(PeerId, Nanos)],
    faults: &Faults,
) -> Vec<WorkerConnection> {
    let link = Link { latency: Nanos::from_millis(1), ..job.config.link };
    let ends = cluster_with(&Topology::uniform(ends, link), faults);
    let ends = ends.into_iter().map(|end| end as Arc<dyn Transport>).collect();
    elastic::connections(job, ends, come, true).unwrap()
}

/// The notes of a run, and the times of its steps.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) notes: Vec<String>,
    pub(crate) times: Vec<f64>,
}

impl Told {
    /// Returns whether a note contains this text.
    pub(crate) fn has(&self, text: &str) -> bool {
        self.notes.iter().any(|note| note.contains(text))
    }
}

impl RunObserver for Told {
    fn step(&mut self, metrics: &StepMetrics, _: Option<f64>) {
        self.times.push(metrics.time_s);
    }
    fn note(&mut self, note: &str) {
        self.notes.push(note.to_owned());
    }
}
