//! Which activations of a chain of layers to keep, and which to compute again, so that a backward pass fits its
//! memory. It knows layers as times and sizes, not what they compute.

mod rotor;

use farflung_base::{ChainStep, Nanos};

pub use rotor::{Layer, rotor};

/// A way to run a chain forward and backward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecomputePlan {
    /// What is done, in order.
    pub steps: Vec<ChainStep>,
    /// All forwards and backwards together.
    pub time: Nanos,
}

impl RecomputePlan {
    /// How often layer i runs forward.
    #[must_use]
    pub fn forwards(&self, layer: u32) -> usize {
        let of = |step: &&ChainStep| matches!(step, ChainStep::Forward(i) | ChainStep::ForwardAll(i) if *i == layer);
        self.steps.iter().filter(of).count()
    }
}

#[cfg(test)]
mod tests;
