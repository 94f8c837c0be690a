//! The settings of the runs whose memory is compared.

use anyhow::{Result, anyhow};
use farflung::TrainConfig;
use farflung::base::{Bytes, Precision};
use farflung::config::choice::{OptimizerKind, SamplingKind, StatePlace, SyncKind};
use farflung::config::value::Setting as _;
use farflung::config::zero::{Weights, ZeroWithin};
use farflung::optim::sync::DILOCO;
use farflung::parallel::Recompute;
use farflung::parallel::pipeline::Method;
use farflung::zoo::ModelSpec;
use farflung::zoo::weights::{Dtype, TokenIds, config_text};

use crate::step_peaks::STEPS;
use crate::workers::config;

/// A run.
pub(super) struct Settings {
    pub(super) name: &'static str,
    pub(super) config: TrainConfig,
}

/// Returns the runs, or a few smaller ones.
pub(super) fn all(seed: u64, quick: bool) -> Result<Vec<Settings>> {
    let one = TrainConfig {
        workers: 1,
        batch: 4,
        layers: Some(6),
        heads: Some(4),
        dim: Some(if quick { 128 } else { 256 }),
        context: Some(128),
        ..config(seed, false)
    };
    let mut all = alone(&one)?;
    all.extend(replicas(&one)?);
    all.extend(divided(&one)?);
    if quick {
        all.retain(|run| {
            matches!(run.name, "bf16, 16 sequences" | "2 replicas, zero 2" | "2 stages, aqsgd:4")
        });
    }
    Ok(all)
}

fn named(name: &'static str, config: TrainConfig) -> Settings {
    Settings { name, config }
}

/// Runs of one rank.
fn alone(one: &TrainConfig) -> Result<Vec<Settings>> {
    Ok(vec![
        named("one rank", one.clone()),
        named("4 layers recomputed", TrainConfig { recompute: Recompute::Layers(4), ..one.clone() }),
        named("within 25 MB", TrainConfig { recompute: Recompute::Within(Bytes(25_000_000)), ..one.clone() }),
        named("bf16, 16 sequences", TrainConfig { precision: Precision::Bf16, batch: 16, ..one.clone() }),
        named(
            "f16, 2 layers offloaded",
            TrainConfig { precision: Precision::F16, offload: 2, ..one.clone() },
        ),
        named("sparse attention", TrainConfig { attention: Some("window:32/full".parse()?), ..one.clone() }),
        named("Muon", TrainConfig { optimizer: optimizer("muon")?, ..one.clone() }),
        named("state on disk", TrainConfig { state: StatePlace::Disk, ..one.clone() }),
    ])
}

/// Runs of replicas that each have the whole model.
fn replicas(one: &TrainConfig) -> Result<Vec<Settings>> {
    let two = TrainConfig { workers: 2, ..one.clone() };
    let zero = |zero: usize, weights: &[u32]| TrainConfig {
        workers: weights.len(),
        zero,
        zero_weights: Some(Weights(weights.to_vec())),
        ..one.clone()
    };
    Ok(vec![
        named("2 replicas, f32", two.clone()),
        named("2 replicas, int8 with feedback", TrainConfig { codec: "int8+ef".parse()?, ..two.clone() }),
        named("2 replicas, DiLoCo", TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 1, ..two }),
        named("3 replicas, zero 1 as 3:1:2", zero(1, &[3, 1, 2])),
        named("2 replicas, zero 2", zero(2, &[1, 1])),
        named("2 replicas, zero 3", zero(3, &[1, 1])),
        named(
            "4 replicas, zero 3 as 2:1:0:1 in groups of 2",
            TrainConfig { zero_within: ZeroWithin::Neighbours(2), ..zero(3, &[2, 1, 0, 1]) },
        ),
        named(
            "2 replicas, zero 1, state on disk",
            TrainConfig { state: StatePlace::Disk, ..zero(1, &[1, 1]) },
        ),
    ])
}

/// Runs of ranks that divide the model.
fn divided(one: &TrainConfig) -> Result<Vec<Settings>> {
    let pipeline = |stages: usize, schedule: Method| TrainConfig {
        workers: stages,
        stages,
        schedule,
        microbatches: Some(6),
        batch: 2,
        ..one.clone()
    };
    let coded = TrainConfig {
        boundary: "aqsgd:4".parse()?,
        boundary_backward: "direct:8".parse()?,
        sampling: SamplingKind::Epochs,
        steps: STEPS,
        ..pipeline(2, Method::OneFOneB)
    };
    let tensor = TrainConfig { workers: 4, tensor: 2, ..pipeline(2, Method::OneFOneB) };
    Ok(vec![
        named("3 stages, pipedream", TrainConfig { clip: 0.0, ..pipeline(3, Method::PipeDream) }),
        named(
            "2 stages, zb-h1, recomputed",
            TrainConfig { recompute: Recompute::Full, ..pipeline(2, Method::ZbH1) },
        ),
        named("2 stages, aqsgd:4", coded),
        named("2 stages of 2 tensor ranks", tensor),
        named("2 context ranks", TrainConfig { workers: 2, context_parallel: 2, ..one.clone() }),
        named("2 ranks that divide experts", experts(one)?),
    ])
}

fn optimizer(name: &str) -> Result<OptimizerKind> {
    OptimizerKind::parse(name).ok_or_else(|| anyhow!("no such optimizer"))
}

/// Returns two replicas that divide experts. Each token has all experts: only then is routing even, which the
/// prediction assumes.
fn experts(one: &TrainConfig) -> Result<TrainConfig> {
    let mut model = ModelSpec::preset("mixtral-nano")?;
    model.context = 128;
    for experts in model.blocks.iter_mut().filter_map(|run| run.block.experts.as_mut()) {
        experts.per_token = experts.count;
    }
    Ok(TrainConfig {
        model: config_text(&model, Dtype::F32, &TokenIds::default()),
        layers: None,
        heads: None,
        dim: None,
        workers: 2,
        expert: 2,
        ..one.clone()
    })
}
