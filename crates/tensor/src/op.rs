//! The closed set of ops. A backend is a `match` over this enum. A cost model calls [`Op::flops`] and
//! [`Op::bytes`].
//!
//! Matrices are row-major. Letters in shapes: `B` sequences of `T` tokens each; `N = B T` tokens in total; `C`
//! is the width of a token's vector; `V` is the size of the vocabulary.

use crate::{Program, Shape, View, ViewMut};

/// Elementwise operation that a matrix product applies to its result. The CPU applies it to each finished
/// element while it is still in cache; GPUs run it as a second kernel.
#[derive(Debug)]
pub enum Fuse<'a> {
    /// Leaves `c` unchanged.
    None,
    /// `c += bias`. The bias has one value per column.
    Bias(View<'a>),
    /// `x = c + bias; c = gelu(x)`, with the tanh form of GELU. The backward pass multiplies by
    /// `slope = gelu'(x)` ([`Fuse::Times`]). Computing the slope here is cheap, and it is stored instead of
    /// `x`.
    BiasGelu {
        /// Bias with one value per column.
        bias: View<'a>,
        /// Output `slope`, with the shape of `c`; `None` if no backward pass follows.
        slope: Option<ViewMut<'a>>,
    },
    /// `c += bias + residual`.
    BiasAdd {
        /// Bias with one value per column.
        bias: View<'a>,
        /// Residual, with the shape of `c`.
        residual: View<'a>,
    },
    /// `c *= factor`.
    Times {
        /// Factor, with the shape of `c`.
        factor: View<'a>,
    },
}

