//! Tests which runs are rejected on machines of several sizes, and which alternatives are named. Compares
//! estimates with the bytes that a device counts.

use farflung_base::{Bytes, Rank};
use farflung_optim::local::SGD;
use farflung_optim::sync::{DILOCO, NOLOCO, SyncMethod};
use farflung_tensor::Device;
use farflung_zoo::layer::Grads;
use farflung_zoo::{ActivationPolicy, Input, Resize, Stage, Targets, gpt2};

use super::*;
use crate::config::choice::{OptimizerKind, StatePlace, SyncKind, TokenizerKind, TransportKind};
use crate::config::value::Setting;
use crate::train::activations;
use crate::transports::MEMORY;
use farflung_parallel::{Part, Recompute};

const MB: u64 = 1_000_000;

const fn machine(megabytes: u64) -> Available {
    Available { free: megabytes * MB, total: 2 * megabytes * MB }
}

fn refusal(config: &TrainConfig, available: impl Into<Option<Available>>) -> Option<TooLarge> {
    match Case::new(config, None).unwrap().admit(config, available.into()) {
        Ok(()) => None,
        Err(Error::TooLarge(refusal)) => Some(*refusal),
        Err(error) => panic!("{error}"),
    }
}

fn small() -> TrainConfig {
    TrainConfig { transport: TransportKind::of(&MEMORY), ..TrainConfig::default() }
}

#[test]
fn what_would_fit_is_the_largest_that_does() {
    let config = TrainConfig { batch: 100, workers: 12, ..small() };
    let refused = refusal(&config, machine(600)).unwrap();
    assert!(refused.needed > 600_000_000 && refused.available == Some(600 * MB), "{refused}");
    assert!(refused.parts.windows(2).all(|pair| pair[0].1 >= pair[1].1), "{refused}");
    let [batch, workers] = &refused.fits[..] else { panic!("{refused}") };
    let (("batch", batch), ("workers", workers)) = (batch[0], workers[0]) else { panic!("{refused}") };
    let with = |batch, workers| refusal(&TrainConfig { batch, workers, ..config.clone() }, machine(600));
    assert!(with(batch, 12).is_none() && with(batch + 1, 12).is_some(), "{refused}");
    assert!(with(100, workers).is_none() && with(100, workers + 1).is_some(), "{refused}");
    assert!(
        refused.to_string().contains(&format!("`batch` {batch} would fit, or `workers` {workers}")),
        "{refused}"
    );
    // The slack: four fifths of the estimate suffice.
    let least = refused.needed * 4 / 5;
    let exactly = |bytes: u128| Available { free: bytes as u64, total: u64::MAX };
    assert!(refusal(&config, exactly(least)).is_none() && refusal(&config, exactly(least - 1)).is_some());
}

#[test]
fn state_on_disk_is_named_where_it_is_enough() {
    let config = TrainConfig {
        model: "gpt2".to_owned(),
        tokenizer: TokenizerKind::Byte,
        vocab: Some(50_257),
        context: Some(64),
        batch: 1,
        workers: 1,
        ..small()
    };
    let refused = refusal(&config, machine(1200)).unwrap();
    assert!(refused.on_disk && refused.fits.is_empty(), "{refused}");
    assert!(refused.to_string().ends_with(": `state` disk would fit"), "{refused}");
    let disk = TrainConfig { state: StatePlace::Disk, codec: AverageSpec::default(), ..config.clone() };
    assert!(refusal(&disk, machine(1200)).is_none());
    let refused = refusal(&TrainConfig { batch: 64, ..config.clone() }, machine(3800)).unwrap();
    assert!(refused.to_string().contains("`batch` "), "{refused}");
    assert!(refused.to_string().ends_with(" would fit; all of it with `state` disk"), "{refused}");
    // Not where it cannot be.
    let local = TrainConfig { sync: SyncKind::of(&DILOCO), workers: 2, ..config };
    assert!(!refusal(&local, machine(2400)).unwrap().on_disk);
}

