//! Executes the operations of a rank's step: runs its parts of the model on microbatches, sends hidden states
//! and their gradients to other ranks, and averages and applies gradients. The step's list decides the order;
//! the code here works for any order.
//!
//! The same executor measures memory: on a device that only counts, with sequences without contents
//! ([`Source::Counted`]) and without links ([`Wires::Counted`]).

mod components;
mod routers;
mod sequences;
mod source;
mod wires;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use farflung_base::{Nanos, Pending, Rank, StageId};
use farflung_comm::{CommError, Communicator};
use farflung_optim::{Prepared, sum_of_squares};
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::{
    Action, ComputeKind, ComputeOrder, LoweredKind, Message, Placement, StageCost, Updates, Worker,
};
use farflung_parallel::step::{Moment, RankStep, StepOp, StepWorker};
use farflung_tensor::{Device, Interrupt, Param, Tensor, TensorError};
use farflung_zoo::{Cut, Input, Output, Saved, Slices, Targets, TensorKind, TensorSpec, ZooError, stage};

use super::boundary::Boundaries;
use super::divided_gradients::DividedGradients;
use super::kept_pass::KeptPass;
use super::part::{Part, SavedMicrobatch, copy};
use super::spent::{Spent, add_since};
use super::tied::TiedTable;
use crate::{Error, Result};
pub(super) use components::Components;
pub(super) use routers::{RouterRecord, Routers, trailing_bytes};
pub(super) use source::Source;
pub(super) use wires::{Awaited, Wires};

/// The microbatches of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// The microbatches of a training step, counted over all steps and replicas.
    Training {
        /// The number of the step's microbatch 0.
        first: u64,
    },
    /// Held-out microbatches: forward passes only, which keep no activations.
    Evaluation,
}

/// Data that one stage passes to another.
#[derive(Debug)]
pub(super) enum Flow {
    /// Hidden states or their gradients.
    Values(Tensor),
    /// The result of a computation that was done before the pass.
    Kept,
}

/// Sum of the losses of a microbatch or of one slice of it, which may still be in flight from the device.
type Loss = Pending<Result<f64, ZooError>>;

/// The sum of the losses of some tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct LossSum {
    pub(super) sum: f64,
    /// Number of the tokens that count.
    pub(super) tokens: f64,
}

/// The gradients whose squares a rank reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    /// Those of its experts alone: another replica reports the others, of which it has a copy.
    pub(super) only_experts: bool,
    /// Those of its pieces of tensors alone: another rank along the tensor axis reports whole tensors.
    pub(super) only_cut: bool,
}

/// Stage, microbatch and slice of an action.
type Place = (StageId, u32, u16);

fn place(action: Action) -> Place {
    (action.stage, action.microbatch, action.slice)
}

/// The parts of the model on a rank, and its links to others.
#[derive(Debug)]
pub(super) struct Executor {
    pub(super) comm: Communicator,
    pub(super) wires: Wires,
    /// Raised when a stop drops the pass.
    pub(super) interrupt: Interrupt,
    /// The job's ranks at the positions of this pipeline.
    pub(super) pipeline: Vec<Rank>,
    pub(super) device: Device,
    pub(super) placement: Placement,
    pub(super) updates: Updates,
    pub(super) microbatches: u32,
    /// The parts by their first stage in the placement: see [`Placement::storage_stage`].
    pub(super) parts: BTreeMap<StageId, Part>,
    pub(super) tied: TiedTable,
    pub(super) source: Source,
    /// Width of a hidden state.
    pub(super) dim: usize,
    /// Factor of each token's loss, so that the mean of gradients over ranks is the mean over all tokens that
    /// count; by microbatch.
    pub(super) token_weights: Vec<f32>,
    /// The routers of experts.
    pub(super) routers: Routers,
    /// The positions of each slice of a training sequence's tokens.
    pub(super) slices: Vec<Range<usize>>,
    /// The forward passes that are recomputed, sorted.
    pub(super) again: Vec<Place>,
    pub(super) pass: Pass,
    /// Number of microbatches in the pass.
    pub(super) passing: u32,
    /// Sums of losses in the order of the forward passes; empty unless this rank has the model's last part.
    pub(super) losses: Vec<(u32, Loss)>,
    pub(super) held: BTreeMap<Place, SavedMicrobatch>,
    /// State that the slices of a microbatch pass on to each other on a stage, if there are several.
    pub(super) carried: BTreeMap<(StageId, u32), Slices>,
    pub(super) sending: Vec<Pending<Result<(), CommError>>>,
    /// What is kept of the pass, if the run continues passes that fail.
    pub(super) kept: KeptPass,
    /// The codecs of messages to other ranks.
    pub(super) boundaries: Boundaries,
    /// Times of the step so far, by use.
    pub(super) spent: Spent,
}

