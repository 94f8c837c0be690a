//! What ranks of real runs hold at the most, as their allocators count it, beside what was predicted of their plans.

use std::sync::Mutex;

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Bytes;
use farflung::config::choice::{OptimizerKind, SyncKind};
use farflung::optim::local::SGD;
use farflung::optim::sync::DILOCO;
use farflung::parallel::Recompute;
use farflung::parallel::pipeline::Method;
use farflung::train::{Trainer, step_memory};

use crate::allocations::{by_rank, this_is_rank};
use crate::harness::{Mark, Report};
use crate::workers::{Over, config, in_seats, job};

/// Optimizer steps of a run: the second finds all buffers of the first, so that no third is needed.
const STEPS: u64 = 2;

/// A plan, as settings.
struct Planned {
    name: &'static str,
    config: TrainConfig,
}

/// Twelve plans of different kinds for a model of 6 layers.
fn plans(seed: u64) -> Vec<Planned> {
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
    let two = TrainConfig { workers: 2, ..one.clone() };
    let plan = |name, config| Planned { name, config };
    vec![
        plan("one rank", one.clone()),
        plan("one rank, 4 layers again", TrainConfig { recompute: Recompute::Layers(4), ..one.clone() }),
        plan(
            "one rank, within 20 MB",
            TrainConfig { recompute: Recompute::Within(Bytes(20_000_000)), ..one.clone() },
        ),
        plan("2 replicas, f32", two.clone()),
        plan("2 replicas, int8", TrainConfig { codec: "int8".parse().expect("a codec"), ..two.clone() }),
        plan(
            "3 replicas, SGD, two passes a step",
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
        plan(
            "3 stages, 1f1b, recomputed",
            TrainConfig { recompute: Recompute::Full, ..pipeline(3, Method::OneFOneB) },
        ),
        plan(
            "2 replicas of 2 stages, 1f1b",
            TrainConfig { workers: 4, batch: 4, ..pipeline(2, Method::OneFOneB) },
        ),
    ]
}

/// A row for each plan: how far the prediction is off what the worst-predicted rank held.
pub(super) fn run(report: &mut Report<'_>, quick: bool) -> Result<()> {
    let mut plans = plans(report.seed());
    if quick {
        plans.retain(|plan| matches!(plan.name, "one rank" | "2 stages, gpipe"));
    }
    for Planned { name, config } in plans {
        let job = job(config, Over::Memory)?;
        let predicted = step_memory(&job)?;
        let cut = Mutex::new(vec![0; job.world]);
        let (ran, counts) = by_rank(job.world, || {
            in_seats(&job, |seat| {
                let rank = seat.comm.rank().index();
                this_is_rank(rank);
                let mut trainer = Trainer::new(&job, seat.comm, job.config.threads)?;
                // What making a trainer took is not what training takes.
                this_is_rank(rank);
                for _ in 0..STEPS {
                    trainer.step(false)?;
                }
                let buffers = trainer.stage().device().memory().1;
                cut.lock().map_err(|_| anyhow::anyhow!("another rank failed"))?[rank] = buffers;
                Ok(())
            })
        });
        ran?;
        let cut = cut.into_inner().ok().context("a rank failed")?;
        let mut worst = 0.0_f64;
        for ((predicted, count), buffers) in predicted.iter().zip(&counts).zip(&cut) {
            let measured = (count.peak + buffers) as f64;
            let off = predicted.total().0 as f64 / measured - 1.0;
            if off.abs() > worst.abs() {
                worst = off;
            }
        }
        let most = counts.iter().zip(&cut).map(|(count, buffers)| count.peak + buffers).max().unwrap_or(0);
        report.row(&format!("{name}: the fullest rank"), most as f64 / 1e6, "MB", Mark::None)?;
        report.row(
            &format!("{name}: prediction off the worst-predicted rank"),
            worst.abs(),
            "",
            Mark::AtMost(0.05),
        )?;
    }
    Ok(())
}
