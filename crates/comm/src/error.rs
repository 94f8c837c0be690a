//! What can go wrong between machines. Every error that has a culprit names it.

use std::io;
use std::sync::Arc;

use farflung_base::{Nanos, PeerId, Rank};

use crate::simulated::Happening;

/// Why a peer is not there any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DownReason {
    /// It closed its endpoint in good order.
    #[error("it left")]
    Left,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(io::ErrorKind),
    /// The connection ended in the middle of something.
    #[error("the connection ended without a goodbye")]
    Ended,
    /// It sent something that is not our protocol; the connection was closed.
    #[error("it broke the protocol: {0}")]
    Protocol(WireError),
    /// A fault rule of the simulated network crashed it.
    #[error("it crashed")]
    Crashed,
    /// Its encrypted session is broken; the connection was closed.
    #[error("its encrypted session is broken: {0}")]
    Sealed(String),
}

/// What is wrong with bytes that came from a socket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not a frame of ours at all.
    #[error("frame does not start with the magic bytes")]
    Magic,
    /// A frame of another version of the protocol.
    #[error("protocol version {got}, this side speaks {want}")]
    Version {
        /// This side's version.
        want: u8,
        /// The version in the frame.
        got: u8,
    },
    /// A frame kind that does not exist, or not at this point.
    #[error("unexpected frame kind {0}")]
    Kind(u8),
    /// A tag channel that does not exist.
    #[error("unknown channel {0}")]
    Channel(u8),
    /// A frame of another epoch of the membership.
    #[error("a frame of epoch {got} (modulo 256), this link has {want}")]
    Epoch {
        /// This side's, modulo 256.
        want: u8,
        /// The one in the frame.
        got: u8,
    },
    /// A payload longer than a frame may be.
    #[error("a payload of {got} bytes, at most {max} are allowed")]
    Length {
        /// The bound.
        max: usize,
        /// The claimed length.
        got: usize,
    },
    /// The checksum does not match.
    #[error("checksum mismatch")]
    Checksum,
    /// A control message whose contents make no sense.
    #[error("malformed {0}")]
    Malformed(&'static str),
}

/// Why a rank was not let into a job. On the wire variants are numbers in this order, so new ones come last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// It expects another number of ranks.
    #[error("world size {got}, but the job has {want}")]
    WorldSize {
        /// The size that the master was given.
        want: u32,
        /// The size that the other side was given.
        got: u32,
    },
    /// It belongs to another job.
    #[error("another job id")]
    Job,
    /// Its rank is not below the world size.
    #[error("rank {0} does not exist")]
    Rank(u32),
    /// Its rank is there already.
    #[error("rank {0} has joined already")]
    Taken(u32),
    /// It speaks another version of the protocol.
    #[error("protocol version {got}, the job speaks {want}")]
    Version {
        /// The master's version.
        want: u8,
        /// The other side's.
        got: u8,
    },
    /// Its public key is not the one that is known here, or not in the allow list.
    #[error("a key that is not known here, or not in the allow list")]
    Key,
    /// It does not prove the join secret.
    #[error("no proof of the join secret: a ticket or secret of another run, or one from before `--rotate`")]
    Secret,
    /// Its ticket has expired.
    #[error(
        "an expired ticket: {} by this clock; `farflung ticket` on the host makes a new one",
        ago(*.expiry, *.clock)
    )]
    Expired {
        /// When, in seconds since 1970.
        expiry: u64,
        /// The time where it was refused.
        clock: u64,
    },
    /// It is not encrypted, and the job is, or the other way round.
    #[error(
        "one side is encrypted and the other is not: give both the ticket or the secret, or --insecure to both"
    )]
    Clear,
    /// Both connect to each other at the same time: the connection of the greater number stays.
    #[error("both connect at the same time")]
    Crossed,
    /// Another rank has its key. Sent over QUIC alone, where peers are known by their keys: older processes
    /// speak TCP alone, so the version of the wire stays.
    #[error("another rank has this key: give each process a key of its own, by --key-file or FARFLUNG_HOME")]
    SameKey,
}

impl Refusal {
    /// One word or two, by which refusals are counted.
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
            Self::Clear => "not encrypted",
            Self::Crossed => "crossed",
            Self::SameKey => "key taken",
        }
    }
}

