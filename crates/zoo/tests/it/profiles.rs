//! What layers cost by running them on the counting device, against closed forms.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_zoo::family::{Preset, presets};
use farflung_zoo::profile::ModelProfile;
use farflung_zoo::{ModelSpec, Resize};

/// Shapes of both families: the presets, some in other sizes.
fn shapes() -> Vec<ModelSpec> {
    let mut all: Vec<ModelSpec> = presets().map(Preset::spec).collect();
    for (layers, heads, dim, context) in [(1, 1, 2, 1), (3, 2, 24, 10), (2, 4, 64, 33), (5, 8, 128, 128)] {
        let sizes = Resize {
            layers: Some(layers),
            heads: Some(heads),
            dim: Some(dim),
            context: Some(context),
            vocab: Some(19),
        };
        all.push(ModelSpec::preset("nano").unwrap().resized(sizes).unwrap());
        all.push(ModelSpec::preset("llama-nano").unwrap().resized(sizes).unwrap());
    }
    all
}

#[test]
fn they_equal_the_closed_forms_exactly() {
    let shapes = shapes();
    assert!(shapes.len() >= 20, "{}", shapes.len());
    for spec in shapes {
        let profile = ModelProfile::of(&spec).unwrap();
        let (t, c, v) = (spec.context as u64, spec.dim as u64, spec.vocab as u64);
        let (_, block) = profile.blocks[0];
        let of = spec.blocks[0].block;
        let (h, g) = (of.attention.heads.query as u64, of.attention.heads.kv as u64);
        let (d, f) = (of.attention.head_dim as u64, of.mlp.width as u64);
        let (q, kv) = (h * d, g * d);
        let gated = of.mlp.gated;
        let (stats, hidden) = (2 * t, t * c);
        let qkv = q + 2 * kv;
        // Matrices of a block, and its vectors: biases of all matrices and of both norms, or gains alone.
        let matrices = c * qkv + q * c + if gated { 3 } else { 2 } * c * f;
        let vectors = if gated { 2 * c } else { 4 * c + qkv + c + f + c };
        assert_eq!(block.parameters, matrices + vectors);
        assert_eq!(
            spec.parameters(),
            profile.embedding.parameters + spec.layers() as u64 * block.parameters + profile.head.parameters
        );
        // Products of forward pass, gradient of input and gradient of weights are equal.
        assert_eq!(block.forward.products, 2 * t * matrices);
        assert_eq!((block.input.products, block.weight.products), (2 * t * matrices, 2 * t * matrices));
        // Causal attention: two products forward, five backward, over T (T + 1) / 2 pairs per head.
        assert_eq!(block.forward.attention, 2 * q * t * (t + 1));
        assert_eq!(block.input.attention, 5 * q * t * (t + 1));
        assert_eq!(block.weight.attention, 0);
        // Kept: input, both norms and their statistics, q k v, log-sum-exps, attention's output, the middle,
        // and two buffers of the feed-forward network.
        let kept = 4 * hidden + 2 * stats + t * qkv + h * t + t * q + 2 * t * f;
        assert_eq!(block.saved, 4 * kept);
        // Between the halves: the gradients of output, middle and both norms, and those of the matrices'
        // outputs that are not in the place of what was kept.
        let between = 4 * hidden + t * qkv + t * f;
        assert_eq!(block.between, 4 * between);
        let head_products = 2 * t * v * c;
        let head = profile.head;
        let works = [head.forward, head.input, head.weight].map(|work| work.products);
        assert_eq!(works, [head_products; 3]);
        assert_eq!((head.saved, head.logits), (4 * (2 * hidden + stats), 4 * t * v));
        assert_eq!(head.between, 4 * hidden);
        assert_eq!(profile.embedding.forward.products, 0);
        assert_eq!(profile.hidden, 4 * hidden);
        assert_eq!(profile.table, v * c);
        // Forward: the gated product; all else is kept. Backward: the gradients of output, the two norms,
        // middle and input, of the inner width and of q k v; either the last two hidden states at the end, or
        // before them the gradient of attention's output, or q k v twice while they are taken apart.
        assert_eq!(block.forward_temporary, if gated { 4 * t * f } else { 0 });
        let most = (2 * c).max(if gated { qkv } else { q });
        assert_eq!(block.backward_temporary, 4 * t * (3 * c + f + qkv + most));
    }
}
