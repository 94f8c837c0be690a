//! Placement: which rank holds which stage, and which stages follow each other. The order of computations is
//! not part of a placement.

use farflung_base::{Rank, StageId};

use crate::ParallelError;

/// The stages of a pipeline and the ranks that hold them.
///
/// Stages are numbered from the model's input. A method that sends microbatches through the ranks in both
/// directions holds two copies of the model; the second copy's stages are numbered after the first's: with 4
/// ranks, 0 to 3 and 4 to 7. If stages are pools of ranks, each route through the pools is a copy.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Placement {
    ranks: u32,
    copies: u32,
    rank_of: Vec<Rank>,
}

impl Placement {
    /// Creates a placement of stages on the ranks in `rank_of`, which has one entry per stage: `copies` equal
    /// parts, one after the other.
    ///
    /// Errors: [`ParallelError::Placement`] if there are no stages, a rank has no stage, or the copies are not
    /// of equal length.
    pub fn new(rank_of: Vec<Rank>, copies: u32) -> Result<Self, ParallelError> {
        let ranks = rank_of.iter().map(|r| r.index() + 1).max().unwrap_or_default();
        let stages = rank_of.len();
        // A rank's number may come from a file. There cannot be more ranks than stages, which bounds the
        // allocation.
        let mut used = vec![false; ranks.min(stages + 1)];
        for rank in &rank_of {
            if let Some(used) = used.get_mut(rank.index()) {
                *used = true;
            }
        }
        let even = copies > 0 && stages.is_multiple_of(copies as usize);
        if stages == 0 || !even || used.contains(&false) {
            return Err(ParallelError::Placement { stages, ranks, copies });
        }
        Ok(Self { ranks: ranks as u32, copies, rank_of })
    }

    fn of(ranks: u32, copies: u32, stages: u32, rank_of: impl Fn(u32) -> u32) -> Self {
        Self { ranks, copies, rank_of: (0..stages).map(|stage| Rank(rank_of(stage))).collect() }
    }

    /// Places `chunks` stages on each rank, going round: stage g is on rank g mod `ranks`.
    #[must_use]
    pub fn looped(ranks: u32, chunks: u32) -> Self {
        Self::of(ranks, 1, ranks * chunks, |stage| stage % ranks)
    }

    /// Places `chunks` stages on each rank, going forth and back: 0 to p-1, then p-1 to 0, and so on. With 2
    /// chunks, this is a V-shaped placement.
    #[must_use]
    pub fn wave(ranks: u32, chunks: u32) -> Self {
        Self::of(ranks, 1, ranks * chunks, |stage| {
            let along = stage % ranks;
            if (stage / ranks).is_multiple_of(2) { along } else { ranks - 1 - along }
        })
    }

    /// Places two copies of the model: one from the first rank to the last, one from the last to the first.
    #[must_use]
    pub fn both_ways(ranks: u32) -> Self {
        Self { copies: 2, ..Self::wave(ranks, 2) }
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns the number of stages, over all copies.
    #[must_use]
    pub fn stages(&self) -> u32 {
        self.rank_of.len() as u32
    }

    /// Returns the number of copies of the model.
    #[must_use]
    pub const fn copies(&self) -> u32 {
        self.copies
    }

    /// Returns the number of stages of one copy.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.stages() / self.copies
    }

