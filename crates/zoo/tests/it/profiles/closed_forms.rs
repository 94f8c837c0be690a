//! Compares what layers cost by running them on the counting device with closed forms. The bench `profile`
//! includes this file too, by `#[path]`: the parent module must import the crate under the name `zoo`.

use super::zoo::exchange::Axis;
use super::zoo::family::presets;
use super::zoo::profile::ModelProfile;
use super::zoo::spec::{AttentionBias, Residual};
use super::zoo::{AxisShare, ModelSpec, Resize, ZooError};

/// Shapes of all families without experts, with names: the presets, and some in other sizes.
pub(crate) fn shapes() -> Result<Vec<(String, ModelSpec)>, ZooError> {
    let mut all: Vec<_> = presets().map(|preset| (preset.name.to_owned(), preset.spec())).collect();
    all.retain(|(_, spec)| spec.mixtures().next().is_none());
    for (layers, heads, dim, context) in [(1, 1, 2, 1), (3, 2, 24, 10), (2, 4, 64, 33), (5, 8, 128, 128)] {
        let sizes = Resize {
            layers: Some(layers),
            heads: Some(heads),
            dim: Some(dim),
            context: Some(context),
            vocab: Some(19),
        };
        for preset in ["nano", "llama-nano", "gpt-j-6b", "pythia-70m", "qwen3-0.6b", "mistral-7b"] {
            let name = format!("{preset} with {layers} x {dim}, context {context}");
            let fits = |spec: ModelSpec| spec.resized(sizes).ok();
            let Some(mut spec) = fits(ModelSpec::preset(preset)?) else { continue };
            let pattern = &mut spec.blocks[0].block.attention.pattern;
            if pattern.window().is_some() {
                *pattern = "window:9".parse().expect("a pattern");
            }
            all.push((name, spec));
        }
    }
    Ok(all)
}

/// A figure of a profile, and its closed form.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) profile: u64,
    pub(crate) closed_form: u64,
}

/// Returns all figures of a model's layers: of the whole ones, and of the pieces of ranks that divide blocks,
/// as far as each gets a head and a column.
pub(crate) fn figures(spec: &ModelSpec) -> Result<Vec<Figure>, ZooError> {
    let mut all = figures_of(spec, &AxisShare::whole())?;
    let of = &spec.blocks[0].block;
    for (rank, weights) in [(0, vec![1, 1]), (1, vec![2, 1]), (3, vec![1; 4])] {
        let share = AxisShare::new(rank, weights)?;
        let fits = |rank: AxisShare| {
            [of.attention.heads.kv, of.mlp.width].into_iter().all(|units| !rank.of(units).is_empty())
        };
        if share.all().all(fits) {
            all.extend(figures_of(spec, &share)?);
        }
    }
    Ok(all)
}

