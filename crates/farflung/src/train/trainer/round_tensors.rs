//! The state of a rank of a pipeline with local steps, by tensor, as of the last average: the parameters, the
//! state of the method of synchronisation, and the optimizer. Names are those of a checkpoint: a tensor's
//! parameters have its name, and each state has the tensor's name after its kind (`outer.anchor/wte.weight`).
//! All replicas have the same parameters and states of the method. Each has its own optimizer.

use std::collections::BTreeMap;

use farflung_tensor::{ParamLayout, Tensor};

use super::named_tensors::{NamedTensors, RunCounters};
use super::retreat::agreed;
use super::{Trainer, named};
use crate::train::checkpoint::CHAIN;
use crate::train::job::Job;
use crate::train::part::Part;
use crate::{Error, Result};

/// Prefix of the names of the method's states.
const OUTER: &str = "outer.";

/// Returns whether a tensor with this name belongs to one replica's optimizer.
pub(in crate::train) fn is_optimizer(name: &str) -> bool {
    name.starts_with(CHAIN)
}

/// Returns the states of a part by kind: those of the method, then those of the optimizer.
fn states(part: &Part) -> impl Iterator<Item = (String, &Tensor)> {
    let outer = part.sync.iter().flat_map(|sync| sync.states());
    let chain = part.chain.states().map(|(name, state)| (format!("{CHAIN}{name}"), state));
    outer.map(|(name, state)| (format!("{OUTER}{name}"), state)).chain(chain)
}

impl Trainer {
    /// Returns the state of this rank's parts after the last average.
    ///
    /// Errors: those of the device.
    pub(super) fn round_pieces(&self, job: &Job) -> Result<NamedTensors> {
        let mut tensors = BTreeMap::new();
        for part in self.executor.parts.values() {
            let params = (String::new(), agreed(part).unwrap_or(&part.params));
            let states = states(part).map(|(kind, state)| (format!("{kind}/"), state));
            for (prefix, flat) in std::iter::once(params).chain(states) {
                let of_part = named(&part.stage, flat, |name| format!("{prefix}{name}"))?;
                tensors.extend(of_part.into_iter().map(|tensor| (tensor.name, tensor.values)));
            }
        }
        let kinds = self.executor.parts.values().map(|part| states(part).map(|(kind, _)| kind).collect());
        let kinds = kinds.max_by_key(Vec::len).unwrap_or_default();
        let step = self.agreed_step();
        let microbatches = job.microbatches_after(step);
        let counted = RunCounters { step, microbatches, states: 0, kinds, ..self.counted(job) };
        Ok(NamedTensors { counted, tensors })
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
            let layout = part.stage.layout().clone();
            if layout.is_empty() {
                continue;
            }
            let mut flats = BTreeMap::new();
            for (kind, _) in states(part) {
                let flat = flat(&layout, &format!("{kind}/"), get)?;
                flats.insert(kind, flat);
            }
            part.params.write(&flat(&layout, "", get)?)?;
            let state = |name: &str| flats.get(&format!("{CHAIN}{name}")).map(Vec::as_slice);
            part.chain.restore(counted.updates, state)?;
            if let Some(sync) = &mut part.sync {
                sync.on_params_set(&part.params)?;
                sync.restore(counted.outer_steps, &|name| flats.get(&format!("{OUTER}{name}")).cloned())?;
                sync.average_mut().restore("", counted.rounds, |_| Some(&[]))?;
            }
        }
        Ok(())
    }
}

/// Returns a flat buffer of a layout, from the tensors with this prefix before their names.
fn flat<'a>(layout: &ParamLayout, prefix: &str, get: &dyn Fn(&str) -> Option<&'a [f32]>) -> Result<Vec<f32>> {
    let mut flat = vec![0.0; layout.len()];
    for param in layout.params() {
        let name = format!("{prefix}{}", param.name);
        let values = get(&name).filter(|values| values.len() == param.shape.len());
        let values = values.ok_or_else(|| Error::Message {
            message: format!("{name} of the run's state"),
            problem: "is missing or has the wrong length",
        })?;
        flat[param.range()].copy_from_slice(values);
    }
    Ok(flat)
}
