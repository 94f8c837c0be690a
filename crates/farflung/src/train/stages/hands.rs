//! What a rank of a pipeline can do: run its parts of the model on microbatches, and hand hidden states and their
//! gradients to other ranks. The schedule's executor says when; nothing here knows the order.

use std::collections::BTreeMap;

use farflung_base::{Pending, Rank, StageId};
use farflung_comm::{CommError, Communicator};
use farflung_optim::Prepared;
use farflung_parallel::pipeline::{
    Action, ComputeKind, ComputeOrder, Content, LoweredKind, Message, Placement, Updates, Worker,
};
use farflung_tensor::{Device, Tensor};
use farflung_zoo::{Input, Output, Sampler, stage};

use super::part::{Held, Part, copy};
use super::tied::Tied;
use crate::config::choice::Recompute;
use crate::{Error, Result};

/// Which microbatches pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// Those of a step: from this batch of the sampler on.
    Training {
        /// The batch of microbatch 0.
        first: u64,
    },
    /// The held-out ones: forwards of which nothing is kept.
    Evaluation,
}

/// Where an action stands: its stage and microbatch.
type Place = (StageId, u32);

/// A rank's parts and links.
#[derive(Debug)]
pub(super) struct Hands {
    pub(super) comm: Communicator,
    /// The rank of the job that holds rank 0 of this pipeline.
    pub(super) first: u32,
    pub(super) device: Device,
    pub(super) placement: Placement,
    pub(super) updates: Updates,
    pub(super) microbatches: u32,
    pub(super) parts: BTreeMap<StageId, Part>,
    pub(super) tied: Tied,
    pub(super) sampler: Sampler,
    pub(super) evaluation: Sampler,
    /// Width of a hidden state.
    pub(super) dim: usize,
    /// Scale of the losses' gradients.
    pub(super) scale: f32,
    pub(super) recompute: Recompute,
    /// Of which microbatches a stage's forward runs again.
    pub(super) again: Vec<Place>,
    pub(super) pass: Pass,
    /// Sums of losses by microbatch, where this rank has the model's last part.
    pub(super) losses: Vec<f64>,
    pub(super) held: BTreeMap<Place, Held>,
    pub(super) sending: Vec<Pending<Result<(), CommError>>>,
}

/// The forwards that an order runs again, sorted.
pub(super) fn recomputed(order: &ComputeOrder) -> Vec<Place> {
    let actions = order.actions().map(|(_, action)| action);
    let mut places: Vec<_> =
        actions.filter(|a| a.kind == ComputeKind::Recompute).map(|a| (a.stage, a.microbatch)).collect();
    places.sort_unstable();
    places
}

impl Hands {
    /// The pipeline is empty, and `pass` begins.
    pub(super) fn begin(&mut self, pass: Pass, microbatches: u32) {
        self.pass = pass;
        self.held.clear();
        self.sending.clear();
        self.losses = vec![0.0; microbatches as usize];
        self.parts.values_mut().for_each(Part::begin);
    }

    /// What was sent has left.
    pub(super) fn sent(&mut self) -> Result<()> {
        self.sending.drain(..).try_for_each(|sending| Ok(sending.wait()?))
    }

    /// Inputs and targets of a microbatch.
    fn batch(&self, microbatch: u32) -> Result<(Vec<u32>, Vec<u32>)> {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        match self.pass {
            Pass::Training { first } => {
                self.sampler.batch(first + u64::from(microbatch), &mut inputs, &mut targets)?;
            }
            Pass::Evaluation => self.evaluation.batch(microbatch.into(), &mut inputs, &mut targets)?,
        }
        Ok((inputs, targets))
    }

    /// What a stage takes: hidden states, or a microbatch's tokens at the model's input.
    fn input(&self, part: &Part, microbatch: u32, hidden: Option<Tensor>) -> Result<Input> {
        Ok(match hidden {
            Some(x) => Input::Hidden(x),
            None => Input::Tokens(part.stage.tokens(&self.batch(microbatch)?.0, self.sampler.context())?),
        })
    }