fn figures_of(spec: &ModelSpec, share: &AxisShare) -> Result<Vec<Figure>, ZooError> {
    let profile = ModelProfile::of_share(spec, share)?;
    // The rank's own tokens.
    let (t, c, v) = (spec.context as u64, spec.dim as u64, share.of(spec.vocab).len() as u64);
    let (_, block) = profile.blocks[0];
    let of = spec.blocks[0].block;
    // The rank's own heads and inner columns.
    let kv_heads = of.attention.heads.kv;
    let g = share.of(kv_heads).len() as u64;
    let h = g * (of.attention.heads.query / kv_heads) as u64;
    let (d, f) = (of.attention.head_dim as u64, share.of(of.mlp.width).len() as u64);
    let ranks = share.ranks() as u64;
    let (q, kv) = (h * d, g * d);
    let gated = of.mlp.gated;
    let (stats, hidden) = (2 * t, t * c);
    let qkv = q + 2 * kv;
    let is_sequential = of.residual == Residual::Sequential;
    let norms = if of.residual == Residual::ParallelOneNorm { 1 } else { 2 };
    let second_norm = norms - 1;
    let head_norm = u64::from(of.attention.head_norm.is_some());
    // Matrices of a block, and its vectors: gains of norms and of heads' norms, and biases.
    let matrices = c * qkv + q * c + if gated { 3 } else { 2 } * c * f;
    let of_attention = match of.attention.bias {
        AttentionBias::None => 0,
        AttentionBias::Inputs => qkv,
        AttentionBias::All => qkv + c,
    };
    let of_mlp = u64::from(of.mlp.bias) * (f + c);
    let vectors = norms * c * (1 + u64::from(of.norm.bias)) + of_attention + of_mlp + head_norm * 2 * d;
    // Products of forward pass, gradient of input and gradient of weights are equal.
    let products = 2 * t * matrices;
    // Kept: input, norms and their statistics, q k v, log-sum-exps, attention's output, the middle if there is
    // one, two buffers of the feed-forward network, and queries and keys before their norms with statistics.
    let middle = u64::from(is_sequential);
    let kept = (1 + norms + middle) * hidden
        + norms * stats
        + t * qkv
        + h * t
        + t * q
        + 2 * t * f
        + head_norm * (t * (q + kv) + 2 * t * (h + g));
    // Between the halves: the gradients of output, middle and norms, and those of the matrices' outputs that
    // are not in the place of what was kept.
    let between = (1 + norms + middle) * hidden + t * qkv + t * f + head_norm * t * (q + kv);
    // Backward: the gradients of output, the two norms, middle and input, of the inner width and of q k v;
    // either the last two hidden states at the end, or before them the gradient of attention's output, or q k v
    // twice while they are taken apart.
    let most = (2 * c).max(if gated { qkv } else { q });
    let head = profile.head;
    let head_products = 2 * t * v * c;
    // An odd number of values is rounded down.
    let sent_by = |sums: u64, values: u64| 2 * sums * (4 * values * (ranks - 1) / ranks);
    let sent = |sums: u64| sent_by(sums, hidden);
    // Causal attention over T (T + 1) / 2 pairs per head, without those before a window.
    let outside = of.attention.pattern.window().map_or(0, |window| t.saturating_sub(window as u64));
    let pairs = t * (t + 1) - outside * (outside + 1);
    // Blocks whose temporary buffers the forms below describe.
    let is_plain = is_sequential && head_norm == 0 && !(of.attention.fused && of.attention.rotary.is_some());
    let of_layers = profile.embedding.parameters + spec.layers() as u64 * block.parameters;
    let all = [
        ("parameters of a block", block.parameters, matrices + vectors),
        (
            "parameters",
            if ranks == 1 { spec.parameters() } else { of_layers + head.parameters },
            of_layers + head.parameters,
        ),
        // A pass sums hidden states behind attention and behind the feed-forward network; once where both have
        // the same input. With one norm, their gradients are added before the sum.
        (
            "bytes that a block sends forward",
            block.sent_forward.along(Axis::Tensor),
            sent(if is_sequential { 2 } else { 1 }),
        ),
        ("products of a block's forward pass", block.forward.products, products),
        ("products for a block's input", block.input.products, products),
        ("products for a block's weights", block.weight.products, products),
        // The embedding sums hidden states, and so does the head the gradient of its input. The loss needs the
        // largest logit of each token, and the sum of exponentials and the target's logit.
        (
            "bytes that the embedding sends",
            profile.embedding.sent_forward.along(Axis::Tensor),
            sent_by(1, t * c),
        ),
        ("bytes that the head sends forward", head.sent_forward.along(Axis::Tensor), sent_by(3, t)),
        ("bytes that the head sends backward", head.sent_backward.along(Axis::Tensor), sent_by(1, t * c)),
        // Two products forward, five backward.
        ("attention of a block's forward pass", block.forward.attention, 2 * q * pairs),
        ("attention for a block's input", block.input.attention, 5 * q * pairs),
        ("attention for a block's weights", block.weight.attention, 0),
        ("bytes that a block keeps", block.saved, 4 * kept),
        ("bytes between the halves of a block's backward pass", block.between, 4 * between),
        ("products of the head's forward pass", head.forward.products, head_products),
        ("products for the head's input", head.input.products, head_products),
        ("products for the head's weights", head.weight.products, head_products),
        ("bytes that the head keeps", head.saved, 4 * (2 * hidden + stats)),
        ("bytes of logits", head.logits, 4 * t * v),
        ("bytes between the halves of the head's backward pass", head.between, 4 * hidden),
        ("products of the embedding", profile.embedding.forward.products, 0),
        ("bytes of hidden states", profile.hidden, 4 * hidden),
        ("values of the token table", profile.table, v * c),
    ];
    let mut all = all.to_vec();
    if head_norm == 0 {
        // Norms of heads sum the gradients of their gains, too.
        let sums = 1 + second_norm;
        all.push(("bytes that a block sends backward", block.sent_backward.along(Axis::Tensor), sent(sums)));
    }
    if is_plain {
        // The gated product; all else is kept.
        let forward = if gated { 4 * t * f } else { 0 };
        all.push(("temporary bytes of a block's forward pass", block.forward_temporary, forward));
        let backward = 4 * t * (3 * c + f + qkv + most);
        all.push(("temporary bytes of a block's backward pass", block.backward_temporary, backward));
    }
    let figure = |(name, profile, closed_form)| Figure { name, profile, closed_form };
    Ok(all.into_iter().map(figure).collect())
}
