//! Classifies errors: the exit code of each, which ones concern another rank, and how errors of other crates
//! are converted.

use std::io;
use std::path::Path;

use farflung_comm::{CommError, Refusal};
use farflung_optim::OptimError;
use farflung_parallel::ParallelError;
use farflung_store::StoreError;
use farflung_tensor::TensorError;
use farflung_zoo::ZooError;

use super::Error;

impl Error {
    /// Returns the process's exit code: 2 for wrong usage; 75 if a peer was lost and the job can be requeued;
    /// 128 plus its number after a signal; the code that the error contains, if a launched process or another
    /// rank failed; else 1.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Setting { .. }
            | Self::Unprotected { .. }
            | Self::Exposed { .. }
            | Self::KeyFile { .. }
            | Self::Model(_)
            | Self::Ticket { .. }
            | Self::Comm(
                CommError::Unproven { .. }
                | CommError::NoEncryptedConnection { .. }
                | CommError::Clocks { .. },
            )
            | Self::RanksDiffer { .. }
            | Self::MemberDiffers { .. }
            | Self::JoinRefused(_)
            | Self::TooSlow { .. }
            | Self::StillRuns { .. }
            | Self::ForeignFolder { .. }
            | Self::PartsElsewhere { .. }
            | Self::NoCopy { .. }
            | Self::TooLarge(_)
            | Self::UnknownKey { .. }
            | Self::ConfigValue { .. }
            | Self::ConfigSyntax { .. }
            | Self::HalfSet { .. }
            | Self::Variable { .. }
            | Self::Input(_)
            | Self::Tensor(TensorError::NoSuchDevice { .. })
            | Self::Parallel(
                ParallelError::Plan { .. }
                | ParallelError::PlanFile { .. }
                | ParallelError::PlanVersion { .. }
                | ParallelError::TraceLine { .. }
                | ParallelError::UnknownName { .. },
            )
            | Self::Zoo(
                ZooError::UnknownPreset { .. }
                | ZooError::UnknownTokenizer { .. }
                | ZooError::Tokenizer { .. }
                | ZooError::TokenizerOption { .. }
                | ZooError::Chat { .. }
                | ZooError::Source(_)
                | ZooError::TooShort { .. },
            ) => 2,
            // `Taken` gets code 75: the rank is still held by a dead process, and becomes free after a while.
            // Other rejections are permanent, so their code is 2. A cache miss at a boundary gets code 75,
            // since both ends compare their samples after a restart.
            Self::Comm(CommError::Refused { reason, .. }) if !matches!(reason, Refusal::Taken(_)) => 2,
            Self::Removed { .. }
            | Self::PartLost { .. }
            | Self::NoMajority { .. }
            | Self::NobodyAnswers { .. }
            | Self::PeerLost { .. }
            | Self::StoppedBy { .. }
            | Self::CutOff { .. }
            | Self::Comm(CommError::Missing { .. } | CommError::Refused { .. })
            | Self::Boundary { source: farflung_compress::CompressError::CacheMiss { .. }, .. } => 75,
            Self::Stopped(signal) | Self::StoppedAt { signal, .. } | Self::EndedAtOnce { signal, .. } => {
                signal.exit_code()
            }
            Self::Launch(error) => error.exit_code(),
            Self::OnRank { code, .. } | Self::NoRoomOn { code, .. } => *code,
            // A run that cannot begin is as one whose memory does not suffice.
            Self::NoRoom(lack) if lack.step.is_none() => 2,
            Self::State(error) if error.is_lasting() => 2,
            _ => 1,
        }
    }

    /// Converts the error of a schedule that does not support a value to an error on the setting with this
    /// value.
    #[must_use]
    pub fn schedule(error: ParallelError) -> Self {
        let (field, value, expected) = match error {
            ParallelError::NotAdmitted { method, field, given, needs } => {
                (field, given.to_string(), format!("for {method} {needs}"))
            }
            ParallelError::UnknownName { name, known, .. } => ("schedule", name, known.join(", ")),
            ParallelError::Zero { field, .. } => (field, "0".to_owned(), "at least 1".to_owned()),
            ParallelError::PerStage { given, stages, .. } => {
                ("cost", format!("for {given} stages"), format!("one entry or {stages}"))
            }
            ParallelError::TooManyRanks { ranks, limit } => {
                ("stages", ranks.to_string(), format!("at most {limit}"))
            }
            ParallelError::TooLarge { actions, limit } => {
                ("microbatches", format!("such that there are {actions} actions"), format!("at most {limit}"))
            }
            other => return other.into(),
        };
        Self::Setting { field, value, expected }
    }

    /// Returns whether a rank's disk is too full or cannot be written, this rank's or another's. What has been
    /// computed is not concerned.
    pub(crate) fn is_of_disk(&self) -> bool {
        self.is_no_room() || matches!(self, Self::Io { .. } | Self::OnRank { .. })
    }

    /// Returns whether the error is about a peer rather than about this rank.
    #[must_use]
    pub const fn is_peer_lost(&self) -> bool {
        matches!(self, Self::PeerLost { .. })
    }

    /// Returns whether a checkpoint could not be saved because a disk is full, of this rank or of another.
    pub(crate) const fn is_no_room(&self) -> bool {
        matches!(self, Self::NoRoom(_) | Self::NoRoomOn { .. })
    }

    /// Returns whether a write failed because a disk is full, or because of a limit on the user's files.
    pub(crate) fn is_disk_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if crate::disk::is_full(source))
    }

    /// Returns whether a step was dropped on purpose, by this rank or by another one, or because a rank does
    /// not answer. In these cases no wrong value was computed.
    pub(crate) fn is_interruption(&self) -> bool {
        match self {
            Self::Tensor(error)
            | Self::Zoo(ZooError::Tensor(error))
            | Self::Optim(OptimError::Tensor(error)) => *error == TensorError::Interrupted,
            Self::Comm(error) => error.is_cancelled(),
            _ => self.is_peer_lost(),
        }
    }

    /// Returns the rank that dropped a step on purpose, if one did. The number of a peer is taken as its rank.
    pub(crate) fn cancelled_by(&self) -> Option<farflung_base::Rank> {
        let Self::PeerLost { peer, source } = self else { return None };
        let cancelled = source.downcast_ref::<CommError>().is_some_and(CommError::is_cancelled);
        cancelled.then_some(farflung_base::Rank(peer.0))
    }

    /// Classifies an error that occurred while inputs were read: files and settings that the user gave. It gets
    /// exit code 2, unless it has another one, or the system may be able to read the file later.
    #[must_use]
    pub fn of_input(self) -> Self {
        use std::error::Error as _;

        let mut cause = self.source();
        let mut io = if let Self::Io { source, .. } = &self { Some(source) } else { None };
        while let Some(error) = cause {
            io = io.or(error.downcast_ref::<io::Error>());
            cause = error.source();
        }
        let is_lasting = io.is_none_or(|error| {
            matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::IsADirectory
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::InvalidInput
                    | io::ErrorKind::InvalidData
                    | io::ErrorKind::UnexpectedEof
            )
        });
        if is_lasting && self.exit_code() == 1 { Self::Input(Box::new(self)) } else { self }
    }

    /// Returns a function for `map_err` that makes the error of doing `action` to `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