/// Returns the forward passes that an order runs again, sorted.
fn recomputed(order: &ComputeOrder) -> Vec<Place> {
    let actions = order.actions().map(|(_, action)| action);
    let mut places: Vec<_> = actions.filter(|a| a.kind == ComputeKind::Recompute).map(place).collect();
    places.sort_unstable();
    places
}

impl Executor {
    /// Clears the pipeline and begins a pass.
    pub(super) fn begin(&mut self, pass: Pass, microbatches: u32) {
        (self.pass, self.passing) = (pass, microbatches);
        self.carried.clear();
        self.sending.clear();
        self.losses.clear();
        if !self.kept.begin(pass != Pass::Evaluation) {
            self.held.clear();
            self.routers.begin();
            self.parts.values_mut().for_each(Part::begin);
        }
    }

    /// Waits until all messages have been sent.
    pub(super) fn sent(&mut self) -> Result<()> {
        self.sending.drain(..).try_for_each(|sending| Ok(sending.wait()?))
    }

    /// Returns the sum of the pass's losses, added up by microbatch, and the number of tokens that count;
    /// `None` if the last part is on another rank.
    pub(super) fn total_loss(&mut self) -> Result<Option<LossSum>> {
        let mut sums = self.kept.losses();
        for (microbatch, loss) in self.losses.drain(..) {
            *sums.entry(microbatch).or_insert(0.0) += loss.wait()?;
        }
        self.kept.keep_losses(&sums);
        if sums.is_empty() {
            return Ok(None);
        }
        let counted: Result<f64> = sums.keys().map(|&microbatch| self.counted(microbatch)).sum();
        Ok(Some(LossSum { sum: sums.values().sum(), tokens: counted? }))
    }

    /// Returns the predicted times of an action of a training pass. In an evaluation, computations take no time
    /// on the virtual clock.
    fn cost(&self, action: Action) -> StageCost {
        match self.pass {
            Pass::Training { .. } => {
                self.parts[&self.placement.storage_stage(action.stage)].costs[usize::from(action.slice)]
            }
            Pass::Evaluation => StageCost::default(),
        }
    }

    /// Runs the forward pass of an action's tokens on its stage, which takes this long.
    fn pass_on(
        &mut self,
        action: Action,
        (version, took): (u32, Nanos),
        input: Input,
    ) -> Result<(Output, Saved)> {
        let borders = self.borders(action)?;
        let (targets, start) = (self.targets(action)?, self.positions(action.slice).start);
        let part = &self.parts[&self.placement.storage_stage(action.stage)];
        let sliced = self.pass != Pass::Evaluation && self.slices.len() > 1;
        let carried = match self.carried.entry((action.stage, action.microbatch)) {
            Entry::Vacant(entry) if sliced => Some(entry.insert(part.stage.slices(self.source.batch())?)),
            Entry::Vacant(_) => None,
            Entry::Occupied(entry) => Some(entry.into_mut()),
        };
        part.forward(
            (version, &by_layer(part, &self.comm, took)),
            input.with_borders(borders).with_sequence_weight(self.routers.sequence_weight),
            start,
            targets.as_ref().map(|(ids, weights)| {
                // In an evaluation, no gradient follows.
                let scale = self.token_weights.get(action.microbatch as usize).copied().unwrap_or(1.0);
                Targets { ids, weights: weights.as_ref(), scale }
            }),
            carried,
        )
    }

