//! The first block: token and position embeddings.

use farflung_tensor::{Op, Result, Tensor};

use super::{Grads, StageContext};

/// Embedding: `wte[token] + wpe[position]`.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    /// Index of `wte.weight` in the layout; `wpe.weight` follows.
    pub first: usize,
    /// Width of a hidden state.
    pub dim: usize,
}

impl Embedding {
    /// Returns hidden states `[B, T, C]` of tokens `[B, T]` (u32). The first token of each row is at position
    /// `start`.
    pub fn forward(&self, cx: &StageContext<'_>, tokens: &Tensor, start: usize) -> Result<Tensor> {
        let [wte, wpe] = cx.layout.views(cx.params, self.first)?;
        let (b, t) = (tokens.shape().rows(), tokens.shape().cols());
        let mut y = cx.empty([b, t, self.dim])?;
        cx.device.run(Op::Embed {
            tokens: tokens.view(),
            start,
            tokens_table: wte,
            positions_table: wpe,
            y: y.view_mut(),
        })?;
        Ok(y)
    }

    /// Computes the gradients of both tables, with the `start` of the forward pass. If the head, which uses the
    /// same token table, has already written its gradient (`tied_head_wrote`), the embedding's gradient is
    /// added to it.
    pub fn backward(
        &self,
        cx: &StageContext<'_>,
        tokens: &Tensor,
        start: usize,
        dy: &Tensor,
        grads: &mut Grads<'_>,
        tied_head_wrote: bool,
    ) -> Result<()> {
        let [mut wte, mut wpe] = cx.layout.views_mut(grads.flat, self.first)?;
        if !grads.accumulate {
            if !tied_head_wrote {
                cx.device.run(Op::Fill { value: 0.0, y: wte.reborrow() })?;
            }
            cx.device.run(Op::Fill { value: 0.0, y: wpe.reborrow() })?;
        }
        cx.device.run(Op::EmbedGrad {
            tokens: tokens.view(),
            dy: dy.view(),
            d_tokens_table: wte,
            d_positions_table: wpe.part(start * self.dim, [tokens.shape().cols(), self.dim])?,
        })
    }
}
