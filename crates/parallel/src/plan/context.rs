//! The replicas that divide the positions of their sequences: views of the data axis.

use std::ops::Range;

use farflung_base::{ContextCut, Rank};

use super::Plan;
use crate::mesh::{Coordinates, whole_groups};

impl Plan {
    /// Returns the number of replicas that read different sequences; those that divide some count once.
    #[must_use]
    pub fn readers(&self) -> u32 {
        whole_groups(self.replicas(), self.context.readers())
    }

    /// Returns a replica's number among those that divide the positions of the same sequences.
    #[must_use]
    pub const fn context_rank(&self, replica: u32) -> u32 {
        self.context.rank_of(replica)
    }

    /// Returns the replicas that read the same sequences, one of which is `replica`.
    #[must_use]
    pub const fn readers_of(&self, replica: u32) -> Range<u32> {
        let first = replica - self.context_rank(replica);
        first..first + self.context.readers()
    }

    /// Returns how replicas divide positions, as checkpoints have it: empty if they have whole sequences.
    #[must_use]
    pub fn recorded_context(&self) -> String {
        let ContextCut { ring, ulysses, order } = self.context;
        if self.context.divides() { format!("{ring} x {ulysses} {order}") } else { String::new() }
    }

    /// Returns the ranks at the same position of a pipeline that pass keys and values on to each other.
    pub(super) fn along_context(&self, rank: Rank) -> Vec<Rank> {
        let own = self.at(rank).data;
        let groups = (0..self.context.ring).map(|group| group * self.context.ulysses);
        let member = self.context_rank(own) % self.context.ulysses;
        self.beside(rank, groups.map(|group| self.readers_of(own).start + group + member))
    }

    /// Returns the ranks at the same position of a pipeline that exchange positions for heads.
    pub(super) fn along_ulysses(&self, rank: Rank) -> Vec<Rank> {
        let own = self.at(rank).data;
        let first = own - own % self.context.ulysses;
        self.beside(rank, first..first + self.context.ulysses)
    }

    fn beside(&self, rank: Rank, replicas: impl Iterator<Item = u32>) -> Vec<Rank> {
        let at = self.at(rank);
        replicas.map(|data| self.rank(Coordinates { data, ..at })).collect()
    }
}
