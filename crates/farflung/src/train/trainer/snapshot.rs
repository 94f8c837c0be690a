//! A rank's training state as bytes, for another rank that holds the same parts. It contains what a checkpoint
//! contains, except the state that only its own rank can use, such as residuals.

use std::collections::BTreeMap;

use farflung_base::StageId;
use farflung_tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::retreat::agreed;
use crate::train::fault::Fault;
use crate::train::floats::floats;
use crate::{Error, Result};

/// Progress of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::train) struct Progress {
    /// Number of steps done.
    pub(in crate::train) step: u64,
    /// Number of averages that the method of synchronisation has committed.
    pub(in crate::train) outer_step: u64,
}

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

/// Counters of a replica's optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::train) struct OptimizerCounters {
    /// Number of updates, by part.
    pub(super) updates: Vec<u64>,
    /// State of the loss scale.
    pub(super) scale: Vec<f32>,
}

/// Parameters and states after a certain step, by name.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::train) struct Snapshot {
    counters: Counters,
    tensors: BTreeMap<String, Vec<f32>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Counters {
    progress: Progress,
    rounds: u64,
    /// Number of updates of the optimizer, by part.
    updates: Vec<u64>,
    scale: Vec<f32>,
    /// Name and number of elements of each tensor, in the order of the values.
    tensors: Vec<(String, u64)>,
}

impl Snapshot {
    /// Encodes as bytes: the length of the counters (`u64`, little endian), the counters, then all values as
    /// little-endian `f32`.
    pub(in crate::train) fn to_bytes(&self) -> Vec<u8> {
        let head = postcard::to_stdvec(&self.counters).expect("numbers and names can be serialized");
        let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
        bytes.extend(head);
        for values in self.tensors.values() {
            bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        }
        bytes
    }

    /// Returns the number of steps after which it was taken.
    pub(in crate::train) const fn step(&self) -> u64 {
        self.counters.progress.step
    }

    /// Returns the numbers of steps and averages after which it was taken.
    pub(super) const fn progress(&self) -> Progress {
        self.counters.progress
    }

    /// Creates a snapshot of `parts` parts with these tensors, whose counters are all zero.
    pub(super) fn without_counters(tensors: BTreeMap<String, Vec<f32>>, parts: usize) -> Self {
        let counters = Counters {
            progress: Progress { step: 0, outer_step: 0 },
            rounds: 0,
            updates: vec![0; parts],
            scale: Vec::new(),
            tensors: tensors.iter().map(|(name, values)| (name.clone(), values.len() as u64)).collect(),
        };
        Self { counters, tensors }
    }

    /// Sets the counters of the optimizer to zero: with local steps they differ between replicas.
    pub(super) fn without_optimizer_counters(mut self) -> Self {
        self.counters.updates.fill(0);
        self.counters.scale.clear();
        self
    }

    /// Returns this state with these counters of the optimizer.
    pub(in crate::train) fn with_optimizer_counters(mut self, counters: OptimizerCounters) -> Self {
        OptimizerCounters { updates: self.counters.updates, scale: self.counters.scale } = counters;
        self
    }

    /// Replaces the values of a tensor; does nothing if it has no such tensor of this length.
    pub(super) fn set(&mut self, name: &str, values: Vec<f32>) {
        if let Some(old) = self.tensors.get_mut(name).filter(|old| old.len() == values.len()) {
            *old = values;
        }
    }

    /// Returns the values of a tensor; `None` if it has no such tensor.
    pub(super) fn get(&self, name: &str) -> Option<&[f32]> {
        self.tensors.get(name).map(Vec::as_slice)
    }

    /// Flips the bit that a test requests, in the last tensor.
    pub(super) fn inject_fault(&mut self, fault: Fault) {
        fault.flip_bit_in_last(&mut self.tensors);
    }

    /// Returns the state of the loss scale.
    pub(super) fn scale(&self) -> &[f32] {
        &self.counters.scale
    }

