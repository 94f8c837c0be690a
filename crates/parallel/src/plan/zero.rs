//! The replicas that divide the optimizer's state: the data axis of a plan's mesh.

use super::Plan;

impl Plan {
    /// Returns whether each rank holds the optimizer's state of a shard of its parameters alone.
    #[must_use]
    pub const fn divides_state(&self) -> bool {
        self.zero > 0
    }

    /// Returns whether each rank holds the gradients of such a shard alone, too.
    #[must_use]
    pub const fn divides_gradients(&self) -> bool {
        self.zero > 1
    }

    /// Returns whether each rank holds the parameters of such a shard alone, too.
    #[must_use]
    pub const fn divides_weights(&self) -> bool {
        self.zero > 2
    }

    /// Returns the weights by which replicas divide the optimizer's state.
    #[must_use]
    pub fn shares_of_state(&self) -> Vec<u32> {
        match &self.zero_weights[..] {
            [] => vec![1; self.replicas() as usize],
            weights => weights.to_vec(),
        }
    }

    /// Returns these weights as checkpoints have them: none if each replica has all of it.
    #[must_use]
    pub fn recorded_state(&self) -> Vec<u32> {
        if self.divides_state() { self.shares_of_state() } else { Vec::new() }
    }
}
