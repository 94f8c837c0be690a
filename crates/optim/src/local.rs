//! Optimizers of one rank by name: one file a method, one row in [`METHODS`]. Each is a chain with the
//! arithmetic and the order of PyTorch's, or of its paper where PyTorch has none.

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

/// The numbers that methods are made of; each reads those that it has a use for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalSettings {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to what is divided by.
    pub eps: f64,
    /// Momentum; 0 keeps no buffer.
    pub momentum: f64,
    /// What SGD leaves out of each gradient after the first as it joins the momentum.
    pub dampening: f64,
    /// Nesterov's look-ahead.
    pub nesterov: bool,
    /// Decay of `RMSprop`'s average of squares.
    pub rho: f64,
    /// Whether `RMSprop` subtracts the square of the average gradient.
    pub centered: bool,
    /// `AdaGrad`'s own decay of the learning rate.
    pub lr_decay: f64,
    /// What `AdaBound`'s rates go to.
    pub final_lr: f64,
    /// How fast they do.
    pub gamma: f64,
    /// How far Muon moves hidden matrices.
    pub muon_scale: MuonScale,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Global l2 norm that gradients are scaled down to.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
    /// Updates after which a second moment stands still.
    pub freeze: u64,
    /// Changes of a second moment after which the updates between two of them double.
    pub variance_doubling: u64,
    /// Local updates after which those between two meetings of replicas double.
    pub local_doubling: u64,
    /// The most local updates between two meetings.
    pub most_local: u64,
    /// Slow weights around the method.
    pub lookahead: Option<Lookahead>,
}

impl Default for LocalSettings {
    /// PyTorch's, where its optimizers agree.
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
    /// Steps between two moves of the slow weights.
    pub every: u64,
    /// How far these then go towards the fast ones.
    pub alpha: f64,
}

impl Default for Lookahead {
    /// The paper's.
    fn default() -> Self {
        Self { every: 5, alpha: 0.5 }
    }
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
    /// Gradients, by a codec in most steps, and later what local steps gathered.
    Gathered {
        /// The codec that they go through, unless another is asked for.
        codec: &'static str,
        /// The method of synchronisation that it takes.
        sync: &'static str,
    },
}

impl Averages {
    /// The codec that an optimizer's averages go through, unless another is asked for.
    #[must_use]
    pub const fn codec(self) -> Option<&'static str> {
        match self {
            Self::Gradients => None,
            Self::Momentum { codec } | Self::Gathered { codec, .. } => Some(codec),
        }
    }

    /// The method of synchronisation that an optimizer takes, where that is not one of several.
    #[must_use]
    pub const fn sync(self) -> Option<&'static str> {
        match self {
            Self::Gradients | Self::Momentum { .. } => None,
            Self::Gathered { sync, .. } => Some(sync),
        }
    }
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
    /// Those of them whose value, where none is given, is the method's own; a flag's is 0 or 1.
    pub defaults: &'static [(&'static str, f64)],
    /// What replicas average.
    pub averages: Averages,
    /// Buffers that it keeps, each as long as the parameters.
    pub buffers: fn(&LocalSettings) -> usize,
    /// Whether it sees whole tensors, so that a step has several passes.
    pub per_tensor: bool,
    /// Its chain.
    pub build: fn(LocalSettings) -> ChainBuilder,
}

/// All methods; the first is the default.
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

/// Buffers of a method, each as long as the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalBuffers {
    /// Its state, which checkpoints hold.
    pub states: usize,
    /// Those that are in use during a step only.
    pub work: usize,
}

impl LocalMethod {
    /// The method of a name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        METHODS.iter().find(|method| method.name == name)
    }

    /// Its own default of a setting, if it has one.
    #[must_use]
    pub fn default_of(&self, setting: &str) -> Option<f64> {
        self.defaults.iter().find(|(name, _)| *name == setting).map(|(_, value)| *value)
    }

    /// Its chain, with slow weights around it where the settings say so.
    #[must_use]
    pub fn chain(&self, settings: LocalSettings) -> ChainBuilder {
        let chain = (self.build)(settings);
        match settings.lookahead {
            Some(Lookahead { every, alpha }) => chain.then(lookahead(every, alpha)),
            None => chain,
        }
    }

    /// The buffers of [`LocalMethod::chain`].
    #[must_use]
    pub fn memory(&self, settings: &LocalSettings) -> LocalBuffers {
        let states = (self.buffers)(settings) + usize::from(settings.lookahead.is_some());
        // A pass has room for three states.
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
