//! What the ranks that divide layers send each other in the passes of a stage: found by running the stage on
//! the device that only counts, with even routing.

use std::ops::Range;
use std::sync::Arc;

use farflung_base::{Axis, Bytes, Operation, Rank};
use farflung_comm::{Program, operation, ring_all_gather, ring_reduce_scatter};
use farflung_parallel::Coordinates;
use farflung_tensor::{Device, Tensor};
use farflung_zoo::exchange::CountedExchange;
use farflung_zoo::layer::Grads;
use farflung_zoo::{Input, ModelSpec, Packed, Stage, Targets};

use crate::Result;
use crate::row_messages::RowMessages;
use crate::train::bind::ReplicaSchedule;
use crate::train::bound_plan::BoundPlan;
use crate::train::division::Division;
use crate::train::trainer::stage_of;

/// An exchange of a layer, as one of the ranks that divide it takes part in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LayerExchange {
    /// A sum of this many values along the tensor axis.
    Sum(usize),
    /// A gather along the tensor axis: the number of values of each rank's piece.
    Gather(Vec<usize>),
    /// A scatter of a sum along the tensor axis: the number of values of each rank's piece.
    Scatter(Vec<usize>),
    /// Tokens for experts: the bytes to each replica of a group.
    Tokens(Vec<u64>),
    /// This many values in equal pieces from each rank to each, along the view of heads.
    ByHeads(usize),
    /// This many values to the next rank along the ring of positions.
    PassOn(usize),
    /// The wait for what the rank before passes on, in the exchange with this index.
    Arrived(usize),
}

impl LayerExchange {
    /// Returns the axis of the ranks that take part.
    pub(super) const fn axis(&self) -> Axis {
        match self {
            Self::Sum(_) | Self::Gather(_) | Self::Scatter(_) => Axis::Tensor,
            Self::Tokens(_) => Axis::Expert,
            Self::ByHeads(_) => Axis::Ulysses,
            Self::PassOn(_) | Self::Arrived(_) => Axis::Context,
        }
    }

    /// Returns what a rank does in the exchange, whose ranks along an axis are `group`.
    pub(super) fn turn(&self, group: impl Fn(Axis) -> Vec<Rank>) -> LayerTurn {
        match self {
            Self::PassOn(_) => LayerTurn::Begin(group(self.axis())[0]),
            Self::Arrived(index) => LayerTurn::Await(*index),
            _ => LayerTurn::Whole(group(self.axis())[0]),
        }
    }

    /// Returns the operation of a gather or a scatter among its ranks.
    pub(super) fn in_ring(&self) -> Operation {
        let (Self::Gather(values) | Self::Scatter(values)) = self else { return Operation::default() };
        let gathers = matches!(self, Self::Gather(_));
        let program = if gathers { ring_all_gather } else { ring_reduce_scatter };
        let ranks = (0..values.len() as u32).map(Rank);
        let programs: Vec<Program> =
            ranks.map(|rank| program(rank, values.len()).with_counts(values)).collect();
        operation(&programs, Bytes((values.iter().sum::<usize>() * size_of::<f32>()) as u64))
    }
}

/// What a rank does for an exchange of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) enum LayerTurn {
    /// It takes part in the exchange of the ranks of which this is the first, and waits for it.
    Whole(Rank),
    /// It begins it, and goes on.
    Begin(Rank),
    /// It waits for the exchange with this index.
    Await(usize),
}

/// Returns the exchanges that were counted, in the plan's codec.
fn sent(plan: &BoundPlan, counted: Vec<CountedExchange>) -> Result<Vec<LayerExchange>> {
    let of = |exchange| {
        Ok(match exchange {
            CountedExchange::Rows(sent) => {
                let messages = RowMessages::new(plan.expert_codec(), sent.cols, 0)?;
                let bytes = |(&rows, &count): (&usize, &usize)| messages.bytes(rows, count) as u64;
                LayerExchange::Tokens(sent.rows.iter().zip(&sent.numbers).map(bytes).collect())
            }
            CountedExchange::AllReduce(_, values) => LayerExchange::Sum(values),
            CountedExchange::AllToAll(_, values) => LayerExchange::ByHeads(values),
            CountedExchange::PassOn(_, values) => LayerExchange::PassOn(values),
            CountedExchange::Arrived(index) => LayerExchange::Arrived(index),
            CountedExchange::Gather(_, values) => LayerExchange::Gather(values),
            CountedExchange::Scatter(_, values) => LayerExchange::Scatter(values),
        })
    };
    counted.into_iter().map(of).collect()
}

