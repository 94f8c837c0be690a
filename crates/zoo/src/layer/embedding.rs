//! The first layer: token embeddings, and position embeddings if the model has a table of them.

use farflung_base::Axis;
use farflung_tensor::{Op, Tensor};

use super::builder::Builder;
use super::{Grads, Result, StageContext};
use crate::naming::Slot;
use crate::spec::{ModelSpec, Positions};
use crate::tensor_spec::TensorKind;

/// Embedding: `tokens[token]`, or `tokens[token] + positions[position]`.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    /// Index of the token table in the layout.
    table: usize,
    /// Index of the position table.
    positions: Option<usize>,
    dim: usize,
    /// The id of the first row of the token table, if ranks divide it.
    first: Option<u32>,
}

impl Embedding {
    /// Adds the token table, which a tied head uses too, and returns its index.
    pub(super) fn table(builder: &mut Builder, spec: &ModelSpec) -> usize {
        builder.vocabulary_tensor(Slot::TokenTable, TensorKind::Table, &[spec.vocab, spec.dim])
    }

    pub(super) fn new(builder: &mut Builder, spec: &ModelSpec, table: usize) -> Self {
        let has_positions = spec.positions == Positions::Learned;
        let shape = [spec.context, spec.dim];
        let positions = has_positions.then(|| builder.tensor(Slot::PositionTable, TensorKind::Table, &shape));
        let first = builder.piece_of_vocabulary(spec.vocab).map(|piece| piece.first);
        Self { table, positions, dim: spec.dim, first }
    }

    /// Returns the index of the first parameter, and their number.
    pub(crate) const fn params(&self) -> (usize, usize) {
        (self.table, 1 + self.positions.is_some() as usize)
    }

    /// Returns hidden states `[B, T, C]` of tokens `[B, T]` (u32). The first token of each row is at position
    /// `start`.
    pub fn forward(&self, cx: &StageContext<'_>, tokens: &Tensor, start: usize) -> Result<Tensor> {
        let (b, t) = (tokens.shape().rows(), tokens.shape().cols());
        let mut y = cx.empty([b, t, self.dim])?;
        // If ranks divide the table, one has the row of each token, and one adds the positions.
        let adds = self.first.is_none() || cx.exchange.rank(Axis::Tensor) == 0;
        let positions = self.positions.filter(|_| adds);
        cx.device.run(Op::Embed {
            tokens: tokens.view(),
            first: self.first,
            positions: cx.positions(start),
            tokens_table: cx.param(self.table)?,
            positions_table: positions.map(|at| cx.param(at)).transpose()?,
            y: y.view_mut(),
        })?;
        if self.first.is_some() { cx.reduced(y) } else { Ok(y) }
    }

    /// Computes the gradients of the tables, with the `start` of the forward pass. If a tied head, which uses
    /// the same token table, has already written its gradient (`tied_head_wrote`), the embedding's gradient is
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
        let dy = cx.whole(dy)?;
        let (adds, accumulate) = (cx.has_gradient_of_whole(), grads.accumulate());
        let (mut table, mut positions) = if self.positions.is_some() {
            let [table, positions] = grads.of(cx.layout, self.table)?;
            (table, Some(positions))
        } else {
            let [table] = grads.of(cx.layout, self.table)?;
            (table, None)
        };
        if !accumulate {
            if !tied_head_wrote {
                cx.device.run(Op::Fill { value: 0.0, y: table.reborrow() })?;
            }
            if let Some(positions) = &mut positions {
                cx.device.run(Op::Fill { value: 0.0, y: positions.reborrow() })?;
            }
        }
        cx.device.run(Op::EmbedGrad {
            tokens: tokens.view(),
            first: self.first,
            positions: cx.positions(start),
            dy: dy.view(),
            d_tokens_table: table,
            d_positions_table: positions.filter(|_| adds),
        })?;
        Ok(())
    }
}
