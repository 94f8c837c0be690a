//! The residuals of codecs that a rank's later checkpoints contain, before they exist.

use super::Trainer;
use crate::Result;
use crate::train::apart::alone;
use crate::train::job::Job;
use crate::train::sizes::averaging;

impl Trainer {
    /// Returns the bytes of residuals that the rank does not have yet and will have after the first averages.
    ///
    /// Errors: a codec that cannot save its state.
    pub(in crate::train) fn residuals_to_come(&self, job: &Job) -> Result<u64> {
        let level = job.plan.outermost();
        let bucket = usize::try_from(level.bucket_bytes).unwrap_or(usize::MAX);
        let mut bytes = 0_u64;
        for (&stage, part) in &self.executor.parts {
            let Some(average) = part.sync.as_ref().map(|sync| sync.average()) else { continue };
            let holders = average.communicator().size();
            let is_new = average.save("")?.iter().all(|(_, values)| values.is_empty());
            if holders > 1 && is_new {
                let held = self.apart.get(&self.executor.placement.part(stage));
                let alone = held.map_or(0, |held| alone(&held.params));
                let averaged = part.stage.layout().len() - alone;
                let model = (size_of::<f32>() * averaged) as u128;
                let saved = averaging(&level.codec, model, holders, bucket).saved;
                bytes = bytes.saturating_add(u64::try_from(saved).unwrap_or(u64::MAX));
            }
        }
        Ok(bytes)
    }
}
