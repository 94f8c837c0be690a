//! How a chain of layers runs forward and backward when not all activations are kept: plain data that planners
//! make and models follow.

use std::fmt;

/// A step of a forward and backward pass over layers that are counted from 0. "Input i" is what layer i takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainStep {
    /// Keep input i until it is let go of.
    Keep(u32),
    /// Run layer i from input i and keep nothing of it but its output.
    Forward(u32),
    /// Run layer i from input i and keep all that its backward needs.
    ForwardAll(u32),
    /// Run layer i backward. Its activations are freed.
    Backward(u32),
    /// Go back to input i, which is kept.
    Restore(u32),
    /// Let go of input i.
    Drop(u32),
}

impl fmt::Display for ChainStep {
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
