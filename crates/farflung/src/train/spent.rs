//! Times of a step on a rank, by use, measured with the transport's clock.

use farflung_base::Nanos;
use farflung_comm::Communicator;

/// Time of a step on a rank. Time that is neither waiting nor communication is computation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// Time from the step's beginning to its end, without the evaluation and checkpoint after it.
    pub took: Nanos,
    /// Time for which the pass waited for hidden states or gradients of other stages, and for tokens of other
    /// replicas and what comes back of them.
    pub wait: Nanos,
    /// Time for which the rank waited for averages, votes and exchanges between replicas: communication that
    /// was not hidden by computation, including the wait for slower ranks.
    pub communicate: Nanos,
    /// Time of updates whose optimizer has its state on disk, and the wait for earlier ones to reach the disk.
    /// It counts as computation.
    pub disk: Nanos,
}

impl Spent {
    /// Returns the time for which the rank computed.
    #[must_use]
    pub const fn compute(&self) -> Nanos {
        self.took.saturating_sub(self.wait).saturating_sub(self.communicate)
    }
}

/// Adds the time since `begun` to a field of [`Spent`].
pub(super) fn add_since(begun: Nanos, comm: &Communicator, to: &mut Nanos) {
    *to = to.saturating_add(comm.now().saturating_sub(begun));
}
