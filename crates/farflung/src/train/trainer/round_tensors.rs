//! The state of a rank of a pipeline with local steps, by tensor, as of the last average: the parameters, the
//! state of the method of synchronisation, and the optimizer. Names are those of a checkpoint: a tensor's
//! parameters have its name, and each state has the tensor's name after its kind (`outer.anchor/wte.weight`).
//! All replicas have the same parameters and states of the method. Each has its own optimizer.

use std::collections::BTreeMap;

use farflung_optim::Chain;
use farflung_optim::sync::Synchroniser;
use farflung_tensor::{ParamLayout, Tensor};
use farflung_zoo::Stage;

use super::Trainer;
use super::named_tensors::{NamedTensors, RunCounters};
use super::retreat::{RollbackPoint, agreed};
use crate::train::job::Job;
use crate::train::part::Part;
use crate::train::pieces::{Scope, StateKind, tensor_name};
use crate::{Error, Result};

/// The kind of the parameters.
pub(super) const PARAMS: &str = "";

/// Tensors by name.
pub(super) type Tensors = BTreeMap<String, Vec<f32>>;

/// Returns the states of a method by kind.
pub(super) fn outer_states(sync: &dyn Synchroniser) -> impl Iterator<Item = (String, &Tensor)> {
    sync.states().into_iter().map(|(name, state)| (StateKind::Method(name.to_owned()).name(), state))
}

/// Returns the states of an optimizer by kind.
pub(super) fn chain_states(chain: &Chain) -> impl Iterator<Item = (String, &Tensor)> {
    chain.states().map(|(name, state)| (StateKind::Optimizer(name.to_owned()).name(), state))
}

/// Returns the states of a part by kind: those of the optimizer, and those that replicas share.
fn states(part: &Part) -> impl Iterator<Item = (String, &Tensor)> {
    let states = part.states(false).into_iter().filter(|state| match state.kind {
        StateKind::Optimizer(_) => true,
        StateKind::Method(_) => state.scope == Scope::Run,
        StateKind::Parameters | StateKind::OwnParameters => false,
    });
    states.map(|state| (state.kind.name(), state.values))
}

/// Adds the tensors of a flat buffer of this kind.
///
/// Errors: those of the device.
pub(super) fn add_tensors(into: &mut Tensors, stage: &Stage, kind: &str, flat: &Tensor) -> Result<()> {
    for param in stage.layout().params() {
        let values = flat.view().part(param.start, param.shape)?.to_vec::<f32>()?;
        into.insert(tensor_name(kind, &param.name), values);
    }
    Ok(())
}

/// Returns a flat buffer of this kind; `get` returns its tensors by name.
///
/// Errors: [`Error::Message`] if a tensor is missing or has another length.
pub(super) fn flat<'a>(
    layout: &ParamLayout,
    kind: &str,
    get: &dyn Fn(&str) -> Option<&'a [f32]>,
) -> Result<Vec<f32>> {
    let mut flat = vec![0.0; layout.len()];
    for param in layout.params() {
        let name = tensor_name(kind, &param.name);
        let values = get(&name).filter(|values| values.len() == param.shape.len());
        let values = values.ok_or_else(|| Error::Message {
            message: format!("{name} of the run's state"),
            problem: "is missing or has the wrong length",
        })?;
        flat[param.range()].copy_from_slice(values);
    }
    Ok(flat)
}

fn flats<'a, 's>(
    layout: &ParamLayout,
    states: impl Iterator<Item = (String, &'s Tensor)>,
    get: &dyn Fn(&str) -> Option<&'a [f32]>,
) -> Result<Tensors> {
    states.map(|(kind, _)| flat(layout, &kind, get).map(|flat| (kind, flat))).collect()
}

/// Replaces the parameters of a part and the state of its method; `get` returns tensors by name.
///
/// Errors: as [`flat`]; those of the method. The parameters may have changed then.
pub(super) fn restore_shared<'a>(
    (layout, params, sync): (&ParamLayout, &mut Tensor, Option<&mut Box<dyn Synchroniser>>),
    counted: &RunCounters,
    get: &dyn Fn(&str) -> Option<&'a [f32]>,
) -> Result<()> {
    params.write(&flat(layout, PARAMS, get)?)?;
    let Some(sync) = sync else { return Ok(()) };
    let flats = flats(layout, outer_states(&**sync), get)?;
    sync.on_params_set(params)?;
    sync.restore(counted.outer_steps, &|name| {
        flats.get(&StateKind::Method(name.to_owned()).name()).cloned()
    })?;
    Ok(sync.average_mut().restore("", counted.rounds, |_| Some(&[]))?)
}

