//! `times.jsonl`: how the time of each step was spent on a rank, one JSON object per line. Each rank has such a
//! file in its folder; rank 0's is beside the metrics. `farflung watch` plots them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::line_file::LineFile;
use crate::train::Spent;

/// The file's name.
pub const TIMES: &str = "times.jsonl";

/// A line of the file. Seconds are of the run's clock, which is virtual on simulated links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Number of steps done. A run that continues from a checkpoint repeats some steps.
    pub step: u64,
    /// The rank among the ranks of the step.
    pub rank: u32,
    /// Seconds from the step's beginning to its end, without the evaluation and checkpoint after it.
    pub took_s: f64,
    /// Part of `took_s`: waiting for hidden states or gradients of other stages.
    pub wait_s: f64,
    /// Part of `took_s`: waiting for averages, votes and exchanges between replicas, including the wait for
    /// slower ranks.
    pub communicate_s: f64,
    /// Part of the time that is neither waiting nor communication: updates whose optimizer has its state on
    /// disk, and the wait for earlier ones to reach it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_s: f64,
    /// Bytes of that state that this rank has read, since its process began.
    #[serde(default, skip_serializing_if = "is_none")]
    pub disk_read: u64,
    /// Bytes that it has written.
    #[serde(default, skip_serializing_if = "is_none")]
    pub disk_written: u64,
    /// Bytes sent by this rank since the run's first step.
    pub bytes_sent: u64,
    /// Whether all replicas had the same parameters at the step's end.
    pub met: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
const fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
const fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

impl StepTimes {
    /// Returns the seconds for which the rank computed.
    #[must_use]
    pub fn compute_s(&self) -> f64 {
        (self.took_s - self.wait_s - self.communicate_s).max(0.0)
    }

    /// Returns the times of a step, with the other fields at their defaults.
    pub(crate) fn of(spent: Spent) -> Self {
        let Spent { took, wait, communicate, disk } = spent;
        Self {
            took_s: took.as_secs_f64(),
            wait_s: wait.as_secs_f64(),
            communicate_s: communicate.as_secs_f64(),
            disk_s: disk.as_secs_f64(),
            ..Self::default()
        }
    }
}

/// Appends steps to a rank's file. Lines that cannot be written are
/// dropped, with a warning.
#[derive(Debug, Default)]
pub(crate) struct StepTimesLog(Option<LineFile>);

impl StepTimesLog {
    /// Makes a log in this folder; without a folder, steps are dropped. The file is opened at the first step.
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        Self(folder.map(|folder| LineFile::new(folder.join(TIMES))))
    }

    pub(crate) fn write(&mut self, times: &StepTimes) {
        if let Some(file) = &mut self.0 {
            file.append(times);
        }
    }
}
