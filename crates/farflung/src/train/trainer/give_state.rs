//! A rank's state as others take it: as of the last step after which all replicas had the same parameters, and
//! the records from which a step, or with local steps a synchronisation, is computed again elsewhere.

use farflung_base::StageId;
use farflung_tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::replayed_parts::wrong_record;
use super::retreat::{RollbackPoint, agreed};
use crate::Result;
use crate::train::job::Job;
use crate::train::part::Part;
use crate::train::pieces::{FlatState, Scope, StateKind};
use crate::train::run_state::{OptimizerCounters, RunCounters, RunState};

/// Sizes of the state that a rank sends to a member that has none, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::train) struct StateBytes {
    /// Bytes of the state that is the same on all replicas.
    pub(in crate::train) shared: u64,
    /// Bytes of the optimizer's state, if it differs between replicas; else 0.
    pub(in crate::train) own: u64,
    /// Bytes from which a step, or a round of local steps, can be replayed.
    pub(in crate::train) record: u64,
    /// Number of local steps of a round; 1 if replicas agree at each step.
    pub(in crate::train) every: u64,
    /// Whether the rank holds only a part of the model.
    pub(in crate::train) is_part: bool,
}

/// Returns the bytes of one kind of state of a part.
fn flat_bytes(part: &Part) -> u64 {
    let params = part.stage.layout().params().iter();
    params.map(|param| (param.shape.len() * size_of::<f32>()) as u64).sum()
}

