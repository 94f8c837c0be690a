//! The order of a pipeline's work, as far as it decides what ranks hold at once.

use farflung_base::Rank;
use farflung_parallel::pipeline::{ComputeOrder, Method, Settings, Updates};
use farflung_zoo::GptConfig;

use super::super::planned::{microbatches, read_schedule};
use super::held::{self, Position};
use crate::{Error, Result, TrainConfig};
use farflung_parallel::Recompute;

/// Forwards of an order that is looked at; of a longer one, a shorter one says what ranks hold.
const MOST_CELLS: u128 = 1 << 18;

/// A pipeline's ranks.
#[derive(Debug)]
pub(super) struct Pipeline {
    /// By rank.
    pub(super) positions: Vec<Position>,
    /// Actions of a step.
    step: u128,
    /// Stages of the model.
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
    /// The pipeline of settings with several stages.
    ///
    /// Errors: [`Error::Setting`] for an order that cannot be, or a file's that cannot be read.
    pub(super) fn new(config: &TrainConfig, model: &GptConfig, world: usize) -> Result<Self> {
        let replicas = (world / config.stages).max(1) as u64;
        let held_out = config.eval_batches.div_ceil(replicas);
        if u32::try_from(held_out).is_err() {
            let (value, most) =
                (config.eval_batches.to_string(), u64::from(u32::MAX).saturating_mul(replicas));
            return Err(Error::Setting { field: "eval-batches", value, expected: format!("at most {most}") });
        }
        let again = |order: ComputeOrder| {
            if config.recompute == Recompute::None { order } else { order.with_recompute() }
        };
        if let Some(path) = &config.schedule_file {
            let order = again(read_schedule(path)?);
            let step = order.actions().count() as u128;
            let depth = order.placement().depth().into();
            return Ok(Self { positions: held::pipeline(config, model, &order)?, step, depth });
        }
        let method = config.schedule;
        let ranks = number("stages", config.stages)?;
        let all = number("microbatches", microbatches(config))?;
        let chunks = config.chunks.map(|n| number("chunks", n)).transpose()?;
        let memory = config.memory.map(|n| number("memory", n)).transpose()?;
        let settings = |microbatches| Settings { chunks, memory, ..Settings::new(ranks, microbatches) };
        let stages = u128::from(ranks) * u128::from(chunks.unwrap_or(method.default_chunks()));
        let cells = stages * u128::from(all);
        let order = |microbatches| {
            let order = method.order(&settings(microbatches)).map_err(Error::schedule)?;
            Ok::<_, Error>(again(match order.updates() {
                Updates::Stashed { .. } => order.with_updates(Updates::Stashed { sync: config.version_sync }),
                _ => order,
            }))
        };
        // A forward, two halves of a backward, and what is computed again.
        let step = cells.saturating_mul(4);
        // One that is too large for any order is refused before it is made.
        if cells <= MOST_CELLS || cells > ComputeOrder::MAX_CELLS as u128 {
            let positions = held::pipeline(config, model, &order(all)?)?;
            return Ok(Self { positions, step, depth: stages });
        }
        let fewer = (MOST_CELLS / stages / (2 * u128::from(ranks)) * (2 * u128::from(ranks))) as u32;
        let mut positions = vec![Position { copies: 1, gathers: true, ..Position::default() }; config.stages];
        if let Some(order) = order(fewer.min(all)).ok().filter(|_| fewer > 0) {
            positions = held::pipeline(config, model, &order)?;
            for (rank, position) in (0..).map(Rank).zip(&mut positions) {
                position.scale(bound(method, &settings(all), rank), bound(method, &settings(fewer), rank));
            }
        }
        Ok(Self { positions, step, depth: stages })
    }

    /// Actions of a step, and of the evaluation.
    pub(super) fn actions(&self, config: &TrainConfig, world: usize) -> u128 {
        let replicas = (world / config.stages).max(1) as u64;
        let held_out = u128::from(config.eval_batches.div_ceil(replicas));
        self.step.saturating_add(self.depth.saturating_mul(held_out))
    }
}

/// What a method promises a rank to hold at the most; 1 where it promises nothing.
fn bound(method: Method, settings: &Settings, rank: Rank) -> u128 {
    method.peak_bound(settings, rank.0).unwrap_or(1).max(1).into()
}
