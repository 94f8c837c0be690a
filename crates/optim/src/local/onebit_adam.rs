//! 1-bit Adam, and `QAdam`, which is the same with moments corrected for their start and another codec.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{FrozenAdam, add_decayed_weights, scale_by_frozen_adam, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// [`onebit_adam`] with the decays, weight decay and clipping of the settings.
pub const ONEBIT_ADAM: LocalMethod = LocalMethod {
    name: "onebit-adam",
    summary: "Adam whose variance stands still after --codec-warmup, while momentum is averaged in 1 bit",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Momentum { codec: "sign" },
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| onebit_adam(settings.into()),
};

/// [`qadam`] with the decays, weight decay and clipping of the settings.
pub const QADAM: LocalMethod = LocalMethod {
    name: "qadam",
    summary: "as onebit-adam, with moments corrected for their start and averaged in 8 bits",
    averages: Averages::Momentum { codec: "minmax8" },
    build: |settings| qadam(settings.into()),
    ..ONEBIT_ADAM
};

/// Settings of [`onebit_adam`] and [`qadam`]; `DeepSpeed`'s defaults, but no clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OnebitAdam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Steps of the warm-up.
    pub freeze: u64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Global l2 norm that averaged gradients, and after the warm-up averaged momentum, are scaled down to.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for OnebitAdam {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, freeze: 100_000, weight_decay: 0.0, clip: None, schedule }
    }
}

impl From<LocalSettings> for OnebitAdam {
    fn from(settings: LocalSettings) -> Self {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, freeze, .. } = settings;
        Self { beta1, beta2, eps, freeze, weight_decay, clip, schedule }
    }
}

/// 1-bit Adam: Adam without bias correction for `freeze` steps; then the second moment stays, and replicas
/// average the momentum to which each has added its own gradient, through a codec with feedback on both sides
/// ([`AverageConfig::warmup`](crate::AverageConfig) is to be `freeze` as well).
///
/// Source: Tang et al. 2021, "1-bit Adam", Alg. 1. Differs: clipping, if any, is of what was averaged; and as
/// [`scale_by_frozen_adam`] says, where `DeepSpeed` asks for a mask.
#[must_use]
pub fn onebit_adam(settings: OnebitAdam) -> ChainBuilder {
    chain(settings, false)
}

/// `QAdam`: as [`onebit_adam`], with bias correction.
///
/// Source: BAGUA's `QAdam` (Gan et al. 2021). Differs: the correction of the second moment stands still with
/// it; theirs goes on, and so changes the step's size.
#[must_use]
pub fn qadam(settings: OnebitAdam) -> ChainBuilder {
    chain(settings, true)
}

fn chain(settings: OnebitAdam, corrects: bool) -> ChainBuilder {
    let OnebitAdam { beta1, beta2, eps, freeze, weight_decay, clip, schedule } = settings;
    let adam = scale_by_frozen_adam(FrozenAdam { beta1, beta2, eps, freeze, corrects });
    clipped(clip).then(adam).then(add_decayed_weights(weight_decay)).then(scale_by_schedule(schedule))
}
