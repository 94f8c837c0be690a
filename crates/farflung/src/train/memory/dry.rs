//! A worker that allocates the tensors of a rank's step, as `executor.rs` and `trainer.rs` do, on a device that
//! only counts them.

use std::collections::BTreeMap;

use farflung_base::{Rank, StageId};
use farflung_optim::{Chain, Prepared, global_norm};
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::{
    Action, ComputeKind, LoweredKind, Message, Placement, TiedWeights, Updates, Worker,
};
use farflung_tensor::{DType, Device, Tensor};
use farflung_zoo::{ActivationPolicy, Input, ModelSpec, Output, Saved, Slices, Stage, Targets};

use crate::train::activations::within_budget;
use crate::train::bind::ReplicaSchedule;
use crate::train::bound_plan::BoundPlan;
use crate::train::executor::recomputed;
use crate::train::part::{Part, Parts, SavedMicrobatch, SendTiming, copy};
use crate::train::trainer::chain;
use crate::{Error, Result, RunSettings};

/// A stage, microbatch and slice.
type Place = (StageId, u32, u16);

fn place(action: Action) -> Place {
    (action.stage, action.microbatch, action.slice)
}

/// A rank's parts, without values.
pub(super) struct DryRun<'a> {
    model: &'a ModelSpec,
    schedule: &'a ReplicaSchedule,
    placement: &'a Placement,
    device: Device,
    batch: usize,
    parts: BTreeMap<StageId, Part>,
    /// Whether passes are told where documents begin.
    documents: bool,
    again: Vec<Place>,
    held: BTreeMap<Place, SavedMicrobatch>,
    carried: BTreeMap<(StageId, u32), Slices>,
    /// Bytes of the largest message that was sent or received.
    message: u64,
}

impl<'a> DryRun<'a> {
    pub(super) fn new(
        plan: &BoundPlan,
        model: &'a ModelSpec,
        config: &RunSettings,
        schedule: &'a ReplicaSchedule,
        position: Rank,
        device: &Device,
    ) -> Result<Self> {
        let placement = schedule.placement();
        let mut parts = BTreeMap::new();
        for stage in placement.homes_of(position) {
            parts.insert(stage, part(plan, model, config, schedule, stage, device)?);
        }
        Ok(Self {
            model,
            schedule,
            placement,
            device: device.clone(),
            batch: plan.batch as usize,
            parts,
            documents: config.document_mask,
            again: recomputed(schedule.schedule.order()),
            held: BTreeMap::new(),
            carried: BTreeMap::new(),
            message: 0,
        })
    }

    /// Returns the number of elements of the parameters, without padding.
    pub(super) fn elements(&self) -> u64 {
        self.parts.values().map(|part| part.stage.layout().count() as u64).sum()
    }

    /// Returns the bytes of the parameters in their buffers.
    pub(super) fn parameters(&self) -> u64 {
        self.parts.values().map(|part| buffer(part.stage.layout().len())).sum()
    }

    /// Returns the bytes of older versions of the parameters.
    pub(super) fn versions(&self) -> u64 {
        let updates = self.schedule.updates();
        let of = |(stage, part): (&StageId, &Part)| {
            let most = updates.versions_held(self.placement.part(*stage), self.placement.depth());
            buffer(part.stage.layout().len()) * u64::from(most.saturating_sub(1))
        };
        self.parts.iter().map(of).sum()
    }

    pub(super) fn has_table(&self) -> bool {
        self.parts.keys().any(|&stage| self.placement.is_first(stage) || self.placement.is_last(stage))
    }

    /// Returns the bytes of messages between stages in the host's memory.
    pub(super) const fn messages(&self) -> u64 {
        // One message that is being sent or received, as numbers and as bytes. Messages that are in flight are
        // buffered by the transport and are not counted.
        2 * self.message
    }

    /// Allocates the tensors of the commit after a pass: the norm and the update.
    pub(super) fn commit(&mut self) -> Result<()> {
        if self.schedule.updates() != Updates::Flush {
            return self.parts.values_mut().try_for_each(|part| part.catch_up(None));
        }
        for part in self.parts.values_mut() {
            part.contribute_alone()?;
        }
        for part in self.parts.values_mut() {
            if !part.stage.layout().is_empty() {
                global_norm(&part.grads)?;
            }
            part.commit(Prepared::with_norm(1.0)?, None)?;
        }
        Ok(())
    }

