//! What the codecs of an average keep between rounds, saved and restored.

use super::Average;
use crate::OptimError;

impl Average {
    /// Returns the state that this rank's codecs keep between rounds. With error feedback, buffers are named
    /// `{prefix}bucket0.worker1.residual` or `{prefix}bucket0.server1.residual`, with the block's number (left
    /// out after `server` for one block), or `{prefix}bucket0.PARAMETER.residual` for a protocol. Empty before
    /// the first round. Valid only for this rank, program, layout, `bucket_bytes` and `fragments`.
    ///
    /// Errors: [`OptimError::Compress`] between the end of a round and its commit or rollback.
    pub fn save(&self, prefix: &str) -> Result<Vec<(String, Vec<f32>)>, OptimError> {
        let mut saved = Vec::new();
        for (bucket, reduction) in self.reductions.iter().enumerate() {
            reduction.save(&format!("{prefix}bucket{bucket}."), &mut saved)?;
        }
        Ok(saved)
    }

    /// Restores the state that [`Average::save`] returned under the same `prefix`, and the number of rounds;
    /// `get` returns each buffer by its name. A codec whose buffer is empty starts anew.
    ///
    /// Errors: [`OptimError::State`] if a buffer is missing or has another length, [`OptimError::Compress`] if
    /// one is not finite; nothing has changed then.
    pub fn restore<'a>(
        &mut self,
        prefix: &str,
        round: u64,
        get: impl Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        let stage = self.stage_of(round);
        let mut restored = self.new_reductions(stage)?;
        if round >= self.config.warmup {
            for (bucket, reduction) in restored.iter_mut().enumerate() {
                reduction.restore(&format!("{prefix}bucket{bucket}."), &get)?;
            }
        }
        (self.round, self.arrived, self.uncommitted, self.stage) = (round, 0, 0..0, stage);
        self.take(restored);
        Ok(())
    }
}
