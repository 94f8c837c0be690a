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
mod dispatch;
mod embedding;
mod experts;
mod feed_forward;
mod head;
mod linear;
mod mlp;
mod norm;
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
pub use embedding::Embedding;
pub use experts::Experts;
pub use head::{Head, HeadSaved, Targets};
pub use linear::{Linear, Then};
pub use mlp::Mlp;
pub use norm::NormLayer;
pub use rotary::table as rotary_table;
pub use routing::{Routed, RouterLossValues, RouterPass};
pub use sequence::SequencePieces;

use farflung_base::Axis;
use farflung_tensor::{DType, Device, ParamLayout, Shape, Tensor, TensorError};

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
    /// The stage's parameters.
    pub params: &'a Tensor,
    /// The exchange with the ranks that have the other pieces of the layers.
    pub exchange: &'a dyn Exchange,
    /// Factor of gradients before a matrix product rounds them; the product is divided by it. A power of two.
    pub gradient_scale: f32,
    /// What gradients of routers depend on beyond their layers.
    pub router: RouterPass<'a>,
    /// Where the documents of the pass's tokens begin and prefixes end.
    pub borders: &'a Borders,
    /// The positions of this rank in hidden states, if ranks divide sequences. Gradients of whole tensors are
    /// then parts of a sum over the ranks.
    pub sequence: Option<&'a SequencePieces>,
}

impl StageContext<'_> {
    /// Creates a tensor with unspecified contents, to be overwritten completely.
    pub(crate) fn empty(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        Ok(self.device.empty(DType::F32, shape)?)
    }

    /// Replaces partial sums by the sum over the ranks that divide a layer's width.
    pub(crate) fn sum(&self, partial: &mut Tensor) -> Result<()> {
        self.exchange.all_reduce(Axis::Tensor, partial)
    }
}

/// The gradients of a stage.
#[derive(Debug)]
pub struct Grads<'a> {
    /// A flat buffer of the stage's layout.
    pub flat: &'a mut Tensor,
    /// Whether to add to the gradients instead of overwriting them.
    pub accumulate: bool,
}

/// Returns the three dimensions of hidden states.
pub(crate) fn dims(x: &Tensor) -> Result<[usize; 3]> {
    let rhs = Shape::from([0, 0, 0]);
    let mismatch = |_| TensorError::ShapeMismatch { op: "hidden states [B, T, C]", lhs: x.shape(), rhs };
    Ok(x.shape().dims().try_into().map_err(mismatch)?)
}
