//! A pre-norm transformer block: `x + attention(norm x)`, then `x + mlp(norm x)`.

use std::ops::Range;

use farflung_tensor::Tensor;

use super::builder::Builder;
use super::{Activations, Attention, Before, Grads, Keep, Kept, Later, Mlp, NormLayer, Result, StageContext};
use crate::naming::Slot;
use crate::spec::BlockSpec;

/// A block.
#[derive(Debug, Clone)]
pub struct Block {
    attention_norm: NormLayer,
    attention: Attention,
    mlp_norm: NormLayer,
    mlp: Mlp,
}

impl Block {
    pub(super) fn new(builder: &mut Builder, dim: usize, spec: &BlockSpec) -> Result<Self> {
        Ok(Self {
            attention_norm: NormLayer::new(builder, Slot::AttentionNorm, dim, &spec.norm),
            attention: Attention::new(builder, dim, &spec.attention)?,
            mlp_norm: NormLayer::new(builder, Slot::MlpNorm, dim, &spec.norm),
            mlp: Mlp::new(builder, dim, &spec.mlp),
        })
    }

    /// Returns the indices of the block's parameters in the layout.
    pub(crate) const fn params(&self) -> Range<usize> {
        self.attention_norm.params().0..self.mlp.end()
    }

    /// Returns the width of a token's keys, and of its values.
    pub(crate) const fn cached_width(&self) -> usize {
        self.attention.cached_width()
    }

    /// Runs the forward pass, from `[B, T, C]` to `[B, T, C]`.
    pub fn forward(
        &self,
        cx: &StageContext<'_>,
        x: Tensor,
        mut before: Before<'_>,
        keep: Keep,
    ) -> Result<(Tensor, Activations)> {
        let mut saved = Activations::new(keep);
        let (normed, stats) = self.attention_norm.forward(cx, &x)?;
        saved.put(Kept::AttentionStats, stats);
        let middle = self.attention.forward(cx, &normed, &x, &mut before, &mut saved)?;
        saved.put(Kept::AttentionNormed, normed);
        saved.put(Kept::Input, x);

        let (normed, stats) = self.mlp_norm.forward(cx, &middle)?;
        saved.put(Kept::MlpStats, stats);
        let y = self.mlp.forward(cx, &normed, &middle, &mut saved)?;
        saved.put(Kept::MlpNormed, normed);
        saved.put(Kept::Middle, middle);
        Ok((y, saved))
    }

    /// Returns the gradient of the input, given that of the output. `saved` keeps what the weight gradients
    /// need.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        saved: &mut Activations,
        dy: Tensor,
        mut later: Later<'_>,
    ) -> Result<Tensor> {
        let d_normed = self.mlp.backward_input(cx, saved, &dy)?;
        let (x, stats) = (saved.get(Kept::Middle), saved.get(Kept::MlpStats));
        let d_middle = self.mlp_norm.backward_input(cx, x, stats, &d_normed, Some(&dy))?;
        saved.put(Kept::OutputGrad, dy);
        saved.put(Kept::MlpNormedGrad, d_normed);

        let d_normed = self.attention.backward_input(cx, saved, &mut later, &d_middle)?;
        let (x, stats) = (saved.get(Kept::Input), saved.get(Kept::AttentionStats));
        let dx = self.attention_norm.backward_input(cx, x, stats, &d_normed, Some(&d_middle))?;
        saved.put(Kept::MiddleGrad, d_middle);
        saved.put(Kept::AttentionNormedGrad, d_normed);
        Ok(dx)
    }

    /// Computes the weight gradients.
    ///
    /// # Panics
    /// If [`Block::backward_input`] was not called before.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        saved: &Activations,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let get = |name| saved.get(name);
        self.mlp.backward_weight(cx, saved, get(Kept::MlpNormed), get(Kept::OutputGrad), grads)?;
        let (x, dy) = (get(Kept::AttentionNormed), get(Kept::MiddleGrad));
        self.attention.backward_weight(cx, saved, x, dy, grads)?;
        for (norm, x, stats, dy) in [
            (&self.mlp_norm, Kept::Middle, Kept::MlpStats, Kept::MlpNormedGrad),
            (&self.attention_norm, Kept::Input, Kept::AttentionStats, Kept::AttentionNormedGrad),
        ] {
            norm.backward_weight(cx, get(x), get(stats), get(dy), grads)?;
        }
        Ok(())
    }
}
