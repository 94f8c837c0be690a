//! Events of a recording: what reached a rank of a simulated network, and when.

use std::fmt;

use farflung_base::{Nanos, PeerId};
use serde::{Deserialize, Serialize};

use crate::transport::{Channel, Tag};

/// What reached a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Reached {
    /// Its crash.
    Crash,
    /// A frame: the conversation it belongs to, its length, and a checksum of its bytes.
    Frame {
        /// The communicator.
        context: u64,
        /// What the number counts, as on the wire.
        channel: u8,
        /// Of the message or collective.
        number: u32,
        /// Bytes.
        length: u32,
        /// CRC-32 of the bytes.
        crc: u32,
    },
    /// The news that its sender is gone.
    Gone,
}

/// Something that reached a rank, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Happening {
    /// When.
    pub time: u64,
    /// From whom.
    pub from: u32,
    /// The number of what the sender has sent.
    pub sequence: u64,
    /// Whom.
    pub to: u32,
    /// What.
    pub what: Reached,
}

impl Happening {
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

impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (time, from, to) = (Nanos(self.time), PeerId(self.from), PeerId(self.to));
        match self.what {
            Reached::Crash => write!(f, "the crash of {to} at {time}"),
            Reached::Gone => write!(f, "at {time} at {to} the news that {from} is gone"),
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
