//! Compares pipelines of real GPT stages with one process that has the same microbatches.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write as _;

use crate::small::{job, on_all};
use farflung::TrainConfig;
use farflung::base::{Algorithm, Bytes, Rank};
use farflung::comm::{AllReduce as _, cost};
use farflung::config::choice::{OptimizerKind, TransportKind};
use farflung::optim::local::SGD;
use farflung::parallel::Recompute;
use farflung::parallel::pipeline::{Method, Updates, VersionSync};
use farflung::tensor::{Device, Tensor};
use farflung::train::{Prediction, Trainer, refusal};
use farflung::transports::SIMULATED;
use farflung::zoo::layer::Grads;
use farflung::zoo::{Batch, Input, Output, Stage, Targets, stage};

const STEPS: u64 = 3;

/// Returns settings of a small GPT whose gradients are not clipped.
fn config() -> (tempfile::TempDir, TrainConfig) {
    let (folder, config) = crate::small::config(STEPS);
    (folder, TrainConfig { clip: 0.0, ..config })
}

/// Losses, the last gradient, the parameters and the held-out loss of a run.
#[derive(Debug, PartialEq)]
struct Trace {
    losses: Vec<f64>,
    grads: Vec<f32>,
    params: Vec<f32>,
    held_out: f64,
}

fn alone(config: &TrainConfig, microbatches: usize) -> Trace {
    let config =
        TrainConfig { workers: 1, stages: 1, accumulate: microbatches, microbatches: None, ..config.clone() };
    let job = job(&config);
    on_all(&job, |connection| {
        let mut worker = Trainer::new(&job, connection.comm, 1).unwrap();
        let losses = (0..STEPS).map(|_| worker.step(false).unwrap().loss).collect();
        Trace {
            losses,
            grads: worker.grads().to_vec().unwrap(),
            params: worker.params().to_vec().unwrap(),
            held_out: worker.evaluate().unwrap(),
        }
    })
    .remove(0)
}

fn piped(config: &TrainConfig) -> Trace {
    let job = job(config);
    let traces = on_all(&job, |connection| {
        let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
        let losses = (0..STEPS).map(|_| rank.step(false).unwrap().loss).collect();
        let held_out = rank.evaluate().unwrap();
        let grads = rank.gather_grads().unwrap();
        let params = rank.gather_params().unwrap();
        Some(Trace { losses, grads: grads?.to_vec().unwrap(), params: params?.to_vec().unwrap(), held_out })
    });
    traces.into_iter().flatten().next().unwrap()
}

