//! Executes the actions of a rank: runs its parts of the model on microbatches, and sends hidden states and
//! their gradients to other ranks. The schedule's executor decides the order of the actions; the code here
//! works for any order.

mod sequences;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use farflung_base::{Nanos, Pending, Rank, StageId};
use farflung_comm::{CommError, Communicator, WaitMode};
use farflung_optim::Prepared;
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::{
    Action, ComputeKind, ComputeOrder, Content, LoweredKind, Message, Placement, PollArrivals, StageCost,
    Updates, Worker,
};
use farflung_tensor::{Device, Interrupt, Tensor, TensorError};
use farflung_zoo::{Input, Output, Sampler, Saved, Slices, Targets, ZooError, stage};

use super::boundary::{Boundaries, BoundaryMessage};
use super::floats::floats;
use super::kept_pass::{KeptMessage, KeptPass};
use super::part::{Part, SavedMicrobatch, SendTiming, copy};
use super::spent::{Spent, add_since};
use super::tied::TiedTable;
use crate::{Error, Result};

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

/// A message that may still be in flight.
type Bytes = Pending<Result<Vec<u8>, CommError>>;

/// Data that one stage passes to another.
#[derive(Debug)]
pub(super) enum Flow {
    /// Hidden states or their gradients.
    Values(Tensor),
    /// The result of a computation that was done before the pass.
    Kept,
}