    fn forward(&mut self, action: Action, hidden: Option<Tensor>) -> Result<Option<Tensor>> {
        let Action { stage, microbatch, .. } = action;
        let place = (stage, microbatch);
        let version = match self.pass {
            Pass::Training { .. } => {
                self.updates.version(self.placement.part(stage), self.placement.depth(), microbatch)
            }
            Pass::Evaluation => 0,
        };
        self.parts
            .get_mut(&stage)
            .expect("the schedule gives a rank its own stages")
            .catch_up(Some(version))?;
        let part = &self.parts[&stage];
        let again = self.pass != Pass::Evaluation && self.again.binary_search(&place).is_ok();
        let kept = hidden.as_ref().filter(|_| again).map(copy).transpose()?;
        let input = self.input(part, microbatch, hidden)?;
        let targets = self.targets(stage, microbatch)?;
        // Declared before it is done, so that workers on simulated links compute side by side.
        self.comm.advance(part.cost.forward);
        let (output, mut saved) =
            part.forward(version, input, targets.as_ref().map(|targets| (targets, self.scale)))?;
        let output = match output {
            Output::Hidden(y) => Some(y),
            Output::Losses(losses) => {
                self.losses[microbatch as usize] = stage::total(&losses)?;
                None
            }
        };
        if self.pass == Pass::Evaluation {
            return Ok(output);
        }
        let saved = match self.recompute {
            Recompute::Full if again => None,
            Recompute::Layers(layers) if again => {
                saved.forget(layers);
                Some(saved)
            }
            _ => Some(saved),
        };
        self.held.insert(place, Held { saved, input: kept, version });
        Ok(output)
    }

    /// A microbatch's targets on a stage that makes the model's output.
    fn targets(&self, stage: StageId, microbatch: u32) -> Result<Option<Tensor>> {
        if !self.placement.is_last(stage) {
            return Ok(None);
        }
        let targets = self.batch(microbatch)?.1;
        Ok(Some(self.parts[&stage].stage.tokens(&targets, self.sampler.context())?))
    }

    fn recompute(&mut self, action: Action) -> Result<()> {
        let Action { stage, microbatch, .. } = action;
        let mut held = self.take(action);
        let part = &self.parts[&stage];
        let input = self.input(part, microbatch, held.input.take())?;
        self.comm.advance(part.cost.recompute);
        if let Some(saved) = &mut held.saved {
            part.recompute(held.version, input, saved)?;
        } else {
            let targets = self.targets(stage, microbatch)?;
            let (_, saved) = part.forward(held.version, input, targets.as_ref().map(|t| (t, self.scale)))?;
            held.saved = Some(saved);
        }
        self.held.insert((stage, microbatch), held);
        Ok(())
    }

    fn take(&mut self, action: Action) -> Held {
        self.held
            .remove(&(action.stage, action.microbatch))
            .expect("a checked schedule runs the forward first")
    }

    /// The optimizer of a stage that does not wait for the others.
    fn step(&mut self, action: Action) -> Result<()> {
        let Action { stage, microbatch, .. } = action;
        let part = self.placement.part(stage);
        let next = Some(microbatch + 1).filter(|&next| next < self.microbatches);
        let needed = next.map(|next| self.updates.version(part, self.placement.depth(), next));
        let mine = self.parts.get_mut(&stage).expect("the schedule gives a rank its own stages");
        mine.finish_reduce()?;
        if let Some(table) = self.tied.exchange(stage, mine)? {
            // Whoever waited here for the other user of the table would keep the pipeline waiting.
            return mine.put_off(table, needed);
        }
        let norm = farflung_optim::global_norm(&mine.grads)?;
        mine.commit(Prepared::with_norm(norm)?, needed)
    }