    fn forward(&mut self, action: Action, hidden: Option<Tensor>) -> Result<Option<Tensor>> {
        let Action { stage, microbatch, .. } = action;
        let version = match self.pass {
            Pass::Training { .. } => {
                self.updates.version(self.placement.part(stage), self.placement.depth(), microbatch)
            }
            Pass::Evaluation => 0,
        };
        let again = self.pass != Pass::Evaluation && self.again.binary_search(&place(action)).is_ok();
        let kept = hidden.as_ref().filter(|_| again).map(copy).transpose()?;
        let input = self.input(action, hidden)?;
        let (output, mut saved) = self.pass_on(action, (version, self.cost(action).forward), input)?;
        let output = match output {
            Output::Hidden(y) => Some(y),
            Output::Losses(losses) => {
                self.losses.push((microbatch, stage::start_total(&losses)));
                None
            }
        };
        if self.pass == Pass::Evaluation {
            return Ok(output);
        }
        self.routers.add(microbatch, &saved);
        let part = &self.parts[&self.placement.storage_stage(stage)];
        let saved = match part.recompute {
            Recompute::Full if again => None,
            recompute => {
                if let (Recompute::Layers(layers), true) = (recompute, again) {
                    saved.drop_activations(layers as usize);
                }
                saved.offload(part.offload);
                Some(saved)
            }
        };
        self.held.insert(place(action), SavedMicrobatch { saved, input: kept, version, again });
        Ok(output)
    }

    fn recompute(&mut self, action: Action) -> Result<()> {
        let mut held = self.take(action);
        // The microbatch may have its activations already: it ran under the order before a loss.
        if !std::mem::take(&mut held.again) {
            self.held.insert(place(action), held);
            return Ok(());
        }
        let input = self.input(action, held.input.take())?;
        let took = self.cost(action).recompute;
        if let Some(saved) = &mut held.saved {
            let carried = self.carried.get_mut(&(action.stage, action.microbatch));
            let part = &self.parts[&self.placement.storage_stage(action.stage)];
            part.recompute((held.version, &by_layer(part, &self.comm, took)), input, saved, carried)?;
        } else {
            held.saved = Some(self.pass_on(action, (held.version, took), input)?.1);
        }
        self.held.insert(place(action), held);
        Ok(())
    }

    /// Runs a backward pass: returns the gradient of the stage's input; a whole backward also adds the
    /// gradients of the weights.
    fn backward(&mut self, action: Action, dy: Option<Tensor>) -> Result<Option<Tensor>> {
        let Action { stage, microbatch, slice, kind } = action;
        if self.held.get(&place(action)).is_some_and(|held| held.again) {
            // It ran under the order before a loss; this order does not contain the computation.
            self.recompute(action)?;
        }
        let mut held = self.take(action);
        let mut saved = held.saved.take().expect("it was recomputed before");
        let home = self.placement.storage_stage(stage);
        self.routers.join(microbatch, &self.parts[&home].stage, &mut saved)?;
        if kind == ComputeKind::Backward && self.slices.len() == 1 {
            let (part, passing) = self.passing(stage, self.cost(action).backward());
            return part.backward(held.version, saved, dy, passing);
        }
        let cost = self.cost(action);
        let took = if kind == ComputeKind::Backward { cost.input } else { cost.time(kind) };
        let carried = self.carried.get_mut(&(stage, microbatch));
        let part = &self.parts[&self.placement.storage_stage(stage)];
        let dx =
            part.backward_input((held.version, &by_layer(part, &self.comm, took)), &mut saved, dy, carried)?;
        if slice == 0 {
            self.carried.remove(&(stage, microbatch));
        }
        if kind == ComputeKind::Backward {
            self.backward_weight(action, saved)?;
        } else {
            self.held.insert(place(action), SavedMicrobatch { saved: Some(saved), ..held });
        }
        Ok(dx)
    }

    /// Adds the gradients of an action's weights.
    fn backward_weight(&mut self, action: Action, saved: Saved) -> Result<()> {
        let (part, passing) = self.passing(action.stage, self.cost(action).weight);
        part.backward_weight(saved, passing)
    }

    /// Returns the part of a stage, and what advances the clock by a backward pass of this length. If the
    /// part's gradients leave while they are computed, each range of them takes its share of the time.
    fn passing(&mut self, stage: StageId, took: Nanos) -> (&mut Part, impl Fn(&Range<usize>) + use<'_>) {
        let Self { comm, parts, placement, .. } = self;
        let part = parts.get_mut(&placement.storage_stage(stage));
        let part = part.expect("the schedule gives a rank its own stages");
        let elements = part.leaves().then_some(part.stage.layout().len() as u64);
        if elements.is_none() {
            // Advanced before the computation, so that workers on simulated links compute in parallel.
            comm.advance(took);
        }
        let comm = &*comm;
        let passed = move |range: &Range<usize>| {
            if let Some(elements) = elements {
                comm.advance(share(took, range.len() as u64, elements));
            }
        };
        (part, passed)
    }

