//! `events.jsonl`: what happened in a run and when, one JSON object per line. Each rank has such a file in its
//! folder; rank 0's is beside the metrics. Lines of earlier starts of the run are kept.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub(crate) use crate::error::causes;
use crate::line_file::{self, LineFile, LineRead, Lines};
use crate::{Error, Result};

/// The file's name.
pub const EVENTS: &str = "events.jsonl";

/// Sequences of a lost replica that are in no average.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostSequences {
    /// Endpoints of the replica's members. Not all of them need be lost.
    pub members: Vec<u32>,
    /// Number of the first sequence. Sequences are numbered from 0 in the order in which the run takes them
    /// from its data; with `--shards`, from the data of this replica.
    pub first: u64,
    /// Number of sequences in each step, with consecutive numbers.
    pub each: u64,
    /// Number of steps.
    pub steps: u64,
    /// Difference between the first numbers of a step and the next one.
    pub stride: u64,
}

impl LostSequences {
    /// Returns the number of sequences.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.each.saturating_mul(self.steps)
    }

    /// Returns the numbers of the sequences, by step.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let Self { first, each, steps, stride, .. } = *self;
        let start = move |step: u64| first.saturating_add(step.saturating_mul(stride));
        (0..steps).map(move |step| start(step)..start(step).saturating_add(each))
    }
}

/// A kind of event with its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
#[non_exhaustive]
pub enum EventKind {
    /// The run continued from a checkpoint.
    Resumed {
        /// The checkpoint.
        from: String,
        /// Settings that differ from the checkpoint's, and folders that were lost.
        notes: Vec<String>,
    },
    /// A checkpoint was saved on this rank, and on all others that answered.
    Saved {
        /// The path of this rank's checkpoint.
        path: String,
    },
    /// A checkpoint that was due was not saved, because a disk is full. The run goes on.
    Unsaved {
        /// The error, with the folder and the bytes.
        reason: String,
    },
    /// Gradients overflowed: all ranks dropped the step and computed it again with a smaller loss scale.
    Skipped {
        /// Number of times that the step was dropped.
        times: u32,
    },
    /// Members joined, left or were lost, and the others continued.
    Members {
        /// The number of the view.
        epoch: u64,
        /// Number of members now.
        members: usize,
        /// Endpoints that joined.
        joined: Vec<u32>,
        /// Endpoints that left or were lost.
        left: Vec<u32>,
        /// Names of those that joined or left, by endpoint, if they have one.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        names: BTreeMap<u32, String>,
        /// Sequences of the lost members in the local steps of a round whose average lacks these members. They
        /// may have trained on some of them; nobody trains on the others.
        lost_sequences: u64,
        /// These sequences, by replica. Empty on a member that has joined after the steps in question.
        #[serde(default)]
        lost: Vec<LostSequences>,
        /// Steps that were done and are lost, since no remaining member has all of the model after them.
        #[serde(default)]
        lost_steps: u64,
        /// Whether the members continued from their checkpoints, since no member had all of the model in
        /// memory.
        #[serde(default)]
        from_checkpoints: bool,
        /// Percentage of the step in flight that the other members had computed and do not compute again.
        #[serde(default)]
        kept_percent: u32,
        /// Time from the beginning of the change, or of the step in which a loss was noticed, to the next step,
        /// in milliseconds of the run's clock.
        took_ms: u64,
        /// The failure that this member saw; `None` if members joined or left normally.
        reason: Option<String>,
    },
    /// A newcomer fetches the state while the members train on.
    Following {
        /// Endpoint of the newcomer.
        member: u32,
        /// Bytes of the state, which the members have copied after this step.
        state: u64,
        /// Bytes of each step since, which the newcomer replays.
        record: u64,
    },
    /// A newcomer is about to be admitted: the cost of its state for the members.
    Admitting {
        /// Endpoint of the newcomer.
        member: u32,
        /// Bytes of the state.
        state: u64,
        /// Predicted time for which all wait, from the rates of the newcomer's links, in milliseconds; `None`
        /// if these are not known. The event `members` that follows has the time that it took.
        predicted_ms: Option<u64>,
        /// Whether the transfer may take less time, because the newcomer's part of the model is decided later.
        at_most: bool,
    },
    /// A step failed although all members answered: the members repeat it under a new view.
    Repeated {
        /// The number of the view.
        epoch: u64,
        /// Number of times that the step has failed in this way.
        times: u32,
        /// Time for which members now wait for each other, in milliseconds.
        deadline_ms: u64,
        /// Time from the failure to the next attempt, in milliseconds of the run's clock.
        took_ms: u64,
        /// The failure that this member saw.
        reason: Option<String>,
    },
    /// Members got new shares of a step, by their speed.
    Shares {
        /// Microbatches of each member in a step, by rank.
        microbatches: Vec<u32>,
        /// Predicted time of a step before the change, from measured times, in microseconds.
        before_us: u64,
        /// Predicted time of a step now, in microseconds.
        now_us: u64,
    },
    /// The model's layers are divided among the stages in another way.
    Layers {
        /// Number of layers of each stage.
        layers: Vec<u32>,
        /// Predicted time of a step before the change, from measured times, in microseconds.
        before_us: u64,
        /// Predicted time of a step now, in microseconds.
        now_us: u64,
    },
    /// The pools of the stages have changed, or the routes of microbatches through them.
    Pools {
        /// Endpoints of each stage's members.
        members: Vec<Vec<u32>>,
        /// Relative speed of each member within its stage.
        rates: Vec<Vec<u32>>,
        /// The member that has changed its stage, if that is the cause.
        moved: Option<u32>,
    },
    /// A newcomer was refused, because all members would have waited too long for its state.
    Unadmitted {
        /// Endpoint of the newcomer.
        member: u32,
        /// Bytes of the state.
        state: u64,
        /// Time that it would have taken, or that it had taken so far, in milliseconds.
        takes_ms: u64,
        /// Longest time for which members wait (`--join-wait`), in milliseconds.
        limit_ms: u64,
    },
    /// A member or newcomer has reported numbers that cannot be true. They are not used.
    Nonsense {
        /// Its endpoint.
        member: u32,
        /// What it has reported, and what was expected.
        reason: String,
    },
    /// A peer was lost, which ended the run on this rank.
    Lost {
        /// The peer, and how the loss was detected.
        peer: String,
    },
    /// Ranks were found to have wrong values, which ended the run.
    Named {
        /// The ranks.
        ranks: Vec<u32>,
        /// The error that names the wrong values.
        reason: String,
    },
    /// A signal stopped the run.
    Stopped {
        /// Name of the signal, and what is saved.
        reason: String,
    },
    /// The run ended for another reason.
    Refused {
        /// The error.
        reason: String,
    },
}