    /// A number for each message of a pass.
    fn tag(&self, message: Message) -> u32 {
        let cell = message.from.0 * self.losses.len() as u32 + message.microbatch;
        2 * cell + u32::from(message.content == Content::Gradient)
    }
}

impl Worker for Hands {
    type Data = Tensor;
    type Pending = (Message, Pending<Result<Vec<u8>, CommError>>);
    type Error = Error;

    fn compute(&mut self, action: Action, input: Option<Tensor>) -> Result<Option<Tensor>> {
        match action.kind {
            ComputeKind::Forward => return self.forward(action, input),
            ComputeKind::Recompute => self.recompute(action)?,
            ComputeKind::Backward | ComputeKind::BackwardInput => {
                let mut held = self.take(action);
                let part =
                    self.parts.get_mut(&action.stage).expect("the schedule gives a rank its own stages");
                let mut saved = held.saved.take().expect("a checked schedule recomputes before it");
                let whole = action.kind == ComputeKind::Backward;
                self.comm.advance(if whole { part.cost.backward() } else { part.cost.input });
                let dx = part.backward_input(held.version, &mut saved, input)?;
                if whole {
                    part.backward_weight(saved)?;
                } else {
                    self.held.insert((action.stage, action.microbatch), Held { saved: Some(saved), ..held });
                }
                return Ok(dx);
            }
            ComputeKind::BackwardWeight => {
                let saved = self.take(action).saved.expect("the first half left it here");
                let part =
                    self.parts.get_mut(&action.stage).expect("the schedule gives a rank its own stages");
                self.comm.advance(part.cost.weight);
                part.backward_weight(saved)?;
            }
            // With a flush, all stages step together once all ranks agreed.
            ComputeKind::Step if self.updates == Updates::Flush => {}
            ComputeKind::Step => self.step(action)?,
        }
        Ok(None)
    }

    fn send(&mut self, to: Rank, message: Message, data: Tensor) -> Result<()> {
        let values = data.to_vec::<f32>()?;
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let to = Rank(self.first + to.0);
        self.sending.push(self.comm.start_send(to, self.tag(message), bytes));
        Ok(())
    }

    fn receive(&mut self, from: Rank, message: Message) -> Result<Self::Pending> {
        let from = Rank(self.first + from.0);
        Ok((message, self.comm.start_recv(from, self.tag(message))))
    }

    fn wait(&mut self, (message, pending): Self::Pending) -> Result<Tensor> {
        let bytes = pending.wait()?;
        let shape = [self.sampler.shard().batch, self.sampler.context(), self.dim];
        let values = floats(&bytes, shape.iter().product());
        let values = values.ok_or_else(|| Error::Message {
            message: message.to_string(),
            problem: "is not as long as a microbatch's hidden states",
        })?;
        Ok(self.device.tensor(&values, shape)?)
    }

    fn shift(&mut self, kind: LoweredKind, stage: StageId, _: u32, _: u16) -> Result<()> {
        match kind {
            LoweredKind::Reduce => {
                self.parts.get_mut(&stage).expect("the schedule gives a rank its own stages").reduce()
            }
            LoweredKind::ReduceTied => self.tied.start(&self.parts[&stage]),
            // Nothing else is asked for when the schedule is lowered.
            _ => Ok(()),
        }
    }

    fn recall(&mut self, message: Message) -> Result<Tensor> {
        // A pass that fails is begun anew: nothing is kept for a second executor.
        Err(Error::Message { message: message.to_string(), problem: "was not kept" })
    }
}

/// Little-endian bytes as exactly `count` numbers.
pub(super) fn floats(bytes: &[u8], count: usize) -> Option<Vec<f32>> {
    let (words, rest) = bytes.as_chunks::<4>();
    (words.len() == count && rest.is_empty())
        .then(|| words.iter().map(|&word| f32::from_le_bytes(word)).collect())
}
