//! The first block: token and position embeddings.

use farflung_tensor::{Op, Result, Tensor};

use super::{Cx, Grads};

/// `wte[token] + wpe[position]`; its two tables start at `first` in the layout.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    /// Place of `wte.weight` in the layout; `wpe.weight` follows.
    pub first: usize,
    /// Width of a hidden state.
    pub dim: usize,
}

impl Embedding {
    /// Hidden states `[B, T, C]` of tokens `[B, T]` (u32), the first of each row at position `start`.
    pub fn forward(&self, cx: &Cx<'_>, tokens: &Tensor, start: usize) -> Result<Tensor> {
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

    /// The gradients of both tables, for the `start` of the forward pass. A head that shares the token table
    /// (`tied_head_wrote`) wrote its part before; this adds to it.
    pub fn backward(
        &self,
        cx: &Cx<'_>,
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