#[test]
fn where_no_single_setting_is_enough_several_are_named_or_the_model() {
    let config = TrainConfig { batch: 5000, workers: 64, accumulate: 3, ..small() };
    let refused = refusal(&config, machine(100)).unwrap();
    let [together] = &refused.fits[..] else { panic!("{refused}") };
    let [("batch", batch), ("workers", 1), ("accumulate", 1), ("eval-batches", 1)] = together[..] else {
        panic!("{refused}")
    };
    let least = |batch| TrainConfig { batch, workers: 1, accumulate: 1, eval_batches: 1, ..config.clone() };
    assert!(refusal(&least(batch), machine(100)).is_none());
    assert!(refusal(&least(batch + 1), machine(100)).is_some());

    let huge = TrainConfig { model: "gpt3-175b".to_owned(), ..small() };
    let refused = refusal(&huge, machine(16_000)).unwrap();
    assert!(refused.fits.is_empty(), "{refused}");
    let model = refused.model.unwrap().to_owned();
    assert!(
        refused.to_string().ends_with(&format!(
            "with `batch` 1 and `workers` 1 the largest `model` that would fit is {model}"
        )),
        "{refused}"
    );
    assert!(refusal(&TrainConfig { model, batch: 1, workers: 1, ..small() }, machine(16_000)).is_none());
    let none = refusal(&huge, machine(1)).unwrap();
    assert!(none.model.is_none() && none.to_string().ends_with("no smaller settings would fit"), "{none}");
}

#[test]
fn sizes_without_end_are_refused_and_overflow_nothing() {
    let most = usize::MAX;
    let absurd = TrainConfig { batch: most, accumulate: most, eval_batches: u64::MAX, ..small() };
    let long = TrainConfig { stages: 2, microbatches: Some(50_000_000), ..small() };
    assert!(refusal(&long, machine(64_000)).is_some());
    for config in [
        TrainConfig { batch: 1_000_000_000, ..small() },
        TrainConfig { accumulate: 1 << 40, ..small() },
        TrainConfig { eval_batches: 1 << 40, ..small() },
        TrainConfig { workers: 2048, batch: 1 << 20, ..small() },
        absurd,
    ] {
        for available in [Some(machine(64_000)), None] {
            let refused = refusal(&config, available).unwrap();
            assert_eq!(refused.available.is_none(), available.is_none());
            assert_eq!(Error::TooLarge(Box::new(refused)).exit_code(), 2);
        }
    }
    assert!(refusal(&small(), None).is_none());

    let error = |config: TrainConfig| Case::new(&config, None).err().unwrap().to_string();
    assert!(
        error(TrainConfig { workers: 2049, ..small() })
            .starts_with("`workers` is 2049, expected at most 2048")
    );
    assert!(error(TrainConfig { threads: 100_000, ..small() }).starts_with("`threads` is 100000"));
    let stages = |config: TrainConfig| error(TrainConfig { stages: 2, ..config });
    assert!(stages(TrainConfig { chunks: Some(1 << 30), ..small() }).starts_with("`chunks` is 1073741824"));
    assert!(
        stages(TrainConfig { microbatches: Some(1 << 33), ..small() })
            .starts_with("`microbatches` is 8589934592")
    );
    assert!(stages(TrainConfig { eval_batches: 1 << 40, ..small() }).starts_with("`eval-batches` is"));
}

#[test]
fn processes_of_one_machine_are_held_to_all_of_it_together() {
    let env = |local_world_size| LaunchEnv {
        rank: Rank(1),
        world_size: 4,
        local_rank: 1,
        local_world_size,
        master_addr: String::new(),
        master_port: 1,
        source: "a test",
        more_addresses: Vec::new(),
        security: farflung_comm::secure::Security::unencrypted(),
    };
    let config = TrainConfig { batch: 100, ..small() };
    let admit = |local, free, all| {
        let case = Case::new(&config, Some(&env(local))).unwrap();
        case.admit(&config, Some(Available { free: free * MB, total: all * MB }))
    };
    let one = needed_memory(&config, Some(&env(None))).unwrap();
    assert!((200_000_000..400_000_000).contains(&one), "{one}");
    admit(Some(4), 400, 2000).unwrap();
    admit(Some(1), 400, 500).unwrap();
    let refused = admit(Some(4), 400, 500).unwrap_err().to_string();
    assert!(refused.starts_with("the 4 processes on this machine need about 1."), "{refused}");
    assert!(
        refused.contains(" and 500 MB are available: `batch` ") && !refused.contains("`workers`"),
        "{refused}"
    );
}

