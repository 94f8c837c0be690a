//! What the routers of a pass chose: for metrics, and for losses that take layers together. Then each stage of
//! a pipeline needs the choices of all others: their sums go forward with the hidden states and back with the
//! gradients.

use super::{Saved, Stage};
use crate::ZooError;
use crate::layer::{Routed, RouterPass};

/// The choices of routers in a pass.
#[derive(Debug, Default)]
pub(super) struct RoutedPass {
    /// Of this stage's layers.
    pub(super) layers: Vec<Routed>,
    /// Weight of each sequence in the means of losses.
    pub(super) sequence_weight: f32,
    /// How often each expert was chosen in the whole model, `[B, E]`.
    pub(super) joined: Option<Vec<u32>>,
}

impl Saved {
    /// Returns what each router of the stage chose in the pass.
    #[must_use]
    pub fn routed(&self) -> &[Routed] {
        &self.routed.layers
    }

    /// Sets how often each expert was chosen in all stages together, `[B, E]`: the sum of [`Routed::join`] of
    /// each stage's [`Saved::routed`]. It must be set before the backward pass of a stage that is not the whole
    /// model, if [`ModelSpec::joins_routers`](crate::ModelSpec::joins_routers).
    pub fn join_routed(&mut self, chosen: Vec<u32>) {
        self.routed.joined = Some(chosen);
    }

    /// Like [`Saved::join_routed`], as if the routers of all other stages had chosen nothing: for passes whose
    /// gradients train nothing.
    pub fn join_alone(&mut self) {
        self.routed.joined = Some(Routed::join(&self.routed.layers));
    }
}

impl Stage {
    /// Returns what the routers of the stage add to the loss of a pass: the sum over its sequences. A mean over
    /// the sequences of a step is part of the loss whose gradient is computed. Call it before the backward
    /// pass, and after [`Saved::join_routed`].
    ///
    /// Errors: [`ZooError::StageInput`] if the choices in other stages are needed and not known.
    pub fn router_loss(&self, saved: &mut Saved) -> Result<f64, ZooError> {
        self.join_alone(&mut saved.routed);
        let joined = self.router_pass(&saved.routed)?.joined;
        let mut sum = 0.0;
        for (block, experts) in self.spec.mixtures() {
            let of_block = saved.routed.layers.iter().filter(|routed| routed.block == block);
            sum += of_block.map(|routed| routed.loss_of_sequences(experts, joined)).sum::<f64>();
        }
        Ok(sum)
    }

    /// Joins the choices of a stage that is the whole model, unless that is done.
    pub(super) fn join_alone(&self, saved: &mut RoutedPass) {
        let is_whole = self.layers.blocks.len() == self.spec.layers();
        if is_whole && saved.joined.is_none() && self.spec.joins_routers() {
            saved.joined = Some(Routed::join(&saved.layers));
        }
    }

    /// Returns what gradients of routers depend on, after [`Stage::join_alone`].
    ///
    /// Errors: [`ZooError::StageInput`] if the choices in other stages are not known.
    pub(super) fn router_pass<'a>(&self, saved: &'a RoutedPass) -> Result<RouterPass<'a>, ZooError> {
        if !self.spec.joins_routers() {
            return Ok(RouterPass { sequence_weight: saved.sequence_weight, joined: None });
        }
        let expected = "the choices of the routers of all stages (`Saved::join_routed`)";
        let (layers, joined) = (self.spec.mixtures().count(), saved.joined.as_deref());
        let joined = joined.ok_or(ZooError::StageInput { expected })?;
        let own = saved.layers.first().map_or(joined.len(), |own| own.chosen.len());
        if joined.len() != own {
            return Err(ZooError::StageInput {
                expected: "as many choices of routers as sequences and experts",
            });
        }
        Ok(RouterPass { sequence_weight: saved.sequence_weight, joined: Some((layers, joined)) })
    }
}
