//! The ranks that divide the experts of a mixture, and those that hold the same of them: a view of the data
//! axis.

use std::ops::Range;

use farflung_base::{Axis, Rank};

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

    /// Returns the ranks that hold the same experts as a rank, in order: one of each group of replicas.
    ///
    /// ```
    /// # use farflung_parallel::{Axis, Plan};
    /// # let text = "version = 1\nmesh = \"data=4,pipeline=1\"\nmachines = [\"a\", \"b\", \"c\", \"d\"]\n\
    /// #     precision = \"f32\"\nbatch = 4\nmicrobatches = [1, 1, 1, 1]\nexperts = [1, 1]\n[model]\n\
    /// #     name = \"mixtral-nano\"\nlayers = 4\nparameters = 1330048\n[[part]]\nlayers = \"0..4\"\n\
    /// #     [[level]]\nmethod = \"ddp\"\n";
    /// use farflung_base::Rank;
    ///
    /// // Four replicas, of which two and two have all experts.
    /// let plan: Plan = text.parse()?;
    /// plan.check()?;
    /// assert_eq!(plan.group(Rank(3), Axis::Expert), [Rank(2), Rank(3)]);
    /// assert_eq!(plan.expert_holders(Rank(3)), [Rank(1), Rank(3)]);
    /// # Ok::<(), farflung_parallel::ParallelError>(())
    /// ```
    ///
    /// # Panics
    /// If the plan has no such rank.
    #[must_use]
    pub fn expert_holders(&self, rank: Rank) -> Vec<Rank> {
        let own = self.expert_rank(self.at(rank).data);
        let data = self.group(rank, Axis::Data);
        data.into_iter().filter(|&other| self.expert_rank(self.at(other).data) == own).collect()
    }
}
