//! Chains whose states are not in the device's memory between steps: they come piece by piece.

use std::fmt::Debug;
use std::ops::Range;

use farflung_tensor::{Device, ParamLayout, Tensor, View};

use super::{Chain, ChainBuilder};
use crate::{OptimError, Shard};

/// Keeps the states of a chain, for example on a disk. A step takes the pieces one after another, changes them,
/// and gives them back in the same order.
pub trait StateStore: Debug + Send {
    /// Returns the states of the next piece, in the order of [`ChainBuilder::state_names`]: tensors on the
    /// chain's device, at least as long as the piece. Before the first step they are zeros.
    ///
    /// Errors: [`OptimError::Store`].
    fn take(&mut self) -> Result<Vec<Tensor>, OptimError>;

    /// Keeps the states of the piece that was taken last. `params` are the piece's parameters after the step.
    ///
    /// Errors: [`OptimError::Store`].
    fn give(&mut self, states: Vec<Tensor>, params: View<'_>) -> Result<(), OptimError>;
}

/// Where the states of a chain are, in pieces.
#[derive(Debug)]
pub(super) struct StoredStates {
    pub(super) store: Box<dyn StateStore>,
    pub(super) pieces: Vec<Range<usize>>,
}

impl ChainBuilder {
    /// Cuts the ranges of a shard of a layout's flat buffers into pieces of at most `most` elements each,
    /// where the links allow that: if one works on whole tensors, a piece has whole tensors, and at least
    /// one.
    #[must_use]
    pub fn pieces(&self, layout: &ParamLayout, shard: &Shard, most: usize) -> Vec<Range<usize>> {
        shard.ranges().iter().flat_map(|range| self.pieces_of(layout, range, most)).collect()
    }

    fn pieces_of(&self, layout: &ParamLayout, shard: &Range<usize>, most: usize) -> Vec<Range<usize>> {
        let most = most.max(1);
        let borders: Vec<usize> = if self.links.iter().any(|link| link.transform.per_tensor().is_some()) {
            let starts = layout.params().iter().skip(1).map(|param| param.start);
            starts.filter(|at| shard.start < *at && *at < shard.end).chain([shard.end]).collect()
        } else {
            (1..=shard.len().div_ceil(most)).map(|i| (shard.start + i * most).min(shard.end)).collect()
        };
        let mut pieces: Vec<Range<usize>> = Vec::new();
        let mut start = shard.start;
        for end in borders {
            match pieces.last_mut() {
                Some(last) if end - last.start <= most => last.end = end,
                _ if end > start => pieces.push(start..end),
                _ => {}
            }
            start = end;
        }
        pieces
    }

    /// Binds the chain to a shard of a layout's flat buffers, as [`ChainBuilder::build_shard`] does, with its
    /// states in a store. `pieces` are those of [`ChainBuilder::pieces`].
    ///
    /// A step has the same bits as with states in memory. If the store fails within a step, some parameters
    /// have taken it and others have not, so that the chain cannot go on.
    ///
    /// Errors: those of [`ChainBuilder::build_shard`]; [`OptimError::Setting`] if a piece ends within a tensor
    /// that a link needs whole, or if replicas average more than gradients.
    ///
    /// # Panics
    /// If the pieces together, in their order, are not the shard.
    pub fn build_stored(
        self,
        device: &Device,
        layout: &ParamLayout,
        shard: Shard,
        (pieces, store): (Vec<Range<usize>>, Box<dyn StateStore>),
    ) -> Result<Chain, OptimError> {
        assert_eq!(Shard::new(pieces.iter().cloned()), shard, "pieces cover the shard");
        self.check_parts(layout, &pieces, "pieces")?;
        self.bind(device, layout, shard, Some(StoredStates { store, pieces }))
    }
}

impl Chain {
    /// Returns the ranges of the flat buffers that a step updates one after another.
    pub fn pieces(&self) -> impl Iterator<Item = &Range<usize>> {
        self.pieces.iter().map(|piece| &piece.range)
    }

    /// Sets the number of steps after which the store has the states.
    pub const fn resume_at(&mut self, step: u64) {
        self.step = step;
    }
}