    pub(super) fn part(&mut self, stage: StageId) -> &mut Part {
        let home = self.placement.storage_stage(stage);
        self.parts.get_mut(&home).expect("the schedule gives a rank its own stages")
    }

    fn take(&mut self, action: Action) -> SavedMicrobatch {
        self.held.remove(&place(action)).expect("a checked schedule runs the forward first")
    }

    /// Returns the oldest version of a part's parameters that a microbatch after this one still uses.
    fn needed_after(&self, stage: StageId, microbatch: u32) -> Option<u32> {
        let next = Some(microbatch + 1).filter(|&next| next < self.microbatches)?;
        Some(self.updates.version(self.placement.part(stage), self.placement.depth(), next))
    }

    /// Applies an update of a part. `agreed` is what all ranks have agreed on; without it, the norm is that of
    /// the part's own gradients.
    fn update(&mut self, stage: StageId, microbatch: u32, agreed: Option<Prepared>) -> Result<()> {
        let (needed, begun) = (self.needed_after(stage, microbatch), self.comm.now());
        let part = self.part(stage);
        let prepared = match agreed {
            Some(prepared) => prepared,
            None => Prepared::with_norm(farflung_optim::global_norm(&part.grads)?)?,
        };
        let is_on_disk = part.disk.is_some();
        part.commit(prepared, needed)?;
        if is_on_disk {
            add_since(begun, &self.comm, &mut self.spent.disk);
        }
        Ok(())
    }

    /// Applies the updates on which all ranks have agreed. If holders of a part update shards of it, each then
    /// has its own.
    pub(super) fn update_all(&mut self, step: &RankStep, prepared: Prepared) -> Result<()> {
        for &op in step.at(Moment::Commit) {
            if let StepOp::Update { stage, microbatch } = op {
                self.update(stage, microbatch, Some(prepared))?;
            }
        }
        Ok(())
    }

    /// Gathers the shards that were updated. If that fails, it can be repeated.
    pub(super) fn gather_all(&mut self, step: &RankStep) -> Result<()> {
        let gathers = step.at(Moment::Commit).iter().filter(|op| matches!(op, StepOp::GatherParameters(_)));
        gathers.copied().collect::<Vec<_>>().into_iter().try_for_each(|op| self.run_op(op))
    }

    /// Returns the sums of squared gradients by part of the model: of the parts that this rank reports, and 0
    /// for the others.
    pub(super) fn squares(&self, counts: Counts) -> Result<Vec<f64>> {
        let Self { parts, placement, .. } = self;
        let depth = placement.depth();
        let mut squares = vec![0.0; depth as usize];
        for (&stage, part) in parts {
            // Each part counts once; a table that two parts hold counts with the first.
            if stage.0 < depth {
                squares[placement.part(stage) as usize] =
                    own_squares(part, placement.is_last(stage), counts)?;
            }
        }
        Ok(squares)
    }

    fn run(&mut self, action: Action, input: Option<Tensor>) -> Result<Option<Tensor>> {
        match action.kind {
            ComputeKind::Forward => return self.forward(action, input),
            ComputeKind::Recompute => self.recompute(action)?,
            ComputeKind::Backward | ComputeKind::BackwardInput => return self.backward(action, input),
            ComputeKind::BackwardWeight => {
                let saved = self.take(action).saved.expect("the backward pass of the input kept it");
                self.backward_weight(action, saved)?;
            }
            // A step's list has its updates as operations of their own.
            ComputeKind::Step => {}
        }
        Ok(None)
    }
}

/// Advances the clock by a pass of this length before it is computed, so that workers on simulated links
/// compute in parallel. If the part's weights are gathered layer by layer, the returned function does so
/// before each layer, given its number of elements and those of all layers.
fn by_layer<'c>(part: &Part, comm: &'c Communicator, took: Nanos) -> impl Fn(u64, u64) + use<'c> {
    let gathers = part.weights.is_some();
    if !gathers {
        comm.advance(took);
    }
    move |own, all| {
        if gathers && all > 0 {
            comm.advance(share(took, own, all));
        }
    }
}

/// Returns a share of a time.
pub(super) const fn share(took: Nanos, of: u64, elements: u64) -> Nanos {
    Nanos((took.0 as u128 * of as u128 / elements as u128) as u64)
}

