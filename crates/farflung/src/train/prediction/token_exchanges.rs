//! The messages with which the replicas that divide experts send each other tokens, in the passes of a stage:
//! found by running the stage on the device that only counts, with even routing.

use std::ops::Range;
use std::sync::Arc;

use farflung_base::Axis;
use farflung_tensor::{Device, Tensor};
use farflung_zoo::exchange::{Counted, CountedRows};
use farflung_zoo::layer::Grads;
use farflung_zoo::{Input, ModelSpec, Packed, Stage, Targets};

use crate::Result;
use crate::row_messages::RowMessages;
use crate::train::bind::ReplicaSchedule;
use crate::train::bound_plan::BoundPlan;
use crate::train::expert_ranks::ExpertRanks;
use crate::train::trainer::stage_of;

/// The bytes of an exchange to each rank of a group.
pub(super) type ToRanks = Vec<u64>;

/// Returns the bytes of exchanges, in the plan's codec.
fn sent(plan: &BoundPlan, exchanges: Vec<CountedRows>) -> Result<Vec<ToRanks>> {
    let of = |CountedRows { cols, rows, numbers }: CountedRows| {
        let messages = RowMessages::new(plan.expert_codec(), cols, 0)?;
        Ok(rows.iter().zip(numbers).map(|(&rows, count)| messages.bytes(rows, count) as u64).collect())
    };
    exchanges.into_iter().map(of).collect()
}

/// The exchanges of a rank in the passes of a stage for one microbatch, in their order.
#[derive(Debug, Clone, Default)]
pub(super) struct TokenExchanges {
    pub(super) forward: Vec<ToRanks>,
    /// Those of a whole backward pass before each range of gradients is final; after the last range at its end.
    pub(super) backward: Vec<Vec<ToRanks>>,
    /// Those of the gradient of the input alone, and of the gradients of the weights after it.
    pub(super) input: Vec<ToRanks>,
    pub(super) weight: Vec<ToRanks>,
}

impl TokenExchanges {
    /// Runs the stage of part `number` as `replica` has it.
    pub(super) fn of(
        plan: &BoundPlan,
        model: &ModelSpec,
        schedule: &ReplicaSchedule,
        (number, replica): (usize, u32),
    ) -> Result<Self> {
        if !plan.divides_experts() {
            return Ok(Self::default());
        }
        let device = Device::sizes().with_precision(plan.precision);
        let counted = Arc::new(Counted::new([(Axis::Expert, ExpertRanks::of(plan).share(replica)?)]));
        let exchange = Arc::clone(&counted) as _;
        let stage = stage_of(plan, (model, replica), schedule, number, (&device, exchange))?;
        let run = Run {
            batch: plan.batch as usize,
            layers: schedule.layers[number].clone(),
            params: stage.zeros()?,
            grads: stage.zeros()?,
            stage,
        };
        run.exchanges(&|| sent(plan, counted.take_rows()))
    }
}

/// A stage with what its passes need.
struct Run {
    stage: Stage,
    batch: usize,
    layers: Range<usize>,
    params: Tensor,
    grads: Tensor,
}

impl Run {
    fn exchanges(mut self, taken: &dyn Fn() -> Result<Vec<ToRanks>>) -> Result<TokenExchanges> {
        let spec = self.stage.spec().clone();
        let device = self.stage.device().clone();
        let hidden = || device.empty(farflung_tensor::DType::F32, [self.batch, spec.context, spec.dim]);
        let tokens = || self.stage.tokens(&vec![0; self.batch * spec.context], spec.context);
        let is_last = self.layers.end == spec.layers();
        let forward = || {
            let input =
                if self.layers.start == 0 { Input::Tokens(tokens()?) } else { Input::Hidden(hidden()?) };
            let targets = if is_last { Some(tokens()?) } else { None };
            let targets = targets.as_ref().map(|ids| Targets::all(ids, 1.0));
            Ok::<_, crate::Error>(self.stage.forward(&self.params, Packed::from(input), targets)?.1)
        };
        let from_above = || Ok::<_, crate::Error>(if is_last { None } else { Some(hidden()?) });
        let saved = forward()?;
        let mut found = TokenExchanges { forward: taken()?, ..TokenExchanges::default() };
        let dy = from_above()?;
        let mut again = forward()?;
        let dy_again = from_above()?;
        taken()?;
        let mut grads = Grads { flat: &mut self.grads, accumulate: true };
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