    fn tokens(&self, action: Action) -> Result<Tensor> {
        let len = self.schedule.slices[usize::from(action.slice)].len();
        Ok(self.parts[&self.placement.storage_stage(action.stage)]
            .stage
            .tokens(&vec![0; self.batch * len], len)?)
    }

    fn input(&self, action: Action, hidden: Option<Tensor>) -> Result<Input> {
        Ok(match hidden {
            Some(x) => Input::Hidden(x),
            None => Input::Tokens(self.tokens(action)?),
        })
    }

    fn pass_on(&mut self, action: Action, version: u32, input: Input) -> Result<(Output, Saved)> {
        let targets = self.placement.is_last(action.stage).then(|| self.tokens(action)).transpose()?;
        let documents = self.documents.then(|| self.tokens(action)).transpose()?;
        // The last token of a document has no target.
        let weights = targets.as_ref().filter(|_| self.documents).map(|targets| {
            let count = targets.shape().len();
            self.device.empty(DType::F32, count)
        });
        let weights = weights.transpose()?;
        let start = self.schedule.slices[usize::from(action.slice)].start;
        let part = &self.parts[&self.placement.storage_stage(action.stage)];
        let key = (action.stage, action.microbatch);
        if self.schedule.slices.len() > 1 && !self.carried.contains_key(&key) {
            self.carried.insert(key, part.stage.slices(self.batch)?);
        }
        let carried = self.carried.get_mut(&key);
        let input = input.with_documents(documents);
        let targets = targets.as_ref().map(|ids| Targets { ids, weights: weights.as_ref(), scale: 1.0 });
        part.forward(version, input, start, targets, carried)
    }

    fn forward(&mut self, action: Action, hidden: Option<Tensor>) -> Result<Option<Tensor>> {
        let Action { stage, microbatch, .. } = action;
        let version =
            self.schedule.updates().version(self.placement.part(stage), self.placement.depth(), microbatch);
        self.part(stage).catch_up(Some(version))?;
        let again = self.again.binary_search(&place(action)).is_ok();
        let kept = hidden.as_ref().filter(|_| again).map(copy).transpose()?;
        let input = self.input(action, hidden)?;
        let (output, mut saved) = self.pass_on(action, version, input)?;
        let output = match output {
            Output::Hidden(y) => Some(y),
            Output::Losses(_) => None,
        };
        let part = &self.parts[&self.placement.storage_stage(stage)];
        let saved = match part.recompute {
            Recompute::Full if again => None,
            recompute => {
                if let (Recompute::Layers(layers), true) = (recompute, again) {
                    saved.drop_activations(layers as usize);
                }
                Some(saved)
            }
        };
        self.held.insert(place(action), SavedMicrobatch { saved, input: kept, version, again });
        Ok(output)
    }

