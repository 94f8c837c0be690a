//! 1-bit LAMB.

use super::{Averages, LocalMethod, LocalSettings, ONEBIT_ADAM};
use crate::transform::{FrozenLamb, clip_by_global_norm_until, scale_by_onebit_lamb, scale_by_schedule};
use crate::{Chain, ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`onebit_lamb`].
pub const ONEBIT_LAMB: LocalMethod = LocalMethod {
    name: "onebit-lamb",
    summary: "1-bit LAMB: LAMB whose variance and layer coefficients are frozen after --codec-warmup; from \
              then on momentum is averaged in 1 bit",
    defaults: &[("eps", 1e-6)],
    averages: Averages::Momentum { codec: "sign" },
    buffers: |_| 4,
    per_tensor: true,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, freeze, .. } = settings;
        onebit_lamb(FrozenLamb { beta1, beta2, eps, freeze, weight_decay }, clip, schedule)
    },
    ..ONEBIT_ADAM
};

/// Builds 1-bit LAMB: [`scale_by_onebit_lamb`] and the learning rate.
///
/// Source: Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
/// Convergence Speed". Differs: clipping, if any, applies only to gradients, which are averaged in the warm-up;
/// for more see [`scale_by_onebit_lamb`].
#[must_use]
pub fn onebit_lamb(settings: FrozenLamb, clip: Option<f64>, schedule: LrSchedule) -> ChainBuilder {
    let chain = match clip {
        // After the warm-up the chain takes momentum in which all tensors were scaled to one size, so it is not
        // clipped.
        Some(max) => Chain::new().then(clip_by_global_norm_until(max, settings.freeze)),
        None => Chain::new(),
    };
    chain.then(scale_by_onebit_lamb(settings)).then(scale_by_schedule(schedule))
}
