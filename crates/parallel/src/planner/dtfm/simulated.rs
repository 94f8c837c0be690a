//! Simulates a layout's step event by event. Unlike the cost model, it includes the overlap of messages with
//! computation.

use farflung_base::{Bytes, Nanos};

use super::{Layout, PairCosts};
use crate::ParallelError;
use crate::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, simulate};
use crate::share::largest_remainder;

/// The model and batch that the pipelines of a layout train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingLoad {
    /// Number of blocks of the model, divided over stages as equally as possible.
    pub layers: u32,
    /// Number of values of a hidden state.
    pub hidden: u64,
    /// Number of tokens in a sequence. A microbatch is one sequence.
    pub sequence: u64,
    /// Number of entries in the vocabulary. The last stage computes the logits.
    pub vocabulary: u64,
    /// Number of sequences in a step, over all pipelines.
    pub batch: u32,
    /// Sustained operations per second of each device.
    pub flops: u64,
}

impl TrainingLoad {
    /// Returns GPT-3 XL as trained by DT-FM, on devices of 50 TFLOP/s.
    #[must_use]
    pub const fn gpt3_xl(layers: u32, batch: u32) -> Self {
        Self { layers, hidden: 2048, sequence: 2048, vocabulary: 50_257, batch, flops: 50_000_000_000_000 }
    }

    /// Returns the forward operations of one layer for one sequence: `24 S h^2 (1 + S / 6h)` (Narayanan et al.
    /// 2021).
    const fn layer(&self) -> u64 {
        let (s, h) = (self.sequence, self.hidden);
        24 * s * h * h + 4 * s * s * h
    }

    /// Returns the forward operations of the logits for one sequence.
    const fn head(&self) -> u64 {
        2 * self.sequence * self.hidden * self.vocabulary
    }

    fn time(&self, operations: u64) -> Nanos {
        let time = u128::from(operations) * 1_000_000_000 / u128::from(self.flops.max(1));
        Nanos(u64::try_from(time).unwrap_or(u64::MAX))
    }
}

/// Returns the time of a step: the slowest pipeline under GPipe, then the averages, with the links of `costs`.
///
/// Links carry f16 values, one message at a time in each direction, in parallel with computation. Pipelines do
/// not share links. A backward takes twice as long as a forward. Averages start when all pipelines are done.
///
/// Errors: [`ParallelError::Plan`] if the batch is not a multiple of the pipelines, or there are fewer layers
/// than stages.
pub fn simulate_layout(
    layout: &Layout,
    costs: &PairCosts,
    load: &TrainingLoad,
) -> Result<Nanos, ParallelError> {
    let (stages, replicas) = (costs.groups() as u32, costs.size() as u32);
    let wrong = |field: &str, value: u32, expected: String| {
        Err(ParallelError::Plan { field: field.to_owned(), value: value.to_string(), expected })
    };
    if load.batch == 0 || !load.batch.is_multiple_of(replicas) {
        return wrong("batch", load.batch, format!("a multiple of the {replicas} pipelines"));
    }
    if load.layers < stages {
        return wrong("layers", load.layers, format!("at least one for each of {stages} stages"));
    }
    let order = Method::GPipe.order(&Settings::new(stages, load.batch / replicas))?;
    let layers = largest_remainder(load.layers.into(), &vec![1; stages as usize]);
    let stage = |s: u32| {
        let head = if s + 1 == stages { load.head() } else { 0 };
        let forward = load.time(layers[s as usize] * load.layer() + head);
        StageCost { forward, input: forward, weight: forward, ..StageCost::default() }
    };
    let message = Bytes(load.sequence * load.hidden * 2);
    let mut slowest = Nanos::ZERO;
    for pipeline in &layout.pipelines {
        let boundary = |pair: &[farflung_base::Rank]| Boundary {
            link: costs.link(pair[0], pair[1]),
            forward: message,
            backward: message,
        };
        let cost = PipelineCost {
            stages: (0..stages).map(stage).collect(),
            boundaries: pipeline.windows(2).map(boundary).collect(),
            slices: Vec::new(),
            overlap_percent: 0,
        };
        slowest = slowest.max(simulate(&order, &cost)?.makespan());
    }
    Ok(slowest.saturating_add(layout.cost.data_parallel))
}