/// Returns the sum of a part's squared gradients, without those of a table that counts with another part.
fn own_squares(part: &Part, is_last: bool, counts: Counts) -> Result<f64> {
    if part.divided.as_ref().is_some_and(DividedGradients::hides_values) {
        return Ok(f64::NAN);
    }
    let behind = if is_last { part.behind_table() } else { 0 };
    // Of gradients that others update, this rank has its own contribution alone.
    let sum_of = |range: Range<usize>| {
        let range = range.start.max(behind)..range.end;
        let own = part.own_gradients(&range).into_iter();
        own.map(|own| sum_of_squares(&part.grads, own)).sum::<std::result::Result<f64, _>>()
    };
    if counts == Counts::default() {
        return Ok(sum_of(0..part.stage.layout().len())?);
    }
    let wanted = |_: &Param, spec: &TensorSpec| {
        (!counts.only_experts || spec.kind == TensorKind::Expert)
            && (!counts.only_cut || spec.cut != Cut::Whole)
    };
    let squares = part.stage.ranges_of(wanted).into_iter().map(sum_of);
    Ok(squares.sum::<std::result::Result<_, _>>()?)
}

impl StepWorker for Executor {
    fn run_op(&mut self, op: StepOp) -> Result<()> {
        let begun = self.comm.now();
        match op {
            StepOp::OpenReduce(stage) => return self.part(stage).open_reduce(),
            StepOp::FinishReduce(stage) => self.part(stage).finish_reduce()?,
            StepOp::FinishTied => self.tied.finish(&mut self.parts, &self.placement)?,
            StepOp::TakeTied => {
                self.tied.take_first(&mut self.parts, &self.placement, Part::averaged_gradients)?;
            }
            StepOp::Contribute(stage) => return self.part(stage).contribute_alone(),
            StepOp::Update { stage, microbatch } => return self.update(stage, microbatch, None),
            StepOp::Defer { stage, microbatch } => {
                let needed = self.needed_after(stage, microbatch);
                let table = self.tied.exchange(stage, &self.parts[&stage])?;
                self.part(stage).defer_update(table, needed)?;
            }
            StepOp::CatchUp(stage) => self.part(stage).catch_up()?,
            StepOp::GatherParameters(stage) => self.part(stage).gather_parameters()?,
            StepOp::Pass(_)
            | StepOp::StartVote(_)
            | StepOp::FinishVote(_)
            | StepOp::Exchange(_)
            | StepOp::TakeExchanged
            | StepOp::Prepare(_)
            | StepOp::Agree
            | StepOp::Apply(_)
            | StepOp::Mix(_)
            | StepOp::Depart(_) => unreachable!("{op} is an operation of a schedule or of several replicas"),
        }
        add_since(begun, &self.comm, &mut self.spent.communicate);
        Ok(())
    }
}

impl Worker for Executor {
    type Data = Flow;
    type Pending = Awaited;
    type Error = Error;

    fn compute(&mut self, action: Action, input: Option<Flow>) -> Result<Option<Flow>> {
        if self.interrupt.is_raised() {
            return Err(TensorError::Interrupted.into());
        }
        if self.kept.is_done(action, self.placement.part(action.stage)) {
            return Ok(Some(Flow::Kept));
        }
        let input = match input {
            Some(Flow::Values(values)) => Some(values),
            Some(Flow::Kept) | None => None,
        };
        self.kept.begins(action.kind);
        let output = self.run(action, input)?;
        self.kept.did(action);
        Ok(output.map(Flow::Values))
    }

    fn send(&mut self, to: Rank, message: Message, data: Flow) -> Result<()> {
        self.send_message(to, message, data)
    }

    fn receive(&mut self, from: Rank, message: Message) -> Result<Self::Pending> {
        Ok(self.post_message(from, message))
    }

    fn wait(&mut self, awaited: Awaited) -> Result<Flow> {
        self.take_message(awaited)
    }

    fn start_transfer(&mut self, kind: LoweredKind, stage: StageId, _: u32, _: u16) -> Result<()> {
        match kind {
            LoweredKind::Reduce => self.part(stage).reduce(),
            LoweredKind::ReduceTied => self.tied.start(&self.parts[&self.placement.storage_stage(stage)]),
            // Lowering produces no other actions here.
            _ => Ok(()),
        }
    }

    fn restore_output(&mut self, message: Message) -> Result<Flow> {
        // A failed pass starts again from its beginning, and skips computations that are done. No executor
        // continues in the middle of a list, so none needs an output.
        Err(Error::Message { message: message.to_string(), problem: "was not kept" })
    }
}