#[test]
fn tensors_on_a_gpu_need_no_host_memory() {
    let need = |device: &str| {
        let config = TrainConfig { device: Setting::parse(device).unwrap(), ..small() };
        needed_memory(&config, None).unwrap()
    };
    assert!(need("cuda") < need("cpu") / 2 && need("cuda,cpu") < need("cpu"));
    let away = TrainConfig { device: Setting::parse("cuda").unwrap(), offload: 2, ..small() };
    assert!(needed_memory(&away, None).unwrap() > need("cuda") + 2 * 4 * 16 * 128 * 12 * 64 * 4);
}

static SAME: SyncMethod = SyncMethod { replicas_differ: false, ..NOLOCO };

#[test]
fn settings_that_hold_more_need_more() {
    let need = |config: TrainConfig| needed_memory(&config, None).unwrap();
    let model = 4 * 4 * u128::from(ModelSpec::preset("nano").unwrap().parameters());
    let adam = need(small());
    // AdamW has two moments. A checkpoint is written tensor by tensor, without copies of them.
    let sgd = TrainConfig { optimizer: OptimizerKind::of(&SGD), momentum: 0.0, ..small() };
    let moments = adam - need(sgd);
    assert!((2 * model..3 * model).contains(&moments), "{moments}");
    // Of gradients, each of four ranks keeps a quarter, and none in buckets.
    let divided = |zero| need(TrainConfig { zero, codec: "none".parse().unwrap(), ..small() });
    assert!(divided(2) + model < divided(1), "{} {}", divided(2), divided(1));
    let diloco = TrainConfig { sync: SyncKind::of(&DILOCO), ..small() };
    assert!(need(diloco) > adam + 3 * model);
    // Where replicas differ, their own parameters are kept while the common ones are in use.
    let of = |method: &'static SyncMethod| need(TrainConfig { sync: SyncKind::of(method), ..small() });
    assert!(of(&NOLOCO) > of(&SAME) + model);
    assert!(need(TrainConfig { error_feedback: false, ..small() }) + 2 * model < adam);
    assert!(need(TrainConfig { recompute: Recompute::Full, ..small() }) < adam);
}

#[test]
fn a_long_order_holds_what_a_short_one_says() {
    let model = ModelSpec::preset("nano").unwrap();
    let positions = |schedule: &str, microbatches| {
        let config = TrainConfig {
            stages: 2,
            schedule: schedule.parse().unwrap(),
            microbatches: Some(microbatches),
            ..small()
        };
        Pipeline::new(&config, &model, 2).unwrap().positions
    };
    assert_eq!(positions("1f1b", 200_000), positions("1f1b", 64));
    let (short, long) = (positions("gpipe", 1000), positions("gpipe", 1_000_000));
    for (short, long) in short.iter().zip(&long) {
        assert!(long.held.abs_diff(1000 * short.held) * 100 < long.held, "{short:?} {long:?}");
        assert_eq!(long.logits, 1000 * short.logits);
    }
}