impl EventKind {
    /// Returns the event of an error that ends a run.
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

/// A line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Steps done.
    pub step: u64,
    /// The run's clock in seconds: virtual on simulated links.
    pub time_s: f64,
    /// The event's kind and data.
    #[serde(flatten)]
    pub what: EventKind,
}

/// Appends events to a run's file. Those that cannot be written are dropped, with a warning: they do not end
/// the run.
#[derive(Debug)]
pub(crate) struct EventLog {
    file: Option<LineFile>,
    /// The run's clock in seconds, as last set.
    pub(crate) time_s: f64,
}

impl EventLog {
    /// Makes a log in this folder; without a folder, events are dropped. The file is opened at the first event.
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        Self { file: folder.map(|folder| LineFile::new(folder.join(EVENTS))), time_s: 0.0 }
    }

    /// Writes an event that happened after `step` steps.
    pub(crate) fn write(&mut self, step: u64, what: EventKind) {
        let event = Event { step, time_s: self.time_s, what };
        if let Some(file) = &mut self.file {
            file.append(&event);
        }
    }
}

/// Reads all events of a file; a last line without a newline, as a crash leaves it, is ignored.
///
/// Errors: [`Error::Io`], [`Error::NotAFile`], [`Error::Events`] with the line.
pub fn read(path: &Path) -> Result<Vec<Event>> {
    line_file::check_kind(path)?;
    let mut lines = Lines::of(File::open(path).map_err(Error::io("read", path))?);
    let mut events = Vec::new();
    while let Some(line) = lines.next().map_err(Error::io("read", path))? {
        if matches!(line, LineRead::Open(_)) {
            break;
        }
        let event = serde_json::from_slice(line.bytes());
        let number = events.len() + 1;
        let wrong = |source| Error::Events { path: path.to_owned(), line: number, source };
        events.push(event.map_err(wrong)?);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn events_are_appended_behind_the_last_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(EVENTS);
        let saved = |step: u64| EventKind::Saved { path: format!("step-{step}") };
        let event = |step, what| Event { step, time_s: 0.5, what };
        let log = |folder| EventLog { time_s: 0.5, ..EventLog::new(folder) };
        let named = EventKind::Named { ranks: vec![2], reason: "wrong".to_owned() };
        log(Some(folder.path())).write(1, saved(1));
        let line = "{\"step\":1,\"time_s\":0.5,\"event\":\"saved\",\"path\":\"step-1\"}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), line);
        fs::write(&path, format!("{line}{{\"step\":2,\"ti")).unwrap();
        assert_eq!(read(&path).unwrap(), [event(1, saved(1))]);
        log(Some(folder.path())).write(3, named.clone());
        assert_eq!(read(&path).unwrap(), [event(1, saved(1)), event(3, named)]);
        fs::write(&path, "{}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().ends_with("events.jsonl:1 is not a valid event"));
        // A log without a folder, or with a missing folder, writes nothing.
        log(None).write(1, saved(1));
        log(Some(&folder.path().join("missing"))).write(1, saved(1));
    }
}
