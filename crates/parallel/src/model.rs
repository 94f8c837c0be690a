//! The input of planners besides machines: the sizes of a model, and the user's limits. All of them are
//! numbers; no weights are involved.

use farflung_base::{Bytes, Precision};

use crate::{Codec, ParallelError};

/// Sizes of a model and its batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    /// Number of trainable parameters.
    pub parameters: u64,
    /// Number of parameters of each tensor in forward order, so that buckets end at the ends of tensors. Empty:
    /// buckets of equal size.
    pub tensors: Vec<u64>,
    /// Number of tokens of all ranks in one step.
    pub tokens_per_step: u64,
    /// Number of tokens in one sequence.
    pub context: u64,
    /// Number of sequences in one microbatch, the unit in which a step is divided over ranks.
    pub sequences_per_microbatch: u64,
    /// Floating-point operations per token, forward and backward: about 6 per parameter.
    pub flops_per_token: u64,
}

impl ModelShape {
    /// Creates the shape of a dense model: 6 operations per parameter and token (2 forward, 4 backward),
    /// microbatches of one sequence.
    #[must_use]
    pub const fn dense(parameters: u64, context: u64, tokens_per_step: u64) -> Self {
        Self {
            parameters,
            tensors: Vec::new(),
            tokens_per_step,
            context,
            sequences_per_microbatch: 1,
            flops_per_token: parameters.saturating_mul(6),
        }
    }

    /// Returns the number of tokens in one microbatch.
    #[must_use]
    pub const fn microbatch_tokens(&self) -> u64 {
        self.context.saturating_mul(self.sequences_per_microbatch)
    }

    /// Returns the number of microbatches of all ranks in one step.
    ///
    /// Errors: [`ParallelError::Zero`] for a count that is zero; [`ParallelError::NotWhole`] if the step is not
    /// a whole number of microbatches; [`ParallelError::TensorsDiffer`] if the tensors do not add up.
    pub fn microbatches(&self) -> Result<u64, ParallelError> {
        for (field, value) in [
            ("parameters", self.parameters),
            ("tokens_per_step", self.tokens_per_step),
            ("context", self.context),
            ("sequences_per_microbatch", self.sequences_per_microbatch),
            ("flops_per_token", self.flops_per_token),
        ] {
            if value == 0 {
                return Err(ParallelError::Zero { of: "the model".to_owned(), field });
            }
        }
        let tensors = self.tensors.iter().fold(0_u64, |sum, &t| sum.saturating_add(t));
        if !self.tensors.is_empty() && tensors != self.parameters {
            return Err(ParallelError::TensorsDiffer { tensors, parameters: self.parameters });
        }
        let microbatch_tokens = self.microbatch_tokens();
        if !self.tokens_per_step.is_multiple_of(microbatch_tokens) {
            return Err(ParallelError::NotWhole { tokens_per_step: self.tokens_per_step, microbatch_tokens });
        }
        Ok(self.tokens_per_step / microbatch_tokens)
    }

    /// Returns the number of parameters of each of at most `count` buckets in backward order: the gradient of
    /// the last tensor is ready first.
    ///
    /// With tensors, a bucket ends with the tensor at which it reaches `parameters / count`, rounded up.
    /// Without tensors, the sizes of buckets differ by at most one.
    #[must_use]
    pub fn buckets(&self, count: u32) -> Vec<u64> {
        let count = u64::from(count).clamp(1, self.parameters.max(1));
        if self.tensors.is_empty() {
            return (0..count)
                .map(|i| self.parameters / count + u64::from(i < self.parameters % count))
                .collect();
        }
        let target = self.parameters.div_ceil(count);
        let mut buckets: Vec<u64> = Vec::new();
        let mut open = 0;
        for &tensor in self.tensors.iter().rev() {
            open += tensor;
            if open >= target {
                buckets.push(open);
                open = 0;
            }
        }
        if open > 0 {
            buckets.push(open);
        }
        buckets
    }
}

/// Limits and goals for a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum time that communication may add to a step, in percent of its compute.
    pub overhead_percent: u32,
    /// Maximum number of local steps between two synchronisations; 1 allows only `ddp`.
    pub max_every: u32,
    /// Maximum number of buckets for gradients.
    pub max_buckets: u32,
    /// Codec for synchronised values.
    pub codec: Codec,
    /// Precision of the computation.
    pub precision: Precision,
    /// Bytes of state per parameter of a replica. Weights, gradient and two moments in f32 take 16.
    pub state_bytes_per_parameter: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            overhead_percent: 20,
            max_every: 500,
            max_buckets: 64,
            codec: Codec::F32,
            precision: Precision::F32,
            state_bytes_per_parameter: 16,
        }
    }
}

impl Limits {
    /// Returns the memory of a replica on each rank. Local steps also need an anchor and an outer momentum in
    /// f32.
    #[must_use]
    pub const fn replica(&self, parameters: u64, every: u32) -> Bytes {
        let outer = if every > 1 { 8 } else { 0 };
        Bytes(parameters.saturating_mul(self.state_bytes_per_parameter.saturating_add(outer)))
    }
}
