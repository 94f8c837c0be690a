//! The operations of a communicator: what a collective or message does, without the deadline, the handling of
//! failures and the result, which are the same for all of them.

use std::task::Poll;

use farflung_base::PeerId;

use crate::transport::{Port, Tag};
use crate::{Algorithm, CommError};

/// A collective or message under way.
pub(crate) trait Operation: Send {
    /// Result of the operation.
    type Output;
    /// Does what can be done now.
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>>;
    /// Returns the peer that it waits for.
    fn waits_for(&self) -> PeerId;
    /// Returns whether that peer alone can let it continue.
    fn needs_one(&self) -> bool {
        true
    }
    /// Returns the algorithm, if there are several for such an operation.
    fn algorithm(&self) -> Option<Algorithm> {
        None
    }
    /// Returns its position in the order of all operations, as [`progress`] computes it.
    fn progress(&self) -> u32 {
        0
    }
    /// Called when it is cancelled or fails.
    fn cut(&mut self, _port: &mut dyn Port) {}
    /// Returns the result, after it is complete.
    fn finish(self) -> Self::Output;
}

/// Returns the position of a step of a collective (or of one of its lanes) in the order of all operations, as
/// one number that grows.
pub(crate) fn progress(tag: Tag, step: usize) -> u32 {
    tag.number << 12 | step.min(0xFFF) as u32
}
