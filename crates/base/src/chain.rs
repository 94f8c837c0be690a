//! Steps of a forward and backward pass over a chain of layers, some of whose activations are recomputed. Plain
//! data: a planner produces the list, a model executes it.

use std::fmt;

/// One step of a forward and backward pass. Layers are counted from 0; "input i" is the input of layer i.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainStep {
    /// Keep input i until [`ChainStep::Drop`].
    Keep(u32),
    /// Run layer i on input i and keep only its output.
    Forward(u32),
    /// Run layer i on input i and keep all activations that its backward pass needs.
    ForwardAll(u32),
    /// Run layer i's backward pass, then free its activations.
    Backward(u32),
    /// Make the kept input i the current input again.
    Restore(u32),
    /// Free input i.
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