/// One operation. Outputs are exclusive views, so an op's inputs and outputs do not overlap unless its doc says
/// so.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "an op exists for one call only")]
pub enum Op<'a> {
    /// Sets all elements of `y` to `value`.
    Fill {
        /// The value.
        value: f32,
        /// Output: f32, any shape.
        y: ViewMut<'a>,
    },
    /// `y = x` with a conversion of the element type: between f32 and f16 or bf16 (rounded to nearest, ties to
    /// even), or a copy without conversion.
    Cast {
        /// Input, any shape.
        x: View<'a>,
        /// Output, with as many elements as `x`.
        y: ViewMut<'a>,
    },
    /// `c = a b`, or `c += a b`, and then `fuse`. `a` is `[m, k]`, `b` is `[k, n]`, `c` is `[m, n]`.
    MatMul {
        /// First operand: `[m, k]`, or `[k, m]` if `a_t`.
        a: View<'a>,
        /// Whether to read `a` transposed.
        a_t: bool,
        /// Second operand: `[k, n]`, or `[n, k]` if `b_t`.
        b: View<'a>,
        /// Whether to read `b` transposed.
        b_t: bool,
        /// Output: `[m, n]`.
        c: ViewMut<'a>,
        /// Whether to add to `c` instead of overwriting it.
        accumulate: bool,
        /// Factors of `a` and of `b`, applied before they are rounded to the device's precision; the product is
        /// divided by both. They must be powers of two, which change only the rounding range: without one,
        /// small gradients become zero in f16.
        scales: [f32; 2],
        /// Elementwise operation applied to the result.
        fuse: Fuse<'a>,
    },
    /// `y[j] = sum over rows of x[., j]`, or added to `y`. This is the gradient of a bias.
    SumRows {
        /// Input: `[N, C]`.
        x: View<'a>,
        /// Output: `[C]`.
        y: ViewMut<'a>,
        /// Whether to add to `y` instead of overwriting it.
        accumulate: bool,
    },
    /// Layer norm over the last dimension, eps 1e-5 (Ba et al. 2016).
    LayerNorm {
        /// Input: `[N, C]`.
        x: View<'a>,
        /// Gain: `[C]`.
        gain: View<'a>,
        /// Bias: `[C]`.
        bias: View<'a>,
        /// Output: `[N, C]`.
        y: ViewMut<'a>,
        /// Output: `[N, 2]`, mean and reciprocal standard deviation of each row, kept for the backward pass.
        stats: ViewMut<'a>,
    },
    /// Input gradient of layer norm, plus the gradient of the residual branch: `dx = residual + d(norm)/dx dy`.
    LayerNormInput {
        /// Input of the forward pass: `[N, C]`.
        x: View<'a>,
        /// Gain: `[C]`.
        gain: View<'a>,
        /// `stats` of the forward pass: `[N, 2]`.
        stats: View<'a>,
        /// Gradient of the norm's output: `[N, C]`.
        dy: View<'a>,
        /// Gradient of the residual branch: `[N, C]`; `None` to add nothing.
        residual: Option<View<'a>>,
        /// Output, the gradient of the input: `[N, C]`.
        dx: ViewMut<'a>,
    },
    /// Gradients of layer norm's gain and bias.
    LayerNormWeight {
        /// Input of the forward pass: `[N, C]`.
        x: View<'a>,
        /// `stats` of the forward pass: `[N, 2]`.
        stats: View<'a>,
        /// Gradient of the norm's output: `[N, C]`.
        dy: View<'a>,
        /// Output, the gradient of the gain: `[C]`.
        d_gain: ViewMut<'a>,
        /// Output, the gradient of the bias: `[C]`.
        d_bias: ViewMut<'a>,
        /// Whether to add to the gradients instead of overwriting them.
        accumulate: bool,
    },
    /// Causal attention of all heads, computed in tiles without storing the matrix of scores (Dao 2022).
    Attention {
        /// Number of heads.
        heads: usize,
        /// Input: `[B, T, 3 C]`, with the query, key and value of each token side by side.
        qkv: View<'a>,
        /// Output: `[B, T, C]`.
        y: ViewMut<'a>,
        /// Output: `[B, heads, T]`, log-sum-exp of each row of scores, kept for the backward pass.
        lse: ViewMut<'a>,
    },
    /// Gradient of [`Op::Attention`].
    AttentionGrad {
        /// Number of heads.
        heads: usize,
        /// Input of the forward pass: `[B, T, 3 C]`.
        qkv: View<'a>,
        /// Output of the forward pass: `[B, T, C]`.
        y: View<'a>,
        /// `lse` of the forward pass: `[B, heads, T]`.
        lse: View<'a>,
        /// Gradient of `y`: `[B, T, C]`.
        dy: View<'a>,
        /// Output, the gradient of `qkv`: `[B, T, 3 C]`.
        d_qkv: ViewMut<'a>,
    },
    /// Causal attention with a cache of keys and values. The keys and values of the new tokens are written to
    /// the cache at `past`; then the new queries attend to all cached tokens and, causally, to the new ones.
    AttentionCached {
        /// Number of heads.
        heads: usize,
        /// Number of tokens in the cache before the new ones.
        past: usize,
        /// Queries, keys and values of the new tokens: `[B, T, 3 C]`.
        qkv: View<'a>,
        /// Cache of keys: `[B, capacity, C]`.
        keys: ViewMut<'a>,
        /// Cache of values: `[B, capacity, C]`.
        values: ViewMut<'a>,
        /// Output: `[B, T, C]`.
        y: ViewMut<'a>,
        /// Output, as in [`Op::Attention`]; `None` if no backward pass follows.
        lse: Option<ViewMut<'a>>,
    },
    /// Gradient of [`Op::AttentionCached`]. Call it for the last slice of tokens first. It adds the gradients
    /// from these queries to the gradients of all keys and values that they attended to. The gradients of the
    /// new tokens' own keys and values are then complete and are also written to `d_qkv`.
    AttentionCachedGrad {
        /// Number of heads.
        heads: usize,
        /// Number of tokens in the cache before the new ones.
        past: usize,
        /// Queries, keys and values of the new tokens: `[B, T, 3 C]`.
        qkv: View<'a>,
        /// Cache of keys: `[B, capacity, C]`.
        keys: View<'a>,
        /// Cache of values: `[B, capacity, C]`.
        values: View<'a>,
        /// Output of the forward pass: `[B, T, C]`.
        y: View<'a>,
        /// `lse` of the forward pass: `[B, heads, T]`.
        lse: View<'a>,
        /// Gradient of `y`: `[B, T, C]`.
        dy: View<'a>,
        /// Output, the gradient of `qkv`: `[B, T, 3 C]`.
        d_qkv: ViewMut<'a>,
        /// Gradient of the cached keys, `[B, capacity, C]`. Before the op it has the contributions of all later
        /// tokens; the op adds the contributions of the new tokens.
        d_keys: ViewMut<'a>,
        /// Gradient of the cached values, `[B, capacity, C]`, updated as `d_keys`.
        d_values: ViewMut<'a>,
    },
    /// `y[i] = tokens_table[tokens[i]] + positions_table[start + i mod T]`.
    Embed {
        /// Token ids: u32 `[B, T]`.
        tokens: View<'a>,
        /// Position of each row's first token.
        start: usize,
        /// Token table: `[V, C]`.
        tokens_table: View<'a>,
        /// Position table: `[positions, C]`.
        positions_table: View<'a>,
        /// Output: `[B, T, C]`.
        y: ViewMut<'a>,
    },
    /// Gradient of [`Op::Embed`] with `start` 0, added to both tables. Rows are summed in token order on every
    /// device. For another `start`, pass the part of `d_positions_table` that begins at row `start`.
    EmbedGrad {
        /// Token ids: u32 `[B, T]`.
        tokens: View<'a>,
        /// Gradient of the embedding's output: `[B, T, C]`.
        dy: View<'a>,
        /// Gradient of the token table, `[V, C]`. The op adds to it.
        d_tokens_table: ViewMut<'a>,
        /// Gradient of the position table, `[positions, C]`. The op adds to it.
        d_positions_table: ViewMut<'a>,
    },
    /// Softmax cross-entropy of each row against its target. With `grad_scale`, the logits are overwritten by
    /// their gradient, `(softmax - onehot) * grad_scale`, which avoids a second buffer of that size.
    CrossEntropy {
        /// Logits: `[N, V]`.
        logits: ViewMut<'a>,
        /// Ids of the target tokens: u32 `[N]`.
        targets: View<'a>,
        /// Output: `[N]`, the loss of each row in nats.
        losses: ViewMut<'a>,
        /// Scale of the gradient; `None` leaves the logits unchanged.
        grad_scale: Option<f32>,
    },
    /// `partials[i] = sum of squares of x[i * chunk ..][..chunk]`, chunk = [`Op::SQUARES_CHUNK`].
    SumSquares {
        /// Input: f32, any shape.
        x: View<'a>,
        /// Output: `[ceil(len / chunk)]`.
        partials: ViewMut<'a>,
    },
    /// Elementwise arithmetic: see [`Program`].
    Map {
        /// Program to run.
        program: &'a Program,
        /// Scalar arguments of the program.
        scalars: &'a [f32],
        /// Read-only buffers: f32, all of the same length.
        reads: &'a [View<'a>],
        /// Updated buffers: f32, of the same length as `reads`.
        writes: &'a mut [ViewMut<'a>],
    },
}

