//! The closed set of ops. A backend is a `match` over this enum; a cost model asks it for FLOPs and bytes.
//!
//! Matrices are row-major. `N` is a count of tokens (batch times length), `C` the model's width.

use crate::{Program, Shape, View, ViewMut};

/// What a matrix product does with each finished element before it leaves the cache.
#[derive(Debug)]
pub enum Fuse<'a> {
    /// Nothing.
    None,
    /// `c += bias`, one value per column.
    Bias(View<'a>),
    /// `x = c + bias; c = gelu(x)`, the tanh form. The backward pass multiplies by `slope = gelu'(x)`
    /// ([`Fuse::Times`]), which costs little here and takes the place of `x` in memory.
    BiasGelu {
        /// One value per column.
        bias: View<'a>,
        /// Of `c`'s shape; not wanted where no backward pass follows.
        slope: Option<ViewMut<'a>>,
    },
    /// `c += bias + residual`.
    BiasAdd {
        /// One value per column.
        bias: View<'a>,
        /// Of `c`'s shape.
        residual: View<'a>,
    },
    /// `c *= factor`.
    Times {
        /// Of `c`'s shape.
        factor: View<'a>,
    },
}

/// One operation. Outputs are exclusive views, so that no op can read what it writes unless its doc says so.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "an op lives for one call")]
pub enum Op<'a> {
    /// `y = value`.
    Fill {
        /// The value.
        value: f32,
        /// f32, any shape.
        y: ViewMut<'a>,
    },
    /// `y = x` with a change of element type: f32 to and from f16 and bf16 (round to nearest, ties to even), or
    /// a copy.
    Cast {
        /// Any shape.
        x: View<'a>,
        /// As many elements.
        y: ViewMut<'a>,
    },
    /// `c = a b`, or `c += a b`, and then `fuse`. `a` is `[m, k]`, `b` is `[k, n]`, `c` is `[m, n]`.
    MatMul {
        /// `[m, k]`, or `[k, m]` when transposed.
        a: View<'a>,
        /// Reads `a` transposed.
        a_t: bool,
        /// `[k, n]`, or `[n, k]` when transposed.
        b: View<'a>,
        /// Reads `b` transposed.
        b_t: bool,
        /// `[m, n]`.
        c: ViewMut<'a>,
        /// Adds to `c` rather than overwriting it.
        accumulate: bool,
        /// What `a` and `b` are multiplied with before they are rounded to the device's precision, and the
        /// product divided by: powers of two, which change nothing else. In f16, a gradient is too small
        /// without one.
        scales: [f32; 2],
        /// What follows.
        fuse: Fuse<'a>,
    },
    /// `y[j] = sum over rows of x[., j]`, or added to `y`: the gradient of a bias.
    SumRows {
        /// `[N, C]`.
        x: View<'a>,
        /// `[C]`.
        y: ViewMut<'a>,
        /// Adds to `y` rather than overwriting it.
        accumulate: bool,
    },
    /// Layer norm over the last dimension, eps 1e-5 (Ba et al. 2016).
    LayerNorm {
        /// `[N, C]`.
        x: View<'a>,
        /// `[C]`.
        gain: View<'a>,
        /// `[C]`.
        bias: View<'a>,
        /// `[N, C]`.
        y: ViewMut<'a>,
        /// `[N, 2]`: mean and reciprocal standard deviation of each row, kept for the backward pass.
        stats: ViewMut<'a>,
    },
    /// Input gradient of layer norm, added to what flows past it: `dx = residual + d(norm)/dx dy`.
    LayerNormInput {
        /// `[N, C]`.
        x: View<'a>,
        /// `[C]`.
        gain: View<'a>,
        /// `[N, 2]`.
        stats: View<'a>,
        /// `[N, C]`.
        dy: View<'a>,
        /// `[N, C]`, or nothing to add.
        residual: Option<View<'a>>,
        /// `[N, C]`.
        dx: ViewMut<'a>,
    },
    /// Weight gradients of layer norm.
    LayerNormWeight {
        /// `[N, C]`.
        x: View<'a>,
        /// `[N, 2]`.
        stats: View<'a>,
        /// `[N, C]`.
        dy: View<'a>,
        /// `[C]`.
        d_gain: ViewMut<'a>,
        /// `[C]`.
        d_bias: ViewMut<'a>,
        /// Adds to the gradients rather than overwriting them.
        accumulate: bool,
    },
    /// Causal attention of all heads, tiled, without the matrix of scores (Dao 2022).
    Attention {
        /// Number of heads.
        heads: usize,
        /// `[B, T, 3 C]`: queries, keys and values side by side.
        qkv: View<'a>,
        /// `[B, T, C]`.
        y: ViewMut<'a>,
        /// `[B, heads, T]`: log of the sum of exponentials of each row of scores, kept for the backward pass.
        lse: ViewMut<'a>,
    },
    /// Gradient of [`Op::Attention`].
    AttentionGrad {
        /// Number of heads.
        heads: usize,
        /// `[B, T, 3 C]`.
        qkv: View<'a>,
        /// `[B, T, C]`.
        y: View<'a>,
        /// `[B, heads, T]`.
        lse: View<'a>,
        /// `[B, T, C]`.
        dy: View<'a>,
        /// `[B, T, 3 C]`.
        d_qkv: ViewMut<'a>,
    },
    /// Causal attention of new tokens over a cache of keys and values: the new ones are appended at `past`,
    /// then the new queries attend to all.
    AttentionCached {
        /// Number of heads.
        heads: usize,
        /// Tokens in the cache before these.
        past: usize,
        /// `[B, T, 3 C]` of the new tokens.
        qkv: View<'a>,
        /// `[B, capacity, C]`.
        keys: ViewMut<'a>,
        /// `[B, capacity, C]`.
        values: ViewMut<'a>,
        /// `[B, T, C]`.
        y: ViewMut<'a>,
        /// As in [`Op::Attention`]; not wanted where no backward pass follows.
        lse: Option<ViewMut<'a>>,
    },
    /// Gradient of [`Op::AttentionCached`], the newest tokens first: adds what the queries give to the
    /// gradients of all keys and values that they saw. Those of the new tokens are complete with that, and go
    /// to `d_qkv` too.
    AttentionCachedGrad {
        /// Number of heads.
        heads: usize,
        /// Tokens in the cache before these.
        past: usize,
        /// `[B, T, 3 C]` of the new tokens.
        qkv: View<'a>,
        /// `[B, capacity, C]`.
        keys: View<'a>,
        /// `[B, capacity, C]`.
        values: View<'a>,
        /// `[B, T, C]`.
        y: View<'a>,
        /// `[B, heads, T]`.
        lse: View<'a>,
        /// `[B, T, C]`.
        dy: View<'a>,
        /// `[B, T, 3 C]`.
        d_qkv: ViewMut<'a>,
        /// `[B, capacity, C]`: sums over the tokens behind these, and these after it.
        d_keys: ViewMut<'a>,
        /// `[B, capacity, C]`, likewise.
        d_values: ViewMut<'a>,
    },
    /// `y[i] = tokens_table[tokens[i]] + positions_table[start + i mod T]`.
    Embed {
        /// u32 `[B, T]`.
        tokens: View<'a>,
        /// Position of each row's first token.
        start: usize,
        /// `[V, C]`.
        tokens_table: View<'a>,
        /// `[positions, C]`.
        positions_table: View<'a>,
        /// `[B, T, C]`.
        y: ViewMut<'a>,
    },
    /// Gradient of [`Op::Embed`] for `start` 0, added to both tables; rows are summed in token order on every
    /// device. For another start, `d_positions_table` is the part of the table from there on.
    EmbedGrad {
        /// u32 `[B, T]`.
        tokens: View<'a>,
        /// `[B, T, C]`.
        dy: View<'a>,
        /// `[V, C]`.
        d_tokens_table: ViewMut<'a>,
        /// `[positions, C]`.
        d_positions_table: ViewMut<'a>,
    },
    /// Softmax cross-entropy of each row against its target. With `grad_scale`, the logits are overwritten by
    /// their gradient, `(softmax - onehot) * grad_scale`: there is never a second buffer of that size.
    CrossEntropy {
        /// `[N, V]`.
        logits: ViewMut<'a>,
        /// u32 `[N]`.
        targets: View<'a>,
        /// `[N]`: the loss of each row in nats.
        losses: ViewMut<'a>,
        /// `None` leaves the logits alone.
        grad_scale: Option<f32>,
    },
    /// `partials[i] = sum of squares of x[i * chunk ..][..chunk]`, chunk = [`Op::SQUARES_CHUNK`].
    SumSquares {
        /// f32, any shape.
        x: View<'a>,
        /// `[ceil(len / chunk)]`.
        partials: ViewMut<'a>,
    },
    /// Elementwise arithmetic, see [`Program`].
    Map {
        /// The program.
        program: &'a Program,
        /// Its scalar arguments.
        scalars: &'a [f32],
        /// f32, all of one length.
        reads: &'a [View<'a>],
        /// f32, of the same length.
        writes: &'a mut [ViewMut<'a>],
    },
}

