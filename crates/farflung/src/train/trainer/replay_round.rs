//! Replay of a synchronisation on a rank that took no part in it, in a run with local steps. What the replicas
//! have averaged is enough: the outer step is computed from it again, with the same bits on the same kind of
//! device.

use super::Trainer;
use super::snapshot::{Snapshot, named};
use crate::{Error, Result};

/// Kind of the tensors in the record of a synchronisation.
const AVERAGED: &str = "averaged";

impl Trainer {
    /// Returns whether a step or a synchronisation can be replayed from its record.
    pub(in crate::train) fn keeps_averages(&self) -> bool {
        let mut syncs = self.executor.parts.values().map(|part| part.sync.as_ref());
        self.each_step || syncs.all(|sync| sync.is_some_and(|sync| !sync.averaged().is_empty()))
    }

    /// Returns how often all replicas have had the same parameters: after each step, or after each
    /// synchronisation.
    pub(in crate::train) fn agreements(&self) -> u64 {
        let progress = self.progress();
        // The method has already counted an average that is not applied yet.
        let open = u64::from(self.undecided.is_average_open());
        if self.each_step { progress.step } else { progress.outer_step.saturating_sub(open) }
    }

    /// Returns the record of the synchronisation that was just committed.
    ///
    /// Errors: those of the device.
    pub(super) fn round_record(&self) -> Result<Snapshot> {
        let record = self.snapshot(|part, tensors, stage| {
            for (name, averaged) in part.sync.iter().flat_map(|sync| sync.averaged()) {
                tensors.push((named(stage, AVERAGED, &name), averaged));
            }
        })?;
        Ok(record.without_optimizer_counters())
    }

    /// Returns the bytes of the record of the last synchronisation, without its counters.
    pub(super) fn round_record_bytes(&self) -> u64 {
        let averaged = |part: &super::Part| {
            let averaged = part.sync.iter().flat_map(|sync| sync.averaged());
            averaged.map(|(_, x)| (x.shape().len() * size_of::<f32>()) as u64).sum::<u64>()
        };
        self.executor.parts.values().map(averaged).sum()
    }

    /// Takes the outer step of the synchronisation that follows the last one, from its record. The states of
    /// the optimizer that were averaged take these means; its other states stay as they are.
    ///
    /// Errors: [`Error::Message`] for the record of another synchronisation or of other parts; those of the
    /// method.
    pub(super) fn replay_round(&mut self, record: &Snapshot) -> Result<()> {
        let wrong = |problem| Error::Message { message: "the record of a round".to_owned(), problem };
        if record.progress().outer_step != self.progress().outer_step + 1 {
            return Err(wrong("is not that of the next round"));
        }
        for (&stage, part) in &mut self.executor.parts {
            let sync = part.sync.as_mut().ok_or_else(|| wrong("belongs to a method with local steps"))?;
            let get = |name: &str| record.get(&named(stage, AVERAGED, name)).map(<[f32]>::to_vec);
            sync.set_averaged(&part.chain, &get)?;
            sync.prepare()?;
        }
        for part in self.executor.parts.values_mut() {
            if let Some(sync) = &mut part.sync {
                sync.commit_accumulated(&mut part.params, &mut part.chain)?;
            }
        }
        self.step = record.step();
        Ok(())
    }
}