impl Trainer {
    /// Copies the state to which a stop within a later step returns, if steps are local and none was taken
    /// since the last synchronisation.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn mark_round(&mut self) -> Result<()> {
        let is_between = self.step == self.agreed_step() && !self.unmet;
        let is_marked = self.mark.as_ref().is_some_and(|mark| mark.step() == self.step);
        if self.each_step || !is_between || is_marked { Ok(()) } else { self.set_rollback_point() }
    }

    /// Returns the copy of this rank's state after the last average, if there is one.
    fn last_mark(&self) -> Option<&RollbackPoint> {
        self.mark.as_ref().filter(|mark| mark.step() == self.agreed_step())
    }

    /// Returns what another rank can take of a part's state.
    fn movable<'a>(&'a self, stage: StageId, part: &'a Part) -> impl Iterator<Item = FlatState<'a>> {
        let mark = self.last_mark();
        let states = part.states(self.each_step).into_iter().filter(|state| match state.kind {
            StateKind::OwnParameters => false,
            StateKind::Method(_) => state.scope == Scope::Run,
            _ => true,
        });
        // Replicas may have trained since they were equal.
        states.map(move |state| {
            let then = match &state.kind {
                StateKind::Parameters => agreed(part),
                StateKind::Optimizer(_) => mark.and_then(|mark| mark.state(stage, &state.kind)),
                _ => None,
            };
            FlatState { values: then.map_or(state.values, Into::into), ..state }
        })
    }

    fn state_of(&self, counted: RunCounters, wanted: impl Fn(&FlatState<'_>) -> bool) -> Result<RunState> {
        let number = |stage: &StageId| self.executor.placement.part(*stage) as usize;
        let parts = &self.executor.parts;
        let layers = parts.keys().map(|stage| self.schedule.layers[number(stage)].clone()).collect();
        let mut all = RunState { counted, layers, ..RunState::default() };
        for (&stage, part) in parts {
            for state in self.movable(stage, part).filter(&wanted) {
                all.add(part.stage.layout(), &state.kind, state.values)?;
            }
        }
        Ok(all)
    }

    /// Returns this rank's state at the step after which all replicas last agreed. Without a copy of the
    /// optimizer as it was then ([`Trainer::mark_round`]), its present state.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn state(&self, job: &Job) -> Result<RunState> {
        self.state_of(self.counted(job), |_| true)
    }

    /// Returns the part of [`Trainer::state`] that is the same on all replicas.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn shared_state(&self, job: &Job) -> Result<RunState> {
        let shared = self.state_of(self.counted(job), |state| state.scope == Scope::Run)?;
        Ok(if self.each_step { shared } else { shared.without_optimizer() })
    }

    /// Returns the optimizer's state at the step after which all replicas last agreed, without counters. If
    /// there is no copy of it as it was then ([`Trainer::mark_round`]), its present state.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn optimizer(&self) -> Result<RunState> {
        let optimizer = |state: &FlatState<'_>| matches!(state.kind, StateKind::Optimizer(_));
        self.state_of(RunCounters::default(), optimizer)
    }

    /// Like [`Trainer::optimizer`]; `None` if there is no copy.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn marked_optimizer(&self) -> Result<Option<RunState>> {
        self.last_mark().map(|_| self.optimizer()).transpose()
    }

    /// Returns an earlier copy of this replica's optimizer in which the states that the last synchronisation
    /// averaged have their present values, which are the same on all replicas.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn with_averaged_states(&self, mut earlier: RunState) -> Result<RunState> {
        for part in self.executor.parts.values() {
            let averaged = part.sync.as_ref().map_or(&[][..], |sync| sync.averaged_states());
            let states: Vec<(&str, &Tensor)> = part.chain.states().collect();
            for &(name, state) in averaged.iter().filter_map(|&number| states.get(number)) {
                earlier.add(part.stage.layout(), &StateKind::Optimizer(name.to_owned()), state)?;
            }
        }
        Ok(earlier)
    }

    /// Returns the counters of [`Trainer::optimizer`].
    pub(in crate::train) fn optimizer_counters(&self) -> OptimizerCounters {
        if let Some(mark) = self.last_mark() {
            return mark.counters();
        }
        let updates = self.executor.parts.values().map(|part| part.chain.step()).max().unwrap_or(0);
        OptimizerCounters { updates, scale: self.scale.save().to_vec() }
    }

    /// Returns the run's counters at the step after which all replicas last agreed.
    fn counted(&self, job: &Job) -> RunCounters {
        let step = self.agreed_step();
        let kinds = |(&stage, part): (&StageId, &Part)| {
            let kinds = self.movable(stage, part).map(|state| state.kind.name());
            kinds.filter(|kind| !kind.is_empty()).collect()
        };
        let kinds: Vec<Vec<String>> = self.executor.parts.iter().map(kinds).collect();
        let counters = self.counters();
        RunCounters {
            step,
            outer_steps: counters.outer_step,
            rounds: counters.rounds,
            microbatches: if job.pipelines.is_some() { job.microbatches_after(step) } else { 0 },
            optimizer: self.optimizer_counters(),
            kinds: kinds.into_iter().max_by_key(Vec::len).unwrap_or_default(),
        }
    }

    /// Returns the values from which the step that was just committed is computed again: its averaged
    /// gradients. With local steps: what the replicas have averaged.
    fn averaged<'a>(&self, part: &'a Part) -> Vec<(StateKind, &'a Tensor)> {
        if self.each_step {
            return vec![(StateKind::Gradients, &part.grads)];
        }
        let averaged = part.sync.iter().flat_map(|sync| sync.averaged());
        averaged.map(|(kind, values)| (StateKind::Averaged(kind), values)).collect()
    }

    /// Returns the record of the step that was just committed, with the counters after it. With local steps:
    /// of the synchronisation. Only valid until the next step begins.
    ///
    /// Errors: those of the device; [`Error::Message`](crate::Error::Message) if the vote on a pipeline's step
    /// had no norm of the gradients.
    pub(in crate::train) fn record(&self, job: &Job) -> Result<RunState> {
        let counted = self.counted(job);
        let mut record = self.state_of(counted, |_| false)?;
        for part in self.executor.parts.values() {
            for (kind, values) in self.averaged(part) {
                record.add(part.stage.layout(), &kind, values)?;
            }
        }
        if !self.each_step {
            return Ok(record.without_optimizer());
        }
        record.squares = self.committed().squares;
        if record.squares.is_none() && self.schedule.layers.len() > 1 {
            return Err(wrong_record("has no norm of the gradients"));
        }
        Ok(record)
    }

    /// Returns the bytes of the record of a step or of a synchronisation, without its counters.
    pub(in crate::train) fn record_bytes(&self) -> u64 {
        let bytes = |part| flat_bytes(part) * self.averaged(part).len() as u64;
        self.executor.parts.values().map(bytes).sum()
    }

    /// Returns the sizes of this rank's state.
    pub(in crate::train) fn state_bytes(&self) -> StateBytes {
        let is_part = self.schedule.placement().depth() > 1;
        let mut bytes = StateBytes { is_part, record: self.record_bytes(), ..StateBytes::default() };
        bytes.every = if self.each_step { 1 } else { self.every };
        for (&stage, part) in &self.executor.parts {
            for state in self.movable(stage, part) {
                let sum = if state.scope == Scope::Run { &mut bytes.shared } else { &mut bytes.own };
                *sum += flat_bytes(part);
            }
        }
        bytes
    }
}