/// A message that another rank sends, unless the computation that needs it was done before the pass.
#[derive(Debug)]
pub(super) struct Awaited {
    message: Message,
    bytes: Option<Bytes>,
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

/// Stage, microbatch and slice of an action.
type Place = (StageId, u32, u16);

fn place(action: Action) -> Place {
    (action.stage, action.microbatch, action.slice)
}

/// The parts of the model on a rank, and its links to others.
#[derive(Debug)]
pub(super) struct Executor {
    pub(super) comm: Communicator,
    /// The same communicator for messages of a pass, which a stop cancels sooner.
    pub(super) messages: Communicator,
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
    pub(super) sampler: Sampler,
    pub(super) evaluation: Sampler,
    /// Width of a hidden state.
    pub(super) dim: usize,
    /// Factor of each token's loss, so that the mean of gradients over ranks is the mean over all tokens that
    /// count; by microbatch.
    pub(super) token_weights: Vec<f32>,
    /// The microbatch whose backward pass is the last of a step, by stage.
    pub(super) last: BTreeMap<StageId, u32>,
    /// Whether gradients are averaged with other holders of a part in each step.
    pub(super) averages: bool,
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
pub(super) fn recomputed(order: &ComputeOrder) -> Vec<Place> {
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

    /// Runs the forward pass of an action's tokens on its stage.
    fn pass_on(&mut self, action: Action, version: u32, input: Input) -> Result<(Output, Saved)> {
        let documents = self.documents(action)?;
        let (targets, start) = (self.targets(action)?, self.positions(action.slice).start);
        let part = &self.parts[&self.placement.storage_stage(action.stage)];
        let sliced = self.pass != Pass::Evaluation && self.slices.len() > 1;
        let carried = match self.carried.entry((action.stage, action.microbatch)) {
            Entry::Vacant(entry) if sliced => {
                Some(entry.insert(part.stage.slices(self.sampler.shard().batch)?))
            }
            Entry::Vacant(_) => None,
            Entry::Occupied(entry) => Some(entry.into_mut()),
        };
        part.forward(
            version,
            input.with_documents(documents),
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
        self.part(stage).catch_up(Some(version))?;
        let again = self.pass != Pass::Evaluation && self.again.binary_search(&place(action)).is_ok();
        let kept = hidden.as_ref().filter(|_| again).map(copy).transpose()?;
        let input = self.input(action, hidden)?;
        // Advanced before the computation, so that workers on simulated links compute in parallel.
        self.comm.advance(self.cost(action).forward);
        let (output, mut saved) = self.pass_on(action, version, input)?;
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
        self.comm.advance(self.cost(action).recompute);
        if let Some(saved) = &mut held.saved {
            let carried = self.carried.get_mut(&(action.stage, action.microbatch));
            self.parts[&self.placement.storage_stage(action.stage)].recompute(
                held.version,
                input,
                saved,
                carried,
            )?;
        } else {
            held.saved = Some(self.pass_on(action, held.version, input)?.1);
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
        if kind == ComputeKind::Backward && self.slices.len() == 1 {
            return self.whole_backward(action, held.version, saved, dy);
        }
        self.comm.advance(self.cost(action).time(kind));
        let carried = self.carried.get_mut(&(stage, microbatch));
        let dx = self.parts[&self.placement.storage_stage(stage)].backward_input(
            held.version,
            &mut saved,
            dy,
            carried,
        )?;
        if slice == 0 {
            self.carried.remove(&(stage, microbatch));
        }
        if kind == ComputeKind::Backward {
            self.part(stage).backward_weight(saved)?;
        } else {
            self.held.insert(place(action), SavedMicrobatch { saved: Some(saved), ..held });
        }
        Ok(dx)
    }

    /// Runs a backward pass layer by layer. If one stage has the whole model, the gradients of the step's last
    /// microbatch are also sent to the other holders layer by layer.
    fn whole_backward(
        &mut self,
        action: Action,
        version: u32,
        saved: Saved,
        dy: Option<Tensor>,
    ) -> Result<Option<Tensor>> {
        let Action { stage, microbatch, .. } = action;
        let cost = self.cost(action);
        let home = self.placement.storage_stage(stage);
        let part = self.parts.get_mut(&home).expect("the schedule gives a rank its own stages");
        let comm = &self.comm;
        if self.placement.depth() > 1 {
            comm.advance(cost.backward());
            return part.backward(version, saved, dy, |_| {}, SendTiming::Later);
        }
        let again = if part.recompute == Recompute::None { Nanos::ZERO } else { cost.recompute };
        let (took, elements) = (cost.backward().saturating_add(again), part.stage.layout().len() as u64);
        let last = self.averages && self.last.get(&stage) == Some(&microbatch);
        // Advances the clock by these parameters' share of the backward pass.
        let passed = |range: &Range<usize>| comm.advance(Nanos(took.0 * range.len() as u64 / elements));
        part.backward(version, saved, dy, passed, if last { SendTiming::AsReady } else { SendTiming::Later })
    }

    fn part(&mut self, stage: StageId) -> &mut Part {
        let home = self.placement.storage_stage(stage);
        self.parts.get_mut(&home).expect("the schedule gives a rank its own stages")
    }

    fn take(&mut self, action: Action) -> SavedMicrobatch {
        self.held.remove(&place(action)).expect("a checked schedule runs the forward first")
    }

    /// Updates a stage's weights without waiting for the other stages.
    fn step(&mut self, action: Action) -> Result<()> {
        let Action { stage, microbatch, .. } = action;
        let part = self.placement.part(stage);
        let next = Some(microbatch + 1).filter(|&next| next < self.microbatches);
        let needed = next.map(|next| self.updates.version(part, self.placement.depth(), next));
        let mine = self.parts.get_mut(&stage).expect("the schedule gives a rank its own stages");
        let begun = self.comm.now();
        mine.finish_reduce()?;
        let table = self.tied.exchange(stage, mine)?;
        add_since(begun, &self.comm, &mut self.spent.communicate);
        if let Some(table) = table {
            // The update is deferred, since waiting here for the other rank with the table would stall the
            // pipeline.
            return mine.defer_update(Some(table), needed);
        }
        let norm = farflung_optim::global_norm(&mine.grads)?;
        mine.commit(Prepared::with_norm(norm)?, needed)
    }

    /// Returns the number of a message's microbatch and the numbers of its samples, over all steps and
    /// replicas. `None` in an evaluation, which sends values unencoded and leaves the codecs' state unchanged.
    fn boundary_message(&self, message: Message) -> Option<(u64, Vec<u64>)> {
        let Pass::Training { first } = self.pass else { return None };
        let (microbatch, batch) = (first + u64::from(message.microbatch), self.sampler.shard().batch as u64);
        let sequences = microbatch * batch..(microbatch + 1) * batch;
        Some((microbatch, sequences.map(|n| self.sampler.window(n).unwrap_or(n)).collect()))
    }

    /// Returns a tag that is unique among the messages of a pass.
    fn tag(&self, message: Message) -> u32 {
        let microbatch = message.from.0 * self.passing + message.microbatch;
        let cell = microbatch * self.slices.len() as u32 + u32::from(message.slice);
        2 * cell + u32::from(message.content == Content::Gradient)
    }
}

impl Executor {
    fn run(&mut self, action: Action, input: Option<Tensor>) -> Result<Option<Tensor>> {
        match action.kind {
            ComputeKind::Forward => return self.forward(action, input),
            ComputeKind::Recompute => self.recompute(action)?,
            ComputeKind::Backward | ComputeKind::BackwardInput => return self.backward(action, input),
            ComputeKind::BackwardWeight => {
                let saved = self.take(action).saved.expect("the backward pass of the input kept it");
                self.comm.advance(self.cost(action).weight);
                self.part(action.stage).backward_weight(saved)?;
            }
            // With a flush, all stages are updated together after all ranks have agreed.
            ComputeKind::Step if self.updates == Updates::Flush => {}
            ComputeKind::Step => self.step(action)?,
        }
        Ok(None)
    }

    /// Returns a message as it is sent.
    fn encoded(&mut self, message: Message, data: &Tensor) -> Result<Vec<u8>> {
        let values = data.to_vec::<f32>()?;
        let coded = match self.boundary_message(message) {
            Some((microbatch, samples)) => {
                self.boundaries.encode(BoundaryMessage { message, samples: &samples, microbatch }, &values)?
            }
            None => None,
        };
        let bytes = coded.unwrap_or_else(|| values.iter().flat_map(|v| v.to_le_bytes()).collect());
        let Message { microbatch, content, .. } = message;
        self.kept.keep(KeptMessage { microbatch, content }, &bytes);
        Ok(bytes)
    }

    /// Returns whether another rank needs a message in this pass.
    fn needs(&self, Message { from, content, microbatch, .. }: Message) -> bool {
        self.kept.needs(microbatch, self.placement.part(from), content)
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
        let bytes = match data {
            Flow::Values(values) => self.encoded(message, &values)?,
            Flow::Kept if !self.needs(message) => return Ok(()),
            Flow::Kept => {
                let Message { microbatch, content, .. } = message;
                let kept = self.kept.sent(KeptMessage { microbatch, content }).map(<[u8]>::to_vec);
                // Only messages that were kept are announced to the other ranks.
                let problem = "was not kept";
                kept.ok_or_else(|| Error::Message { message: message.to_string(), problem })?
            }
        };
        if !self.needs(message) {
            return Ok(());
        }
        let to = self.pipeline[to.index()];
        let sending = self.messages.start_send(to, self.tag(message), bytes);
        self.sending.push(sending);
        Ok(())
    }

    fn receive(&mut self, from: Rank, message: Message) -> Result<Self::Pending> {
        let from = self.pipeline[from.index()];
        let bytes = self.needs(message).then(|| self.messages.start_recv(from, self.tag(message)));
        Ok(Awaited { message, bytes })
    }

    fn wait(&mut self, Awaited { message, bytes }: Awaited) -> Result<Flow> {
        let Some(pending) = bytes else { return Ok(Flow::Kept) };
        let begun = self.comm.now();
        let bytes = pending.wait()?;
        add_since(begun, &self.comm, &mut self.spent.wait);
        let shape = [self.sampler.shard().batch, self.positions(message.slice).len(), self.dim];
        let count = shape.iter().product();
        let coded = match self.boundary_message(message) {
            Some((microbatch, samples)) => self.boundaries.decode(
                BoundaryMessage { message, samples: &samples, microbatch },
                &bytes,
                count,
            )?,
            None => None,
        };
        let values = coded.or_else(|| floats(&bytes, count)).ok_or_else(|| Error::Message {
            message: message.to_string(),
            problem: "does not have the length of a microbatch's hidden states",
        })?;
        Ok(Flow::Values(self.device.tensor(&values, shape)?))
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

impl PollArrivals for Executor {
    fn arrived(&mut self, awaited: &mut [&mut Awaited]) -> Option<usize> {
        match awaited.iter().position(|awaited| awaited.bytes.is_none()) {
            Some(kept) => Some(kept),
            None => self.comm.first(&mut on_their_way(awaited), WaitMode::Now),
        }
    }

    fn first(&mut self, awaited: &mut [&mut Awaited]) -> usize {
        if let Some(kept) = awaited.iter().position(|awaited| awaited.bytes.is_none()) {
            return kept;
        }
        // `first` returns `None` only if the network has ended. Waiting for the first message then returns the
        // error.
        let begun = self.comm.now();
        let first = self.comm.first(&mut on_their_way(awaited), WaitMode::UntilOne).unwrap_or(0);
        add_since(begun, &self.comm, &mut self.spent.wait);
        first
    }
}

fn on_their_way<'a>(awaited: &'a mut [&mut Awaited]) -> Vec<&'a mut Bytes> {
    awaited.iter_mut().filter_map(|awaited| awaited.bytes.as_mut()).collect()
}
