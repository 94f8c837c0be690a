//! `times.jsonl`: where the time of each step went on a rank, an object a line. Each rank has one in its
//! folder; rank 0's is beside the metrics. `farflung watch` draws them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::line_file::LineFile;
use crate::train::Spent;

/// The file's name.
pub const TIMES: &str = "times.jsonl";

/// A line of the file. Seconds are of the run's clock: virtual on simulated links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Steps done. A run that goes on from a checkpoint repeats some.
    pub step: u64,
    /// The rank, among those of the step.
    pub rank: u32,
    /// Seconds from the step's beginning to its end: evaluations and checkpoints behind it are not in them.
    pub took_s: f64,
    /// Of these, waiting for hidden states or gradients of other stages.
    pub wait_s: f64,
    /// Of these, waiting for averages, votes and what replicas exchange between steps, slower ranks included.
    pub communicate_s: f64,
    /// Bytes that the rank has sent since the run's first step.
    pub bytes_sent: u64,
    /// Whether all replicas were the same at the step's end.
    pub met: bool,
}

impl StepTimes {
    /// Seconds in which the rank computed.
    #[must_use]
    pub fn compute_s(&self) -> f64 {
        (self.took_s - self.wait_s - self.communicate_s).max(0.0)
    }

    /// The times of a step without the rest.
    pub(crate) fn of(spent: Spent) -> Self {
        let Spent { took, wait, communicate } = spent;
        Self {
            took_s: took.as_secs_f64(),
            wait_s: wait.as_secs_f64(),
            communicate_s: communicate.as_secs_f64(),
            ..Self::default()
        }
    }
}

/// Appends steps to a rank's file. What cannot be written is warned of and dropped: no run ends for it.
#[derive(Debug, Default)]
pub(crate) struct StepTimesLog(Option<LineFile>);

impl StepTimesLog {
    /// A log in this folder; without one, steps are dropped. The file is opened at the first step.
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        Self(folder.map(|folder| LineFile::new(folder.join(TIMES))))
    }

    pub(crate) fn write(&mut self, times: &StepTimes) {
        if let Some(Err(error)) = self.0.as_mut().map(|file| file.append(times)) {
            tracing::warn!(%error, "the times of a step were not written");
        }
    }
}