    /// Returns this state with the numbers of steps and of rounds of averages that `other` has.
    pub(in crate::train) fn counted_as(mut self, other: &Self) -> Self {
        self.counters.progress = other.counters.progress;
        self.counters.rounds = other.counters.rounds;
        self
    }

    /// Returns the counters without the values of any tensor.
    pub(in crate::train) fn without_values(&self) -> Self {
        Self { counters: self.counters.clone(), tensors: BTreeMap::new() }
    }

    /// Decodes the output of [`Snapshot::to_bytes`]. Returns `None` if the bytes are not valid. Lengths in
    /// untrusted bytes are checked before anything is allocated.
    pub(in crate::train) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (len, rest) = bytes.split_first_chunk::<8>()?;
        let (head, mut rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        let counters: Counters = postcard::from_bytes(head).ok()?;
        let mut tensors = BTreeMap::new();
        for (name, count) in &counters.tensors {
            let count = usize::try_from(*count).ok()?;
            let (values, behind) = rest.split_at_checked(count.checked_mul(size_of::<f32>())?)?;
            rest = behind;
            tensors.insert(name.clone(), floats(values, count)?);
        }
        (rest.is_empty() && tensors.len() == counters.tensors.len()).then_some(Self { counters, tensors })
    }
}

/// Returns the name of a buffer of a part.
pub(super) fn named(stage: StageId, kind: &str, name: &str) -> String {
    format!("{stage}/{kind}/{name}")
}

impl Trainer {
    /// Returns the numbers of steps and averages done.
    pub(in crate::train) fn progress(&self) -> Progress {
        let counters = self.counters();
        Progress { step: counters.step, outer_step: counters.outer_step }
    }

    /// Returns whether the average after the last step failed. The next call of [`Trainer::step`] then repeats
    /// only that average.
    pub(in crate::train) const fn lacks_average(&self) -> bool {
        self.unmet
    }

    /// Returns the last step after which all replicas had the same parameters.
    pub(in crate::train) fn agreed_step(&self) -> u64 {
        if self.each_step {
            return self.step;
        }
        // The last step of a run ends its period, whatever its length.
        let ends = self.step.is_multiple_of(self.every) || self.step == self.steps;
        if ends && !self.unmet { self.step } else { self.step.saturating_sub(1) / self.every * self.every }
    }

    /// Returns the sizes of this rank's state.
    pub(in crate::train) fn state_bytes(&self) -> StateBytes {
        let len = |x: &Tensor| (x.shape().len() * size_of::<f32>()) as u64;
        let is_part = self.schedule.placement().depth() > 1;
        let mut bytes = StateBytes { is_part, record: self.record_bytes(), ..StateBytes::default() };
        bytes.every = if self.each_step { 1 } else { self.every };
        for part in self.executor.parts.values() {
            let chain: u64 = part.chain.states().map(|(_, state)| len(state)).sum();
            let sync: u64 =
                part.sync.iter().flat_map(|sync| sync.states()).map(|(_, state)| len(state)).sum();
            bytes.shared += len(&part.params) + sync;
            *(if self.each_step { &mut bytes.shared } else { &mut bytes.own }) += chain;
        }
        bytes
    }

