//! Chooses which activations of a chain of layers to keep and which to recompute, so that a backward pass fits
//! in memory. Layers are only times and sizes here.

mod rotor;

use farflung_base::{ChainStep, Nanos};

pub use rotor::{Layer, rotor};

/// A way to run a chain forward and backward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecomputePlan {
    /// Steps, in order.
    pub steps: Vec<ChainStep>,
    /// Time of all forwards and backwards.
    pub time: Nanos,
}

impl RecomputePlan {
    /// Returns the number of times that a layer runs forward.
    #[must_use]
    pub fn forwards(&self, layer: u32) -> usize {
        let of = |step: &&ChainStep| matches!(step, ChainStep::Forward(i) | ChainStep::ForwardAll(i) if *i == layer);
        self.steps.iter().filter(of).count()
    }
}

#[cfg(test)]
mod tests;