    fn recompute(&mut self, action: Action) -> Result<()> {
        let mut held = self.take(action);
        let input = self.input(action, held.input.take())?;
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

    fn backward(&mut self, action: Action, dy: Option<Tensor>) -> Result<Option<Tensor>> {
        let Action { stage, microbatch, slice, kind } = action;
        let mut held = self.take(action);
        let mut saved = held.saved.take().expect("a checked schedule recomputes before it");
        if kind == ComputeKind::Backward && self.schedule.slices.len() == 1 {
            return self.part(stage).backward(held.version, saved, dy, |_| {}, SendTiming::Later);
        }
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

    /// Applies the update of a microbatch, in schedules without a flush.
    fn step(&mut self, action: Action) -> Result<()> {
        let (updates, depth) = (self.schedule.updates(), self.placement.depth());
        let next = Some(action.microbatch + 1).filter(|&next| next < self.schedule.microbatches());
        let needed = next.map(|next| updates.version(self.placement.part(action.stage), depth, next));
        let ends = self.placement.is_first(action.stage) || self.placement.is_last(action.stage);
        if self.schedule.tie() == TiedWeights::Across && ends {
            return self.part(action.stage).defer_update(None, needed);
        }
        self.part(action.stage).commit(Prepared::with_norm(1.0)?, needed)
    }

    fn part(&mut self, stage: StageId) -> &mut Part {
        let home = self.placement.storage_stage(stage);
        self.parts.get_mut(&home).expect("the schedule gives a rank its own stages")
    }

    fn take(&mut self, action: Action) -> SavedMicrobatch {
        self.held.remove(&place(action)).expect("a checked schedule runs the forward first")
    }

    /// Counts a message and returns its shape.
    fn message(&mut self, slice: u16) -> [usize; 3] {
        let len = self.schedule.slices[usize::from(slice)].len();
        let shape = [self.batch, len, self.model.dim];
        let bytes = (shape.iter().product::<usize>() * size_of::<f32>()) as u64;
        self.message = self.message.max(bytes);
        shape
    }
}

/// Returns the bytes of a flat f32 buffer: whole pages of 4096 bytes, at least one.
fn buffer(elements: usize) -> u64 {
    ((elements * size_of::<f32>()).max(1) as u64).next_multiple_of(4096)
}

/// Makes a part as `trainer/build.rs` does, without the synchronisation of its copies.
fn part(
    plan: &BoundPlan,
    model: &ModelSpec,
    config: &RunSettings,
    schedule: &ReplicaSchedule,
    stage: StageId,
    device: &Device,
) -> Result<Part> {
    let placement = schedule.placement();
    let number = placement.part(stage) as usize;
    let planned = &plan.parts[number];
    let mut built = Stage::new(model, schedule.layers[number].clone(), device)?;
    if placement.depth() == 1 {
        let count = planned.layers.end - planned.layers.start;
        let steps = within_budget(planned, model, plan.batch as usize)?.map(|plan| plan.steps.into());
        // Offloading has no effect here, since a CPU's memory is the host's memory.
        built.set_activation_policy(ActivationPolicy {
            recompute: planned.recompute.of(count) as usize,
            offload: 0,
            steps,
        });
    }
    let chain: Chain = chain(config, device, &built, (1, plan.outermost().every.into()))?;
    Part::new(Parts {
        params: built.zeros()?,
        stage: built,
        chain,
        sync: None,
        costs: Vec::new(),
        recompute: planned.recompute,
        offload: 0,
        weight: 1.0,
        keeps: false,
    })
}

impl Worker for DryRun<'_> {
    type Data = Tensor;
    type Pending = Message;
    type Error = Error;

    fn compute(&mut self, action: Action, input: Option<Tensor>) -> Result<Option<Tensor>> {
        match action.kind {
            ComputeKind::Forward => return self.forward(action, input),
            ComputeKind::Recompute => self.recompute(action)?,
            ComputeKind::Backward | ComputeKind::BackwardInput => return self.backward(action, input),
            ComputeKind::BackwardWeight => {
                let saved = self.take(action).saved.expect("the backward pass of the input kept it");
                self.part(action.stage).backward_weight(saved)?;
            }
            // With a flush, all stages are updated together after all ranks have agreed.
            ComputeKind::Step if self.schedule.updates() == Updates::Flush => {}
            ComputeKind::Step => self.step(action)?,
        }
        Ok(None)
    }

    fn send(&mut self, _: Rank, message: Message, _: Tensor) -> Result<()> {
        self.message(message.slice);
        Ok(())
    }

    fn receive(&mut self, _: Rank, message: Message) -> Result<Message> {
        Ok(message)
    }

    fn wait(&mut self, message: Message) -> Result<Tensor> {
        let shape = self.message(message.slice);
        Ok(self.device.empty(DType::F32, shape)?)
    }

    fn start_transfer(&mut self, _: LoweredKind, _: StageId, _: u32, _: u16) -> Result<()> {
        Ok(())
    }

    fn restore_output(&mut self, message: Message) -> Result<Tensor> {
        Err(Error::Message { message: message.to_string(), problem: "was not kept" })
    }
}
