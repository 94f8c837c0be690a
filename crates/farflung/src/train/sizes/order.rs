//! Derives the memory of each rank of a pipeline from the settings, without making very long orders.

use farflung_base::{Nanos, Rank};
use farflung_parallel::pipeline::{ComputeOrder, Method, Settings, StageCost, Updates};
use farflung_zoo::ModelSpec;

use super::super::planned::{check_pools, microbatches, read_schedule};
use super::rank_memory::{self, RankMemory};
use crate::{Error, Result, TrainConfig};

/// Highest number of forward passes in an order that is made for the estimate. Longer orders are extrapolated
/// from a shorter one.
const MOST_CELLS: u128 = 1 << 18;

/// The properties of a pipeline that determine its memory.
#[derive(Debug)]
pub(super) struct Pipeline {
    /// Memory that each rank needs.
    pub(super) positions: Vec<RankMemory>,
    /// Number of actions in a step.
    step: u128,
    /// Number of stages of the model.
    depth: u128,
}

fn number(field: &'static str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::Setting {
        field,
        value: value.to_string(),
        expected: format!("at most {}", u32::MAX),
    })
}

impl Pipeline {
    /// Makes the description for settings with more than one stage.
    ///
    /// Errors: [`Error::Setting`] if the schedule does not support the settings; those of [`read_schedule`].
    pub(super) fn new(config: &TrainConfig, model: &ModelSpec, world: usize) -> Result<Self> {
        let replicas = config.readers_of(world).max(1) as u64;
        if u32::try_from(config.eval_passes(replicas)).is_err() {
            let (value, most) = (config.eval_batches.to_string(), u64::from(u32::MAX));
            return Err(Error::Setting { field: "eval-batches", value, expected: format!("at most {most}") });
        }
        let again = |order: ComputeOrder| {
            let scheduled = config.recompute.is_scheduled(order.placement().depth());
            if scheduled { order.with_recompute() } else { order }
        };
        if let Some(path) = &config.schedule_file {
            let order = again(read_schedule(path)?);
            let step = order.actions().count() as u128;
            let depth = order.placement().depth().into();
            return Ok(Self { positions: rank_memory::pipeline(config, model, &order)?, step, depth });
        }
        if let Some(pools) = config.pools() {
            check_pools(config, &pools, world)?;
            let all = number("microbatches", microbatches(config))?;
            let memory = config.memory.map(|n| number("memory", n)).transpose()?;
            // The memory of a rank does not grow with the number of microbatches, so a shorter order is enough.
            let square = u128::from(pools.ranks()).pow(2);
            let few = all.min((MOST_CELLS / square.max(1)) as u32).max(pools.fewest());
            let order = pools.order(few.min(all), &[StageCost::UNIT], Nanos::ZERO, memory);
            let order = again(order.map_err(Error::schedule)?);
            let step = order.actions().count() as u128 * u128::from(all) / u128::from(few.min(all).max(1));
            let depth = pools.stages().into();
            return Ok(Self { positions: rank_memory::pipeline(config, model, &order)?, step, depth });
        }
        let method = config.schedule;
        let ranks = number("stages", config.stages)?;
        let all = number("microbatches", microbatches(config))?;
        let chunks = config.chunks.map(|n| number("chunks", n)).transpose()?;
        let memory = config.memory.map(|n| number("memory", n)).transpose()?;
        let settings = |microbatches| Settings { chunks, memory, ..Settings::new(ranks, microbatches) };
        let depth = u128::from(ranks) * u128::from(chunks.unwrap_or(method.default_chunks()));
        let cells = depth * u128::from(all);
        let order = |microbatches| {
            let order = method.order(&settings(microbatches)).map_err(Error::schedule)?;
            Ok::<_, Error>(again(match order.updates() {
                Updates::Stashed { .. } => order.with_updates(Updates::Stashed { sync: config.version_sync }),
                _ => order,
            }))
        };
        // Per microbatch and stage: a forward, two halves of a backward, a recomputation.
        let step = cells.saturating_mul(4);
        // Above the second limit `order` returns an error without making lists.
        if cells <= MOST_CELLS || cells > ComputeOrder::MAX_CELLS as u128 {
            let positions = rank_memory::pipeline(config, model, &order(all)?)?;
            return Ok(Self { positions, step, depth });
        }
        let round = 2 * u128::from(ranks);
        let fewer = (MOST_CELLS / depth / round * round) as u32;
        let mut positions = vec![RankMemory { copies: 1, ..RankMemory::default() }; config.stages];
        if let Some(order) = order(fewer.min(all)).ok().filter(|_| fewer > 0) {
            positions = rank_memory::pipeline(config, model, &order)?;
            for (rank, position) in (0..).map(Rank).zip(&mut positions) {
                position.scale(bound(method, &settings(all), rank), bound(method, &settings(fewer), rank));
            }
        }
        Ok(Self { positions, step, depth })
    }

    /// Returns the number of actions in the schedules of a step and of an evaluation.
    pub(super) fn actions(&self, config: &TrainConfig, world: usize) -> u128 {
        let replicas = config.readers_of(world).max(1) as u64;
        let held_out = u128::from(config.eval_passes(replicas));
        self.step.saturating_add(self.depth.saturating_mul(held_out))
    }
}

/// Returns the largest number of activations that a method lets a rank hold, at least 1.
fn bound(method: Method, settings: &Settings, rank: Rank) -> u128 {
    method.peak_bound(settings, rank.0).max(1).into()
}
