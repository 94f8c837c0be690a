//! 1-bit Adam, and `QAdam`: the same method with bias correction and another default codec.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{FrozenAdam, add_decayed_weights, scale_by_frozen_adam, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`onebit_adam`].
pub const ONEBIT_ADAM: LocalMethod = LocalMethod {
    name: "onebit-adam",
    summary: "Adam whose variance is frozen after --codec-warmup; from then on momentum is averaged in 1 bit",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Momentum { codec: "sign" },
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| onebit_adam(settings.into()),
};

/// Row of [`METHODS`](super::METHODS) for [`qadam`].
pub const QADAM: LocalMethod = LocalMethod {
    name: "qadam",
    summary: "as onebit-adam, with bias-corrected moments, and momentum averaged in 8 bits",
    averages: Averages::Momentum { codec: "minmax8" },
    build: |settings| qadam(settings.into()),
    ..ONEBIT_ADAM
};

/// Settings of [`onebit_adam`] and [`qadam`]. The defaults are `DeepSpeed`'s, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OnebitAdam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Number of warm-up steps.
    pub freeze: u64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Upper bound of the global l2 norm of averaged gradients and, after the warm-up, of averaged momentum;
    /// `None` disables clipping.
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

/// Builds 1-bit Adam: Adam without bias correction for `freeze` steps. After them the second moment is frozen.
/// Each replica adds its own gradient to the momentum, and replicas average the result through a codec with
/// error feedback on both sides. [`AverageConfig::warmup`](crate::AverageConfig) must be `freeze` as well.
///
/// Source: Tang et al. 2021, "1-bit Adam", Alg. 1. Differs: clipping, if any, applies to the averaged values;
/// and elements that get momentum from a codec alone are treated as in [`scale_by_frozen_adam`], where
/// `DeepSpeed` asks the user for a mask.
#[must_use]
pub fn onebit_adam(settings: OnebitAdam) -> ChainBuilder {
    chain(settings, false)
}

/// Builds `QAdam`: [`onebit_adam`] with bias correction.
///
/// Source: BAGUA's `QAdam` (Gan et al. 2021). Differs: the bias correction of the second moment is frozen with
/// it. In BAGUA it continues, which changes the size of the step.
#[must_use]
pub fn qadam(settings: OnebitAdam) -> ChainBuilder {
    chain(settings, true)
}

fn chain(settings: OnebitAdam, corrects: bool) -> ChainBuilder {
    let OnebitAdam { beta1, beta2, eps, freeze, weight_decay, clip, schedule } = settings;
    let adam = scale_by_frozen_adam(FrozenAdam { beta1, beta2, eps, freeze, corrects });
    clipped(clip).then(adam).then(add_decayed_weights(weight_decay)).then(scale_by_schedule(schedule))
}
