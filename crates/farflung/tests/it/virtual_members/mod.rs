//! Members that come and leave on the virtual clock: their settings, their network, and what a run says.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::sync::Arc;

use farflung::comm::Transport;
use farflung::comm::simulated::{Faults, cluster_with};
use farflung::config::choice::LrScheduleKind;
use farflung::train::{Job, Report, Seat, Watch, elastic};
use farflung::{Result, StepMetrics, TrainConfig};
use farflung_base::{Link, Nanos, PeerId, Topology};

/// What becomes of a seat.
pub(crate) type Ended = Result<Option<Report>>;

/// The settings with a tiny model of a text, which is written into the folder.
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

/// The text of most of them.
pub(crate) fn fox() -> String {
    "the quick brown fox ".repeat(500)
}

/// Seats in a network of so many endpoints, a millisecond apart, of which some come at a time.
pub(crate) fn seats(job: &Job, ends: usize, come: &[(PeerId, Nanos)], faults: &Faults) -> Vec<Seat> {
    let link = Link { latency: Nanos::from_millis(1), ..job.config.link };
    let ends = cluster_with(&Topology::uniform(ends, link), faults);
    let ends = ends.into_iter().map(|end| end as Arc<dyn Transport>).collect();
    elastic::seats(job, ends, come, true).unwrap()
}

/// What a run says, and when its steps were done.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) notes: Vec<String>,
    pub(crate) times: Vec<f64>,
}

impl Told {
    /// Whether a note has this text.
    pub(crate) fn has(&self, text: &str) -> bool {
        self.notes.iter().any(|note| note.contains(text))
    }
}

impl Watch for Told {
    fn step(&mut self, metrics: &StepMetrics, _: Option<f64>) {
        self.times.push(metrics.time_s);
    }
    fn note(&mut self, note: &str) {
        self.notes.push(note.to_owned());
    }
}