/// The exchanges of a rank in the passes of a stage for one microbatch, in their order.
#[derive(Debug, Clone, Default)]
pub(super) struct LayerExchanges {
    pub(super) forward: Vec<LayerExchange>,
    /// Those of a whole backward pass before each range of gradients is final; after the last range at its end.
    pub(super) backward: Vec<Vec<LayerExchange>>,
    /// Those of the gradient of the input alone, and of the gradients of the weights after it.
    pub(super) input: Vec<LayerExchange>,
    pub(super) weight: Vec<LayerExchange>,
}

impl LayerExchanges {
    /// Runs the stage of part `number` as the rank at `at` has it.
    pub(super) fn of(
        plan: &BoundPlan,
        model: &ModelSpec,
        schedule: &ReplicaSchedule,
        (number, at): (usize, Coordinates),
    ) -> Result<Self> {
        let division = Division::of(plan);
        if !division.exchanges() || schedule.layers[number].is_empty() {
            return Ok(Self::default());
        }
        let device = Device::sizes().with_precision(plan.precision);
        let counted = Arc::new(division.counted(at)?);
        let exchange = Arc::clone(&counted) as _;
        let stage = stage_of(plan, (model, at), schedule, number, (&device, exchange))?;
        let run = Run {
            batch: plan.batch as usize,
            layers: schedule.layers[number].clone(),
            tokens: stage.own(&vec![0_u8; model.context]).len(),
            params: stage.zeros()?,
            grads: stage.zeros()?,
            stage,
        };
        run.exchanges(&|| sent(plan, counted.take_exchanges()))
    }
}

/// A stage with what its passes need.
struct Run {
    stage: Stage,
    batch: usize,
    /// Tokens of a sequence that the rank has.
    tokens: usize,
    layers: Range<usize>,
    params: Tensor,
    grads: Tensor,
}

impl Run {
    fn exchanges(mut self, taken: &dyn Fn() -> Result<Vec<LayerExchange>>) -> Result<LayerExchanges> {
        let spec = self.stage.spec().clone();
        let device = self.stage.device().clone();
        let own = self.stage.own_positions(spec.context);
        let hidden = || device.empty(farflung_tensor::DType::F32, [self.batch, own, spec.dim]);
        let tokens = || self.stage.tokens(&vec![0; self.batch * self.tokens], self.tokens);
        let is_last = self.layers.end == spec.layers();
        let forward = || {
            let input =
                if self.layers.start == 0 { Input::Tokens(tokens()?) } else { Input::Hidden(hidden()?) };
            let targets = if is_last { Some(tokens()?) } else { None };
            let targets = targets.as_ref().map(|ids| Targets::all(ids, 1.0));
            let mut saved = self.stage.forward(&self.params, Packed::from(input), targets)?.1;
            saved.join_alone();
            Ok::<_, crate::Error>(saved)
        };
        let from_above = || Ok::<_, crate::Error>(if is_last { None } else { Some(hidden()?) });
        let saved = forward()?;
        let mut found = LayerExchanges { forward: taken()?, ..LayerExchanges::default() };
        let dy = from_above()?;
        let mut again = forward()?;
        let dy_again = from_above()?;
        taken()?;
        let mut grads = Grads::flat(&mut self.grads, true);
        let mut ranges = Vec::new();
        self.stage.backward(&self.params, saved, dy, &mut grads, |_, _| ranges.push(taken()))?;
        ranges.push(taken());
        found.backward = ranges.into_iter().collect::<Result<_>>()?;
        self.stage.backward_input(&self.params, &mut again, dy_again)?;
        found.input = taken()?;
        self.stage.backward_weight(again, &mut grads, |_, _| {})?;
        found.weight = taken()?;
        Ok(found)
    }
}
