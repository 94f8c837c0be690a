//! Events of a recording: what reached a rank of a simulated network, and when.

use std::fmt;

use farflung_base::{Nanos, PeerId};
use serde::{Deserialize, Serialize};

use crate::transport::{Channel, Tag};

/// Kind of an event that reached a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Reached {
    /// The rank itself crashed.
    Crash,
    /// A frame: its tag, its length, and a checksum of its bytes.
    Frame {
        /// Id of the communicator.
        context: u64,
        /// Channel of the tag, as its number on the wire.
        channel: u8,
        /// Number of the message or collective.
        number: u32,
        /// Length of the payload in bytes.
        length: u32,
        /// CRC-32 of the payload.
        crc: u32,
    },
    /// The rank was notified that the sender is gone.
    Gone,
}

/// An event that reached a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SimulatedEvent {
    /// Virtual time in ns.
    pub time: u64,
    /// Rank that sent the frame or the notification. For a crash, the crashed rank.
    pub from: u32,
    /// Number of the frame or notification among all those of its sender. For a crash, its index in the list of
    /// faults.
    pub sequence: u64,
    /// Rank that the event reached.
    pub to: u32,
    /// Kind of the event.
    pub what: Reached,
}

impl SimulatedEvent {
    pub(super) fn frame(time: Nanos, from: usize, sequence: u64, to: usize, tag: Tag, bytes: &[u8]) -> Self {
        let what = Reached::Frame {
            context: tag.context,
            channel: tag.channel as u8,
            number: tag.number,
            length: bytes.len() as u32,
            crc: crc32fast::hash(bytes),
        };
        Self::bare(time, from, sequence, to, what)
    }

    pub(super) const fn bare(time: Nanos, from: usize, sequence: u64, to: usize, what: Reached) -> Self {
        Self { time: time.0, from: from as u32, sequence, to: to as u32, what }
    }
}

impl fmt::Display for SimulatedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (time, from, to) = (Nanos(self.time), PeerId(self.from), PeerId(self.to));
        match self.what {
            Reached::Crash => write!(f, "the crash of {to} at {time}"),
            Reached::Gone => write!(f, "at {time} at {to} the report that {from} can no longer be reached"),
            Reached::Frame { context, channel, number, length, crc } => {
                let what = match channel {
                    c if c == Channel::User as u8 => "message",
                    c if c == Channel::Collective as u8 => "collective",
                    c if c == Channel::Abort as u8 => "abort",
                    _ => "suspicion",
                };
                write!(
                    f,
                    "at {time} at {to} a frame of {length} bytes (crc {crc:08x}) from {from} for {what} {number} of \
                     context {context:x}"
                )
            }
        }
    }
}
