//! The layers of a model: a closed set, a file each. A layer has its forward pass, the gradient of its input
//! and the gradient of its weights, written out; there is no automatic differentiation. The two gradients are
//! separate, so that a pipeline can communicate between them, or run them at different times.
//!
//! A layer registers its tensors with a [`Builder`] when it is made. What it keeps for the backward pass, it
//! puts into the named set [`Activations`]. One forward pass serves training, evaluation and decoding: [`Keep`]
//! says whether anything is kept, and [`Before`] which tokens are already in a cache.
//!
//! Ranks can divide the width of layers (Shoeybi et al. 2019, "Megatron-LM"): heads, inner columns and the
//! vocabulary are cut; norms, the table of positions and hidden states are whole. A layer says how its tensors
//! are cut ([`Cut`](crate::Cut)), and communicates through the [`Exchange`] of its context alone.
//!
//! Shapes: `B` sequences of `T` tokens, width `C`, vocabulary `V`. Hidden states are `[B, T, C]`.

mod activations;
mod attention;
mod block;
mod borders;
mod builder;
mod context;
mod dispatch;
mod embedding;
mod experts;
mod feed_forward;
mod grads;
mod head;
mod linear;
mod mlp;
mod norm;
mod params;
mod rotary;
mod routing;
mod sequence;
mod vocabulary;

pub use activations::{Activations, Keep, Kept};
pub use attention::{Attention, Before, KeyValues, Later};
pub use block::Block;
pub use borders::Borders;
pub(crate) use builder::Layers;
pub use builder::{Builder, LayerKind};
pub use context::{ContextBorders, ContextPieces};
pub use embedding::Embedding;
pub use experts::Experts;
pub use grads::{Grads, UnitGrads};
pub use head::{Head, HeadSaved, Targets};
pub use linear::{Linear, Then};
pub use mlp::Mlp;
pub use norm::NormLayer;
pub use params::{LayerParams, LayerUnits, Params, UnitParams, UnitValues};
pub use rotary::table as rotary_table;
pub use routing::{Routed, RouterLossValues, RouterPass};
pub use sequence::SequencePieces;

use farflung_base::Axis;
use farflung_tensor::{
    DType, Device, Heads, Op, ParamLayout, ProgramBuilder, Rotary, Shape, Tensor, TensorError, TokenPositions,
};

use crate::ZooError;
use crate::exchange::Exchange;

pub(crate) type Result<T> = std::result::Result<T, ZooError>;

/// Context that every layer of a stage needs.
#[derive(Debug, Clone, Copy)]
pub struct StageContext<'a> {
    /// Device on which the stage runs.
    pub device: &'a Device,
    /// Layout of the parameters in the stage's flat buffers.
    pub layout: &'a ParamLayout,
    /// The parameters of the layer, or those of the stage.
    pub params: LayerParams<'a>,
    /// The exchange with the ranks that have the other pieces of the layers.
    pub exchange: &'a dyn Exchange,
    /// Factor of gradients before a matrix product rounds them; the product is divided by it. A power of two.
    pub gradient_scale: f32,
    /// What gradients of routers depend on beyond their layers.
    pub router: RouterPass<'a>,
    /// Where the documents of the pass's tokens begin and prefixes end.
    pub borders: &'a Borders,
    /// The positions of this rank in hidden states, if ranks divide sequences where layers are whole. Gradients
    /// of whole tensors are then parts of a sum over the ranks.
    pub sequence: Option<&'a SequencePieces>,
    /// The positions of this rank in all layers, if ranks divide sequences. Tokens and targets are those of
    /// these positions, and gradients of all tensors are parts of a sum over the ranks.
    pub context: Option<&'a ContextPieces>,
}

impl StageContext<'_> {
    /// Creates a tensor with unspecified contents, to be overwritten completely.
    pub(crate) fn empty(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        Ok(self.device.empty(DType::F32, shape)?)
    }

    /// Returns the positions of the pass's tokens, the first of which is at position `start` of its sequence.
    pub(crate) fn positions(&self, start: usize) -> TokenPositions<'_> {
        match (self.context, &self.borders.context) {
            (Some(_), Some(borders)) => TokenPositions::At(borders.positions.view()),
            _ => TokenPositions::From { start, documents: self.borders.documents() },
        }
    }

    /// Adds `x` to `y`.
    pub(crate) fn add(&self, y: &mut Tensor, x: &Tensor) -> Result<()> {
        let mut p = ProgramBuilder::new();
        let (own, more) = (p.load(0), p.read(0));
        let sum = p.add(own, more);
        p.store(0, sum);
        let program = p.build()?;
        let (reads, writes) = (&[x.view()], &mut [y.view_mut()]);
        Ok(self.device.run(Op::Map { program: &program, scalars: &[], reads, writes })?)
    }

    /// Puts queries, keys and values `[B, T, heads D]` side by side, and rotates queries and keys.
    pub(crate) fn join_heads(
        &self,
        [q, k, v]: &[Tensor; 3],
        (heads, head_dim): (Heads, usize),
        rotary: Option<Rotary<'_>>,
    ) -> Result<Tensor> {
        let [b, t, _] = dims(q)?;
        let mut qkv = self.empty([b, t, heads.width() * head_dim])?;
        let (q, k, v) = (q.view(), k.view(), v.view());
        self.device.run(Op::JoinHeads { heads, rotary, q, k, v, qkv: qkv.view_mut() })?;
        Ok(qkv)
    }

    /// Takes queries, keys and values apart, and undoes the rotation.
    pub(crate) fn split_heads(
        &self,
        qkv: &Tensor,
        (heads, head_dim): (Heads, usize),
        rotary: Option<Rotary<'_>>,
    ) -> Result<[Tensor; 3]> {
        let [b, t, _] = dims(qkv)?;
        let empty = |heads: usize| self.empty([b, t, heads * head_dim]);
        let [mut q, mut k, mut v] = [empty(heads.query)?, empty(heads.kv)?, empty(heads.kv)?];
        let (dq, dk, dv) = (q.view_mut(), k.view_mut(), v.view_mut());
        self.device.run(Op::SplitHeads { heads, rotary, d_qkv: qkv.view(), dq, dk, dv })?;
        Ok([q, k, v])
    }

    /// Replaces partial sums by the sum over the ranks that divide a layer's width.
    pub(crate) fn sum(&self, partial: &mut Tensor) -> Result<()> {
        self.exchange.all_reduce(Axis::Tensor, partial)
    }
}

/// Returns the three dimensions of hidden states.
pub(crate) fn dims(x: &Tensor) -> Result<[usize; 3]> {
    let rhs = Shape::from([0, 0, 0]);
    let mismatch = |_| TensorError::ShapeMismatch { op: "hidden states [B, T, C]", lhs: x.shape(), rhs };
    Ok(x.shape().dims().try_into().map_err(mismatch)?)
}