impl Op<'_> {
    /// Elements that [`Op::SumSquares`] puts into one partial sum.
    pub const SQUARES_CHUNK: usize = 1 << 15;

    /// Epsilon of [`Op::LayerNorm`].
    pub const LAYER_NORM_EPS: f32 = 1e-5;

    /// Its name, as errors and traces say it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Fill { .. } => "fill",
            Self::Cast { .. } => "cast",
            Self::MatMul { .. } => "matmul",
            Self::SumRows { .. } => "sum_rows",
            Self::LayerNorm { .. } => "layer_norm",
            Self::LayerNormInput { .. } => "layer_norm_input",
            Self::LayerNormWeight { .. } => "layer_norm_weight",
            Self::Attention { .. } => "attention",
            Self::AttentionGrad { .. } => "attention_grad",
            Self::AttentionCached { .. } => "attention_cached",
            Self::AttentionCachedGrad { .. } => "attention_cached_grad",
            Self::Embed { .. } => "embed",
            Self::EmbedGrad { .. } => "embed_grad",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::SumSquares { .. } => "sum_squares",
            Self::Map { .. } => "map",
        }
    }

    /// Floating-point operations; a fused multiply-add counts as two, attention counts the causal half, and
    /// transcendental functions count as one.
    #[must_use]
    pub fn flops(&self) -> u64 {
        let n = |v: Shape| v.len() as u64;
        let causal = |y: Shape, past: usize| {
            // y is [B, T, C]: T (T + 1) / 2 pairs of a query and a key in each of B sequences, and those with
            // the past.
            let t = length(y) as u64;
            n(y) * (2 * past as u64 + t + 1)
        };
        match self {
            Self::Fill { .. } | Self::Cast { .. } => 0,
            Self::MatMul { a, a_t, c, .. } => {
                let k = if *a_t { a.shape().rows() } else { a.shape().cols() };
                2 * n(c.shape()) * k as u64
            }
            Self::SumRows { x, .. } => n(x.shape()),
            Self::LayerNorm { x, .. } => 8 * n(x.shape()),
            Self::LayerNormInput { x, .. } => 11 * n(x.shape()),
            Self::LayerNormWeight { x, .. } => 5 * n(x.shape()),
            Self::Attention { y, .. } => 2 * causal(y.shape(), 0),
            Self::AttentionGrad { y, .. } => 5 * causal(y.shape(), 0),
            Self::AttentionCached { y, past, .. } => 2 * causal(y.shape(), *past),
            Self::AttentionCachedGrad { y, past, .. } => 5 * causal(y.shape(), *past),
            Self::Embed { y, .. } => n(y.shape()),
            Self::EmbedGrad { dy, .. } => 2 * n(dy.shape()),
            Self::CrossEntropy { logits, .. } => 5 * n(logits.shape()),
            Self::SumSquares { x, .. } => 2 * n(x.shape()),
            Self::Map { program, writes, .. } => {
                program.flops() as u64 * writes.first().map_or(0, |w| n(w.shape()))
            }
        }
    }

    /// Bytes that must cross the memory bus when nothing is in a cache: each operand once in, each result once
    /// out.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let r = |v: &View<'_>| (v.len() * v.dtype().size()) as u64;
        let w = |v: &ViewMut<'_>| (v.len() * v.dtype().size()) as u64;
        let rw = |v: &ViewMut<'_>, read: bool| w(v) * (1 + u64::from(read));
        // The rows of a cache, of keys or of values, that queries see whose outputs are a [B, T, C].
        let seen = |y: Shape, past: usize| {
            let batch = y.rows().checked_div(length(y)).unwrap_or(0);
            ((past + length(y)) * y.cols() * batch * size_of::<f32>()) as u64
        };
        match self {
            Self::Fill { y, .. } => w(y),
            Self::Cast { x, y } => r(x) + w(y),
            Self::MatMul { a, b, c, accumulate, fuse, .. } => {
                let fused = match fuse {
                    Fuse::None => 0,
                    Fuse::Bias(bias) => r(bias),
                    Fuse::BiasGelu { bias, slope } => r(bias) + slope.as_ref().map_or(0, w),
                    Fuse::BiasAdd { bias, residual } => r(bias) + r(residual),
                    Fuse::Times { factor } => r(factor),
                };
                r(a) + r(b) + rw(c, *accumulate) + fused
            }
            Self::SumRows { x, y, accumulate } => r(x) + rw(y, *accumulate),
            Self::LayerNorm { x, gain, bias, y, stats } => r(x) + r(gain) + r(bias) + w(y) + w(stats),
            Self::LayerNormInput { x, gain, stats, dy, residual, dx } => {
                r(x) + r(gain) + r(stats) + r(dy) + residual.as_ref().map_or(0, r) + w(dx)
            }
            Self::LayerNormWeight { x, stats, dy, d_gain, d_bias, accumulate } => {
                r(x) + r(stats) + r(dy) + rw(d_gain, *accumulate) + rw(d_bias, *accumulate)
            }
            Self::Attention { qkv, y, lse, .. } => r(qkv) + w(y) + w(lse),
            Self::AttentionGrad { qkv, y, lse, dy, d_qkv, .. } => r(qkv) + r(y) + r(lse) + r(dy) + w(d_qkv),
            Self::AttentionCached { qkv, y, past, lse, .. } => {
                r(qkv) + w(y) + lse.as_ref().map_or(0, w) + 2 * seen(y.shape(), *past)
            }
            Self::AttentionCachedGrad { past, qkv, y, lse, dy, d_qkv, .. } => {
                r(qkv) + r(y) + r(lse) + r(dy) + w(d_qkv) + 6 * seen(y.shape(), *past)
            }
            Self::Embed { tokens, y, .. } => r(tokens) + 3 * w(y),
            Self::EmbedGrad { tokens, dy, .. } => r(tokens) + 5 * r(dy),
            Self::CrossEntropy { logits, targets, losses, grad_scale } => {
                rw(logits, grad_scale.is_some()) + r(targets) + w(losses)
            }
            Self::SumSquares { x, partials } => r(x) + w(partials),
            Self::Map { program, reads, writes, .. } => {
                let loaded = program.instrs().iter().filter(|i| matches!(i, crate::Instr::Load(_))).count();
                let one = writes.first().map_or(0, w);
                reads.iter().map(r).sum::<u64>() + one * (loaded + program.stores().len()) as u64
            }
        }
    }
}

/// Tokens of each sequence of a `[B, T, C]`; 0 for another shape, which the op will refuse.
fn length(y: Shape) -> usize {
    y.dims().get(1).copied().unwrap_or(0)
}
