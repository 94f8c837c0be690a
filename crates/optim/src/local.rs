//! Optimizers of one rank by name: one file a method, one row in [`METHODS`]. Each is a chain with the
//! arithmetic and the order of PyTorch's.

mod adamw;
mod frozen_variance;
mod onebit_adam;
mod sgd;

use crate::transform::{add_decayed_weights, clip_by_global_norm, trace};
use crate::{Chain, ChainBuilder, LrSchedule};

pub use adamw::{ADAMW, AdamW, adamw};
pub use frozen_variance::{FrozenAdam, scale_by_frozen_adam};
pub use onebit_adam::{ONEBIT_ADAM, OnebitAdam, QADAM, onebit_adam, qadam};
pub use sgd::{SGD, Sgd, sgd};

/// The numbers that methods are made of; each reads those that it has a use for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalSettings {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Momentum; 0 keeps no buffer.
    pub momentum: f64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Global l2 norm that gradients are scaled down to.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
    /// Updates after which a second moment stands still.
    pub freeze: u64,
}

/// What replicas average where their gradients meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Averages {
    /// Gradients.
    Gradients,
    /// Gradients in a warm-up, then the first moment.
    Momentum {
        /// The codec that it goes through, unless another is asked for.
        codec: &'static str,
    },
}

/// A row of the table of optimizers.
#[derive(Debug, Clone, Copy)]
pub struct LocalMethod {
    /// The name on command lines.
    pub name: &'static str,
    /// One line on what it does.
    pub summary: &'static str,
    /// The settings that only some methods read, by their names on command lines.
    pub reads: &'static [&'static str],
    /// What replicas average.
    pub averages: Averages,
    /// Buffers that it keeps, each as long as the parameters.
    pub buffers: fn(&LocalSettings) -> usize,
    /// Its chain.
    pub build: fn(LocalSettings) -> ChainBuilder,
}

/// All methods; the first is the default.
pub const METHODS: &[LocalMethod] = &[ADAMW, SGD, ONEBIT_ADAM, QADAM];

impl LocalMethod {
    /// The method of a name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        METHODS.iter().find(|method| method.name == name)
    }
}

fn clipped(clip: Option<f64>) -> ChainBuilder {
    match clip {
        Some(max) => Chain::new().then(clip_by_global_norm(max)),
        None => Chain::new(),
    }
}

fn decayed(chain: ChainBuilder, decay: f64) -> ChainBuilder {
    // A decay of 0 would cut the pass for nothing. Not a number goes on, to be refused.
    if decay == 0.0 { chain } else { chain.then(add_decayed_weights(decay)) }
}

pub(crate) fn with_momentum(chain: ChainBuilder, momentum: f64, nesterov: bool) -> ChainBuilder {
    if momentum == 0.0 { chain } else { chain.then(trace(momentum, nesterov)) }
}

#[cfg(test)]
mod tests {
    use farflung_tensor::{Device, ParamLayout, Shape};

    use super::*;

    #[test]
    fn each_row_builds_a_chain_with_the_buffers_that_it_says() {
        let layout = ParamLayout::new([("w".to_owned(), Shape::from([3, 4]))]);
        let device = Device::cpu(1).unwrap();
        let schedule = LrSchedule::constant(1e-3);
        for momentum in [0.0, 0.9] {
            let settings = LocalSettings {
                beta1: 0.9,
                beta2: 0.95,
                momentum,
                weight_decay: 0.1,
                clip: Some(1.0),
                schedule,
                freeze: 1,
            };
            for method in METHODS {
                let chain = (method.build)(settings).build(&device, &layout).unwrap();
                assert_eq!(chain.states().count(), (method.buffers)(&settings), "{}", method.name);
                assert_eq!(
                    LocalMethod::by_name(method.name).map(|found| found.summary),
                    Some(method.summary)
                );
            }
        }
    }
}