fn off(a: &[f32], b: &[f32]) -> f64 {
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

#[test]
fn every_synchronous_schedule_trains_as_one_process() {
    let (_folder, config) = config();
    let want = alone(&config, 4);
    for schedule in Method::ALL.into_iter().filter(|m| m.is_synchronous() && refusal(*m).is_none()) {
        let config = TrainConfig { workers: 2, stages: 2, schedule, microbatches: Some(4), ..config.clone() };
        close(schedule.name(), &piped(&config), &want);
    }
}

#[test]
fn recomputation_offloading_replicas_and_a_clipped_norm_change_nothing() {
    let (_folder, config) = config();
    let config = TrainConfig { clip: 0.1, ..config };
    let want = alone(&config, 8);
    for (recompute, offload) in [(Recompute::Full, 0), (Recompute::Layers(1), 1), (Recompute::None, 9)] {
        assert_eq!(alone(&TrainConfig { recompute, offload, ..config.clone() }, 8), want, "{recompute:?}");
    }
    let four = TrainConfig { workers: 4, stages: 2, microbatches: Some(4), ..config.clone() };
    for (schedule, recompute) in [
        (Method::OneFOneB, Recompute::None),
        (Method::GPipe, Recompute::Full),
        (Method::OneFOneB, Recompute::EachLayer),
        (Method::ZbV, Recompute::EachLayer),
        (Method::Chimera, Recompute::Layers(1)),
        (Method::ZbV, Recompute::None),
        (Method::TeraPipe, Recompute::None),
        (Method::TeraPipe, Recompute::Full),
        (Method::TeraPipe, Recompute::Layers(1)),
    ] {
        let offload = usize::from(recompute != Recompute::Full);
        close(schedule.name(), &piped(&TrainConfig { schedule, recompute, offload, ..four.clone() }), &want);
    }
    let long = TrainConfig { workers: 4, stages: 4, microbatches: Some(8), ..config };
    for schedule in [Method::ZbH1, Method::DualPipeV] {
        close(schedule.name(), &piped(&TrainConfig { schedule, ..long.clone() }), &want);
    }
}

/// Trains in one process, where each part of the model uses the version of its weights that the method's rule
/// determines.
fn stale(config: &TrainConfig, updates: Updates) -> (Vec<f64>, Vec<f32>) {
    let job = job(&TrainConfig { workers: 1, stages: 1, microbatches: None, ..config.clone() });
    let device = Device::cpu(1).unwrap();
    let depth = config.stages as u32;
    let m = config.microbatches.unwrap() as u32;
    let per_update = if let Updates::TwoVersions { every } = updates { every } else { 1 };
    let stages: Vec<Stage> =
        (0..config.stages).map(|k| Stage::new(&job.model, k..k + 1, &device).unwrap()).collect();
    let mut params: Vec<Vec<f32>> =
        stages.iter().map(|s| s.init(config.seed).unwrap().to_vec().unwrap()).collect();
    let sampler = job.sampler(0).unwrap();
    let tokens = 16.0 * 2.0;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        // The outer index is the version, the inner one the part.
        let mut versions = vec![params.clone()];
        let mut sums: Vec<Vec<f32>> = params.iter().map(|p| vec![0.0; p.len()]).collect();
        let mut loss = 0.0;
        for micro in 0..m {
            let seen: Vec<Tensor> = (0..depth)
                .map(|k| {
                    let values = &versions[updates.version(k, depth, micro) as usize][k as usize];
                    device.tensor(values, values.len()).unwrap()
                })
                .collect();
            let Batch { inputs: x, targets: y, .. } =
                sampler.batch(step * u64::from(m) + u64::from(micro)).unwrap();
            let targets = stages[0].tokens(&y, 16).unwrap();
            let mut input = Input::Tokens(stages[0].tokens(&x, 16).unwrap());
            let mut kept = Vec::new();
            for (k, (stage, p)) in stages.iter().zip(&seen).enumerate() {
                let scale = 1.0 / (tokens * per_update as f32);
                let targets = (k + 1 == stages.len()).then_some(Targets::all(&targets, scale));
                let (out, saved) = stage.forward(p, input, targets).unwrap();
                kept.push(saved);
                input = match out {
                    Output::Hidden(h) => Input::Hidden(h),
                    Output::Losses(l) => {
                        loss += stage::total(&l).unwrap();
                        Input::Hidden(l)
                    }
                };
            }
            let mut dy = None;
            for (k, saved) in kept.into_iter().enumerate().rev() {
                let mut flat = stages[k].zeros().unwrap();
                let mut grads = Grads::flat(&mut flat, false);
                dy = stages[k].backward(&seen[k], saved, dy, &mut grads, |_, _| {}).unwrap();
                let values = flat.to_vec::<f32>().unwrap();
                sums[k].iter_mut().zip(values).for_each(|(sum, g)| *sum += g);
            }
            if (micro + 1) % per_update == 0 {
                // The token table is used by two parts.
                let table = stages[0].layout().params()[0].range();
                let last = stages.len() - 1;
                for i in table {
                    let sum = sums[0][i] + sums[last][i];
                    (sums[0][i], sums[last][i]) = (sum, sum);
                }
                for (p, sum) in params.iter_mut().zip(&mut sums) {
                    p.iter_mut().zip(&*sum).for_each(|(p, g)| *p -= config.lr as f32 * g);
                    sum.fill(0.0);
                }
                versions.push(params.clone());
            }
        }
        losses.push(loss / (f64::from(tokens) * f64::from(m)));
    }
    let mut whole = vec![0.0; Stage::whole(&job.model, &device).unwrap().layout().len()];
    let layout = Stage::whole(&job.model, &device).unwrap().layout().clone();
    for (stage, p) in stages.iter().zip(&params) {
        for param in stage.layout().params() {
            let to = &layout.params()[layout.find(&param.name).unwrap()];
            whole[to.range()].copy_from_slice(&p[param.range()]);
        }
    }
    (losses, whole)
}

