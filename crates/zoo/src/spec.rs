//! Description of a model as data: its layers with their sizes. Tensors, parameters, operations and memory
//! follow from it by making or running the layers.

mod bounds;
mod experts;
mod patterns;
mod resize;

use farflung_base::AttentionPattern;
use farflung_tensor::{Heads, Norm};

use crate::naming::Names;

pub use experts::{BalanceOver, Capacity, ExpertWeights, ExpertsSpec, RouterLosses};
pub use resize::Resize;

/// A decoder-only transformer: token embeddings, blocks, a final norm and a head.
///
/// Fields are public, so that a preset can be varied. [`Stage::new`](crate::Stage::new) and
/// [`weights::write`](crate::weights::write) call [`ModelSpec::validate`] first.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The names of its tensors, and its family.
    pub names: &'static Names,
    /// Number of token ids.
    pub vocab: usize,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Width of the hidden states.
    pub dim: usize,
    /// How the embedding tells the position of a token.
    pub positions: Positions,
    /// The blocks, as runs of equal ones.
    pub blocks: Vec<Run>,
    /// Final norm.
    pub norm: NormSpec,
    /// The matrix that turns hidden states into logits.
    pub head: HeadSpec,
}

/// Equal blocks in sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Run {
    /// Number of blocks.
    pub count: usize,
    /// The block.
    pub block: BlockSpec,
}

/// How the embedding tells the position of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// It adds a row of a table that is trained, one for each position.
    Learned,
    /// It does not: attention rotates queries and keys ([`AttentionSpec::rotary`]).
    None,
}

/// Which matrix is the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadSpec {
    /// The token table.
    Tied,
    /// One of its own.
    Own,
    /// One of its own, with a bias for each token.
    OwnWithBias,
}

/// A pre-norm block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// Its norms.
    pub norm: NormSpec,
    /// How attention and the feed-forward network are added.
    pub residual: Residual,
    /// The attention.
    pub attention: AttentionSpec,
    /// The feed-forward network, or each of the experts.
    pub mlp: MlpSpec,
    /// The mixture of which it is an expert; `None` if it is the only one.
    pub experts: Option<ExpertsSpec>,
}

/// How attention `A` and the feed-forward network `M` are added to the hidden states `x`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residual {
    /// `x + A(norm x)`, then `x + M(norm x)` of the result.
    Sequential,
    /// `x + A(norm x) + M(norm' x)`, with two norms (Black et al. 2022, "GPT-NeoX-20B").
    Parallel,
    /// `x + A(n) + M(n)` with `n = norm x` (Wang and Komatsuzaki 2021, "GPT-J-6B").
    ParallelOneNorm,
}

/// A norm over the last dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// Its kind and constant.
    pub norm: Norm,
    /// Whether it adds a bias.
    pub bias: bool,
}

/// Causal attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Number of heads.
    pub heads: Heads,
    /// Values per head. `heads.query * head_dim` need not be the width of the hidden states.
    pub head_dim: usize,
    /// Whether one matrix makes queries, keys and values, side by side, or three do.
    pub fused: bool,
    /// Rotation of queries and keys by position.
    pub rotary: Option<RotarySpec>,
    /// Which of its matrices have biases.
    pub bias: AttentionBias,
    /// Norm of each head of queries and of keys, before their rotation; without a bias.
    pub head_norm: Option<Norm>,
    /// Which of the tokens up to its own a token attends to.
    pub pattern: AttentionPattern,
}

/// Which matrices of an attention have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionBias {
    /// None.
    None,
    /// Those that make queries, keys and values.
    Inputs,
    /// Those, and the last one.
    All,
}

/// Angles of a rotary position embedding (Su et al. 2021). With `width` values rotated, pair `i` turns by
/// `base^(-2 i / width)` per token, before `scaling`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotarySpec {
    /// Number of values of a head that are rotated, from its first one; even.
    pub width: usize,
    /// Base of the frequencies.
    pub base: f64,
    /// Change of the frequencies for longer texts.
    pub scaling: RotaryScaling,
}