    /// Returns the state that is the same on all replicas, at the step after which they last agreed: the
    /// parameters on which they agreed, the method's state, and the optimizer's state if gradients are averaged
    /// at each step.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn shared_snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = self.snapshot(|part, tensors, stage| {
            tensors.push((named(stage, "params", ""), agreed(part).unwrap_or(&part.params)));
            for (name, state) in part.sync.iter().flat_map(|sync| sync.states()) {
                tensors.push((named(stage, "sync", name), state));
            }
            if self.each_step {
                tensors.extend(part.chain.states().map(|(name, state)| (named(stage, "chain", name), state)));
            }
        })?;
        snapshot.counters.progress.step = self.agreed_step();
        Ok(if self.each_step { snapshot } else { snapshot.without_optimizer_counters() })
    }

    pub(super) fn snapshot<'a>(
        &'a self,
        of: impl Fn(&'a super::Part, &mut Vec<(String, &'a Tensor)>, StageId),
    ) -> Result<Snapshot> {
        let mut found = Vec::new();
        for (&stage, part) in &self.executor.parts {
            of(part, &mut found, stage);
        }
        let mut tensors = BTreeMap::new();
        for (name, tensor) in found {
            tensors.insert(name, tensor.to_vec::<f32>()?);
        }
        let counters = Counters {
            progress: self.progress(),
            rounds: self.counters().rounds,
            updates: self.executor.parts.values().map(|part| part.chain.step()).collect(),
            scale: self.scale.save().to_vec(),
            tensors: tensors.iter().map(|(name, values)| (name.clone(), values.len() as u64)).collect(),
        };
        Ok(Snapshot { counters, tensors })
    }

    /// Replaces this rank's state by that of another rank. If optimizers differ between replicas, this rank
    /// keeps its own optimizer, unless `own` has the state of another. If the parts or the lengths of their
    /// parameters do not match, nothing is changed.
    ///
    /// Errors: [`Error::Message`] for a snapshot of other parts; those of the optimizer and of the method.
    pub(in crate::train) fn take_snapshot(
        &mut self,
        shared: &Snapshot,
        own: Option<&Snapshot>,
    ) -> Result<()> {
        let wrong = || Error::Message {
            message: "the state of another member".to_owned(),
            problem: "does not belong to these parts of the model",
        };
        let get = |name: &str| {
            let own = own.and_then(|own| own.tensors.get(name));
            own.or_else(|| shared.tensors.get(name)).map(Vec::as_slice)
        };
        for (&stage, part) in &self.executor.parts {
            let fits = get(&named(stage, "params", ""))
                .is_some_and(|values| values.len() == part.params.shape().len());
            if !fits || shared.counters.updates.len() != self.executor.parts.len() {
                return Err(wrong());
            }
        }
        let optimizer = own.or(self.each_step.then_some(shared)).map(|from| &from.counters);
        for (number, (&stage, part)) in self.executor.parts.iter_mut().enumerate() {
            part.params.write(get(&named(stage, "params", "")).ok_or_else(wrong)?)?;
            if let Some(&updates) = optimizer.and_then(|counters| counters.updates.get(number)) {
                part.chain.restore(updates, |name| get(&named(stage, "chain", name)))?;
            }
            if let Some(sync) = &mut part.sync {
                sync.on_params_set(&part.params)?;
                let state = |name: &str| get(&named(stage, "sync", name)).map(<[f32]>::to_vec);
                sync.restore(shared.counters.progress.outer_step, &state)?;
                // Residuals are not sent to other ranks: a new member begins without any, in the same round as
                // the others.
                sync.average_mut().restore("", shared.counters.rounds, |_| Some(&[]))?;
            }
        }
        if let Some(counters) = optimizer {
            self.scale.restore(&counters.scale);
        }
        self.step = shared.counters.progress.step;
        self.window.clear();
        self.unmet = false;
        self.resync.restart(self.step);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_come_back_and_other_bytes_are_none() {
        let tensors = BTreeMap::from([("a".to_owned(), vec![1.0_f32, -2.0]), ("b".to_owned(), vec![3.0])]);
        let counters = Counters {
            progress: Progress { step: 7, outer_step: 2 },
            rounds: 5,
            updates: vec![7],
            scale: vec![1.0],
            tensors: vec![("a".to_owned(), 2), ("b".to_owned(), 1)],
        };
        let snapshot = Snapshot { counters, tensors };
        let bytes = snapshot.to_bytes();
        assert_eq!(Snapshot::from_bytes(&bytes), Some(snapshot));
        for end in 0..bytes.len() {
            assert_eq!(Snapshot::from_bytes(&bytes[..end]), None);
        }
        assert_eq!(Snapshot::from_bytes(&[&bytes[..], &[0]].concat()), None);
        // The largest possible length of the counters.
        assert_eq!(Snapshot::from_bytes(&[0xFF; 40]), None);
    }
}
