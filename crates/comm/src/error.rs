//! Errors of communication between machines. An error that a peer caused names that peer.

use std::io;
use std::sync::Arc;

use farflung_base::{Nanos, PeerId, Rank};

use crate::simulated::SimulatedEvent;

/// Why a peer is gone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DownReason {
    /// The peer closed its endpoint properly.
    #[error("it left")]
    Left,
    /// The connection broke, with an error of this kind.
    #[error("the connection broke: {0}")]
    Broken(io::ErrorKind),
    /// The connection ended without the peer's last message, the goodbye.
    #[error("the connection closed without its goodbye message")]
    Ended,
    /// The peer sent bytes that are not valid in our protocol; the connection was closed.
    #[error("it sent invalid bytes: {0}")]
    Protocol(WireError),
    /// A fault of the simulated network ended the peer.
    #[error("it crashed")]
    Crashed,
    /// The encrypted session with the peer is broken; the connection was closed.
    #[error("its encrypted session failed: {0}")]
    SessionFailed(String),
}

/// Why bytes from a socket are not a valid message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not a frame of this protocol.
    #[error("the bytes do not start with the expected magic bytes")]
    Magic,
    /// A frame of another version of the protocol.
    #[error("version {got} is not supported, this side uses version {want}")]
    Version {
        /// This side's version.
        want: u8,
        /// The version in the frame.
        got: u8,
    },
    /// A frame kind that does not exist, or is not allowed at this point.
    #[error("unexpected frame kind {0}")]
    Kind(u8),
    /// A tag channel that does not exist.
    #[error("unknown channel {0}")]
    Channel(u8),
    /// A frame of another epoch of the membership.
    #[error("the frame's epoch is {got} (modulo 256), expected {want}")]
    Epoch {
        /// Epoch of this side, modulo 256.
        want: u8,
        /// Epoch in the frame.
        got: u8,
    },
    /// A payload that is longer than allowed.
    #[error("the payload has {got} bytes, expected at most {max}")]
    Length {
        /// Maximum length in bytes.
        max: usize,
        /// Length in the frame.
        got: usize,
    },
    /// The checksum does not match.
    #[error("checksum mismatch")]
    Checksum,
    /// A control message with invalid content.
    #[error("invalid {0}")]
    Malformed(&'static str),
}

/// Why a process was refused by a job. The encoding numbers the variants in this order, so new ones are added
/// at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// The process expects a different number of ranks.
    #[error("the world size is {got}, expected {want}")]
    WorldSize {
        /// Number of ranks that the master was given.
        want: u32,
        /// Number of ranks that the other side was given.
        got: u32,
    },
    /// The process belongs to a different job.
    #[error("the job id differs")]
    Job,
    /// The rank of the process is not below the number of ranks.
    #[error("rank {0} is not below the world size")]
    Rank(u32),
    /// A process with this rank has joined already.
    #[error("rank {0} has joined already")]
    Taken(u32),
    /// The process uses a different version of the protocol.
    #[error("the protocol version is {got}, expected {want}")]
    Version {
        /// The master's version.
        want: u8,
        /// The version of the other side.
        got: u8,
    },
    /// The public key of the process is not the one expected here, or is not in the allow list.
    #[error("the public key is not the expected one, or not in the allow list")]
    Key,
    /// The process does not prove that it has the join secret.
    #[error(
        "the join secret was not proven: the ticket or secret belongs to another run, or was made before \
         `--rotate`"
    )]
    Secret,
    /// The ticket of the process has expired.
    #[error(
        "the ticket expired {} by the clock of the side that refused it; make a new one with \
         `farflung ticket` on the host",
        ago(*.expiry, *.clock)
    )]
    Expired {
        /// End of the ticket's validity, in seconds since 1970.
        expiry: u64,
        /// Time of the clock by which the ticket was refused, in seconds since 1970.
        clock: u64,
    },
    /// One side uses encryption and the other does not.
    #[error(
        "one side uses encryption and the other does not: give both sides the ticket or the secret, or give \
         both --insecure"
    )]
    EncryptionMismatch,
    /// Two processes connected to each other at the same time. Only the connection of the one with the greater
    /// number is kept.
    #[error("both sides connected at the same time")]
    SimultaneousConnect,
    /// Another rank has the same key. Sent over QUIC only, where keys identify peers. Older processes use TCP
    /// only, so adding this variant did not change the version of the protocol.
    #[error("another rank has the same key: give each process its own key, with --key-file or FARFLUNG_HOME")]
    SameKey,
    /// The answer to a process that asks for the members would be longer than a frame.
    #[error(
        "the run has {members} members: their addresses and its description have {bytes} bytes, and one frame \
         holds {}; no more can join",
        crate::FRAME_BYTES
    )]
    ListTooLong {
        /// Number of members.
        members: u32,
        /// Length of the answer in bytes.
        bytes: u64,
    },
}