impl Op<'_> {
    /// Number of elements in each partial sum of [`Op::SumSquares`].
    pub const SQUARES_CHUNK: usize = 1 << 15;

    /// Epsilon of [`Op::LayerNorm`].
    pub const LAYER_NORM_EPS: f32 = 1e-5;

    /// Returns the op's name in errors and traces.
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

    /// Returns the number of floating-point operations. A fused multiply-add counts as two and a transcendental
    /// function as one. Attention counts only the pairs of query and key that the causal mask allows, and a
    /// matrix product does not count its [`Fuse`].
    #[must_use]
    pub fn flops(&self) -> u64 {
        let n = |v: Shape| v.len() as u64;
        let causal = |y: Shape, past: usize| {
            // y is [B, T, C]. Each of B sequences has T (T + 1) / 2 pairs of query and key among the new
            // tokens, and T * past pairs with the cached tokens.
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

    /// Returns the bytes of memory traffic with cold caches: each operand read once, each result written once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let r = |v: &View<'_>| (v.len() * v.dtype().size()) as u64;
        let w = |v: &ViewMut<'_>| (v.len() * v.dtype().size()) as u64;
        let rw = |v: &ViewMut<'_>, read: bool| w(v) * (1 + u64::from(read));
        // Bytes of cached keys (or values) that the queries of a [B, T, C] output attend to.
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

/// Returns the second dimension, which is T of `[B, T, C]`, or 0 if there is none. The op's check rejects
/// shapes that are not `[B, T, C]`.
fn length(y: Shape) -> usize {
    y.dims().get(1).copied().unwrap_or(0)
}
