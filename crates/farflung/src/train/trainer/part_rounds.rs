//! Parts of the model with local steps on a process that takes none yet: the replay of averages, from what the
//! replicas have averaged of these parts, and one replica's optimizer, which is fetched by itself.

use std::collections::BTreeSet;

use super::Trainer;
use super::named_tensors::{NamedTensors, RunCounters};
use super::part_replay::{PartRecord, ReplayedPart, ReplayedParts, wrong};
use super::round_tensors::{
    PARAMS, Tensors, add_tensors, chain_states, flat, outer_states, restore_optimizer,
};
use crate::train::job::Job;
use crate::train::pieces::StateKind;
use crate::{Error, Result};

impl RunCounters {
    /// Returns the counters that all replicas have in common.
    fn shared(self) -> Self {
        let kinds = self.kinds.into_iter().filter(|kind| !StateKind::is_optimizer(kind)).collect();
        Self { updates: 0, scale: Vec::new(), kinds, ..self }
    }
}

impl NamedTensors {
    /// Returns the tensors that all replicas have in common.
    pub(super) fn shared(self) -> Self {
        let tensors = self.tensors.into_iter().filter(|(name, _)| !StateKind::is_optimizer(name)).collect();
        Self { counted: self.counted.shared(), tensors }
    }
}

impl Trainer {
    /// Returns the record of the average that was just applied. Only valid until the next average begins.
    ///
    /// Errors: those of the device.
    pub(super) fn part_round_record(&self, job: &Job) -> Result<PartRecord> {
        let mut tensors = Tensors::new();
        for part in self.executor.parts.values() {
            for (kind, averaged) in part.sync.iter().flat_map(|sync| sync.averaged()) {
                add_tensors(&mut tensors, &part.stage, &kind, averaged)?;
            }
        }
        let grads = NamedTensors { counted: self.round_counted(job).shared(), tensors };
        Ok(PartRecord { squares: 0.0, grads })
    }

    /// Returns this rank's optimizer after the last average, as bytes for a newcomer. `None` if there is no
    /// copy of it; see [`Trainer::mark_round`].
    ///
    /// Errors: those of the device.
    pub(super) fn part_optimizer(&self, job: &Job) -> Result<Option<Vec<u8>>> {
        if self.last_mark().is_none() {
            return Ok(None);
        }
        let (counted, tensors) = (self.round_counted(job), self.marked_tensors()?);
        Ok(Some(NamedTensors { counted, tensors }.to_bytes()))
    }
}

impl ReplayedParts {
    /// Applies the next average from its record.
    ///
    /// Errors: [`Error::Message`] for the record of another average or of other parts; those of the method.
    pub(super) fn replay_round(&mut self, averaged: NamedTensors) -> Result<()> {
        if averaged.counted.outer_steps != self.counted.outer_steps + 1 {
            return Err(wrong("is not that of the next round"));
        }
        let get = |name: &str| averaged.tensors.get(name).map(Vec::as_slice);
        let kinds = averaged.tensors.keys().filter_map(|name| Some(name.split_once('/')?.0));
        let kinds: BTreeSet<&str> = kinds.collect();
        for ReplayedPart { stage, chain, sync, .. } in &mut self.parts {
            let Some(sync) = sync else { continue };
            // What the record has of one tensor, it has of all.
            kinds.iter().try_for_each(|kind| flat(stage.layout(), kind, &get).map(drop))?;
            sync.set_averaged(chain, &|kind| flat(stage.layout(), kind, &get).ok())?;
            sync.prepare()?;
        }
        for ReplayedPart { params, chain, sync, .. } in &mut self.parts {
            if let Some(sync) = sync {
                sync.commit_accumulated(params, chain)?;
                sync.average_mut().restore("", averaged.counted.rounds, |_| Some(&[]))?;
            }
        }
        self.counted = averaged.counted;
        self.optimizer = self.optimizer.map(|since| since.saturating_add(1));
        Ok(())
    }

    /// Takes the optimizer of a replica after the last average.
    ///
    /// Errors: [`Error::Message`] for bytes that are not the optimizer of these parts.
    pub(in crate::train) fn take_optimizer(&mut self, bytes: &[u8]) -> Result<()> {
        let wrong =
            |problem| Error::Message { message: "the optimizer of another member".to_owned(), problem };
        // The number of bytes comes first.
        let optimizer = bytes.get(8..).and_then(NamedTensors::from_bytes);
        let NamedTensors { counted, tensors } = optimizer.ok_or_else(|| wrong("does not read as one"))?;
        let get = |name: &str| tensors.get(name).map(Vec::as_slice);
        for ReplayedPart { stage, chain, .. } in &mut self.parts {
            restore_optimizer((stage.layout(), chain), counted.updates, &get)
                .map_err(|_| wrong("does not belong to these parts of the model"))?;
        }
        self.optimizer = Some(0);
        Ok(())
    }

    /// Returns the state that all replicas have in common.
    ///
    /// Errors: those of the device.
    pub(super) fn shared_tensors(&self) -> Result<Tensors> {
        let mut tensors = Tensors::new();
        for ReplayedPart { stage, params, sync, .. } in &self.parts {
            add_tensors(&mut tensors, stage, PARAMS, params)?;
            for (kind, state) in sync.iter().flat_map(|sync| outer_states(&**sync)) {
                add_tensors(&mut tensors, stage, &kind, state)?;
            }
        }
        Ok(tensors)
    }

    /// Adds the optimizer to the state that all replicas have in common, if it was fetched. The counters stay
    /// those that all have in common: the number of updates is that of the members.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn with_optimizer(&self, mut pieces: NamedTensors) -> Result<NamedTensors> {
        if self.optimizer.is_none() {
            return Ok(pieces);
        }
        for ReplayedPart { stage, chain, .. } in &self.parts {
            for (kind, state) in chain_states(chain) {
                add_tensors(&mut pieces.tensors, stage, &kind, state)?;
                if !pieces.counted.kinds.contains(&kind) {
                    pieces.counted.kinds.push(kind);
                }
            }
        }
        Ok(pieces)
    }
}
