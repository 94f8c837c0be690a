//! Optimizers of one rank by name, with one row of [`METHODS`] per method. Each is a chain with the arithmetic
//! of PyTorch's optimizer, in the same order, or that of its paper or its authors' package where PyTorch has
//! none.

mod adabelief;
mod adabound;
mod adagrad;
mod adam;
mod adamw;
mod amsgrad;
mod lamb;
mod lion;
mod muon;
mod onebit_adam;
mod onebit_lamb;
mod radam;
mod rmsprop;
mod sgd;
mod signum;
mod zero_one_adam;

use crate::transform::{MuonScale, clip_by_global_norm, lookahead, trace};
use crate::{Chain, ChainBuilder, LrSchedule};

pub use adabelief::{ADABELIEF, AdaBelief, adabelief};
pub use adabound::{ADABOUND, AdaBound, adabound};
pub use adagrad::{ADAGRAD, AdaGrad, adagrad};
pub use adam::{ADAM, Adam, adam};
pub use adamw::{ADAMW, AdamW, adamw};
pub use amsgrad::{AMSGRAD, amsgrad};
pub use lamb::{LAMB, Lamb, lamb};
pub use lion::{LION, Lion, lion};
pub use muon::{MUON, Muon, is_hidden_matrix, muon};
pub use onebit_adam::{ONEBIT_ADAM, OnebitAdam, QADAM, onebit_adam, qadam};
pub use onebit_lamb::{ONEBIT_LAMB, onebit_lamb};
pub use radam::{RADAM, radam};
pub use rmsprop::{RMSPROP, RmsProp, rmsprop};
pub use sgd::{SGD, Sgd, sgd};
pub use signum::{SIGNUM, Signum, signum};
pub use zero_one_adam::{ZERO_ONE_ADAM, zero_one_adam};

/// Settings of all methods. Each method reads those that it uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalSettings {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to denominators.
    pub eps: f64,
    /// Momentum. At 0 there is no momentum buffer, except in Muon.
    pub momentum: f64,
    /// SGD's dampening: the part of each gradient after the first that is not added to the momentum.
    pub dampening: f64,
    /// Whether momentum is Nesterov's.
    pub nesterov: bool,
    /// Decay of `RMSprop`'s average of squares.
    pub rho: f64,
    /// Whether `RMSprop` subtracts the square of the average gradient.
    pub centered: bool,
    /// `AdaGrad`'s own decay of the learning rate.
    pub lr_decay: f64,
    /// Learning rate that both of `AdaBound`'s bounds approach.
    pub final_lr: f64,
    /// Speed at which `AdaBound`'s bounds approach `final_lr`.
    pub gamma: f64,
    /// Scale of Muon's steps of hidden matrices.
    pub muon_scale: MuonScale,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
    /// Number of updates after which the second moment is frozen.
    pub freeze: u64,
    /// Number of changes of the second moment after which the number of updates between two changes doubles.
    pub variance_doubling: u64,
    /// Number of local updates after which the number of updates between two synchronisations of replicas
    /// doubles.
    pub local_doubling: u64,
    /// Largest number of local updates between two synchronisations.
    pub most_local: u64,
    /// Lookahead around the method, if any.
    pub lookahead: Option<Lookahead>,
}

impl Default for LocalSettings {
    /// Returns PyTorch's defaults (Adam's where its optimizers differ), but a momentum of 0.9. What PyTorch
    /// does not have is as in the packages of `AdaBound`'s authors and of `DeepSpeed` (0/1 Adam). There is no
    /// freeze.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            momentum: 0.9,
            dampening: 0.0,
            nesterov: false,
            rho: 0.99,
            centered: false,
            lr_decay: 0.0,
            final_lr: 0.1,
            gamma: 1e-3,
            muon_scale: MuonScale::Original,
            weight_decay: 0.0,
            clip: None,
            schedule: LrSchedule::constant(1e-3),
            freeze: u64::MAX,
            variance_doubling: 16,
            local_doubling: 32_678,
            most_local: 16,
            lookahead: None,
        }
    }
}

/// Settings of [`lookahead`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lookahead {
    /// Number of steps between two updates of the slow weights.
    pub every: u64,
    /// Part of the distance to the fast weights that the slow weights then move.
    pub alpha: f64,
}

impl Default for Lookahead {
    /// Returns the paper's settings.
    fn default() -> Self {
        Self { every: 5, alpha: 0.5 }
    }
}

/// Values that replicas average. They depend on the optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Averages {
    /// Gradients in all steps.
    Gradients,
    /// Gradients in a warm-up, then the first moment.
    Momentum {
        /// Default codec for the first moment.
        codec: &'static str,
    },
    /// Gradients until the second moment is frozen, through a codec in steps that do not change it; then what
    /// local steps accumulated.
    Accumulated {
        /// Default codec for the gradients and for the accumulated values.
        codec: &'static str,
        /// Method of synchronisation that the optimizer requires.
        sync: &'static str,
    },
}