impl Refusal {
    /// Returns a short name under which refusals are counted.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Self::WorldSize { .. } => "another world size",
            Self::Job => "another job",
            Self::Rank(_) => "no such rank",
            Self::Taken(_) => "rank taken",
            Self::Version { .. } => "another version",
            Self::Key => "stranger's key",
            Self::Secret => "wrong secret",
            Self::Expired { .. } => "expired ticket",
            Self::EncryptionMismatch => "not encrypted",
            Self::SimultaneousConnect => "crossed",
            Self::SameKey => "key taken",
            Self::ListTooLong { .. } => "too many members",
        }
    }
}

/// Formats how long before `clock` a time was.
fn ago(time: u64, clock: u64) -> String {
    let seconds = clock.saturating_sub(time);
    match seconds {
        0..=119 => format!("{seconds} s ago"),
        120..=7199 => format!("{} min ago", seconds / 60),
        7200..=172_799 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86400),
    }
}

/// Error of a [`Coder`](crate::Coder).
pub type CoderError = Box<dyn std::error::Error + Send + Sync>;

/// Returns the names of the algorithms with a coded form.
fn coded_names() -> String {
    farflung_base::Algorithm::CODED.map(farflung_base::Algorithm::name).join(", ")
}

/// Any error of communication.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A peer did not answer within the time limit.
    #[error(
        "{op}: {peer} did not answer within {after}{}",
        cause.as_ref().map(|cause| format!(": {cause}")).unwrap_or_default()
    )]
    Deadline {
        /// Operation that waited.
        op: &'static str,
        /// The peer for which the operation waited.
        peer: PeerId,
        /// Time limit of the operation.
        after: Nanos,
        /// The likely cause, if the network shows one.
        cause: Option<String>,
    },
    /// Every rank waits, and no event is left that could wake one (simulated network only).
    #[error("{op}: deadlock: every rank waits and no message is in flight; this rank waits for {peer}")]
    Deadlock {
        /// Operation that waited.
        op: &'static str,
        /// The peer for which the operation waited.
        peer: PeerId,
    },
    /// A peer is gone.
    #[error("{op}: {peer} can no longer be reached: {reason}")]
    PeerDown {
        /// Operation that needed the peer.
        op: &'static str,
        /// The peer that is gone.
        peer: PeerId,
        /// Reason why the peer is gone.
        reason: DownReason,
    },
    /// Another rank's part of this communicator failed.
    #[error("{op}: {by} reported a failure of {culprit}")]
    Aborted {
        /// Operation that was interrupted.
        op: &'static str,
        /// Peer that reported the failure.
        by: PeerId,
        /// Peer that caused the failure, according to `by`.
        culprit: PeerId,
    },
    /// A peer runs another collective, or the same one with another length, type or operation.
    #[error(
        "{op}: {peer} runs another collective, or the same one with another length, type or operation \
         (received {got} bytes, expected {want})"
    )]
    Mismatch {
        /// Collective of this side.
        op: &'static str,
        /// Peer that sent the unexpected frame.
        peer: PeerId,
        /// Number of bytes expected.
        want: usize,
        /// Number of bytes received.
        got: usize,
    },
    /// This communicator has failed earlier. The value is that first failure.
    #[error("the communicator cannot be used after an earlier failure: {0}")]
    Poisoned(Arc<Self>),
    /// Cancelled on this rank: its [`Cancel`](crate::Cancel) was used, its pending value was dropped before it
    /// completed, or its communicator was [aborted](crate::Communicator::abort). If a collective is cancelled,
    /// its communicator fails too.
    #[error("{op} was cancelled")]
    Cancelled {
        /// Operation that was cancelled.
        op: &'static str,
    },
    /// Another rank cancelled its part of this communicator, or the message that it was sending. That rank is
    /// not lost.
    #[error("{op}: {peer} cancelled it")]
    CancelledBy {
        /// Operation that was interrupted.
        op: &'static str,
        /// Peer that cancelled.
        peer: PeerId,
    },
    /// This endpoint has ended: it was closed, or crashed in the simulation.
    #[error("{op}: this endpoint has ended")]
    Ended {
        /// Operation that was called.
        op: &'static str,
    },
    /// An invalid argument.
    #[error("{op}: {what} is {got}, expected {want}")]
    Argument {
        /// Function that was called.
        op: &'static str,
        /// Description of the argument.
        what: &'static str,
        /// Value of the argument.
        got: usize,
        /// The required value, or the limit that `what` describes.
        want: usize,
    },
    /// The all-reduce algorithm has no coded form.
    #[error("algorithm `{algorithm}` cannot be used with a codec; these can: {}", coded_names())]
    NoCodedForm {
        /// The requested algorithm.
        algorithm: farflung_base::Algorithm,
    },
    /// The reduction is not defined for the element type.
    #[error("{op}: {reduction} is not defined for {element}")]
    Unsupported {
        /// Function that was called.
        op: &'static str,
        /// Name of the reduction.
        reduction: &'static str,
        /// Name of the element type.
        element: &'static str,
    },
    /// A [`UserOp`](crate::UserOp) panicked.
    #[error("{op}: the reduction `{reduction}` panicked")]
    ReductionPanicked {
        /// Collective that ran the reduction.
        op: &'static str,
        /// Name of the reduction.
        reduction: &'static str,
    },
    /// A message of bytes is longer than [`MAX_MESSAGE`](crate::MAX_MESSAGE).
    #[error("{op}: a message from or to {peer} is longer than {max} bytes")]
    TooLong {
        /// Operation that failed.
        op: &'static str,
        /// Sender of the message; if this rank sends it, the receiver.
        peer: PeerId,
        /// Maximum length in bytes.
        max: usize,
    },
    /// A [`Coder`](crate::Coder) failed to encode or decode.
    #[error("{op}: the coder failed: {source}")]
    Coder {
        /// Operation that failed.
        op: &'static str,
        /// Error of the coder.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// Ranks were missing at the rendezvous, or a rank could not be reached, within the time limit.
    #[error(
        "rendezvous at {master}: after {after} still missing: {}{}",
        list(.ranks),
        .progress.iter().fold(String::new(), |text, one| text + "; " + one)
    )]
    Missing {
        /// Address of the rendezvous.
        master: String,
        /// The missing ranks.
        ranks: Vec<Rank>,
        /// How far each rank came, as far as this one knows.
        progress: Vec<String>,
        /// Time limit.
        after: Nanos,
    },
    /// A run that had to repeat a recorded run differed from it.
    #[error(
        "the run differs from the recording after {after} equal events: the next event of the recording is {}, \
         that of the run is {}",
        or_end(.recorded.as_deref()),
        or_end(.seen.as_deref())
    )]
    Diverged {
        /// Number of events that were the same.
        after: usize,
        /// Next event of the recording; `None` at its end.
        recorded: Option<Box<SimulatedEvent>>,
        /// Event that happened instead; `None` at the end of the run.
        seen: Option<Box<SimulatedEvent>>,
    },
    /// Keys of a store had no value within the time limit.
    #[error("store at {store}: these keys have no value after {after}: {}", .keys.join(", "))]
    Absent {
        /// Address of the store.
        store: String,
        /// Keys without a value.
        keys: Vec<String>,
        /// Time limit.
        after: Nanos,
    },
    /// A store rejected a request: it is full, or the value is not a number.
    #[error("{op} of `{key}`: the store is full, or the value is not a number")]
    Denied {
        /// Function that was called.
        op: &'static str,
        /// Key of the request.
        key: String,
    },
    /// The other side refused this process.
    #[error("{peer} refused this process: {reason}")]
    Refused {
        /// Address of the other side.
        peer: String,
        /// Reason for the refusal.
        reason: Refusal,
    },
    /// An operation on an address, a socket or a thread failed.
    #[error("{what} {address}: {message}")]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// Address with which the operation was called.
        address: String,
        /// Kind of the failure.
        kind: io::ErrorKind,
        /// Message of the system.
        message: String,
    },
    /// The other side does not have the expected key, or does not prove that it belongs to the job.
    #[error("this process rejected {peer}: {reason}")]
    Unproven {
        /// Address of the other side.
        peer: String,
        /// What is wrong with the other side.
        reason: Refusal,
    },
    /// The members of this transport cannot change.
    #[error("{op} is not possible here: {reason}")]
    Fixed {
        /// Function that was called.
        op: &'static str,
        /// Reason for the restriction.
        reason: &'static str,
    },
    /// This process has no MPI, or not one that can be used.
    #[error("MPI cannot be used: {reason}; {advice}")]
    Mpi {
        /// What is wrong.
        reason: String,
        /// What the user can do about it.
        advice: &'static str,
    },
    /// A peer does not share memory with this process, although it must.
    #[error(
        "no shared memory with {peer}: it is on another machine, belongs to another user, or uses another \
         transport; `--transport auto` uses shared memory where that is possible, and sockets elsewhere"
    )]
    NoSharedMemory {
        /// The peer that does not share memory.
        peer: PeerId,
    },
    /// An encrypted connection could not be made.
    #[error("no encrypted connection with {peer}: {reason}")]
    NoEncryptedConnection {
        /// Address of the other side.
        peer: String,
        /// Reason for the failure.
        reason: String,
    },
    /// The clocks of two machines differ, so that a ticket has expired on one of them only.
    #[error(
        "{peer} refused this process: the ticket has expired by its clock, which is {} this one: set the \
         clocks, or make a new ticket",
        skew(*.host, *.own)
    )]
    Clocks {
        /// Address of the other side.
        peer: String,
        /// Time of the other side's clock, in seconds since 1970.
        host: u64,
        /// Time of this machine's clock, in seconds since 1970.
        own: u64,
    },
    /// The other side of a handshake sent bytes that are not valid in our protocol.
    #[error("handshake with {peer} failed: {source}")]
    Handshake {
        /// Address of the other side.
        peer: String,
        /// What is wrong with the bytes.
        #[source]
        source: WireError,
    },
}

