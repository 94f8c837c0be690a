//! Compares stages that are pools of ranks with one process that has the same microbatches.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::pipeline::{Run, model, same, saved};
use crate::small::{job, on_all};
use farflung::TrainConfig;
use farflung::config::choice::TransportKind;
use farflung::config::pools::Numbers;
use farflung::parallel::Recompute;
use farflung::parallel::pipeline::ComputeKind;
use farflung::train::{Prediction, ReplicaSchedule, Thoroughness, Trainer};
use farflung::transports::SIMULATED;

const STEPS: u64 = 3;

/// Losses, the last gradient, the parameters and the held-out loss of a run.
#[derive(Debug, PartialEq)]
struct Trace {
    losses: Vec<f64>,
    grads: Vec<f32>,
    params: Vec<f32>,
    held_out: f64,
}

/// Returns settings of a small GPT whose gradients are not clipped.
fn config() -> (tempfile::TempDir, TrainConfig) {
    let (folder, config) = crate::small::config(STEPS);
    (folder, TrainConfig { clip: 0.0, ..config })
}

fn pooled(config: &TrainConfig, sizes: &[u32], rates: Option<&[u32]>) -> TrainConfig {
    let ranks = sizes.iter().sum::<u32>() as usize;
    let (pools, pool_rates) = (Some(Numbers(sizes.to_vec())), rates.map(|rates| Numbers(rates.to_vec())));
    TrainConfig { workers: ranks, stages: ranks, pools, pool_rates, ..config.clone() }
}

/// Returns rank 0's trace of a run, and for each rank the number of its part with its hash.
fn train(config: &TrainConfig) -> (Trace, Vec<(u32, blake3::Hash)>) {
    let job = job(config);
    let mut ranks = on_all(&job, |connection| {
        let rank = connection.comm.rank();
        let mut trainer = Trainer::new(&job, connection.comm, 1).unwrap();
        let losses = (0..STEPS).map(|_| trainer.step(false).unwrap().loss).collect();
        let held_out = trainer.evaluate().unwrap();
        trainer.verify(Thoroughness::All).unwrap();
        let (grads, params) = if config.pools.is_some() {
            (trainer.gather_grads().unwrap(), trainer.gather_params().unwrap())
        } else {
            (None, None)
        };
        let values = |gathered: Option<farflung::tensor::Tensor>, own: &farflung::tensor::Tensor| {
            gathered.as_ref().unwrap_or(own).to_vec::<f32>().unwrap()
        };
        let (grads, params) = (values(grads, trainer.grads()), values(params, trainer.params()));
        (Trace { losses, grads, params, held_out }, (job.plan.place(rank), trainer.hash().unwrap()))
    });
    let held = ranks.iter().map(|(_, held)| *held).collect();
    (ranks.swap_remove(0).0, held)
}

fn off(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b))).sum();
    (off / b.iter().map(|&b| square(f64::from(b))).sum::<f64>()).sqrt()
}

