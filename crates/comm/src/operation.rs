//! The trait of a communicator's operations: each collective and each message implements it. Deadlines,
//! failures and results are the same for all operations and are handled elsewhere.

use std::task::Poll;

use farflung_base::PeerId;

use crate::transport::{Port, Tag};
use crate::{Algorithm, CommError};

/// A collective or message in progress.
pub(crate) trait Operation: Send {
    /// Result of the operation.
    type Output;
    /// Makes as much progress as possible without blocking.
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>>;
    /// Returns the peer that the operation waits for.
    fn waits_for(&self) -> PeerId;
    /// Returns whether only the peer returned by `waits_for` can let the operation continue.
    fn needs_one(&self) -> bool {
        true
    }
    /// Returns the algorithm of the operation. `None` if the operation has only one.
    fn algorithm(&self) -> Option<Algorithm> {
        None
    }
    /// Returns the position of the operation in the order of all operations, computed by [`progress`].
    fn progress(&self) -> u32 {
        0
    }
    /// Called when the operation is cancelled or fails.
    fn abandon(&mut self, _port: &mut dyn Port) {}
    /// Returns the result, once the operation is complete.
    fn finish(self) -> Self::Output;
}

/// Returns the position of a step of a collective (or of one of its lanes) in the order of all operations, as
/// one increasing number. It wraps around after a million operations, so numbers are compared by their
/// difference.
pub(crate) fn progress(tag: Tag, step: usize) -> u32 {
    tag.number << 12 | step.min(0xFFF) as u32
}