fn skew(host: u64, own: u64) -> String {
    let (apart, way) = (host.abs_diff(own), if host > own { "ahead of" } else { "behind" });
    format!("{} {way}", ago(0, apart).trim_end_matches(" ago"))
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn or_end(event: Option<&SimulatedEvent>) -> String {
    event.map_or_else(|| "the end".to_owned(), ToString::to_string)
}

impl CommError {
    /// Returns the peer that caused the error, if there is one.
    #[must_use]
    pub fn peer(&self) -> Option<PeerId> {
        match self {
            Self::Deadline { peer, .. }
            | Self::Deadlock { peer, .. }
            | Self::PeerDown { peer, .. }
            | Self::CancelledBy { peer, .. }
            | Self::Mismatch { peer, .. }
            | Self::NoSharedMemory { peer }
            | Self::TooLong { peer, .. } => Some(*peer),
            Self::Aborted { culprit, .. } => Some(*culprit),
            Self::Poisoned(first) => first.peer(),
            _ => None,
        }
    }

    /// Returns whether the operation was cancelled on purpose, so that no rank is lost.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        match self {
            Self::Cancelled { .. } | Self::CancelledBy { .. } => true,
            Self::Poisoned(first) => first.is_cancelled(),
            _ => false,
        }
    }

    pub(crate) fn io(what: &'static str, address: &impl ToString, error: &io::Error) -> Self {
        Self::Io { what, address: address.to_string(), kind: error.kind(), message: error.to_string() }
    }
}
