//! The closed set of ops. A backend is a `match` over this enum. A cost model calls [`Op::flops`] and
//! [`Op::bytes`].
//!
//! Matrices are row-major. Letters in shapes: `B` sequences of `T` tokens each; `N = B T` tokens in total; `C`
//! is the width of a token's vector; `V` is the size of the vocabulary.
//!
//! A sequence may hold several documents, one after another. Ops that must know where they begin take
//! `documents`: u32 `[B, T]`, for each token the position in its sequence of its document's first token. That
//! is the token's own position, or what the token before it has. `None`: each sequence is one document. The CPU
//! rejects other values ([`TensorError::Documents`](crate::TensorError::Documents)); GPUs take a start after
//! its token as the token's own position.
//!
//! A document may begin with a prefix that is read in both directions. Attention then takes `prefixes`: u32
//! `[B, T]`, for each token the position in its sequence of the first token after its document's prefix. All
//! tokens of a document have the same; without a prefix, any position up to the document's first. A prefix ends
//! with the op's tokens of the document, or before. The CPU rejects other values
//! ([`TensorError::Prefix`](crate::TensorError::Prefix)); GPUs take an end after the last key as the end of the
//! keys.

mod cost;
mod mask;
mod positions;

pub use self::mask::{AttendedKeys, Heads, KeyRanges, Mask};
pub use self::positions::{Rotary, TokenPositions};
use crate::{Program, View, ViewMut};

/// Elementwise operation that a matrix product applies to its result. The CPU applies it to each finished
/// element while it is still in cache; GPUs run it as a second kernel.
#[derive(Debug)]
pub enum Fuse<'a> {
    /// Leaves `c` unchanged.
    None,
    /// `c += bias`. The bias has one value per column.
    Bias(View<'a>),
    /// `x = c + bias; c = gelu(x)`. The backward pass multiplies by `slope = gelu'(x)` ([`Fuse::Times`]).
    /// Computing the slope here is cheap, and it is stored instead of `x`.
    BiasGelu {
        /// The form of GELU.
        gelu: Gelu,
        /// Bias with one value per column.
        bias: View<'a>,
        /// Output `slope`, with the shape of `c`; `None` if no backward pass follows.
        slope: Option<ViewMut<'a>>,
    },
    /// `c += residual`.
    Add {
        /// Residual, with the shape of `c`.
        residual: View<'a>,
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

/// Forms of GELU (Hendrycks and Gimpel 2016). They differ by at most 5e-4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// `x Phi(x)`, with the distribution function of the normal distribution.
    Erf,
    /// Its approximation `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`.
    Tanh,
}

/// A normalisation over the last dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Which values are normalised.
    pub kind: NormKind,
    /// Constant added to the variance, or to the mean of squares.
    pub eps: f32,
}

/// Kinds of normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// `(x - mean) / sqrt(variance + eps)` (Ba et al. 2016).
    Layer,
    /// `x / sqrt(mean of squares + eps)` (Zhang and Sennrich 2019).
    Rms,
}

