//! A microbatch whose tokens pass a stage slice by slice: forward from the first slice to the last, backward
//! from the last to the first. A slice's queries look at the keys and values of the slices before it, which
//! therefore get gradients from it.
//!
//! Source: Li et al. 2021, "`TeraPipe`", section 3.2.

use std::ops::Range;

use farflung_tensor::Tensor;

use super::{Cache, Input, Keeping, Output, Saved, Stage};
use crate::ZooError;

/// What the slices of a microbatch's tokens leave for each other on a stage: keys and values on the way
/// forward, the gradients of those on the way back.
#[derive(Debug)]
pub struct Slices {
    batch: usize,
    seen: Cache,
    /// Its length is the first position whose gradients are complete.
    gradients: Option<Cache>,
}

impl Slices {
    /// The keys and values of all positions before `start`.
    fn seen_before(&mut self, start: usize) -> Result<&mut Cache, ZooError> {
        if start > self.seen.len {
            return Err(ZooError::StageInput {
                expected: "a microbatch's slices from the first to the last",
            });
        }
        Ok(&mut self.seen)
    }

    /// Keys and values, and their gradients so far, for a slice behind which all are complete.
    fn gradients_before(
        &mut self,
        stage: &Stage,
        slice: &Range<usize>,
    ) -> Result<(&Cache, &mut Cache), ZooError> {
        let complete = self.gradients.as_ref().map_or(self.seen.len, |gradients| gradients.len);
        if slice.end != complete {
            return Err(ZooError::StageInput {
                expected: "a microbatch's slices back from the last to the first",
            });
        }
        if self.gradients.is_none() {
            let shape = [self.batch, stage.config.context, stage.config.dim];
            self.gradients = Some(stage.cache_of(|| Ok(stage.device.zeros(shape)?))?);
        }
        Ok((&self.seen, self.gradients.as_mut().expect("made above")))
    }
}

impl Stage {
    /// For the slices of a microbatch of `batch` sequences of up to the model's context, none of which was here
    /// yet.
    pub fn slices(&self, batch: usize) -> Result<Slices, ZooError> {
        Ok(Slices { batch, seen: self.cache(batch)?, gradients: None })
    }

    /// As [`Stage::forward`] for a slice of a microbatch's tokens, the first of each sequence at position
    /// `start`, after those before it: the slices together give the bits of the whole. One may run again, with
    /// the same bits.
    ///
    /// Errors: [`ZooError::StageInput`] if a slice before it has not been here.
    pub fn forward_slice(
        &self,
        params: &Tensor,
        input: Input,
        start: usize,
        targets: Option<(&Tensor, f32)>,
        slices: &mut Slices,
    ) -> Result<(Output, Saved), ZooError> {
        let seen = slices.seen_before(start)?;
        let (output, saved) =
            self.forward_by(params, input, start, targets, &Keeping::default(), |cx, i, x| {
                Ok(self.blocks[i].forward_slice(cx, x, start, &mut seen.layers[i])?)
            })?;
        seen.len = seen.len.max(saved.positions.end);
        Ok((output, saved))
    }

    /// As [`Stage::recompute`] for a slice.
    ///
    /// Errors: as [`Stage::forward_slice`].
    pub fn recompute_slice(
        &self,
        params: &Tensor,
        input: Input,
        saved: &mut Saved,
        slices: &mut Slices,
    ) -> Result<(), ZooError> {
        let start = saved.positions.start;
        let seen = slices.seen_before(start)?;
        self.recompute_by(params, input, saved, |cx, i, x| {
            Ok(self.blocks[i].forward_slice(cx, x, start, &mut seen.layers[i])?)
        })
    }

    /// As [`Stage::backward_input`] for a slice, after those behind it. The second half,
    /// [`Stage::backward_weight`], is that of a whole microbatch.
    ///
    /// Errors: [`ZooError::StageInput`] if the slice behind it has not been here.
    pub fn backward_input_slice(
        &self,
        params: &Tensor,
        saved: &mut Saved,
        dy: Option<Tensor>,
        slices: &mut Slices,
    ) -> Result<Option<Tensor>, ZooError> {
        let positions = saved.positions.clone();
        let (seen, gradients) = slices.gradients_before(self, &positions)?;
        let dx = self.backward_input_by(params, saved, dy, |cx, i, saved, dy| {
            let carried = (&seen.layers[i], &mut gradients.layers[i]);
            Ok(self.blocks[i].backward_input_slice(cx, saved, dy, positions.start, carried)?)
        })?;
        gradients.len = positions.start;
        Ok(dx)
    }
}