/// The budget is respected, except for the temporary memory of a running block: the device allocates no more
/// than was estimated.
#[test]
fn a_budget_of_memory_is_kept() {
    let model = gpt2(6, 4, 128, 64, 50).unwrap();
    let block = activations::bytes(activations::PerToken::of(&model).block, model.context, 4);
    let mut before = usize::MAX;
    for blocks in [6, 4, 3, 2] {
        let recompute = Recompute::Within(Bytes(block.0 * blocks + block.0 / 4));
        let part = Part { layers: 0..6, recompute, offload: 0 };
        let plan = activations::within_budget(&part, (&model, farflung_base::ContextCut::default()), 4)
            .unwrap()
            .unwrap();
        let keeping = ActivationPolicy { steps: Some(plan.steps.into()), ..ActivationPolicy::default() };
        let measured = measured(&model, keeping);
        let position = rank_memory::whole(&TrainConfig { recompute, batch: 4, ..small() }, &model);
        let estimated = (position.held + position.logits) as usize * 4 * 4 * 64;
        assert!(measured <= estimated, "{blocks} blocks: {measured} of {estimated} bytes");
        assert!(measured * 10 > estimated * 7, "{blocks} blocks: {measured} of {estimated} bytes");
        assert!(measured < before, "{blocks} blocks: {measured} bytes");
        before = measured;
    }
}

/// Returns the bytes that a device allocates for a forward and backward pass of four sequences, besides the
/// parameters and their gradients.
fn measured(model: &ModelSpec, keeping: ActivationPolicy) -> usize {
    let cpu = Device::cpu(1).unwrap();
    let mut stage = Stage::whole(model, &cpu).unwrap();
    stage.set_activation_policy(keeping);
    let (params, mut grads) = (stage.init(1).unwrap(), stage.zeros().unwrap());
    let before = cpu.memory().1;
    let ids: Vec<u32> = (0..4 * 64).map(|i| i % 50).collect();
    let (x, y) = (stage.tokens(&ids, 64).unwrap(), stage.tokens(&ids, 64).unwrap());
    let (_, saved) = stage.forward(&params, Input::Tokens(x), Some(Targets::all(&y, 1.0))).unwrap();
    let mut grads = Grads::flat(&mut grads, false);
    stage.backward(&params, saved, None, &mut grads, |_, _| {}).unwrap();
    cpu.memory().1 - before
}

/// Compares the estimate with the memory that the device allocates for a forward and backward pass.
#[test]
fn activations_are_what_a_device_allocates() {
    let gpt = gpt2(5, 4, 128, 64, 1000).unwrap();
    let sizes =
        Resize { layers: Some(5), heads: Some(6), dim: Some(96), context: Some(64), vocab: Some(1000) };
    let llama = ModelSpec::preset("llama-baby").unwrap().resized(sizes).unwrap();
    for (model, recompute) in [&gpt, &llama].into_iter().flat_map(|model| [0, 2, 5].map(|n| (model, n))) {
        let cpu = Device::cpu(1).unwrap();
        let mut stage = Stage::whole(model, &cpu).unwrap();
        stage.set_activation_policy(ActivationPolicy { recompute, ..ActivationPolicy::default() });
        let (params, mut grads) = (stage.init(1).unwrap(), stage.zeros().unwrap());
        let before = cpu.memory().1;
        let ids: Vec<u32> = (0..4 * 64).collect();
        let (x, y) = (stage.tokens(&ids, 64).unwrap(), stage.tokens(&ids, 64).unwrap());
        let (_, saved) = stage.forward(&params, Input::Tokens(x), Some(Targets::all(&y, 1.0))).unwrap();
        let mut grads = Grads::flat(&mut grads, false);
        stage.backward(&params, saved, None, &mut grads, |_, _| {}).unwrap();
        let measured = (cpu.memory().1 - before) as f64;
        let recompute = if recompute == 0 { Recompute::None } else { Recompute::Layers(recompute as u32) };
        let position = rank_memory::whole(&TrainConfig { recompute, ..small() }, model);
        let estimated = ((position.held + position.logits) * 4 * 4 * 64) as f64;
        let family = model.names.family;
        assert!(
            (0.95..1.05).contains(&(estimated / measured)),
            "{family} {recompute:?}: {estimated} of {measured}"
        );
        assert_eq!(position.parameters, stage.layout().len() as u128);
    }
}
