//! `events.jsonl`: what happened in a run and when, an object a line. Each rank has one in its folder; rank 0's
//! is beside the metrics. Lines of earlier starts of the run stay.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::line_file::LineFile;
use crate::{Error, Result};

/// The file's name.
pub const EVENTS: &str = "events.jsonl";

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
#[non_exhaustive]
pub enum What {
    /// The run went on from a checkpoint.
    Resumed {
        /// The checkpoint.
        from: String,
        /// Settings that differ, and folders that were lost.
        notes: Vec<String>,
    },
    /// A checkpoint was saved on all ranks.
    Saved {
        /// This rank's.
        path: String,
    },
    /// Gradients overflowed: the step was given up on all ranks and computed again with a smaller loss scale.
    Skipped {
        /// How often, in this step.
        times: u32,
    },
    /// Members have come, left or were lost, and the others went on.
    Members {
        /// The number of the view.
        epoch: u64,
        /// How many there are now.
        members: usize,
        /// Endpoints that have come.
        came: Vec<u32>,
        /// Endpoints that are gone.
        went: Vec<u32>,
        /// Sequences that a lost member had trained on in local steps which no average has.
        lost_sequences: u64,
        /// Steps that were done and are lost, since nobody is left who has all of the model after them.
        #[serde(default)]
        lost_steps: u64,
        /// Whether they went on from their checkpoints, since nobody had all of the model in memory.
        #[serde(default)]
        from_checkpoints: bool,
        /// From the beginning of the change to the next step, in milliseconds of the run's clock.
        took_ms: u64,
        /// The failure that was seen here; none where members came or left in peace.
        reason: Option<String>,
    },
    /// A newcomer is about to come in: what its state will cost the members.
    Admitting {
        /// Its endpoint.
        member: u32,
        /// Bytes of the state.
        state: u64,
        /// How long all will wait for it, by the rates of its links, in milliseconds; none where these are not
        /// known. The event `members` that follows says how long the change took.
        predicted_ms: Option<u64>,
        /// Whether it may be less: which part of the model it will have is decided later.
        at_most: bool,
    },
    /// A step failed although all members answered: they do it again under a new view.
    Repeated {
        /// The number of the view.
        epoch: u64,
        /// How often the step has failed so.
        times: u32,
        /// How long they wait for each other now, in milliseconds.
        deadline_ms: u64,
        /// From the failure to the next attempt, in milliseconds of the run's clock.
        took_ms: u64,
        /// The failure that was seen here.
        reason: Option<String>,
    },
    /// Members have other shares of a step: they follow their speed.
    Shares {
        /// Microbatches of each member in a step, by rank.
        microbatches: Vec<u32>,
        /// What a step was expected to take, by the measured times, in microseconds.
        before_us: u64,
        /// What it is expected to take now.
        now_us: u64,
    },
    /// A peer was lost, which ended the run here.
    Lost {
        /// Who, and how one can tell.
        peer: String,
    },
    /// A rank was found to have wrong values, which ended the run.
    Named {
        /// The ranks.
        ranks: Vec<u32>,
        /// What is wrong.
        reason: String,
    },
    /// A signal stopped the run.
    Stopped {
        /// Which.
        reason: String,
    },
    /// The run did not go on, for another reason.
    Refused {
        /// Which.
        reason: String,
    },
}

impl What {
    /// What an error that ends a run is.
    pub(crate) fn ended(error: &Error) -> Self {
        let reason = causes(error);
        match error {
            Error::PeerLost { .. } | Error::CutOff { .. } => Self::Lost { peer: reason },
            Error::Diverged { ranks, .. } => {
                Self::Named { ranks: ranks.iter().map(|rank| rank.0).collect(), reason }
            }
            Error::StepNotFinite { ranks, .. } if !ranks.is_empty() => {
                Self::Named { ranks: ranks.iter().map(|rank| rank.0).collect(), reason }
            }
            Error::OnRank { rank, .. } => Self::Named { ranks: vec![*rank as u32], reason },
            Error::Stopped(_) | Error::StoppedAt { .. } | Error::StoppedBy { .. } => Self::Stopped { reason },
            _ => Self::Refused { reason },
        }
    }
}

/// An error with its causes on one line.
pub(crate) fn causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// A line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Steps done.
    pub step: u64,
    /// The run's clock in seconds: virtual on simulated links.
    pub time_s: f64,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

/// Appends events to a run's file. What cannot be written is warned of and dropped: no run ends for it.
#[derive(Debug)]
pub(crate) struct EventLog {
    file: Option<LineFile>,
    /// The run's clock in seconds, as it was last told.
    pub(crate) time_s: f64,
}

impl EventLog {
    /// A log in this folder; without one, events are dropped. The file is opened at the first event.
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        Self { file: folder.map(|folder| LineFile::new(folder.join(EVENTS))), time_s: 0.0 }
    }

    /// Writes an event after so many steps.
    pub(crate) fn write(&mut self, step: u64, what: What) {
        let event = Event { step, time_s: self.time_s, what };
        if let Some(Err(error)) = self.file.as_mut().map(|file| file.append(&event)) {
            tracing::warn!(%error, "an event was not written");
        }
    }
}

/// Reads all events of a file, but for a line that a crash left half-written at its end.
///
/// Errors: [`Error::Io`], [`Error::Events`] with the line.
pub fn read(path: &Path) -> Result<Vec<Event>> {
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    let lines = bytes[..whole].split_inclusive(|&byte| byte == b'\n').enumerate();
    let parse = |(i, line): (usize, &[u8])| {
        serde_json::from_slice(line).map_err(|source| Error::Events {
            path: path.to_owned(),
            line: i + 1,
            source,
        })
    };
    lines.map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_appended_behind_the_last_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(EVENTS);
        let saved = |step: u64| What::Saved { path: format!("step-{step}") };
        let event = |step, what| Event { step, time_s: 0.5, what };
        let log = |folder| EventLog { time_s: 0.5, ..EventLog::new(folder) };
        let named = What::Named { ranks: vec![2], reason: "wrong".to_owned() };
        log(Some(folder.path())).write(1, saved(1));
        let line = "{\"step\":1,\"time_s\":0.5,\"event\":\"saved\",\"path\":\"step-1\"}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), line);
        fs::write(&path, format!("{line}{{\"step\":2,\"ti")).unwrap();
        assert_eq!(read(&path).unwrap(), [event(1, saved(1))]);
        log(Some(folder.path())).write(3, named.clone());
        assert_eq!(read(&path).unwrap(), [event(1, saved(1)), event(3, named)]);
        fs::write(&path, "{}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().ends_with("events.jsonl:1 is not an event"));
        // Nothing is written where nothing can be.
        log(None).write(1, saved(1));
        log(Some(&folder.path().join("missing"))).write(1, saved(1));
    }
}
