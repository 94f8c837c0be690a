//! The gradients of a part of which each holder keeps a shard alone (`--zero 2`): those of a microbatch exist
//! in whole for one unit at a time, and leave to their owners.

use std::ops::Range;

use farflung_optim::{ShardReduction, global_norm};
use farflung_tensor::Tensor;
use farflung_zoo::Stage;
use farflung_zoo::layer::{Grads, UnitGrads};

use super::zero::PartShards;
use crate::Result;

/// How the gradients of a part reach their owners. The sums of this rank's shard are not in it.
#[derive(Debug)]
pub(super) struct DividedGradients {
    units: UnitGrads,
    /// `None` on a device that only counts.
    reduction: Option<ShardReduction>,
    /// Whether all gradients of this rank's microbatches of the step were finite; `None` if nobody asks.
    is_sound: Option<bool>,
    /// Whether a codec encodes them, which takes no values that are not finite.
    encodes: bool,
    overlap: bool,
}

impl DividedGradients {
    /// Returns those of a part with these shards; without any on a device that only counts.
    pub(super) fn new(stage: &Stage, shards: Option<&PartShards>) -> Self {
        let encodes = shards.is_some_and(PartShards::encodes_gradients);
        Self {
            units: stage.unit_grads(),
            reduction: shards.map(PartShards::reduction),
            is_sound: encodes.then_some(true),
            encodes,
            overlap: shards.is_none_or(PartShards::overlap),
        }
    }

    /// Drops what is left of a step.
    pub(super) fn begin(&mut self) {
        self.units.clear();
        self.is_sound = self.is_sound.map(|_| true);
        if let Some(reduction) = &mut self.reduction {
            reduction.clear();
        }
    }

    /// Sets whether later steps find out if all gradients of this rank are finite.
    pub(super) fn watch(&mut self, wanted: bool) {
        self.is_sound = (wanted || self.encodes).then_some(true);
    }

    /// Returns whether they were, as far as that was found out.
    pub(super) fn is_sound(&self) -> bool {
        self.is_sound.unwrap_or(true)
    }

    /// Returns where a backward pass writes, and what takes each unit away. The sums go to `own`, this rank's
    /// shard: they are added to what it has if `adds`.
    pub(super) fn split<'a>(&'a mut self, own: &'a mut Tensor, adds: bool) -> (Grads<'a>, LeavingUnits<'a>) {
        let Self { units, reduction, is_sound, encodes, overlap } = self;
        let leaving = LeavingUnits {
            reduction: reduction.as_mut(),
            own,
            adds,
            is_sound,
            encodes: *encodes,
            overlap: *overlap,
        };
        (Grads::by_unit(units), leaving)
    }

    /// Returns whether gradients that are not finite were left out of the sums.
    pub(super) fn hides_values(&self) -> bool {
        self.encodes && !self.is_sound()
    }

    /// Waits for the sums on their way.
    pub(super) fn finish(&mut self, own: &mut Tensor) -> Result<()> {
        self.reduction.as_mut().map_or(Ok(()), |reduction| Ok(reduction.finish(own)?))
    }
}

/// Sends each unit's gradients to their owners.
pub(super) struct LeavingUnits<'a> {
    reduction: Option<&'a mut ShardReduction>,
    own: &'a mut Tensor,
    adds: bool,
    is_sound: &'a mut Option<bool>,
    encodes: bool,
    overlap: bool,
}

impl LeavingUnits<'_> {
    pub(super) fn leave(&mut self, range: Range<usize>, grads: &mut Grads<'_>) -> Result<()> {
        let (Some(mut unit), Some(reduction)) = (grads.take(&range), &mut self.reduction) else {
            return Ok(());
        };
        if let Some(is_sound) = self.is_sound {
            let is_finite = global_norm(&unit)?.is_finite();
            *is_sound &= is_finite;
            if !is_finite && self.encodes {
                // All ranks meet as always. This one tells that the step must not be taken.
                unit = unit.device().zeros(range.len())?;
            }
        }
        reduction.start(range, &unit, self.adds, self.own)?;
        if !self.overlap {
            reduction.finish(self.own)?;
        }
        Ok(())
    }
}