/// One operation. Outputs are exclusive views, so an op's inputs and outputs do not overlap unless its doc says
/// so.
#[derive(Debug)]
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
    /// Normalisation over the last dimension: `y = normalised(x) gain + bias`.
    Norm {
        /// The normalisation.
        norm: Norm,
        /// Input: `[N, C]`.
        x: View<'a>,
        /// Gain: `[C]`.
        gain: View<'a>,
        /// Bias: `[C]`; `None` to add nothing.
        bias: Option<View<'a>>,
        /// Output: `[N, C]`.
        y: ViewMut<'a>,
        /// Output: `[N, 2]`, kept for the backward pass: mean (0 for [`NormKind::Rms`]) and reciprocal of the
        /// denominator of each row.
        stats: ViewMut<'a>,
    },
    /// Input gradient of [`Op::Norm`], plus the gradient of the residual branch:
    /// `dx = residual + d(norm)/dx dy`.
    NormInput {
        /// The normalisation.
        norm: Norm,
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
    /// Gradients of the gain and the bias of [`Op::Norm`].
    NormWeight {
        /// Input of the forward pass: `[N, C]`.
        x: View<'a>,
        /// `stats` of the forward pass: `[N, 2]`.
        stats: View<'a>,
        /// Gradient of the norm's output: `[N, C]`.
        dy: View<'a>,
        /// Output, the gradient of the gain: `[C]`.
        d_gain: ViewMut<'a>,
        /// Output, the gradient of the bias: `[C]`; `None` for a norm without one.
        d_bias: Option<ViewMut<'a>>,
        /// Whether to add to the gradients instead of overwriting them.
        accumulate: bool,
    },
    /// Puts queries, keys and values side by side, as attention reads them, and rotates queries and keys.
    JoinHeads {
        /// Number of heads.
        heads: Heads,
        /// Rotation; `None` only copies.
        rotary: Option<Rotary<'a>>,
        /// Queries: `[B, T, query D]`.
        q: View<'a>,
        /// Keys: `[B, T, kv D]`.
        k: View<'a>,
        /// Values: `[B, T, kv D]`.
        v: View<'a>,
        /// Output: `[B, T, (query + 2 kv) D]`.
        qkv: ViewMut<'a>,
    },
    /// Gradient of [`Op::JoinHeads`]: its inverse.
    SplitHeads {
        /// Number of heads.
        heads: Heads,
        /// Rotation of the forward pass, which is undone.
        rotary: Option<Rotary<'a>>,
        /// Gradient of `qkv`: `[B, T, (query + 2 kv) D]`.
        d_qkv: View<'a>,
        /// Output, the gradient of the queries: `[B, T, query D]`.
        dq: ViewMut<'a>,
        /// Output, the gradient of the keys: `[B, T, kv D]`.
        dk: ViewMut<'a>,
        /// Output, the gradient of the values: `[B, T, kv D]`.
        dv: ViewMut<'a>,
    },
    /// `y = silu(gate) up` with `silu(x) = x / (1 + exp(-x))` (Shazeer 2020).
    SwiGlu {
        /// Input of the gate, any shape.
        gate: View<'a>,
        /// Other factor, with as many elements.
        up: View<'a>,
        /// Output, with as many elements.
        y: ViewMut<'a>,
    },
    /// Gradient of [`Op::SwiGlu`], in place, so that the forward pass need not keep its output.
    SwiGluGrad {
        /// Input of the gate, overwritten by its gradient.
        gate: ViewMut<'a>,
        /// Other factor, overwritten by its gradient.
        up: ViewMut<'a>,
        /// Gradient of the output, overwritten by the output.
        dy: ViewMut<'a>,
    },
    /// Causal attention of all heads, computed in tiles without storing the matrix of scores (Dao 2022). `C` is
    /// `query D`, and `W` is `(query + 2 kv) D`.
    Attention {
        /// Number of heads.
        heads: Heads,
        /// Which keys a query attends to.
        mask: Mask<'a>,
        /// Input: `[B, T, W]`, with the query, key and value of each token side by side.
        qkv: View<'a>,
        /// Output: `[B, T, C]`.
        y: ViewMut<'a>,
        /// Output: `[B, query, T]`, log-sum-exp of each row of scores, kept for the backward pass.
        lse: ViewMut<'a>,
    },
    /// Gradient of [`Op::Attention`].
    AttentionGrad {
        /// Number of heads.
        heads: Heads,
        /// `mask` of the forward pass.
        mask: Mask<'a>,
        /// Input of the forward pass: `[B, T, W]`.
        qkv: View<'a>,
        /// Output of the forward pass: `[B, T, C]`.
        y: View<'a>,
        /// `lse` of the forward pass: `[B, query, T]`.
        lse: View<'a>,
        /// Gradient of `y`: `[B, T, C]`.
        dy: View<'a>,
        /// Output, the gradient of `qkv`: `[B, T, W]`.
        d_qkv: ViewMut<'a>,
    },
    /// Causal attention with a cache of keys and values. The keys and values of the new tokens are written to
    /// the cache at `past`; then the new queries attend to all cached tokens and, causally, to the new ones.
    AttentionCached {
        /// Number of heads.
        heads: Heads,
        /// Number of tokens in the cache before the new ones.
        past: usize,
        /// Which keys a query attends to. Documents may begin, and prefixes end, at a cached token.
        mask: Mask<'a>,
        /// Queries, keys and values of the new tokens: `[B, T, W]`.
        qkv: View<'a>,
        /// Cache of keys: `[B, capacity, kv D]`.
        keys: ViewMut<'a>,
        /// Cache of values: `[B, capacity, kv D]`.
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
        heads: Heads,
        /// Number of tokens in the cache before the new ones.
        past: usize,
        /// `mask` of the forward pass.
        mask: Mask<'a>,
        /// Queries, keys and values of the new tokens: `[B, T, W]`.
        qkv: View<'a>,
        /// Cache of keys: `[B, capacity, kv D]`.
        keys: View<'a>,
        /// Cache of values: `[B, capacity, kv D]`.
        values: View<'a>,
        /// Output of the forward pass: `[B, T, C]`.
        y: View<'a>,
        /// `lse` of the forward pass: `[B, query, T]`.
        lse: View<'a>,
        /// Gradient of `y`: `[B, T, C]`.
        dy: View<'a>,
        /// Output, the gradient of `qkv`: `[B, T, W]`.
        d_qkv: ViewMut<'a>,
        /// Gradient of the cached keys, `[B, capacity, kv D]`. Before the op it has the contributions of all
        /// later tokens; the op adds the contributions of the new tokens.
        d_keys: ViewMut<'a>,
        /// Gradient of the cached values, `[B, capacity, kv D]`, updated as `d_keys`.
        d_values: ViewMut<'a>,
    },
    /// Attention to given keys, a range of them for each query. The keys of a sequence may come in several
    /// blocks, in any order: the op runs once for each, and `continues` after the first. `K`, the number of
    /// keys, may be 0.
    AttentionOver {
        /// Number of heads.
        heads: Heads,
        /// Which keys a query attends to.
        ranges: KeyRanges<'a>,
        /// Whether `y` and `lse` hold the attention to other keys: the result is that to both. Otherwise they
        /// are overwritten.
        continues: bool,
        /// Queries, keys and values of the tokens, `[B, T, W]`, of which only the queries are read.
        qkv: View<'a>,
        /// Keys: `[B, K, kv D]`.
        keys: View<'a>,
        /// Values: `[B, K, kv D]`.
        values: View<'a>,
        /// Output, normalised: `[B, T, C]`. 0 for a query that has attended to no key.
        y: ViewMut<'a>,
        /// Output: `[B, query, T]`, log-sum-exp of the scores so far. For a query that has attended to no key
        /// it is negative infinity, or -1e30 on GPUs; all devices take either.
        lse: ViewMut<'a>,
    },
    /// Gradient of [`Op::AttentionOver`] for one block of keys, from the outputs over all blocks. The blocks
    /// may come in any order. The op adds to `dq`, `d_keys` and `d_values`.
    AttentionOverGrad {
        /// Number of heads.
        heads: Heads,
        /// `ranges` of the forward pass over these keys.
        ranges: KeyRanges<'a>,
        /// Queries, keys and values of the tokens, `[B, T, W]`, of which only the queries are read.
        qkv: View<'a>,
        /// Keys: `[B, K, kv D]`.
        keys: View<'a>,
        /// Values: `[B, K, kv D]`.
        values: View<'a>,
        /// Output of the forward pass over all keys: `[B, T, C]`.
        y: View<'a>,
        /// `lse` of the forward pass over all keys: `[B, query, T]`.
        lse: View<'a>,
        /// Gradient of `y`: `[B, T, C]`.
        dy: View<'a>,
        /// Gradient of the queries: `[B, T, C]`. The op adds to it.
        dq: ViewMut<'a>,
        /// Gradient of the keys: `[B, K, kv D]`. The op adds to it.
        d_keys: ViewMut<'a>,
        /// Gradient of the values: `[B, K, kv D]`. The op adds to it.
        d_values: ViewMut<'a>,
    },
    /// `y[i] = tokens_table[tokens[i] - first] + positions_table[position of i]`, or without the second term.
    Embed {
        /// Token ids: u32 `[B, T]`.
        tokens: View<'a>,
        /// The id of the table's first row, if it is a piece of a table: tokens of other pieces add nothing.
        /// `None`: it is a whole table, which has a row for each id.
        first: Option<u32>,
        /// Positions of the tokens; only a table of positions is read at them.
        positions: TokenPositions<'a>,
        /// Token table: `[V, C]`.
        tokens_table: View<'a>,
        /// Position table: `[positions, C]`; `None` to add nothing.
        positions_table: Option<View<'a>>,
        /// Output: `[B, T, C]`.
        y: ViewMut<'a>,
    },
    /// Gradient of [`Op::Embed`], added to the tables. Rows are summed in token order on every device.
    EmbedGrad {
        /// Token ids: u32 `[B, T]`.
        tokens: View<'a>,
        /// `first` of the forward pass.
        first: Option<u32>,
        /// `positions` of the forward pass.
        positions: TokenPositions<'a>,
        /// Gradient of the embedding's output: `[B, T, C]`.
        dy: View<'a>,
        /// Gradient of the token table, `[V, C]`. The op adds to it.
        d_tokens_table: ViewMut<'a>,
        /// Gradient of the position table, `[positions, C]`, if there is one. The op adds to it.
        d_positions_table: Option<ViewMut<'a>>,
    },
    /// Weighted sums of rows that are found by number: `y[n] = add[n] + sum over j of factors[n, j] x[rows[n,
    /// j]]`, in this order. A number that is not below the number of rows of `x` adds nothing. With one row for
    /// each it takes rows out; it is its own gradient, with the numbers the other way round.
    CombineRows {
        /// Input: `[M, C]`.
        x: View<'a>,
        /// Numbers of rows of `x`: u32 `[N, K]`.
        rows: View<'a>,
        /// Factors: `[N, K]`; `None` for 1.
        factors: Option<View<'a>>,
        /// What is added: `[N, C]`; `None` to add nothing.
        add: Option<View<'a>>,
        /// Output: `[N, C]`.
        y: ViewMut<'a>,
    },
    /// Products of rows with rows that are found by number: `y[i] = a[i] . b[rows[i]]`, or 0 if `b` has no such
    /// row. This is the gradient of the factors of [`Op::CombineRows`].
    RowDots {
        /// First factors: `[M, C]`.
        a: View<'a>,
        /// Second factors: `[N, C]`.
        b: View<'a>,
        /// Numbers of rows of `b`: u32 `[M]`.
        rows: View<'a>,
        /// Output: `[M]`.
        y: ViewMut<'a>,
    },
    /// Softmax cross-entropy of each row against its target, times the row's weight. With `grad_scale`, the
    /// logits are overwritten by their gradient, `(softmax - onehot) * weight * grad_scale`, which avoids a
    /// second buffer of that size.
    CrossEntropy {
        /// Logits: `[N, V]`.
        logits: ViewMut<'a>,
        /// Ids of the target tokens: u32 `[N]`.
        targets: View<'a>,
        /// Weights: `[N]`; `None` for 1. Loss and gradient of a row of weight 0 are 0, whatever its logits are,
        /// and its target is any id.
        weights: Option<View<'a>>,
        /// Output: `[N]`, the weighted loss of each row in nats.
        losses: ViewMut<'a>,
        /// Scale of the gradient; `None` leaves the logits unchanged.
        grad_scale: Option<f32>,
    },
    /// The statistics of each row of a piece of the logits, from which those of all pieces make the loss of
    /// [`Op::CrossEntropy`]: the largest logit `m`, the sum of `exp(x - m)`, and the logit of the target, or 0
    /// if it is in another piece.
    LogitStats {
        /// A piece of the logits: `[N, V']`.
        logits: View<'a>,
        /// The id of the piece's first column.
        first: u32,
        /// Ids of the target tokens: u32 `[N]`.
        targets: View<'a>,
        /// Output: `[N, 3]`.
        stats: ViewMut<'a>,
    },
    /// Overwrites a piece of the logits by its gradient, `(exp(x - log_sum) - onehot) * weight * scale`.
    LogitGrad {
        /// A piece of the logits: `[N, V']`.
        logits: ViewMut<'a>,
        /// The id of the piece's first column.
        first: u32,
        /// Ids of the target tokens: u32 `[N]`.
        targets: View<'a>,
        /// Weights: `[N]`, as in [`Op::CrossEntropy`]; `None` for 1.
        weights: Option<View<'a>>,
        /// The logarithm of the sum of `exp(x)` over all pieces: `[N]`.
        log_sums: View<'a>,
        /// Scale of the gradient.
        scale: f32,
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
    pub const SQUARES_CHUNK: usize = 1 << 10;

    /// Returns the op's name in errors and traces.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Fill { .. } => "fill",
            Self::Cast { .. } => "cast",
            Self::MatMul { .. } => "matmul",
            Self::SumRows { .. } => "sum_rows",
            Self::Norm { .. } => "norm",
            Self::NormInput { .. } => "norm_input",
            Self::NormWeight { .. } => "norm_weight",
            Self::JoinHeads { .. } => "join_heads",
            Self::SplitHeads { .. } => "split_heads",
            Self::SwiGlu { .. } => "swiglu",
            Self::SwiGluGrad { .. } => "swiglu_grad",
            Self::Attention { .. } => "attention",
            Self::AttentionGrad { .. } => "attention_grad",
            Self::AttentionCached { .. } => "attention_cached",
            Self::AttentionCachedGrad { .. } => "attention_cached_grad",
            Self::AttentionOver { .. } => "attention_over",
            Self::AttentionOverGrad { .. } => "attention_over_grad",
            Self::Embed { .. } => "embed",
            Self::EmbedGrad { .. } => "embed_grad",
            Self::CombineRows { .. } => "combine_rows",
            Self::RowDots { .. } => "row_dots",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::LogitStats { .. } => "logit_stats",
            Self::LogitGrad { .. } => "logit_grad",
            Self::SumSquares { .. } => "sum_squares",
            Self::Map { .. } => "map",
        }
    }
}