#[test]
fn asynchronous_schedules_train_as_one_process_with_the_same_stale_weights() {
    let (_folder, config) = config();
    let config = TrainConfig {
        optimizer: OptimizerKind::of(&SGD),
        momentum: 0.0,
        weight_decay: 0.0,
        lr: 0.5,
        min_lr: 0.0,
        workers: 4,
        stages: 4,
        microbatches: Some(12),
        ..config
    };
    for (schedule, version_sync, updates) in [
        (Method::PipeDream, VersionSync::Newest, Updates::Stashed { sync: VersionSync::Newest }),
        (Method::PipeDream, VersionSync::Vertical, Updates::Stashed { sync: VersionSync::Vertical }),
        (Method::PipeDream2Bw, VersionSync::Newest, Updates::TwoVersions { every: 4 }),
    ] {
        let config = TrainConfig { schedule, version_sync, ..config.clone() };
        let got = piped(&config);
        let (losses, params) = stale(&config, updates);
        let worst = got.losses.iter().zip(&losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-6, "{schedule} {updates}: {:?} {losses:?}", got.losses);
        assert!(off(&got.params, &params) < 1e-6, "{schedule} {updates}: {}", off(&got.params, &params));
    }
}

/// Two pipelines of two ranks, with slow links between replicas, so that averages take time; each pair has its
/// own link.
fn two_pipelines(folder: &std::path::Path) -> std::path::PathBuf {
    let mut text = "default = \"10gbit,1us\"\n".to_owned();
    for rank in 0..4 {
        let _ = write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"100 MFLOPS\"\nmemory = \"8GB\"\n");
    }
    for (a, b) in [(0, 2), (1, 3)] {
        let _ = write!(text, "[[link]]\nbetween = [\"m{a}\", \"m{b}\"]\nlink = \"20mbit,10us\"\n");
    }
    let path = folder.join("topology.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// On the virtual clock, a part's average starts after its last backward, while its rank still computes other
/// parts.
#[test]
fn averages_hide_behind_the_parts_that_still_compute() {
    let (folder, config) = config();
    let config = TrainConfig {
        workers: 4,
        stages: 2,
        microbatches: Some(4),
        transport: TransportKind::of(&SIMULATED),
        topology: Some(two_pipelines(folder.path())),
        ..config
    };
    // Returns the virtual time of a step, the predicted time of a step, and the time of averaging the third
    // part.
    let timed = |config: &TrainConfig| {
        let job = job(config);
        let all = on_all(&job, |connection| {
            let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
            let begun = rank.comm().now();
            rank.step(false).unwrap();
            (rank.comm().now() - begun).as_secs_f64()
        });
        let predicted = Prediction::of(&job).unwrap().step().as_secs_f64();
        let third = job.plan.parts.get(2).map_or(0.0, |part| {
            let layers = part.layers.start as usize..part.layers.end as usize;
            let cpu = Device::cpu(1).unwrap();
            let values = Stage::new(&job.model, layers, &cpu).unwrap().layout().count();
            let (bytes, pair) =
                (Bytes(4 * values as u64), job.topology().unwrap().among(&[Rank(0), Rank(2)]));
            cost(&Algorithm::Ring.programs(values, bytes, &pair), bytes, &pair).as_secs_f64()
        });
        (all.into_iter().fold(0.0, f64::max), predicted, third)
    };
    for schedule in
        [Method::BreadthFirst, Method::Interleaved, Method::ZbV, Method::OneFOneB, Method::Chimera]
    {
        let (took, predicted, third) = timed(&TrainConfig { schedule, ..config.clone() });
        assert!((took / predicted - 1.0).abs() < 0.01, "{schedule}: {took} s, predicted {predicted} s");
        if schedule == Method::BreadthFirst {
            // The first rank holds the first part and the third: the average of the third is finished before
            // the first part is.
            let (after, ..) = timed(&TrainConfig { schedule, overlap: false, ..config.clone() });
            let hidden = (after - took) / third;
            assert!(
                (0.9..1.1).contains(&hidden),
                "{took} s, {after} s, {third} s for the third part's average"
            );
        }
    }
}
