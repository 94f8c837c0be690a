//! The ranks that divide the experts of a mixture: a view of the data axis.

use std::ops::Range;

use farflung_base::Rank;

use super::Plan;
use crate::mesh::Coordinates;

impl Plan {
    /// Returns whether replicas divide the experts of a mixture.
    #[must_use]
    pub fn divides_experts(&self) -> bool {
        self.experts.len() > 1
    }

    /// Returns the number of replicas that together have all experts.
    #[must_use]
    pub fn expert_ranks(&self) -> u32 {
        (self.experts.len() as u32).max(1)
    }

    /// Returns a replica's number among those with which it divides the experts.
    #[must_use]
    pub fn expert_rank(&self, replica: u32) -> u32 {
        replica % self.expert_ranks()
    }

    /// Returns the replicas that together have all experts, one of which is `replica`.
    #[must_use]
    pub fn expert_group(&self, replica: u32) -> Range<u32> {
        let first = replica - self.expert_rank(replica);
        first..first + self.expert_ranks()
    }

    /// Returns the ranks at the same position of a pipeline in the replicas of a group.
    pub(super) fn along_experts(&self, rank: Rank) -> Vec<Rank> {
        let at = self.at(rank);
        self.expert_group(at.data).map(|data| self.rank(Coordinates { data, ..at })).collect()
    }
}