    /// Returns the number of parts of one copy on each rank, if all ranks have equally many.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.depth() / self.ranks
    }

    /// Returns the rank that holds a stage.
    ///
    /// # Panics
    /// If there is no such stage.
    #[must_use]
    pub fn rank(&self, stage: StageId) -> Rank {
        self.rank_of[stage.index()]
    }

    /// Returns the rank of each stage, in the order of stages.
    #[must_use]
    pub fn rank_of(&self) -> &[Rank] {
        &self.rank_of
    }

    /// Iterates over the stages of a rank, in ascending order.
    pub fn stages_of(&self, rank: Rank) -> impl Iterator<Item = StageId> {
        self.rank_of.iter().zip(0..).filter(move |(r, _)| **r == rank).map(|(_, stage)| StageId(stage))
    }

    /// Returns the stage under which the weights of `stage` are stored: the first stage on the same rank that
    /// is the same part of the model. In pooled placements, several copies of the model share a rank's part,
    /// and its weights are stored once.
    #[must_use]
    pub fn storage_stage(&self, stage: StageId) -> StageId {
        let (rank, part) = (self.rank(stage), self.part(stage));
        let of_part = (part..self.stages()).step_by(self.depth() as usize).map(StageId);
        of_part.take(stage.index() + 1).find(|&other| self.rank(other) == rank).unwrap_or(stage)
    }

    /// Iterates over the stages under which a rank stores its parts, each part once.
    pub fn homes_of(&self, rank: Rank) -> impl Iterator<Item = StageId> {
        self.stages_of(rank).filter(|&stage| self.storage_stage(stage) == stage)
    }

    /// Returns the ranks that hold a part of the model, each once, in ascending order.
    #[must_use]
    pub fn holders(&self, part: u32) -> Vec<Rank> {
        let of_part = (part..self.stages()).step_by(self.depth() as usize).map(StageId);
        let mut ranks: Vec<Rank> = of_part.map(|stage| self.rank(stage)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Returns whether stages are pools of ranks: there are several routes through the ranks, and each rank
    /// holds one part. Bidirectional placements also have several copies but are not pooled; there, both users
    /// of the token table are on the same ranks.
    #[must_use]
    pub fn is_pooled(&self) -> bool {
        self.copies > 1 && self.tie() == TiedWeights::Across
    }

    /// Returns which part of the model a stage is. The same part has the same number in every copy.
    #[must_use]
    pub fn part(&self, stage: StageId) -> u32 {
        stage.0 % self.depth()
    }

    /// Returns whether a stage takes the model's input.
    #[must_use]
    pub fn is_first(&self, stage: StageId) -> bool {
        self.part(stage) == 0
    }

    /// Returns whether a stage computes the model's output.
    #[must_use]
    pub fn is_last(&self, stage: StageId) -> bool {
        self.part(stage) + 1 == self.depth()
    }

    /// Returns the first of a rank's stages that computes the model's input or output: what uses the token
    /// table of a model with a tied head. `None` if the rank has neither.
    #[must_use]
    pub fn end_of(&self, rank: Rank) -> Option<StageId> {
        self.homes_of(rank).find(|&stage| self.is_end(stage))
    }

    /// Returns whether a stage computes the model's input or output.
    #[must_use]
    pub fn is_end(&self, stage: StageId) -> bool {
        self.is_first(stage) || self.is_last(stage)
    }

    /// Returns whether the two users of the token table, embedding and head, are on the same ranks.
    #[must_use]
    pub fn tie(&self) -> TiedWeights {
        let holders = |wanted: fn(&Self, StageId) -> bool| {
            let stages = (0..self.stages()).map(StageId).filter(|&s| wanted(self, s));
            let mut ranks: Vec<Rank> = stages.map(|s| self.rank(s)).collect();
            ranks.sort_unstable();
            ranks
        };
        match self.depth() {
            1 => TiedWeights::Whole,
            _ if holders(Self::is_first) == holders(Self::is_last) => TiedWeights::Local,
            _ => TiedWeights::Across,
        }
    }

    /// Returns the stage that takes this stage's output.
    #[must_use]
    pub fn next(&self, stage: StageId) -> Option<StageId> {
        (!self.is_last(stage)).then_some(StageId(stage.0 + 1))
    }

    /// Returns the stage whose output this stage takes.
    #[must_use]
    pub fn previous(&self, stage: StageId) -> Option<StageId> {
        (!self.is_first(stage)).then(|| StageId(stage.0 - 1))
    }
}

/// Location of the two users of a model's token table: the embedding in the first part and the head in the
/// last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TiedWeights {
    /// The same part has both users.
    Whole,
    /// Each rank that holds one of the two users also holds the other.
    Local,
    /// The two users are on different ranks.
    Across,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_shared_within_a_rank_or_across_two() {
        assert_eq!(Placement::looped(4, 1).tie(), TiedWeights::Across);
        assert_eq!(Placement::looped(4, 2).tie(), TiedWeights::Across);
        assert_eq!(Placement::wave(4, 2).tie(), TiedWeights::Local);
        assert_eq!(Placement::both_ways(4).tie(), TiedWeights::Local);
        assert_eq!(Placement::looped(1, 1).tie(), TiedWeights::Whole);
    }

    fn ranks(placement: &Placement) -> Vec<u32> {
        placement.rank_of().iter().map(|r| r.0).collect()
    }

    #[test]
    fn loops_waves_and_both_ways() {
        assert_eq!(ranks(&Placement::looped(3, 2)), [0, 1, 2, 0, 1, 2]);
        assert_eq!(ranks(&Placement::wave(3, 3)), [0, 1, 2, 2, 1, 0, 0, 1, 2]);
        let both = Placement::both_ways(4);
        assert_eq!(ranks(&both), [0, 1, 2, 3, 3, 2, 1, 0]);
        assert_eq!(both.stages_of(Rank(1)).collect::<Vec<_>>(), [StageId(1), StageId(6)]);
        assert!(both.is_first(StageId(4)) && both.is_last(StageId(3)) && both.part(StageId(6)) == 2);
        assert_eq!((both.next(StageId(3)), both.previous(StageId(4))), (None, None));
        assert_eq!(both.next(StageId(4)), Some(StageId(5)));
        let vee = Placement::wave(4, 2);
        assert_eq!(vee.next(StageId(3)), Some(StageId(4)));
    }

    #[test]
    fn a_part_of_several_copies_is_kept_once() {
        // Rank 0 has the first stage of both routes; ranks 1 and 2 have the second stage of one route each.
        let pools = Placement::new([0, 1, 0, 2].map(Rank).to_vec(), 2).unwrap();
        assert_eq!(pools.homes_of(Rank(0)).collect::<Vec<_>>(), [StageId(0)]);
        assert_eq!(
            (pools.storage_stage(StageId(2)), pools.storage_stage(StageId(3))),
            (StageId(0), StageId(3))
        );
        assert_eq!((pools.holders(0), pools.holders(1)), (vec![Rank(0)], vec![Rank(1), Rank(2)]));
        assert!(pools.is_pooled() && pools.tie() == TiedWeights::Across);
        let both = Placement::both_ways(4);
        assert!((0..8).map(StageId).all(|stage| both.storage_stage(stage) == stage) && !both.is_pooled());
        let two_by_two = Placement::new([0, 2, 1, 3].map(Rank).to_vec(), 2).unwrap();
        assert!(two_by_two.is_pooled() && !Placement::looped(4, 2).is_pooled());
    }

    #[test]
    fn placements_without_sense_are_refused() {
        for (rank_of, copies) in
            [(vec![], 1), (vec![0, 2], 1), (vec![0, 1, 2], 2), (vec![0], 0), (vec![u32::MAX, 0], 1)]
        {
            assert!(Placement::new(rank_of.into_iter().map(Rank).collect(), copies).is_err());
        }
        assert_eq!(Placement::new([0, 1, 0, 1].map(Rank).to_vec(), 1).unwrap(), Placement::looped(2, 2));
    }
}