fn close(name: &str, got: &Trace, want: &Trace) {
    let losses = got.losses.iter().zip(&want.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(losses < 1e-6, "{name}: losses {losses}");
    assert!((got.held_out - want.held_out).abs() < 1e-6, "{name}: {} {}", got.held_out, want.held_out);
    assert!(off(&got.grads, &want.grads) < 1e-5, "{name}: gradients {}", off(&got.grads, &want.grads));
    assert!(off(&got.params, &want.params) < 1e-5, "{name}: parameters {}", off(&got.params, &want.params));
}

fn alone(config: &TrainConfig, microbatches: usize) -> Trace {
    let whole = TrainConfig { workers: 1, stages: 1, accumulate: microbatches, ..config.clone() };
    train(&TrainConfig { microbatches: None, ..whole }).0
}

#[test]
fn pools_train_as_one_process_and_their_ranks_are_equal_to_the_bit() {
    let (_folder, config) = config();
    for (sizes, rates, microbatches) in [
        (&[1, 2][..], None, 4),
        (&[2, 1], None, 5),
        (&[2, 2], None, 4),
        (&[1, 1], None, 4),
        (&[1, 3, 2], Some(&[1, 4, 2, 1, 1, 3][..]), 7),
        (&[3, 1], Some(&[5, 1, 1, 1]), 6),
    ] {
        let want = alone(&config, microbatches);
        let config = TrainConfig { microbatches: Some(microbatches), ..pooled(&config, sizes, rates) };
        let (got, held) = train(&config);
        let name = format!("{sizes:?} {rates:?}");
        close(&name, &got, &want);
        for (part, hash) in &held {
            let of_part = held.iter().filter(|(other, _)| other == part);
            assert!(of_part.clone().all(|(_, other)| other == hash), "{name}: part {part}");
            assert_eq!(of_part.count() as u32, sizes[*part as usize], "{name}: part {part}");
        }
    }
}

#[test]
fn clipping_recomputation_and_packed_boundaries_go_with_pools() {
    let (_folder, config) = config();
    let config = TrainConfig { clip: 0.1, microbatches: Some(6), ..config };
    let want = alone(&config, 6);
    let three = pooled(&config, &[1, 2], None);
    for recompute in [Recompute::Full, Recompute::EachLayer, Recompute::Layers(1)] {
        close("recompute", &train(&TrainConfig { recompute, offload: 1, ..three.clone() }).0, &want);
    }
    close("memory", &train(&TrainConfig { memory: Some(1), ..three.clone() }).0, &want);
    // With 8-bit values the losses are only similar.
    let int8 = "int8".parse().unwrap();
    let packed = train(&TrainConfig {
        boundary: int8,
        boundary_backward: int8,
        codec: "int8".parse().unwrap(),
        ..three
    })
    .0;
    for (got, want) in packed.losses.iter().zip(&want.losses) {
        assert!((got - want).abs() < 0.02, "{got} {want}");
    }
    assert_ne!(packed.losses, want.losses);
}

/// On the virtual clock, microbatches follow the machines' speeds, and a step takes the predicted time.
#[test]
fn machines_of_a_pool_take_microbatches_by_their_speed() {
    let (folder, config) = config();
    let device = |(rank, flops): (usize, &str)| {
        format!("[[device]]\nname = \"m{rank}\"\nflops = \"{flops} MFLOPS\"\nmemory = \"8GB\"\n")
    };
    let devices: String = ["400", "200", "100"].into_iter().enumerate().map(device).collect();
    let topology = folder.path().join("topology.toml");
    std::fs::write(&topology, format!("default = \"50mbit,2ms\"\n{devices}")).unwrap();
    let config = TrainConfig {
        transport: TransportKind::of(&SIMULATED),
        topology: Some(topology),
        microbatches: Some(12),
        ..pooled(&config, &[1, 2], None)
    };
    let job = job(&config);
    assert_eq!(job.plan.pools().unwrap().rates, [1000, 500, 250]);
    let schedule = ReplicaSchedule::new(&job, 0).unwrap();
    let mut counts = [0; 3];
    let actions = schedule.schedule.order().actions();
    for (rank, _) in actions.filter(|(_, action)| action.kind == ComputeKind::Forward) {
        counts[rank.index()] += 1;
    }
    assert_eq!(counts, [12, 8, 4]);
    let took = on_all(&job, |connection| {
        let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
        let begun = rank.comm().now();
        rank.step(false).unwrap();
        (rank.comm().now() - begun).as_secs_f64()
    });
    let took = took.into_iter().fold(0.0, f64::max);
    let predicted = Prediction::of(&job).unwrap().step().as_secs_f64();
    assert!((took / predicted - 1.0).abs() < 0.01, "{took} s, predicted {predicted} s");
}

#[test]
fn a_run_of_pools_resumes_with_the_same_bits_and_on_other_pools() {
    let run = Run::new();
    let args = "--stages 2 --pools 1,2 --microbatches 4 --codec int8 --lr-schedule constant";
    let a = run.done(&[], "alone", args);
    run.done(&[], "twice", &format!("{args} --steps 3"));
    let b = run.done(&[], "twice", &format!("{args} --resume auto"));
    same(args, &a, &b);
    for what in ["model", "optimizer"] {
        assert!(saved(&run.at("alone"), what) == saved(&run.at("twice"), what), "{what}");
    }
    // The run continues with the same microbatches on other ranks: one pipeline, other pools, processes over
    // TCP.
    let plain = "--microbatches 4 --lr-schedule constant";
    let whole = run.done(&[], "whole", &format!("{plain} --stages 2 --workers 2"));
    run.done(&[], "cut", &format!("{plain} --stages 2 --workers 2 --steps 2"));
    run.done(&[], "cut", &format!("{plain} --pools 1,2 --steps 4 --resume auto"));
    same(
        "cut",
        &run.done(&[], "cut", &format!("{plain} --pools 3,1 --pool-rates 2,1,1,1 --resume auto")),
        &whole,
    );
    let threads = run.done(&[], "threads", &format!("{plain} --pools 1,2"));
    let launched = run.done(&["launch", "-n", "3", "--"], "launched", &format!("{plain} --pools 1,2"));
    same("threads", &threads, &whole);
    same("launched", &launched, &whole);
    assert_eq!(model(&run.at("threads")), model(&run.at("launched")));
}

#[test]
fn what_pools_do_not_go_with_is_refused_with_the_reason() {
    let run = Run::new();
    for (args, said) in [
        ("--pools 1,2 --workers 6", "`workers` is 6, expected 3, the ranks of `pools`"),
        ("--pools 1,2 --stages 4", "`stages` is 4, expected 2 (number of stages in `pools`)"),
        ("--pools 1,3 --microbatches 2", "`microbatches` is 2, expected at least 3"),
        ("--pools 1,2 --sync diloco", "ddp with pools"),
        ("--pools 1,2 --optimizer onebit-adam", "with pools, another such as adamw"),
        ("--pools 1,2 --boundary aqsgd:4 --sampling epochs", "a codec without memory with pools"),
        ("--pools 4", "`pools` is"),
    ] {
        let output = run.farflung(&[], "refused", args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(said), "{args}: {text}");
    }
}
