//! The optimizer's state of one replica in a run with local steps, where it differs between replicas. A
//! newcomer takes the state that the first member had after the second to last synchronisation: it can fetch
//! this state while the members take their local steps.

use std::collections::BTreeMap;

use farflung_tensor::Tensor;

use super::Trainer;
use super::snapshot::{OptimizerCounters, Snapshot, named};
use crate::{Error, Result};

/// Kind of the tensors of an optimizer.
const CHAIN: &str = "chain";

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

    /// Returns the optimizer's counters.
    pub(in crate::train) fn optimizer_counters(&self) -> OptimizerCounters {
        let updates = self.executor.parts.values().map(|part| part.chain.step()).collect();
        OptimizerCounters { updates, scale: self.scale.save().to_vec() }
    }

    /// Returns the optimizer's state after the last synchronisation, without counters. `None` if there is no
    /// copy of it; see [`Trainer::mark_round`].
    ///
    /// Errors: those of the device.
    pub(super) fn marked_optimizer(&self) -> Result<Option<Snapshot>> {
        let Some(mark) = self.last_mark() else { return Ok(None) };
        let mut values = BTreeMap::new();
        for (stage, name, state) in mark.states() {
            values.insert(named(stage, CHAIN, name), state.to_vec::<f32>()?);
        }
        Ok(Some(Snapshot::without_counters(values, self.executor.parts.len())))
    }

    /// Returns the optimizer's state now, without counters.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn optimizer(&self) -> Result<Snapshot> {
        let mut values = BTreeMap::new();
        for (&stage, part) in &self.executor.parts {
            for (name, state) in part.chain.states() {
                values.insert(named(stage, CHAIN, name), state.to_vec::<f32>()?);
            }
        }
        Ok(Snapshot::without_counters(values, self.executor.parts.len()))
    }

    /// Returns an earlier copy of this replica's optimizer in which the states that the last synchronisation
    /// averaged have their present values, which are the same on all replicas.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn with_averaged_states(&self, mut earlier: Snapshot) -> Result<Snapshot> {
        for (&stage, part) in &self.executor.parts {
            let averaged = part.sync.as_ref().map_or(&[][..], |sync| sync.averaged_states());
            let states: Vec<(&str, &Tensor)> = part.chain.states().collect();
            for &(name, state) in averaged.iter().filter_map(|&number| states.get(number)) {
                earlier.set(&named(stage, CHAIN, name), state.to_vec::<f32>()?);
            }
        }
        Ok(earlier)
    }

    /// Replaces this rank's optimizer by that of another rank. Its number of updates stays.
    ///
    /// Errors: [`Error::Message`] for the optimizer of other parts.
    pub(in crate::train) fn take_optimizer(&mut self, optimizer: &Snapshot) -> Result<()> {
        for (&stage, part) in &mut self.executor.parts {
            let updates = part.chain.step();
            let get = |name: &str| optimizer.get(&named(stage, CHAIN, name));
            part.chain.restore(updates, get).map_err(|_| Error::Message {
                message: "the optimizer of another member".to_owned(),
                problem: "does not belong to these parts of the model",
            })?;
        }
        Ok(())
    }
}
