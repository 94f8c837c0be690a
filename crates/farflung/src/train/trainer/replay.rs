//! Replay of a committed step on a rank that took no part in it. The averaged gradient of the step is enough:
//! the update is computed from it again, with the same bits on the same kind of device. With local steps, the
//! synchronisation at the end of a round is replayed instead (`replay_round.rs`).

use std::collections::BTreeMap;

use farflung_optim::{Prepared, global_norm};
use farflung_tensor::Tensor;

use super::Trainer;
use super::snapshot::{Snapshot, named};
use crate::train::fault::Fault;
use crate::train::job::Job;
use crate::{Error, Result};

/// Kind of the tensors in the record of a step.
const GRADS: &str = "grads";

impl Trainer {
    /// Returns the state that a newcomer takes to follow this rank, as bytes: in pipelines that of this rank's
    /// parts, otherwise the state that all replicas have.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn encoded_copy(&self, job: &Job) -> Result<Vec<u8>> {
        if job.pipelines.is_some() {
            return Ok(self.part_copy(job)?.to_bytes());
        }
        Ok(self.shared_snapshot()?.to_bytes())
    }

    /// Returns this rank's optimizer after the last synchronisation, as bytes for a newcomer. `None` if there
    /// is no copy of it; see [`Trainer::mark_round`].
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn encoded_optimizer(&self, job: &Job) -> Result<Option<Vec<u8>>> {
        if job.pipelines.is_some() {
            return self.part_optimizer(job);
        }
        Ok(self.marked_optimizer()?.map(|optimizer| optimizer.to_bytes()))
    }

    /// Returns the record of the step or synchronisation that was just committed, as bytes for a newcomer that
    /// follows this rank. Only valid until the next step begins. `fault` is the bit that a test flips in it.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn encoded_record(&self, job: &Job, fault: Option<Fault>) -> Result<Vec<u8>> {
        if job.pipelines.is_some() {
            let mut record = self.part_record(job)?;
            if let Some(fault) = fault {
                record.inject_fault(fault);
            }
            return Ok(record.to_bytes());
        }
        let mut record = self.step_record()?;
        if let Some(fault) = fault {
            record.inject_fault(fault);
        }
        Ok(record.to_bytes())
    }

    /// Returns the record of the step that was just committed: its averaged gradient, and the counters after
    /// it. With local steps: the record of the synchronisation that was just committed. Only valid until the
    /// next step begins.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn step_record(&self) -> Result<Snapshot> {
        if !self.each_step {
            return self.round_record();
        }
        self.snapshot(|part, tensors, stage| tensors.push((named(stage, GRADS, ""), &part.grads)))
    }

    /// Returns the bytes of the record of a step or of a synchronisation, without its counters.
    pub(in crate::train) fn record_bytes(&self) -> u64 {
        if !self.each_step {
            return self.round_record_bytes();
        }
        let len = |x: &Tensor| (x.shape().len() * size_of::<f32>()) as u64;
        self.executor.parts.values().map(|part| len(&part.grads)).sum()
    }

    /// Applies the update of the step or synchronisation that follows the last one done, from its record.
    ///
    /// Errors: [`Error::Message`] for the record of another step or of other parts; those of the optimizer.
    pub(in crate::train) fn replay(&mut self, record: &Snapshot) -> Result<()> {
        if !self.each_step {
            return self.replay_round(record);
        }
        let wrong = |problem| Error::Message { message: "the record of a step".to_owned(), problem };
        if record.step() != self.step + 1 {
            return Err(wrong("is not that of the next step"));
        }
        let mut values = BTreeMap::new();
        for (&stage, part) in &self.executor.parts {
            let grads = record.get(&named(stage, GRADS, ""));
            let grads = grads.filter(|grads| grads.len() == part.grads.shape().len());
            values.insert(stage, grads.ok_or_else(|| wrong("is not that of these parts of the model"))?);
        }
        for (stage, part) in &mut self.executor.parts {
            part.begin();
            part.grads.write(values[stage])?;
        }
        let prepared = Prepared::with_norm(global_norm(&self.first().grads)?)?;
        for part in self.executor.parts.values_mut() {
            part.commit(prepared, None)?;
            part.begin();
        }
        self.scale.restore(record.scale());
        self.step += 1;
        Ok(())
    }
}
