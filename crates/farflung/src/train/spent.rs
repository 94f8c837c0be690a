//! Where the time of a step goes on a rank, by the transport's clock.

use farflung_base::Nanos;
use farflung_comm::Communicator;

/// The time of a step on a rank. What is neither waiting nor communicating is computing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// From the step's beginning to its end: evaluations and checkpoints behind it are not in it.
    pub took: Nanos,
    /// In which the pass waited for hidden states or gradients of other stages.
    pub wait: Nanos,
    /// In which the rank waited for averages, votes and what replicas exchange between steps: the
    /// communication that no computing hid, waiting for slower ranks included.
    pub communicate: Nanos,
}

impl Spent {
    /// In which the rank computed.
    #[must_use]
    pub const fn compute(&self) -> Nanos {
        self.took.saturating_sub(self.wait).saturating_sub(self.communicate)
    }
}

/// Adds the time since `begun` to a part of [`Spent`].
pub(super) fn add_since(begun: Nanos, comm: &Communicator, to: &mut Nanos) {
    *to = to.saturating_add(comm.now().saturating_sub(begun));
}
