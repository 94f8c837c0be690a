//! Which activations of a chain of layers to keep, and which to compute again, so that a backward pass fits its memory.
//! It knows layers as times and sizes, not what they compute.

mod revolve;
mod rotor;
mod segments;

use std::fmt;

use farflung_base::Nanos;

pub use revolve::{revolve, revolve_forwards};
pub use rotor::{Layer, rotor};
pub use segments::{Segments, sqrt_segments};

/// A step of a backward pass over layers that are counted from 0. "Input i" is what layer i takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Keep input i until it is let go of.
    Keep(u32),
    /// Run layer i from input i and keep nothing of it but its output.
    Forward(u32),
    /// Run layer i from input i and keep all that its backward needs.
    ForwardAll(u32),
    /// Run layer i backward; what was kept for it is gone.
    Backward(u32),
    /// Go back to input i, which is kept.
    Restore(u32),
    /// Let go of input i.
    Drop(u32),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep(i) => write!(f, "keep {i}"),
            Self::Forward(i) => write!(f, "F{i}"),
            Self::ForwardAll(i) => write!(f, "F{i}*"),
            Self::Backward(i) => write!(f, "B{i}"),
            Self::Restore(i) => write!(f, "restore {i}"),
            Self::Drop(i) => write!(f, "drop {i}"),
        }
    }
}

/// A way to run a chain forward and backward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecomputePlan {
    /// What is done, in order.
    pub steps: Vec<Step>,
    /// All forwards and backwards together.
    pub time: Nanos,
}

impl RecomputePlan {
    /// How often layer i runs forward.
    #[must_use]
    pub fn forwards(&self, layer: u32) -> usize {
        let of = |step: &&Step| matches!(step, Step::Forward(i) | Step::ForwardAll(i) if *i == layer);
        self.steps.iter().filter(of).count()
    }
}

#[cfg(test)]
mod tests;
