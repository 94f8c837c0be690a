//! Compares what layers cost by running them on the counting device with closed forms. The bench `profile`
//! includes this file too, by `#[path]`: the parent module must import the crate under the name `zoo`.

use super::zoo::exchange::Axis;
use super::zoo::family::presets;
use super::zoo::profile::ModelProfile;
use super::zoo::{AxisShare, ModelSpec, Resize, ZooError};

/// Shapes of both families, with names: the presets, and some in other sizes.
pub(crate) fn shapes() -> Result<Vec<(String, ModelSpec)>, ZooError> {
    let mut all: Vec<_> = presets().map(|preset| (preset.name.to_owned(), preset.spec())).collect();
    for (layers, heads, dim, context) in [(1, 1, 2, 1), (3, 2, 24, 10), (2, 4, 64, 33), (5, 8, 128, 128)] {
        let sizes = Resize {
            layers: Some(layers),
            heads: Some(heads),
            dim: Some(dim),
            context: Some(context),
            vocab: Some(19),
        };
        for preset in ["nano", "llama-nano"] {
            let name = format!("{preset} with {layers} x {dim}, context {context}");
            all.push((name, ModelSpec::preset(preset)?.resized(sizes)?));
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
    let (t, c, v) = (spec.context as u64, spec.dim as u64, spec.vocab as u64);
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
    // Matrices of a block, and its vectors: biases of all matrices and of both norms, or gains alone.
    let matrices = c * qkv + q * c + if gated { 3 } else { 2 } * c * f;
    let vectors = if gated { 2 * c } else { 4 * c + qkv + c + f + c };
    // Products of forward pass, gradient of input and gradient of weights are equal.
    let products = 2 * t * matrices;
    // Kept: input, both norms and their statistics, q k v, log-sum-exps, attention's output, the middle, and
    // two buffers of the feed-forward network.
    let kept = 4 * hidden + 2 * stats + t * qkv + h * t + t * q + 2 * t * f;
    // Between the halves: the gradients of output, middle and both norms, and those of the matrices' outputs
    // that are not in the place of what was kept.
    let between = 4 * hidden + t * qkv + t * f;
    // Backward: the gradients of output, the two norms, middle and input, of the inner width and of q k v;
    // either the last two hidden states at the end, or before them the gradient of attention's output, or q k v
    // twice while they are taken apart.
    let most = (2 * c).max(if gated { qkv } else { q });
    let head = profile.head;
    let head_products = 2 * t * v * c;
    let sent = 4 * (4 * hidden * (ranks - 1) / ranks);
    let of_layers = profile.embedding.parameters + spec.layers() as u64 * block.parameters;
    let all = [
        ("parameters of a block", block.parameters, matrices + vectors),
        (
            "parameters",
            if ranks == 1 { spec.parameters() } else { of_layers + head.parameters },
            of_layers + head.parameters,
        ),
        // Each pass sums hidden states twice: behind attention and behind the feed-forward network.
        ("bytes that a block sends forward", block.sent_forward.along(Axis::Tensor), sent),
        ("bytes that a block sends backward", block.sent_backward.along(Axis::Tensor), sent),
        ("products of a block's forward pass", block.forward.products, products),
        ("products for a block's input", block.input.products, products),
        ("products for a block's weights", block.weight.products, products),
        // Causal attention: two products forward, five backward, over T (T + 1) / 2 pairs per head.
        ("attention of a block's forward pass", block.forward.attention, 2 * q * t * (t + 1)),
        ("attention for a block's input", block.input.attention, 5 * q * t * (t + 1)),
        ("attention for a block's weights", block.weight.attention, 0),
        ("bytes that a block keeps", block.saved, 4 * kept),
        ("bytes between the halves of a block's backward pass", block.between, 4 * between),
        // The gated product; all else is kept.
        (
            "temporary bytes of a block's forward pass",
            block.forward_temporary,
            if gated { 4 * t * f } else { 0 },
        ),
        (
            "temporary bytes of a block's backward pass",
            block.backward_temporary,
            4 * t * (3 * c + f + qkv + most),
        ),
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
    let figure = |(name, profile, closed_form)| Figure { name, profile, closed_form };
    Ok(all.into_iter().map(figure).collect())
}
