//! Replay of a committed step on a rank that took no part in it. The averaged gradient of the step is enough:
//! the update is computed from it again, with the same bits on the same kind of device. With local steps, the
//! synchronisation at the end of a round is replayed instead (`replay_round.rs`).

use std::collections::BTreeMap;

use farflung_optim::{Prepared, global_norm};
use farflung_tensor::Tensor;

use super::Trainer;
use super::snapshot::{Snapshot, named};
use crate::{Error, Result};

/// Kind of the tensors in the record of a step.
const GRADS: &str = "grads";

impl Trainer {
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
