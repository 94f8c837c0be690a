//! 0/1 Adam.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::ChainBuilder;
use crate::transform::{
    SyncSchedule, ZeroOneAdam, add_decayed_weights, scale_by_schedule, scale_by_zero_one_adam,
};

/// Row of [`METHODS`](super::METHODS) for [`zero_one_adam`].
pub const ZERO_ONE_ADAM: LocalMethod = LocalMethod {
    name: "zero-one-adam",
    summary: "0/1 Adam: before --codec-warmup, gradients in 1 bit and a variance that changes more and more \
              rarely; after it, local steps that are averaged in 1 bit",
    reads: &["beta1", "beta2", "eps", "variance-doubling", "local-doubling"],
    defaults: &[],
    averages: Averages::Accumulated { codec: "sign", sync: "zero-one" },
    buffers: |_| 3,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, freeze, .. } = settings;
        let LocalSettings { variance_doubling, local_doubling, most_local: most, .. } = settings;
        let rounds = SyncSchedule { freeze, variance_doubling, local_doubling, most };
        zero_one_adam(ZeroOneAdam { beta1, beta2, eps, rounds, schedule, weight_decay }, clip)
    },
};

/// Builds 0/1 Adam: [`scale_by_zero_one_adam`] with decoupled weight decay and the learning rate. Replicas with
/// this chain are synchronised by [`ZeroOne`](crate::sync::ZeroOne).
///
/// Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam".
/// Differs: clipping, if any, applies to averaged gradients, and in local steps to a replica's own gradients;
/// for more see [`scale_by_zero_one_adam`].
#[must_use]
pub fn zero_one_adam(settings: ZeroOneAdam, clip: Option<f64>) -> ChainBuilder {
    let ZeroOneAdam { schedule, weight_decay, .. } = settings;
    let adam = scale_by_zero_one_adam(settings);
    clipped(clip).then(adam).then(add_decayed_weights(weight_decay)).then(scale_by_schedule(schedule))
}
