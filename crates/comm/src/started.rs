//! The handle of a started operation.

use std::fmt;
use std::task::{Context, Poll};

/// Interface of a started operation, implemented by the endpoint that runs it.
pub(crate) trait Spawned: Send + Sync {
    /// Number of the operation on its endpoint.
    fn number(&self) -> u64;
    /// Blocks until the operation is over.
    fn wait(&self);
    /// Returns whether the operation is over.
    fn is_over(&self) -> bool;
    /// Returns ready if the operation is over. Otherwise registers the task's waker, which is woken at the end.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<()>;
    /// Cancels the operation, unless it is over.
    fn cancel(&self);
}

/// Handle of a started operation. Dropping it cancels the operation, unless it is over.
#[must_use = "dropping an operation cancels it"]
pub struct Started(Box<dyn Spawned>);

impl Started {
    pub(crate) fn new(operation: Box<dyn Spawned>) -> Self {
        Self(operation)
    }

    /// Blocks until the operation is over, driving the network on this thread.
    pub fn wait(&self) {
        self.0.wait();
    }

    /// Returns whether the operation is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }

    /// Returns ready if the operation is over. Otherwise registers the task's waker, which is woken at the end.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll(cx)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl fmt::Debug for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Started({})", self.0.number())
    }
}
