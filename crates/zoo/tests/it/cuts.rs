//! Pieces of models on several ranks, which divide the width of blocks, against whole models.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::sync::Arc;

use farflung_tensor::{Device, Tensor};
use farflung_zoo::exchange::{Alone, Exchange};
use farflung_zoo::layer::Grads;
use farflung_zoo::spec::{AttentionBias, HeadSpec, Residual};
use farflung_zoo::weights::WriteOptions;
use farflung_zoo::{AxisShare, Input, ModelSpec, Output, Resize, Stage, Targets, gpt2};

use crate::families::comparison::threads::Threads;

/// GPT-2 with fused queries, keys and values and biases; LLaMA with grouped queries, and with norms of heads
/// and a window, and with patterns of attention, of which one differs by head; GPT-NeoX with two norms and
/// with one.
fn models() -> Vec<ModelSpec> {
    let mut llama = ModelSpec::preset("llama-nano").unwrap();
    (llama.dim, llama.context, llama.vocab, llama.blocks[0].count) = (24, 10, 19, 2);
    let block = &mut llama.blocks[0].block;
    (block.attention.heads.query, block.attention.heads.kv, block.attention.head_dim) = (6, 3, 10);
    block.attention.rotary.as_mut().unwrap().width = 10;
    block.mlp.width = 40;
    let mut normed = llama.clone();
    let attention = &mut normed.blocks[0].block.attention;
    (attention.bias, attention.pattern) = (AttentionBias::Inputs, "window:4".parse().unwrap());
    attention.head_norm = Some(normed.norm.norm);
    let size = Resize { layers: Some(2), heads: Some(4), dim: Some(24), context: Some(10), vocab: Some(19) };
    let of = |preset: &str| ModelSpec::preset(preset).unwrap().resized(size).unwrap();
    let tiled = llama.clone().with_patterns(&"fixed:2,1,2+block:2/strided:3".parse().unwrap());
    let mut neox = of("pythia-70m");
    neox.blocks[0].block.attention.rotary.as_mut().unwrap().width = 4;
    let mut one_norm = neox.clone();
    one_norm.blocks[0].block.residual = Residual::ParallelOneNorm;
    one_norm.head = HeadSpec::OwnWithBias;
    vec![gpt2(2, 4, 24, 10, 19).unwrap(), llama, tiled, normed, neox, one_norm]
}

/// The losses and gradients of a stage, and the logits of its sequences.
struct Outcome {
    losses: Vec<f32>,
    grads: Vec<f32>,
    logits: Vec<f32>,
}

fn run(stage: &Stage, params: &Tensor) -> Outcome {
    let ids = |shift: u32| (0..20_u32).map(|i| (i * i + 3 * i + shift) % 19).collect::<Vec<_>>();
    let tokens = || stage.tokens(&ids(0), 10).unwrap();
    let targets = stage.tokens(&ids(1), 10).unwrap();
    let target = Targets::all(&targets, 0.05);
    let (output, saved) = stage.forward(params, Input::Tokens(tokens()), Some(target)).unwrap();
    let Output::Losses(losses) = output else { unreachable!("the whole model gives losses") };
    let mut flat = stage.zeros().unwrap();
    let mut grads = Grads::flat(&mut flat, false);
    stage.backward(params, saved, None, &mut grads, |_, _| {}).unwrap();
    let logits = stage.logits(params, tokens()).unwrap();
    Outcome {
        losses: losses.to_vec().unwrap(),
        grads: flat.to_vec().unwrap(),
        logits: logits.to_vec().unwrap(),
    }
}

fn far(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut expected.iter().map(|v| f64::from(*v))).max(1e-2)
}

#[test]
fn pieces_give_the_losses_and_gradients_of_the_whole_model() {
    for spec in models() {
        let cpu = Device::cpu(1).unwrap();
        let whole = Stage::whole(&spec, &cpu).unwrap();
        let all_params = whole.init(5).unwrap();
        let expected = run(&whole, &all_params);
        let tensors = spec.tensors();
        for weights in [vec![1], vec![1, 1], vec![2, 1], vec![1, 1, 1]] {
            let shares: Vec<_> = AxisShare::new(0, weights).unwrap().all().collect();
            let exchanges = Threads::group(shares.len());
            let outcomes: Vec<(Stage, Vec<f32>, Outcome)> = std::thread::scope(|scope| {
                let ranks: Vec<_> = shares
                    .iter()
                    .zip(exchanges)
                    .map(|(share, exchange)| {
                        let (spec, share) = (&spec, share.clone());
                        scope.spawn(move || {
                            let cpu = Device::cpu(1).unwrap();
                            let axis: (AxisShare, Arc<dyn Exchange>) = (share, Arc::new(exchange));
                            let piece = Stage::piece(spec, 0..spec.layers(), &cpu, axis).unwrap();
                            let params = piece.init(5).unwrap();
                            let outcome = run(&piece, &params);
                            (piece, params.to_vec().unwrap(), outcome)
                        })
                    })
                    .collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            for (share, (piece, params, found)) in shares.iter().zip(&outcomes) {
                assert!(far(&found.losses, &expected.losses) < 1e-5);
                assert!(far(&found.logits, &expected.logits) < 1e-5);
                assert_eq!(found.losses, outcomes[0].2.losses);
                for ((own, all), tensor) in
                    piece.layout().params().iter().zip(whole.layout().params()).zip(&tensors)
                {
                    let of_whole = |values: &[f32]| {
                        let mut part = vec![0.0; own.shape.len()];
                        tensor.cut.take(&tensor.shape, share, &values[all.range()], &mut part);
                        part
                    };
                    let name = format!("{} on rank {} of {}", own.name, share.rank(), share.ranks());
                    let initial = of_whole(&all_params.to_vec::<f32>().unwrap());
                    assert_eq!(params[own.range()], initial, "{name}");
                    let off = far(&found.grads[own.range()], &of_whole(&expected.grads));
                    assert!(off < 1e-5, "{name}: {off}");
                }
            }
        }
    }
}

#[test]
fn a_cut_that_leaves_a_rank_without_a_head_is_refused() {
    let spec = gpt2(1, 2, 8, 4, 11).unwrap();
    let cpu = Device::cpu(1).unwrap();
    let share = AxisShare::new(0, vec![1; 3]).unwrap();
    let error = Stage::piece(&spec, 0..1, &cpu, (share, Arc::new(Alone))).unwrap_err().to_string();
    assert!(error.contains("`heads` is 2") && error.contains("tensor axis"), "{error}");
    // A piece is no model that a file could have.
    let share = AxisShare::new(1, vec![1; 2]).unwrap();
    let piece = |exchange: Arc<dyn Exchange>| Stage::piece(&spec, 0..1, &cpu, (share.clone(), exchange));
    // Neither alone nor the other rank.
    let [other, own] = <[Threads; 2]>::try_from(Threads::group(2)).unwrap();
    for exchange in [Arc::new(Alone) as Arc<dyn Exchange>, Arc::new(other)] {
        assert!(piece(exchange).unwrap_err().to_string().contains("`share` is 1"));
    }
    let piece = piece(Arc::new(own)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let refused = piece.store(&piece.init(1).unwrap(), folder.path(), WriteOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("whole width"), "{refused}");
}
