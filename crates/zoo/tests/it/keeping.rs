//! Ways to save device memory between forward and backward passes: gradients stay bit-identical, and memory use
//! decreases.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_base::ChainStep::{self, Backward, Drop, Forward, ForwardAll, Keep, Restore};
use farflung_tensor::Device;
use farflung_zoo::layer::Grads;
use farflung_zoo::spec::{BalanceOver, RouterLosses};
use farflung_zoo::{
    ActivationPolicy, Borders, Input, ModelSpec, Output, Resize, Saved, Stage, Targets, gpt2, stage,
};

const LAYERS: usize = 6;

/// Steps that keep three inputs at first, those of blocks 0, 3 and 4. The input of block 0 is restored three
/// times, for the backward passes of blocks 2, 1 and 0.
const NESTED: [ChainStep; 31] = [
    Keep(0),
    Forward(0),
    Forward(1),
    Forward(2),
    Keep(3),
    Forward(3),
    Keep(4),
    ForwardAll(4),
    ForwardAll(5),
    Backward(5),
    Backward(4),
    Drop(4),
    Restore(3),
    ForwardAll(3),
    Backward(3),
    Drop(3),
    Restore(0),
    Forward(0),
    Forward(1),
    Keep(2),
    ForwardAll(2),
    Backward(2),
    Drop(2),
    Restore(0),
    Forward(0),
    ForwardAll(1),
    Backward(1),
    Restore(0),
    ForwardAll(0),
    Backward(0),
    Drop(0),
];

/// Returns the loss and the gradients of a step, and the maximum bytes on the device.
fn step(
    config: &ModelSpec,
    device: &Device,
    keeping: ActivationPolicy,
    halves: bool,
    after: impl Fn(&mut Saved),
) -> (f64, Vec<f32>, usize) {
    let mut stage = Stage::whole(config, device).unwrap();
    stage.set_activation_policy(keeping);
    let (params, mut grads) = (stage.init(3).unwrap(), stage.zeros().unwrap());
    let ids = |shift| (0..128_u32).map(|i| (i * 7 + shift) % 20).collect::<Vec<_>>();
    let tokens = Input::Tokens(stage.tokens(&ids(0), 64).unwrap()).with_borders(Borders::default());
    let tokens = tokens.with_sequence_weight(0.5);
    let targets = stage.tokens(&ids(7), 64).unwrap();
    let (output, mut saved) =
        stage.forward(&params, tokens, Some(Targets::all(&targets, 1.0 / 128.0))).unwrap();
    after(&mut saved);
    let Output::Losses(losses) = output else { unreachable!("a whole model gives losses") };
    let mut flat = Grads::flat(&mut grads, false);
    if halves {
        assert!(stage.backward_input(&params, &mut saved, None).unwrap().is_none());
        stage.backward_weight(saved, &mut flat, |_, _| {}).unwrap();
    } else {
        stage.backward(&params, saved, None, &mut flat, |_, _| {}).unwrap();
    }
    (stage::total(&losses).unwrap(), grads.to_vec().unwrap(), device.memory().1)
}

/// A model with feed-forward networks, and one with experts whose choices gradients depend on in each way.
fn models() -> Vec<ModelSpec> {
    let size = Resize { layers: Some(LAYERS), dim: Some(32), vocab: Some(20), ..Resize::default() };
    let mut experts = ModelSpec::preset("mixtral-nano").unwrap().resized(size).unwrap();
    // Narrow experts, since parameters and gradients are in memory however activations are kept.
    experts.blocks[0].block.mlp.width = 16;
    let losses = |over| RouterLosses { balance: 0.5, over, z: 0.1 };
    let over = BalanceOver::ALL.map(|over| experts.clone().with_router_losses(losses(over)));
    [gpt2(LAYERS, 4, 32, 64, 20).unwrap()].into_iter().chain(over).collect()
}

/// Tests all settings on devices created by `open`. `apart` says whether device memory is separate from host
/// memory.
fn ways(open: impl Fn() -> Device, apart: bool) {
    for config in models() {
        ways_of(&config, &open, apart);
    }
}

fn ways_of(config: &ModelSpec, open: &impl Fn() -> Device, apart: bool) {
    let (loss, grads, most) = step(config, &open(), ActivationPolicy::default(), false, |_| {});
    for (recompute, offload) in [(2, 0), (LAYERS, 0), (usize::MAX, 1), (0, 2), (0, LAYERS), (2, 2)] {
        for halves in [false, true] {
            let keeping = ActivationPolicy { recompute, offload, steps: None };
            let (same_loss, same_grads, held) = step(config, &open(), keeping.clone(), halves, |_| {});
            assert_eq!(same_loss.to_bits(), loss.to_bits(), "{keeping:?}");
            assert!(same_grads == grads, "{keeping:?}");
            // A recomputed block keeps only its input, about a sixteenth of what a block saves.
            let (all_again, all_away) = (recompute >= LAYERS, offload >= LAYERS && apart);
            if !halves && (all_again || all_away) {
                assert!(held < most * 6 / 10, "{keeping:?}: {held} of {most} bytes");
            }
        }
    }
    for halves in [false, true] {
        let keeping = ActivationPolicy { steps: Some(NESTED.into()), ..ActivationPolicy::default() };
        let (same_loss, same_grads, held) = step(config, &open(), keeping, halves, |_| {});
        assert_eq!(same_loss.to_bits(), loss.to_bits());
        assert!(same_grads == grads);
        assert!(halves || held < most * 7 / 10, "{held} of {most} bytes");
    }
    let (same_loss, same_grads, _) =
        step(config, &open(), ActivationPolicy::default(), false, |saved| saved.offload(4));
    assert!(same_loss.to_bits() == loss.to_bits() && same_grads == grads);
}

#[test]
fn on_a_processor() {
    ways(|| Device::cpu(1).unwrap(), false);
}

#[cfg(feature = "wgpu")]
#[test]
fn on_a_device_with_memory_of_its_own() {
    ways(|| Device::wgpu(0).unwrap(), true);
}