/// How long before `clock` a time was.
fn ago(time: u64, clock: u64) -> String {
    let seconds = clock.saturating_sub(time);
    match seconds {
        0..=119 => format!("{seconds} s ago"),
        120..=7199 => format!("{} min ago", seconds / 60),
        7200..=172_799 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86400),
    }
}

/// What a [`Coder`](crate::Coder) failed with.
pub type CoderError = Box<dyn std::error::Error + Send + Sync>;

/// The algorithms with a coded form.
fn coded_names() -> String {
    farflung_base::Algorithm::CODED.map(farflung_base::Algorithm::name).join(", ")
}

/// Everything that communication can fail with.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A peer did not do its part in time.
    #[error("{op}: {peer} did not answer within {after}")]
    Deadline {
        /// What was waiting.
        op: &'static str,
        /// The peer that it waited for.
        peer: PeerId,
        /// The time it was given.
        after: Nanos,
    },
    /// Nothing can ever happen again: every rank waits (simulated network only).
    #[error("{op}: deadlock: every rank waits and nothing is on its way; this one waits for {peer}")]
    Deadlock {
        /// What was waiting.
        op: &'static str,
        /// The peer that it waited for.
        peer: PeerId,
    },
    /// A peer is gone.
    #[error("{op}: {peer} is gone: {reason}")]
    PeerDown {
        /// What needed it.
        op: &'static str,
        /// The peer.
        peer: PeerId,
        /// Why.
        reason: DownReason,
    },
    /// Another rank's part of this communicator failed.
    #[error("{op}: {by} gave up because of {culprit}")]
    Aborted {
        /// What was interrupted.
        op: &'static str,
        /// The peer that said so.
        by: PeerId,
        /// The peer that it holds responsible.
        culprit: PeerId,
    },
    /// A peer runs another collective, or the same with another length, type or operation.
    #[error(
        "{op}: {peer} is in another collective or has another length ({got} bytes where {want} were due)"
    )]
    Mismatch {
        /// This side's collective.
        op: &'static str,
        /// The peer whose frame did not fit.
        peer: PeerId,
        /// Bytes expected.
        want: usize,
        /// Bytes received.
        got: usize,
    },
    /// An earlier failure ended this communicator.
    #[error("the communicator has failed before: {0}")]
    Poisoned(Arc<Self>),
    /// It was cancelled here: its [`Cancel`](crate::Cancel) was used, its pending value was dropped before it
    /// was done, or its communicator was [aborted](crate::Communicator::abort). A collective ends its
    /// communicator with that.
    #[error("{op} was cancelled")]
    Cancelled {
        /// What was cancelled.
        op: &'static str,
    },
    /// Another rank cancelled its part of this communicator, or the message that was on its way. That rank is
    /// well.
    #[error("{op}: {peer} cancelled it")]
    CancelledBy {
        /// What was interrupted.
        op: &'static str,
        /// Who cancelled.
        peer: PeerId,
    },
    /// This endpoint has ended (simulated crash, or closed).
    #[error("{op}: this endpoint has ended")]
    Ended {
        /// What was asked of it.
        op: &'static str,
    },
    /// Arguments that make no sense.
    #[error("{op}: {what} is {got}, expected {want}")]
    Argument {
        /// The call.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// What it was.
        got: usize,
        /// What it must be, or be below.
        want: usize,
    },
    /// An all-reduce algorithm by which nothing can be averaged through a codec.
    #[error("`{algorithm}` has no form that travels through a codec; {} have", coded_names())]
    NoCodedForm {
        /// The algorithm.
        algorithm: farflung_base::Algorithm,
    },
    /// A reduction that the element type does not have.
    #[error("{op}: {reduction} is not defined for {element}")]
    Unsupported {
        /// The call.
        op: &'static str,
        /// The reduction.
        reduction: &'static str,
        /// The element type.
        element: &'static str,
    },
    /// A [`UserOp`](crate::UserOp) panicked.
    #[error("{op}: the reduction `{reduction}` panicked")]
    ReductionPanicked {
        /// The call.
        op: &'static str,
        /// The reduction's name.
        reduction: &'static str,
    },
    /// A message of bytes is longer than [`MAX_MESSAGE`](crate::MAX_MESSAGE).
    #[error("{op}: a message from {peer} is longer than {max} bytes")]
    TooLong {
        /// The call.
        op: &'static str,
        /// Who sent it.
        peer: PeerId,
        /// The bound.
        max: usize,
    },
    /// A coder failed.
    #[error("{op}: the coder failed: {source}")]
    Coder {
        /// The call.
        op: &'static str,
        /// What the coder said.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// Not every rank came to the rendezvous.
    #[error("rendezvous at {master}: after {after} still missing: {}", list(.ranks))]
    Missing {
        /// Where the job meets.
        master: String,
        /// The ranks that did not come.
        ranks: Vec<Rank>,
        /// The time they were given.
        after: Nanos,
    },
    /// A run that was to be the same as a recorded one was not.
    #[error("the run left the recording after {after} happenings: recorded is {}, seen was {}", or_end(.recorded.as_deref()), or_end(.seen.as_deref()))]
    Diverged {
        /// Happenings that were the same.
        after: usize,
        /// What is recorded next.
        recorded: Option<Box<Happening>>,
        /// What happened instead.
        seen: Option<Box<Happening>>,
    },
    /// Keys of a store had no value in time.
    #[error("store at {store}: after {after} still without a value: {}", .keys.join(", "))]
    Absent {
        /// Where the store is.
        store: String,
        /// The keys that were waited for in vain.
        keys: Vec<String>,
        /// The time they were given.
        after: Nanos,
    },
    /// A store did not do what it was asked: it is full, or the value is no number.
    #[error("{op} of `{key}` in the store: it is full, or the value is no number")]
    Denied {
        /// The call.
        op: &'static str,
        /// With which key.
        key: String,
    },
    /// The master did not let this rank in, or a peer was not who it should be.
    #[error("{peer} refused: {reason}")]
    Refused {
        /// Address of the other side.
        peer: String,
        /// Why.
        reason: Refusal,
    },
    /// An address or a socket did not work.
    #[error("{what} {address}: {message}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which address.
        address: String,
        /// What kind of failure it was.
        kind: io::ErrorKind,
        /// The system's words.
        message: String,
    },
    /// The other side is not who it should be, or does not prove that it belongs to the job.
    #[error("{peer} is not let near this process: {reason}")]
    Unproven {
        /// Address of the other side.
        peer: String,
        /// Why.
        reason: Refusal,
    },
    /// The transport has the members that it began with.
    #[error("{op} is not possible here: {reason}")]
    Fixed {
        /// What was asked for.
        op: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// There is no MPI under this process, or not the one that is needed.
    #[error("no MPI: {reason}; {advice}")]
    Mpi {
        /// What is wrong.
        reason: String,
        /// What to do.
        advice: &'static str,
    },
    /// A peer shares no memory with this process, though it has to.
    #[error(
        "no shared memory with {peer}: it is not on this machine and of this user, or has another transport; \
         `--transport auto` shares memory where that is possible, and takes sockets elsewhere"
    )]
    Apart {
        /// The peer.
        peer: PeerId,
    },
    /// No encrypted connection came about.
    #[error("no encrypted connection with {peer}: {reason}")]
    Unsealed {
        /// Address of the other side.
        peer: String,
        /// Why.
        reason: String,
    },
    /// The clocks of two machines are far apart, so that a ticket has expired on one of them.
    #[error(
        "{peer} refused: the ticket has expired by its clock, which is {} this one: set the clocks, or make \
         a new ticket",
        skew(*.host, *.own)
    )]
    Clocks {
        /// Address of the other side.
        peer: String,
        /// Its clock, in seconds since 1970.
        host: u64,
        /// This machine's.
        own: u64,
    },
    /// The other side of a handshake does not speak our protocol.
    #[error("handshake with {peer}: {source}")]
    Handshake {
        /// Address of the other side.
        peer: String,
        /// What was wrong.
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

fn or_end(happening: Option<&Happening>) -> String {
    happening.map_or_else(|| "the end".to_owned(), ToString::to_string)
}

impl CommError {
    /// The peer that is to blame, where there is one.
    #[must_use]
    pub fn peer(&self) -> Option<PeerId> {
        match self {
            Self::Deadline { peer, .. }
            | Self::Deadlock { peer, .. }
            | Self::PeerDown { peer, .. }
            | Self::CancelledBy { peer, .. }
            | Self::Mismatch { peer, .. }
            | Self::Apart { peer }
            | Self::TooLong { peer, .. } => Some(*peer),
            Self::Aborted { culprit, .. } => Some(*culprit),
            Self::Poisoned(first) => first.peer(),
            _ => None,
        }
    }

    /// Whether somebody wished it so, and nobody is lost.
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
