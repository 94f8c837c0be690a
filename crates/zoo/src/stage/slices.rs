//! Pipelining over tokens: a microbatch's tokens pass a stage slice by slice, forward from the first slice to
//! the last, backward from the last to the first. The queries of a slice attend to the keys and values of
//! earlier slices, whose gradients therefore have a contribution from it.
//!
//! Source: Li et al. 2021, "`TeraPipe`", section 3.2.

use std::ops::Range;

use farflung_tensor::Tensor;

use super::{ActivationPolicy, Cache, Input, Output, Packed, Saved, Seen, Stage};
use crate::ZooError;
use crate::layer::{KeyValues, Later, Params, Targets};

/// Data that the slices of a microbatch share on a stage: keys and values in the forward pass, and their
/// gradients in the backward pass.
#[derive(Debug)]
pub struct Slices {
    batch: usize,
    seen: Cache,
    /// Gradients of keys and values. Those of positions from `gradients.len` on are complete.
    gradients: Option<Cache>,
}

impl Slices {
    /// Returns the cache, which must contain the keys and values of all positions before `start`.
    fn seen_before(&mut self, start: usize) -> Result<&mut Cache, ZooError> {
        if start > self.seen.len {
            return Err(ZooError::StageInput {
                expected: "the slices of a microbatch in order, from the first to the last",
            });
        }
        Ok(&mut self.seen)
    }

    /// Returns keys and values, and their gradients so far. The gradients of all later slices must be complete.
    fn gradients_before(
        &mut self,
        stage: &Stage,
        slice: &Range<usize>,
    ) -> Result<(&Cache, &mut Cache), ZooError> {
        let complete = self.gradients.as_ref().map_or(self.seen.len, |gradients| gradients.len);
        if slice.end != complete {
            return Err(ZooError::StageInput {
                expected: "the slices of a microbatch in reverse order, from the last to the first",
            });
        }
        if self.gradients.is_none() {
            self.gradients = Some(stage.cache_of(self.batch, |shape| Ok(stage.device.zeros(shape)?))?);
        }
        Ok((&self.seen, self.gradients.as_mut().expect("created above")))
    }
}

impl Stage {
    /// Creates the shared data for the slices of a microbatch of `batch` sequences of up to the model's
    /// context.
    pub fn slices(&self, batch: usize) -> Result<Slices, ZooError> {
        Ok(Slices { batch, seen: self.cache(batch)?, gradients: None })
    }

    /// Like [`Stage::forward`], for one slice of a microbatch's tokens. The first token of each sequence is at
    /// position `start`. Earlier slices must have been processed. The outputs of all slices are bit-identical
    /// to those of the whole sequence. Processing a slice again gives the same bits.
    ///
    /// Errors: [`ZooError::StageInput`] if an earlier slice is missing.
    pub fn forward_slice<'a>(
        &self,
        params: impl Into<Params<'a>>,
        input: impl Into<Packed>,
        start: usize,
        targets: Option<Targets<'_>>,
        slices: &mut Slices,
    ) -> Result<(Output, Saved), ZooError> {
        if self.spec.routes_by_sequence() {
            return Err(ZooError::StageInput {
                expected: "whole sequences, of which experts have a capacity or are balanced",
            });
        }
        let seen = slices.seen_before(start)?;
        let before = Seen { past: start, layers: &mut seen.layers };
        let (output, saved) = self.forward_by(
            params.into(),
            input.into(),
            targets,
            &ActivationPolicy::default(),
            Some(before),
        )?;
        seen.len = seen.len.max(saved.positions.end);
        Ok((output, saved))
    }

    /// Like [`Stage::recompute`], for one slice.
    ///
    /// Errors: those of [`Stage::forward_slice`].
    pub fn recompute_slice<'a>(
        &self,
        params: impl Into<Params<'a>>,
        input: Input,
        saved: &mut Saved,
        slices: &mut Slices,
    ) -> Result<(), ZooError> {
        let past = saved.positions.start;
        let seen = slices.seen_before(past)?;
        self.recompute_by(params.into(), input, saved, Some(Seen { past, layers: &mut seen.layers }))
    }

    /// Like [`Stage::backward_input`], for one slice, after all later ones. The second half is
    /// [`Stage::backward_weight`], as for a whole microbatch.
    ///
    /// Errors: [`ZooError::StageInput`] if the next slice has not been processed yet.
    pub fn backward_input_slice<'a>(
        &self,
        params: impl Into<Params<'a>>,
        saved: &mut Saved,
        dy: Option<Tensor>,
        slices: &mut Slices,
    ) -> Result<Option<Tensor>, ZooError> {
        let positions = saved.positions.clone();
        let (seen, gradients) = slices.gradients_before(self, &positions)?;
        let mut layers: Vec<Option<&mut KeyValues>> = gradients.layers.iter_mut().map(Some).collect();
        let later = |i: usize| Later::Slices {
            past: positions.start,
            seen: &seen.layers[i],
            gradients: layers[i].take().expect("each block runs once"),
        };
        let dx = self.backward_input_by(params.into(), saved, dy, later)?;
        gradients.len = positions.start;
        Ok(dx)
    }
}
