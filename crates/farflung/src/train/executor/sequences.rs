//! The sequences of a pass: their numbers, tokens, targets, documents and prefixes, and how many of their
//! tokens count.

use std::ops::Range;

use farflung_parallel::pipeline::Action;
use farflung_tensor::Tensor;
use farflung_zoo::{Batch, Borders, Input, Stage};

use super::{Executor, Pass};
use crate::Result;

impl Executor {
    /// Returns the number of tokens of a microbatch of the pass that count. Ranks that divide sequences have an
    /// equal share each, so that the mean over them is that over all tokens.
    pub(super) fn counted(&self, microbatch: u32) -> Result<f64> {
        self.counted_in(microbatch, 1)
    }

    fn counted_in(&self, microbatch: u32, microbatches: u32) -> Result<f64> {
        let readers = self.parts.values().next().map_or(1, |part| part.stage.readers());
        Ok(self.source.counted(self.pass, microbatch, microbatches)? / readers as f64)
    }

    /// Returns the number of tokens that count in a training step of this many microbatches.
    pub(in crate::train) fn counted_in_step(&self, microbatches: u32) -> Result<f64> {
        self.counted_in(0, microbatches)
    }

    /// Returns the positions of a slice; all positions if sequences are not sliced.
    pub(super) fn positions(&self, slice: u16) -> Range<usize> {
        match self.pass {
            Pass::Training { .. } => self.slices[usize::from(slice)].clone(),
            Pass::Evaluation => 0..self.source.context(),
        }
    }

    /// Returns the inputs and targets of an action's tokens.
    fn batch(&self, action: Action) -> Result<Batch> {
        let batch = self.source.sequences(self.pass, action.microbatch)?;
        Ok(batch.positions(&self.positions(action.slice)))
    }

    /// Returns a stage's input: hidden states, or tokens at the model's input.
    pub(super) fn input(&self, action: Action, hidden: Option<Tensor>) -> Result<Input> {
        Ok(match hidden {
            Some(x) => Input::Hidden(x),
            None => Input::Tokens(self.tokens(action, &self.batch(action)?.inputs)?),
        })
    }

    /// Returns the targets of an action and their weights, if its stage is the last.
    pub(super) fn targets(&self, action: Action) -> Result<Option<(Tensor, Option<Tensor>)>> {
        if !self.placement.is_last(action.stage) {
            return Ok(None);
        }
        let batch = self.batch(action)?;
        let own = |weights: Vec<f32>| self.stage_of(action).own(&weights);
        let weights = batch.weights.map(own);
        let weights = weights.map(|weights| self.device.tensor(&weights, weights.len())).transpose()?;
        Ok(Some((self.tokens(action, &batch.targets)?, weights)))
    }

    fn stage_of(&self, action: Action) -> &Stage {
        &self.parts[&self.placement.storage_stage(action.stage)].stage
    }

    fn tokens(&self, action: Action, ids: &[u32]) -> Result<Tensor> {
        let (stage, positions) = (self.stage_of(action), self.positions(action.slice).len());
        Ok(stage.tokens(&stage.own(ids), positions / stage.readers())?)
    }

    /// Returns where the documents of an action's tokens begin, if they are kept apart, and where prefixes end:
    /// every stage needs it.
    pub(super) fn borders(&self, action: Action) -> Result<Borders> {
        if !self.source.has_borders(self.pass) {
            return Ok(Borders::default());
        }
        Ok(self.stage_of(action).borders(&self.batch(action)?)?)
    }
}