/// Changes of rotary frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RotaryScaling {
    /// None.
    None,
    /// All frequencies divided (Chen et al. 2023, "position interpolation").
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// LLaMA 3.1: low frequencies divided, high ones as they are, those between interpolated.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Turns within `original_context` up to which a frequency is low.
        low_turns: f64,
        /// Turns within `original_context` from which on a frequency is high.
        high_turns: f64,
        /// Context of the training before.
        original_context: usize,
    },
    /// As without scaling up to a number of tokens. Longer texts change the base as they grow ("dynamic NTK"):
    /// they are refused, since the angles of keys in a cache would be others.
    Dynamic {
        /// Factor of the base of longer texts.
        factor: f64,
        /// Most tokens without a change.
        original_context: usize,
    },
    /// High frequencies as they are, low ones divided, those between interpolated; cosines and sines are
    /// multiplied (Peng et al. 2023, "`YaRN`").
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Turns within `original_context` from which on a frequency is high.
        fast_turns: f64,
        /// Turns within `original_context` up to which a frequency is low.
        slow_turns: f64,
        /// Context of the training before.
        original_context: usize,
        /// Factor of cosines and sines.
        amplitude: f64,
        /// Whether the first and the last interpolated pair are rounded outwards to whole ones.
        rounds: bool,
    },
}

/// A feed-forward network: `down(act(up x))`, or `down(act(gate x) * up x)` if it is gated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlpSpec {
    /// Inner width.
    pub width: usize,
    /// Activation.
    pub activation: Activation,
    /// Whether there is a gate.
    pub gated: bool,
    /// Whether its matrices have biases.
    pub bias: bool,
}

/// Activations of feed-forward networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// GELU; without a gate, and with biases.
    Gelu,
    /// GELU in its tanh form; without a gate, and with biases.
    GeluTanh,
    /// SiLU; with a gate, which makes it SwiGLU (Shazeer 2020).
    Silu,
    /// `ReLU`; of experts, without a gate and without biases.
    Relu,
}

impl ModelSpec {
    /// Returns the number of blocks.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.blocks.iter().map(|run| run.count).sum()
    }

    /// Returns the bytes of the hidden states of some sequences of `context` tokens, in f32.
    #[must_use]
    pub fn hidden_bytes(&self, sequences: u64) -> u64 {
        let values = (self.context as u64).saturating_mul(self.dim as u64);
        sequences.saturating_mul(values).saturating_mul(size_of::<f32>() as u64)
    }

    /// Returns the bytes of the token table that the first and the last stage of a pipeline both have, in f32;
    /// 0 if the head has a matrix of its own.
    #[must_use]
    pub fn shared_table_bytes(&self) -> u64 {
        match self.head {
            HeadSpec::Tied => size_of::<f32>() as u64 * self.vocab as u64 * self.dim as u64,
            HeadSpec::Own | HeadSpec::OwnWithBias => 0,
        }
    }

    /// Returns the mixtures of experts, in order, each with the number of its block.
    pub fn mixtures(&self) -> impl Iterator<Item = (usize, &ExpertsSpec)> {
        self.each_block().enumerate().filter_map(|(at, block)| Some((at, block.experts.as_ref()?)))
    }

    /// Returns whether gradients of a router depend on the choices in other layers
    /// ([`RouterLosses::joins_layers`]).
    #[must_use]
    pub fn joins_routers(&self) -> bool {
        self.mixtures().any(|(_, experts)| experts.losses.joins_layers())
    }

    /// Returns whether what a router does with a token depends on other tokens of the sequence.
    #[must_use]
    pub fn routes_by_sequence(&self) -> bool {
        let depends = |experts: &ExpertsSpec| {
            experts.capacity != Capacity::None
                || experts.losses.balance != 0.0
                || experts.losses.joins_layers()
        };
        self.mixtures().any(|(_, experts)| depends(experts))
    }

    /// Returns the model with other losses of its routers, in all blocks that have one.
    #[must_use]
    pub fn with_router_losses(mut self, losses: RouterLosses) -> Self {
        let experts = self.blocks.iter_mut().filter_map(|run| run.block.experts.as_mut());
        experts.for_each(|experts| experts.losses = losses);
        self
    }

    /// Returns the blocks in order.
    pub fn each_block(&self) -> impl Iterator<Item = &BlockSpec> + Clone {
        self.blocks.iter().flat_map(|run| std::iter::repeat_n(&run.block, run.count))
    }
}
