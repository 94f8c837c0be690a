//! Signum and `signSGD`.

use super::{Averages, LocalMethod, LocalSettings, clipped, with_momentum};
use crate::transform::{add_decayed_weights, scale_by_schedule, sign};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`signum`].
pub const SIGNUM: LocalMethod = LocalMethod {
    name: "signum",
    summary: "the sign of the momentum; with --momentum 0 this is signSGD",
    reads: &["momentum"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |settings| usize::from(settings.momentum != 0.0),
    per_tensor: false,
    build: |settings| {
        let LocalSettings { momentum, weight_decay, clip, schedule, .. } = settings;
        signum(Signum { momentum, weight_decay, clip, schedule })
    },
};

/// Settings of [`signum`]. The defaults are those of the paper, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Signum {
    /// Momentum. At 0 there is no momentum buffer.
    pub momentum: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for Signum {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-4);
        Self { momentum: 0.9, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Builds Signum: `b = mu b + g`, `p -= lr (sign(b) + decay p)`. The sign of 0 is 0. Without momentum it is
/// `signSGD`.
///
/// Source: Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems", Alg. 2. There the
/// momentum is an average, which has the same sign.
#[must_use]
pub fn signum(settings: Signum) -> ChainBuilder {
    let Signum { momentum, weight_decay, clip, schedule } = settings;
    let chain = with_momentum(clipped(clip), momentum, false).then(sign());
    chain.then(add_decayed_weights(weight_decay)).then(scale_by_schedule(schedule))
}