/// Returns the words for the newest checkpoint of a run that has ended.
pub(super) fn last_checkpoint(saved: Option<&Path>) -> String {
    saved.map_or_else(
        || "there is no checkpoint".to_owned(),
        |path| format!("the last checkpoint is {}", path.display()),
    )
}

impl From<CommError> for Error {
    fn from(error: CommError) -> Self {
        match error.peer() {
            Some(peer) => Self::PeerLost { peer, source: Box::new(error) },
            None => Self::Comm(error),
        }
    }
}

impl From<ZooError> for Error {
    /// The failure of an exchange between ranks is one of communication.
    fn from(error: ZooError) -> Self {
        match error {
            ZooError::Exchange { axis, source } => match source.downcast::<CommError>() {
                Ok(source) => (*source).into(),
                Err(source) => Self::Zoo(ZooError::Exchange { axis, source }),
            },
            error => Self::Zoo(error),
        }
    }
}

impl From<OptimError> for Error {
    fn from(error: OptimError) -> Self {
        match error {
            OptimError::Comm(error) => error.into(),
            OptimError::Store(error) => match error.downcast::<StoreError>() {
                Ok(error) => Self::State((*error).into()),
                Err(error) => Self::Optim(OptimError::Store(error)),
            },
            error => Self::Optim(error),
        }
    }
}
