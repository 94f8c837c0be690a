//! Compares predictions with the memory of real ranks: a small GPT whose buffers are counted by its device.

use farflung_compress::StateValue;
use farflung_optim::local::METHODS;
use farflung_optim::sync::{DDP, ZERO_ONE};
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::Method;
use farflung_tensor::Precision;
use farflung_zoo::weights::{Dtype, TokenIds, config_text};

use super::*;
use crate::Stop;
use crate::config::choice::{
    LrScheduleKind, OptimizerKind, SamplingKind, StatePlace, SyncKind, TransportKind,
};
use crate::config::pools::Numbers;
use crate::config::value::Setting as _;
use crate::config::zero::Weights;
use crate::train::{Trainer, connections};
use crate::transports::MEMORY;

/// Returns settings of a small GPT without replicas.
fn config(stages: usize, schedule: Method) -> TrainConfig {
    TrainConfig {
        layers: Some(6),
        heads: Some(2),
        dim: Some(32),
        context: Some(32),
        batch: 2,
        microbatches: (stages > 1).then_some(8),
        lr_schedule: LrScheduleKind::Constant,
        clip: 0.0,
        codec: "none".parse().unwrap(),
        transport: TransportKind::of(&MEMORY),
        threads: 1,
        schedule,
        stages,
        workers: stages,
        ..TrainConfig::default()
    }
}

fn job(mut config: TrainConfig) -> Job {
    let data = tempfile::NamedTempFile::new().unwrap();
    let text: Vec<_> = (0..2000).map(|i| format!("{i} and {}", i * i)).collect();
    std::fs::write(data.path(), text.join(", ")).unwrap();
    config.data = Some(data.path().to_owned());
    let workers = config.workers;
    Job::new(config, workers, Stop::manual()).unwrap()
}

/// Returns what each rank's device held in the second of two steps, by kind.
fn measured(job: &Job) -> Vec<MemoryByKind> {
    counted(job).into_iter().map(|held| held.device).collect()
}

