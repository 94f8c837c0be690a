//! Compares the largest memory that ranks of real runs hold, as their allocators count it, with the prediction
//! for their plans.

use std::path::Path;

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::{Bytes, Precision};
use farflung::config::choice::{OptimizerKind, SamplingKind, SyncKind};
use farflung::optim::local::SGD;
use farflung::optim::sync::DILOCO;
use farflung::parallel::Recompute;
use farflung::parallel::pipeline::Method;

use crate::harness::{Report, Threshold};
use crate::step_peaks::{STEPS, StepPeaks, step_peaks};
use crate::workers::config;

/// A plan, given as settings.
struct Planned {
    name: &'static str,
    config: TrainConfig,
}

/// Bytes of a text that is one step of the pipelines in [`plans`]: 12 windows of 128 bytes, some more, and the
/// held-out part.
const ONE_STEP: usize = 2800;

/// Returns plans of different kinds for a model of 6 layers. For the plans that read the text of `one_step`, an
/// epoch is one step.
fn plans(seed: u64, one_step: &Path) -> Vec<Planned> {
    let one = TrainConfig {
        workers: 1,
        batch: 4,
        layers: Some(6),
        heads: Some(4),
        dim: Some(256),
        context: Some(128),
        ..config(seed, false)
    };
    let pipeline = |stages: usize, schedule: Method| TrainConfig {
        workers: stages,
        stages,
        schedule,
        microbatches: Some(6),
        batch: 2,
        ..one.clone()
    };
    let coded = |codec: &str| TrainConfig {
        boundary: codec.parse().expect("a boundary's codec"),
        boundary_backward: "direct:8".parse().expect("a boundary's codec"),
        sampling: SamplingKind::Epochs,
        steps: STEPS,
        ..pipeline(2, Method::OneFOneB)
    };
    let two = TrainConfig { workers: 2, ..one.clone() };
    let plan = |name, config| Planned { name, config };
    vec![
        plan("one rank", one.clone()),
        plan("one rank, 4 layers recomputed", TrainConfig { recompute: Recompute::Layers(4), ..one.clone() }),
        plan(
            "one rank, within 25 MB",
            TrainConfig { recompute: Recompute::Within(Bytes(25_000_000)), ..one.clone() },
        ),
        plan(
            "one rank, bf16, 16 sequences",
            TrainConfig { precision: Precision::Bf16, batch: 16, ..one.clone() },
        ),
        plan("2 replicas, f32", two.clone()),
        plan("2 replicas, int8", TrainConfig { codec: "int8".parse().expect("a codec"), ..two.clone() }),
        plan(
            "3 replicas, SGD, two passes per step",
            TrainConfig {
                workers: 3,
                accumulate: 2,
                optimizer: OptimizerKind::of(&SGD),
                momentum: 0.0,
                ..one.clone()
            },
        ),
        plan("2 replicas, DiLoCo", TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 1, ..two.clone() }),
        plan("2 stages, gpipe", pipeline(2, Method::GPipe)),
        plan("3 stages, 1f1b", pipeline(3, Method::OneFOneB)),
        plan("2 stages, zb-h1", pipeline(2, Method::ZbH1)),
        plan("3 stages, pipedream", TrainConfig { clip: 0.0, ..pipeline(3, Method::PipeDream) }),
        plan(
            "3 stages, 1f1b, recomputed",
            TrainConfig { recompute: Recompute::Full, ..pipeline(3, Method::OneFOneB) },
        ),
        plan("2 stages, 1f1b, direct:4", coded("direct:4")),
        plan("2 stages, 1f1b, int8", coded("int8")),
        plan("2 stages, 1f1b, aqsgd:4", coded("aqsgd:4")),
        plan(
            "2 stages, 1f1b, aqsgd:4, a second epoch",
            TrainConfig { data: Some(one_step.to_owned()), ..coded("aqsgd:4") },
        ),
        plan(
            "2 replicas of 2 stages, 1f1b",
            TrainConfig { workers: 4, batch: 4, ..pipeline(2, Method::OneFOneB) },
        ),
    ]
}

/// Adds rows for each plan: the memory of its fullest rank, and the error of the prediction for the rank that
/// is predicted worst.
pub(super) fn run(report: &mut Report<'_>, quick: bool) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let one_step = folder.path().join("one-step.txt");
    let text: Vec<u8> = (0..ONE_STEP).map(|at| b'a' + (at * at % 23) as u8).collect();
    std::fs::write(&one_step, text)?;
    let mut plans = plans(report.seed(), &one_step);
    if quick {
        plans.retain(|plan| matches!(plan.name, "one rank" | "2 stages, gpipe"));
    }
    for Planned { name, config } in plans {
        let StepPeaks { most, spread, runs, predicted_off } = step_peaks(config)?;
        report.row(&format!("{name}: memory of the fullest rank"), most / 1e6, "MB", Threshold::None)?;
        if runs > 1 {
            report.row(&format!("{name}: variation between runs"), spread, "", Threshold::None)?;
        }
        let off = format!("{name}: relative error of the prediction, worst rank");
        report.row(&off, predicted_off.abs(), "", Threshold::AtMost(0.05))?;
    }
    Ok(())
}
