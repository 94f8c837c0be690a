//! Errors of an optimizer's state on disk.

use std::path::PathBuf;

use farflung_store::StoreError;

/// Why an optimizer's state on disk cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The optimizer's state on disk could not be used: there is no room for it, it belongs to something else,
    /// or its disk has failed.
    #[error("the optimizer's state on disk: {0}")]
    Store(#[source] StoreError),
    /// The optimizer's state is on disk, and a step was begun before its file was opened.
    #[error("the optimizer's state on disk is not open: runs open it before their first step")]
    Closed,
    /// A file of state on disk was written for something else.
    #[error(
        "{path} is a store of other arrays, written for another model, optimizer or division of the model: \
         remove it to continue from a checkpoint, or give another `--state-dir`"
    )]
    OfOther {
        /// The file.
        path: PathBuf,
    },
    /// The run's newest steps are in its state on disk, which is not used.
    #[error(
        "{path} has step {step} of this run, and the newest checkpoint is of step {saved}: continue with \
         `--state disk` and this folder, or remove it to go back to the checkpoint"
    )]
    Ignored {
        /// The folder.
        path: PathBuf,
        /// Its step.
        step: u64,
        /// The step of the newest checkpoint; 0 if there is none.
        saved: u64,
    },
    /// There is a state on disk that the run would overwrite.
    #[error(
        "{path} holds the state of step {step} of a run: continue that with `--resume auto` and its own \
         `--out`, remove the folder, or give another `--state-dir`"
    )]
    Exists {
        /// The folder.
        path: PathBuf,
        /// The step.
        step: u64,
    },
    /// A rank's state on disk is older than that of others, or lost, so that all ranks would lose steps.
    #[error(
        "the state on disk of rank {rank} is {}, and the run has done step {newest}: bring back its folder, or \
         give a checkpoint with `--resume PATH` (and an empty `--state-dir`)",
        if *step == 0 { "missing".to_owned() } else { format!("of step {step}") }
    )]
    Behind {
        /// The rank.
        rank: usize,
        /// The step of its state; 0 if it has none.
        step: u64,
        /// The newest step of another rank.
        newest: u64,
    },
}

impl StateError {
    /// Returns whether another start does not help without a change of what was given.
    pub(super) const fn is_lasting(&self) -> bool {
        match self {
            Self::Store(error) => matches!(
                error,
                StoreError::Room { .. } | StoreError::Locked { .. } | StoreError::Foreign { .. }
            ),
            _ => true,
        }
    }
}

impl From<StoreError> for StateError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::OtherLayout { path } => Self::OfOther { path },
            error => Self::Store(error),
        }
    }
}