impl Averages {
    /// Returns the default codec for what replicas average; `None` means no codec.
    #[must_use]
    pub const fn codec(self) -> Option<&'static str> {
        match self {
            Self::Gradients => None,
            Self::Momentum { codec } | Self::Accumulated { codec, .. } => Some(codec),
        }
    }

    /// Returns the method of synchronisation that the optimizer requires; `None` if it can run with several.
    #[must_use]
    pub const fn sync(self) -> Option<&'static str> {
        match self {
            Self::Gradients | Self::Momentum { .. } => None,
            Self::Accumulated { sync, .. } => Some(sync),
        }
    }
}

/// A row of the table of optimizers.
#[derive(Debug, Clone, Copy)]
pub struct LocalMethod {
    /// Name on command lines.
    pub name: &'static str,
    /// One-line summary.
    pub summary: &'static str,
    /// Settings that this method reads and some others do not, by their names on command lines.
    pub reads: &'static [&'static str],
    /// The method's own defaults for some of these settings; a flag is 0 or 1.
    pub defaults: &'static [(&'static str, f64)],
    /// What replicas average.
    pub averages: Averages,
    /// Returns the number of state buffers, each as long as the parameters.
    pub buffers: fn(&LocalSettings) -> usize,
    /// Whether the method works on whole tensors, so that a step has several passes.
    pub per_tensor: bool,
    /// Builds the method's chain.
    pub build: fn(LocalSettings) -> ChainBuilder,
}

/// All methods. The first is the default.
pub const METHODS: &[LocalMethod] = &[
    ADAMW,
    SGD,
    ADAM,
    AMSGRAD,
    RMSPROP,
    ADAGRAD,
    RADAM,
    LAMB,
    ADABELIEF,
    ADABOUND,
    LION,
    MUON,
    SIGNUM,
    ONEBIT_ADAM,
    QADAM,
    ZERO_ONE_ADAM,
    ONEBIT_LAMB,
];

/// Number of buffers of a method, each as long as the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalBuffers {
    /// State buffers, which checkpoints contain.
    pub states: usize,
    /// Buffers that are used only during a step.
    pub work: usize,
}

impl LocalMethod {
    /// Returns the method with this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        METHODS.iter().find(|method| method.name == name)
    }

    /// Returns the method's own default of a setting, if it has one.
    #[must_use]
    pub fn default_of(&self, setting: &str) -> Option<f64> {
        self.defaults.iter().find(|(name, _)| *name == setting).map(|(_, value)| *value)
    }

    /// Builds the method's chain, with Lookahead around it if the settings say so.
    #[must_use]
    pub fn chain(&self, settings: LocalSettings) -> ChainBuilder {
        let chain = (self.build)(settings);
        match settings.lookahead {
            Some(Lookahead { every, alpha }) => chain.then(lookahead(every, alpha)),
            None => chain,
        }
    }

    /// Returns the number of buffers of [`LocalMethod::chain`].
    #[must_use]
    pub fn memory(&self, settings: &LocalSettings) -> LocalBuffers {
        let states = (self.buffers)(settings) + usize::from(settings.lookahead.is_some());
        // A fused pass has at most three states.
        LocalBuffers { states, work: usize::from(self.per_tensor || states > 3) }
    }
}

fn clipped(clip: Option<f64>) -> ChainBuilder {
    match clip {
        Some(max) => Chain::new().then(clip_by_global_norm(max)),
        None => Chain::new(),
    }
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
        let shapes = [("w".to_owned(), Shape::from([3, 4])), ("b".to_owned(), Shape::from(4))];
        let layout = ParamLayout::new(shapes);
        let device = Device::cpu(1).unwrap();
        for (momentum, centered, lookahead) in
            [(0.0, false, None), (0.9, true, None), (0.9, true, Some(Lookahead::default()))]
        {
            let clip = Some(1.0);
            let settings = LocalSettings { momentum, centered, clip, lookahead, ..LocalSettings::default() };
            for method in METHODS {
                let chain = method.chain(settings).build(&device, &layout).unwrap();
                let found = LocalBuffers { states: chain.states().count(), work: chain.work_buffers() };
                assert_eq!(found, method.memory(&settings), "{}", method.name);
                assert_eq!(
                    LocalMethod::by_name(method.name).map(|found| found.summary),
                    Some(method.summary)
                );
                assert!(method.defaults.iter().all(|(name, _)| method.reads.contains(name)));
            }
        }
    }
}
