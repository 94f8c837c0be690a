//! A pre-norm transformer block: `x + attention(norm x)`, then `x + mlp(norm x)`; or both of the same `x`.

use std::ops::Range;

use farflung_tensor::Tensor;

use super::builder::Builder;
use super::feed_forward::FeedForward;
use super::sequence::Whole;
use super::{
    Activations, Attention, Before, Grads, Keep, Kept, Later, NormLayer, Result, StageContext, Then,
};
use crate::naming::Slot;
use crate::spec::{BlockSpec, Residual};

/// A block.
#[derive(Debug, Clone)]
pub struct Block {
    attention_norm: NormLayer,
    attention: Attention,
    /// `None` if the feed-forward network takes the other norm's output.
    mlp_norm: Option<NormLayer>,
    mlp: FeedForward,
    residual: Residual,
}

impl Block {
    pub(super) fn new(builder: &mut Builder, dim: usize, spec: &BlockSpec) -> Result<Self> {
        Ok(Self {
            attention_norm: NormLayer::new(builder, Slot::AttentionNorm, dim, &spec.norm),
            attention: Attention::new(builder, dim, &spec.attention)?,
            mlp_norm: (spec.residual != Residual::ParallelOneNorm)
                .then(|| NormLayer::new(builder, Slot::MlpNorm, dim, &spec.norm)),
            mlp: FeedForward::new(builder, dim, spec),
            residual: spec.residual,
        })
    }

    /// Returns the indices of the block's parameters in the layout.
    pub(crate) fn params(&self) -> Range<usize> {
        self.attention_norm.params().0..self.mlp.end()
    }

    /// Returns the width of a token's keys, and of its values.
    pub(crate) const fn cached_width(&self) -> usize {
        self.attention.cached_width()
    }

    fn is_sequential(&self) -> bool {
        self.residual == Residual::Sequential
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
        let whole = cx.whole(&normed)?;
        let beside = cx.before_sum(&x);
        let mut middle = self.attention.forward_part(cx, &whole, beside, &mut before, &mut saved)?;
        let y = match &self.mlp_norm {
            Some(norm) if self.is_sequential() => {
                drop(whole);
                saved.put(Kept::AttentionNormed, normed);
                middle = cx.reduced(middle)?;
                cx.after_sum(&mut middle, &x)?;
                saved.put(Kept::Input, x);
                let y = self.mlp_of_normed(cx, (norm, &middle), Then::Add(&middle), &mut saved)?;
                saved.put(Kept::Middle, middle);
                y
            }
            Some(norm) => {
                drop(whole);
                saved.put(Kept::AttentionNormed, normed);
                // What ranks have parts of is summed once, with the other network's.
                let mut y = self.mlp_of_normed(cx, (norm, &x), Then::AddPart(&middle), &mut saved)?;
                cx.after_sum(&mut y, &x)?;
                saved.put(Kept::Input, x);
                y
            }
            None => {
                let mut y = self.mlp.forward(cx, &whole, Then::AddPart(&middle), &mut saved)?;
                cx.after_sum(&mut y, &x)?;
                drop(whole);
                saved.put(Kept::AttentionNormed, normed);
                saved.put(Kept::Input, x);
                y
            }
        };
        Ok((y, saved))
    }

    /// Returns the output of the feed-forward network for the norm of `x`, and `then` what is added to it.
    fn mlp_of_normed(
        &self,
        cx: &StageContext<'_>,
        (norm, x): (&NormLayer, &Tensor),
        then: Then<'_>,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        let (normed, stats) = norm.forward(cx, x)?;
        saved.put(Kept::MlpStats, stats);
        let y = self.mlp.forward(cx, &*cx.whole(&normed)?, then, saved)?;
        saved.put(Kept::MlpNormed, normed);
        Ok(y)
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
        let whole = cx.whole(&dy)?;
        let d_normed = self.mlp.backward_input(cx, saved, &whole)?;
        let Some(norm) = &self.mlp_norm else {
            // The two gradients of the norm's output are added up before the norm, also over ranks.
            let d_normed = self.attention.backward_input(cx, saved, &mut later, &whole, Some(d_normed))?;
            let dx = self.through_attention_norm(cx, saved, d_normed, &dy)?;
            let whole = whole.gathered();
            saved.put(Kept::OutputGrad, whole.unwrap_or(dy));
            return Ok(dx);
        };
        let d_normed = cx.reduced(d_normed)?;
        let (x, stats) = (saved.get(self.mlp_norm_input()), saved.get(Kept::MlpStats));
        let d_middle = norm.backward_input(cx, x, stats, &d_normed, Some(&dy))?;
        saved.put(Kept::MlpNormedGrad, d_normed);
        let of_middle = if self.is_sequential() { Some(cx.whole(&d_middle)?) } else { None };
        let d_attention = of_middle.as_ref().unwrap_or(&whole);
        let d_normed = self.attention.backward_input(cx, saved, &mut later, d_attention, None)?;
        let dx = self.through_attention_norm(cx, saved, d_normed, &d_middle)?;
        // The gradients of the weights need those of all positions.
        let (whole, of_middle) = (whole.gathered(), of_middle.and_then(Whole::gathered));
        saved.put(Kept::OutputGrad, whole.unwrap_or(dy));
        if self.is_sequential() {
            saved.put(Kept::MiddleGrad, of_middle.unwrap_or(d_middle));
        }
        Ok(dx)
    }

    fn through_attention_norm(
        &self,
        cx: &StageContext<'_>,
        saved: &mut Activations,
        d_normed: Tensor,
        beside: &Tensor,
    ) -> Result<Tensor> {
        let (x, stats) = (saved.get(Kept::Input), saved.get(Kept::AttentionStats));
        let dx = self.attention_norm.backward_input(cx, x, stats, &d_normed, Some(beside))?;
        saved.put(Kept::AttentionNormedGrad, d_normed);
        Ok(dx)
    }

    /// Returns what the norm before the feed-forward network takes.
    fn mlp_norm_input(&self) -> Kept {
        if self.is_sequential() { Kept::Middle } else { Kept::Input }
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
        let mlp_input = if self.mlp_norm.is_some() { Kept::MlpNormed } else { Kept::AttentionNormed };
        self.mlp.backward_weight(cx, saved, &*cx.whole(get(mlp_input))?, get(Kept::OutputGrad), grads)?;
        let d_attention = if self.is_sequential() { Kept::MiddleGrad } else { Kept::OutputGrad };
        let x = cx.whole(get(Kept::AttentionNormed))?;
        self.attention.backward_weight(cx, saved, &x, get(d_attention), grads)?;
        drop(x);
        if let Some(norm) = &self.mlp_norm {
            let (x, stats) = (get(self.mlp_norm_input()), get(Kept::MlpStats));
            norm.backward_weight(cx, x, stats, get(Kept::MlpNormedGrad), grads)?;
        }
        let (x, stats) = (get(Kept::Input), get(Kept::AttentionStats));
        self.attention_norm.backward_weight(cx, x, stats, get(Kept::AttentionNormedGrad), grads)
    }
}