/// Returns what each rank held in the second of two steps.
fn counted(job: &Job) -> Vec<StepMemory> {
    std::thread::scope(|scope| {
        let held = |connection: crate::train::WorkerConnection| {
            let mut trainer = Trainer::new(job, connection.comm, 1).unwrap();
            let folder = tempfile::tempdir().unwrap();
            trainer.keep_state_in(job, folder.path()).unwrap();
            trainer.step(false).unwrap();
            trainer.begin_memory();
            trainer.step(false).unwrap();
            let held = trainer.memory();
            let all = trainer.stage().device().memory();
            assert_eq!(held.step.device.total().0, all.0 as u64, "all that the device has allocated");
            let files = std::fs::read_dir(folder.path()).unwrap();
            let files: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
            assert_eq!(held.step.disk.optimizer.0, files);
            // Older versions of parameters, and gradients of units, are dropped with the step.
            let (after, most) = (held.device_after, held.step.device);
            assert!(after.weights.0 > 0 && after.weights <= most.weights, "{held:?}");
            assert!(after.gradients <= most.gradients && after.activations < most.activations, "{held:?}");
            held.step
        };
        let ranks: Vec<_> = connections(job, None)
            .unwrap()
            .into_iter()
            .map(|connection| scope.spawn(move || held(connection)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns the predicted bytes of buffers, by kind.
fn buffers(held: &StepMemory) -> MemoryByKind {
    held.device
}

#[test]
fn buffers_are_predicted_to_the_byte() {
    let one = || config(1, Method::OneFOneB);
    let mut configs = vec![
        one(),
        TrainConfig { recompute: Recompute::Layers(4), ..one() },
        TrainConfig { recompute: Recompute::Full, ..one() },
        TrainConfig { recompute: Recompute::Within(Bytes(600_000)), ..one() },
        TrainConfig { precision: Precision::Bf16, ..one() },
        TrainConfig { accumulate: 3, ..one() },
        TrainConfig { document_mask: true, accumulate: 3, ..one() },
        TrainConfig { document_mask: true, ..config(2, Method::TeraPipe) },
        TrainConfig { document_mask: true, recompute: Recompute::Full, ..config(3, Method::OneFOneB) },
        TrainConfig { recompute: Recompute::Full, ..config(3, Method::OneFOneB) },
        TrainConfig { recompute: Recompute::EachLayer, ..config(3, Method::OneFOneB) },
        TrainConfig { recompute: Recompute::EachLayer, ..config(2, Method::ZbH1) },
    ];
    configs.extend(METHODS.iter().map(|method| TrainConfig {
        optimizer: OptimizerKind::of(method),
        // zero-one-adam needs its own method of synchronisation; every other optimizer works with DDP.
        sync: SyncKind::of(if method.name == "zero-one-adam" { &ZERO_ONE } else { &DDP }),
        ..one()
    }));
    let trains = |schedule: &Method| *schedule != Method::Inference;
    configs.extend(Method::ALL.into_iter().filter(trains).map(|schedule| config(2, schedule)));
    configs.extend([Method::PipeDream, Method::PipeDream2Bw].map(|schedule| config(4, schedule)));
    for config in configs {
        let what = format!(
            "{} of {} stages, {}, {:?}, {}",
            config.schedule, config.stages, config.optimizer, config.recompute, config.precision
        );
        let job = job(config);
        let predicted: Vec<_> = step_memory(&job).unwrap().iter().map(buffers).collect();
        assert_eq!(predicted, measured(&job), "{what}");
    }
}

/// With all experts for each token, routing is even, as it is where memory is counted.
#[test]
fn experts_that_replicas_divide_are_predicted_to_the_byte() {
    let mut model = ModelSpec::preset("mixtral-nano").unwrap();
    model.context = 32;
    for experts in model.blocks.iter_mut().filter_map(|run| run.block.experts.as_mut()) {
        experts.per_token = experts.count;
    }
    let text = config_text(&model, Dtype::F32, &TokenIds::default());
    for (stages, weights, recompute) in [
        (1, vec![1, 1], Recompute::None),
        (1, vec![3, 1], Recompute::None),
        (1, vec![1, 1], Recompute::Full),
        (2, vec![1, 1], Recompute::None),
        (2, vec![3, 1], Recompute::Full),
    ] {
        let config = TrainConfig {
            model: text.clone(),
            layers: None,
            heads: None,
            dim: None,
            workers: 2 * stages,
            microbatches: (stages > 1).then_some(4),
            expert: 2,
            expert_weights: Some(Numbers(weights.clone())),
            recompute,
            ..config(stages, Method::OneFOneB)
        };
        let job = job(config);
        let predicted: Vec<_> = step_memory(&job).unwrap().iter().map(buffers).collect();
        assert_eq!(predicted, measured(&job), "{stages} stages, {weights:?}, {recompute}");
    }
}

#[test]
fn layers_whose_width_ranks_divide_are_predicted_to_the_byte() {
    let shapes = [
        (1, vec![1, 1], 1, Recompute::None),
        (1, vec![3, 1], 2, Recompute::None),
        (1, vec![1, 2, 1], 1, Recompute::Full),
        (2, vec![1, 1], 2, Recompute::None),
        (2, vec![3, 1], 1, Recompute::Full),
    ];
    for ((stages, weights, replicas, recompute), sequence_parallel) in
        shapes.into_iter().flat_map(|shape| [(shape.clone(), false), (shape, true)])
    {
        let config = TrainConfig {
            sequence_parallel,
            heads: Some(4),
            workers: stages * weights.len() * replicas,
            microbatches: (stages > 1).then_some(4),
            tensor: weights.len(),
            tensor_weights: Some(Numbers(weights.clone())),
            recompute,
            ..config(stages, Method::OneFOneB)
        };
        let job = job(config);
        let predicted: Vec<_> = step_memory(&job).unwrap().iter().map(buffers).collect();
        assert_eq!(
            predicted,
            measured(&job),
            "{stages} stages, {weights:?}, {replicas} replicas, {recompute}, {sequence_parallel}"
        );
    }
}

#[test]
fn divided_sequences_are_predicted_to_the_byte() {
    for (stages, readers, ulysses, replicas, recompute) in [
        (1, 2, 1, 1, Recompute::None),
        (1, 4, 2, 1, Recompute::Full),
        (1, 2, 2, 2, Recompute::Layers(1)),
        (2, 4, 1, 1, Recompute::None),
    ] {
        let config = TrainConfig {
            heads: Some(4),
            workers: stages * readers * replicas,
            context_parallel: readers,
            ulysses,
            microbatches: (stages > 1).then_some(4),
            recompute,
            ..config(stages, Method::OneFOneB)
        };
        let job = job(config);
        let predicted: Vec<_> = step_memory(&job).unwrap().iter().map(buffers).collect();
        assert_eq!(
            predicted,
            measured(&job),
            "{stages} stages, {readers} x {ulysses}, {replicas}, {recompute}"
        );
    }
}

#[test]
fn tiles_of_sparse_attention_are_predicted_to_the_byte() {
    for (stages, tensor, attention) in [
        (1, 1, "strided:3"),
        (1, 2, "fixed:2,1,2+block:2"),
        (2, 1, "bigbird:3,1,1+block:2/window:3"),
        (2, 2, "window:3+sinks:1/full"),
    ] {
        let config = TrainConfig {
            workers: stages * tensor,
            tensor,
            attention: Some(attention.parse().unwrap()),
            ..config(stages, Method::OneFOneB)
        };
        let job = job(config);
        let predicted: Vec<_> = step_memory(&job).unwrap().iter().map(buffers).collect();
        assert_eq!(predicted, measured(&job), "{stages} stages, {tensor}, {attention}");
    }
}

#[test]
fn shards_of_the_state_are_predicted_to_the_byte() {
    for (zero, stages, tensor, weights, optimizer) in [
        (1, 1, 1, vec![1, 1], "adamw"),
        (1, 1, 1, vec![5, 0, 1], "sgd"),
        (1, 1, 1, vec![1, 2], "lamb"),
        (1, 1, 1, vec![1, 1, 1, 1], "muon"),
        (1, 2, 1, vec![3, 1], "adamw"),
        (1, 2, 2, vec![0, 1], "adamw"),
        (2, 1, 1, vec![1, 1], "adamw"),
        (2, 1, 1, vec![5, 0, 1], "sgd"),
        (2, 1, 1, vec![1, 2], "lamb"),
    ] {
        let config = TrainConfig {
            workers: stages * tensor * weights.len(),
            tensor,
            zero,
            optimizer: OptimizerKind::parse(optimizer).unwrap(),
            zero_weights: Some(Weights(weights.clone())),
            ..config(stages, Method::OneFOneB)
        };
        let job = job(config);
        let predicted: Vec<_> = step_memory(&job).unwrap().iter().map(buffers).collect();
        assert_eq!(predicted, measured(&job), "{zero}: {stages} stages, {weights:?}, {optimizer}");
    }
}

#[test]
fn state_on_disk_is_predicted_to_the_byte() {
    // Wide enough for several pieces; the largest tensor has more elements than a piece has at most.
    let wide =
        || TrainConfig { dim: Some(640), vocab: Some(2000), layers: Some(1), ..config(1, Method::OneFOneB) };
    let mut held = Vec::new();
    for (optimizer, zero, workers) in [("adamw", 0, 1), ("lamb", 0, 1), ("muon", 0, 1), ("adamw", 1, 2)] {
        let of = |state| {
            let optimizer = OptimizerKind::parse(optimizer).unwrap();
            job(TrainConfig { optimizer, workers, zero, state, ..wide() })
        };
        let [disk, memory] = [StatePlace::Disk, StatePlace::Device].map(of);
        let predicted: Vec<_> = step_memory(&disk).unwrap().iter().map(buffers).collect();
        assert_eq!(predicted, measured(&disk), "{optimizer}, {workers} workers");
        held.push([disk, memory].map(|job| step_memory(&job).unwrap()[0]));
    }
    // Pieces of 4 MiB with two moments: at most six, whatever the size of the model.
    let [disk, memory] = held[0];
    assert_eq!(disk.device.optimizer.0, 6.min(disk.device.weights.0.div_ceil(4 << 20) + 1) * 2 * (4 << 20));
    assert_eq!(memory.device.optimizer.0, 2 * memory.device.weights.0);
}

#[test]
fn files_buckets_and_residuals_are_counted() {
    let disk = job(TrainConfig { state: StatePlace::Disk, ..config(1, Method::OneFOneB) });
    let (predicted, held) = (step_memory(&disk).unwrap(), counted(&disk));
    assert_eq!(predicted[0].disk, held[0].disk);
    assert!(held[0].disk.optimizer.0 > 2 * 3 * 4 * disk.model.parameters(), "{held:?}");
    let averaged = |codec: &str| {
        let codec = codec.parse().unwrap();
        job(TrainConfig { codec, workers: 2, ..config(1, Method::OneFOneB) })
    };
    let (plain, int8, low_rank) = (averaged("none"), averaged("int8"), averaged("powersgd:1"));
    let model = 4 * plain.model.parameters();
    for held in counted(&plain) {
        assert_eq!((held.host.messages.0, held.device.messages.0), (model, 0), "the buckets");
    }
    for held in counted(&int8) {
        // Buckets of the whole model, and the residuals of two phases: of the model, and of half of it.
        let predicted = step_memory(&int8).unwrap()[0];
        assert_eq!(held.host.messages.0, 0, "the device's memory is the host's");
        let least = 2 * model..predicted.host.messages.0;
        assert!(least.contains(&held.device.messages.0), "{held:?}, {predicted:?}");
    }
    for held in counted(&low_rank) {
        assert!((2 * model..5 * model).contains(&held.host.messages.0), "{held:?}");
    }
}

/// The samples that AQ-SGD's ends store are those in a checkpoint, plus a few words each.
#[test]
fn samples_of_boundaries_are_predicted() {
    let with = |boundary_store| {
        let aqsgd = "aqsgd:4".parse().unwrap();
        let config = TrainConfig {
            boundary: aqsgd,
            boundary_store,
            sampling: SamplingKind::Epochs,
            steps: 2,
            ..config(2, Method::OneFOneB)
        };
        job(config)
    };
    let in_memory = with(StoreKind::Memory);
    let of_step = 2 * 8;
    let predicted = step_memory(&in_memory).unwrap();
    let in_files = step_memory(&with(StoreKind::File)).unwrap();
    std::thread::scope(|scope| {
        let saved = |connection: crate::train::WorkerConnection| {
            let mut trainer = Trainer::new(&in_memory, connection.comm, 1).unwrap();
            trainer.step(false).unwrap();
            trainer.step(false).unwrap();
            let state = trainer.boundaries().save().unwrap();
            let held = trainer.memory().step.host.messages.0;
            let bytes = |value: &StateValue<'_>| match value {
                StateValue::Bytes(bytes) => bytes.len() as u64,
                _ => 0,
            };
            let saved = state.values().map(bytes).sum::<u64>();
            assert_eq!(held, saved + state.len() as u64 * 32);
            saved
        };
        let ranks: Vec<_> = connections(&in_memory, None)
            .unwrap()
            .into_iter()
            .map(|connection| scope.spawn(move || saved(connection)))
            .collect();
        for (rank, saved) in ranks.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
            // The samples of two steps in memory; with files, the samples that one step changed.
            let more = predicted[rank].host.messages.0 - in_files[rank].host.messages.0;
            assert_eq!(saved, 2 * of_step * 32 * 32 * 2, "rank {rank}");
            assert_eq!(more, saved / 2 + of_step * 48, "rank {rank}");
        }
    });
    // Each rank has a file for what it sends, and one for what it gets.
    let stored = with(StoreKind::File);
    std::thread::scope(|scope| {
        for (connection, predicted) in connections(&stored, None).unwrap().into_iter().zip(&in_files) {
            let stored = &stored;
            scope.spawn(move || {
                let folder = tempfile::tempdir().unwrap();
                let mut trainer = Trainer::new(stored, connection.comm, 1).unwrap();
                trainer.hold_samples(stored, Some(folder.path())).unwrap();
                trainer.step(false).unwrap();
                let files = std::fs::read_dir(folder.path().join("boundaries")).unwrap();
                let files: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
                let counted = trainer.memory().step.disk;
                assert_eq!((counted, counted.messages.0), (predicted.disk, files));
            });
        }
    });
}