/// Replaces the state of an optimizer, which has taken `updates` updates; `get` returns tensors by name.
///
/// Errors: as [`flat`]; those of the optimizer.
pub(super) fn restore_optimizer<'a>(
    (layout, chain): (&ParamLayout, &mut Chain),
    updates: u64,
    get: &dyn Fn(&str) -> Option<&'a [f32]>,
) -> Result<()> {
    let flats = flats(layout, chain_states(chain), get)?;
    Ok(chain.restore(updates, |name| {
        flats.get(&StateKind::Optimizer(name.to_owned()).name()).map(Vec::as_slice)
    })?)
}

impl Trainer {
    /// Returns the state of this rank's parts after the last average. Without a copy of the optimizer as it was
    /// then ([`Trainer::mark_round`]), its present state.
    ///
    /// Errors: those of the device.
    pub(super) fn round_pieces(&self, job: &Job) -> Result<NamedTensors> {
        let (mut tensors, marked) = (self.marked_tensors()?, self.last_mark().is_some());
        for part in self.executor.parts.values() {
            let params = (PARAMS.to_owned(), agreed(part).unwrap_or(&part.params));
            let states = states(part).filter(|(kind, _)| !(marked && StateKind::is_optimizer(kind)));
            for (kind, flat) in std::iter::once(params).chain(states) {
                add_tensors(&mut tensors, &part.stage, &kind, flat)?;
            }
        }
        Ok(NamedTensors { counted: self.round_counted(job), tensors })
    }

    /// Returns the copy of this rank's state after the last average, if there is one.
    pub(super) fn last_mark(&self) -> Option<&RollbackPoint> {
        self.mark.as_ref().filter(|mark| mark.step() == self.agreed_step())
    }

    /// Returns this rank's optimizer after the last average; empty if there is no copy of it.
    ///
    /// Errors: those of the device.
    pub(super) fn marked_tensors(&self) -> Result<Tensors> {
        let mut tensors = Tensors::new();
        for (stage, name, state) in self.last_mark().iter().flat_map(|mark| mark.states()) {
            let part = &self.executor.parts[&stage];
            add_tensors(&mut tensors, &part.stage, &StateKind::Optimizer(name.to_owned()).name(), state)?;
        }
        Ok(tensors)
    }

    /// Returns the run's counters after the last average.
    pub(super) fn round_counted(&self, job: &Job) -> RunCounters {
        let kinds = self.executor.parts.values().map(|part| states(part).map(|(kind, _)| kind).collect());
        let kinds: Vec<String> = kinds.max_by_key(Vec::len).unwrap_or_default();
        let step = self.agreed_step();
        let microbatches = job.microbatches_after(step);
        let now = self.counted(job);
        let (updates, scale) = match self.last_mark() {
            Some(mark) => (mark.updates(), mark.scale().to_vec()),
            None => (now.updates, now.scale),
        };
        RunCounters { step, microbatches, updates, scale, states: 0, kinds, ..now }
    }

    /// Replaces the parameters and states of this rank's parts by those that `get` returns by name.
    ///
    /// Errors: [`Error::Message`] if a tensor is missing or has another length; those of the optimizer and of
    /// the method.
    pub(super) fn take_round_pieces<'a>(
        &mut self,
        counted: &RunCounters,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<()> {
        for part in self.executor.parts.values_mut() {
            let Part { stage, params, chain, sync, .. } = part;
            if !stage.layout().is_empty() {
                restore_shared((stage.layout(), params, sync.as_mut()), counted, get)?;
                restore_optimizer((stage.layout(), chain), counted.updates, get)?;
            }
        }
        Ok(())
    }
}
