//! How much of a microbatch's work in one stage is done.

use serde::{Deserialize, Serialize};

use super::ComputeKind;

/// How much of a microbatch's work in one stage is done. Later values include earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub enum CellProgress {
    /// Nothing.
    #[default]
    Nothing,
    /// The forward pass.
    Forward,
    /// The gradient of the stage's input.
    InputGradient,
    /// The gradients of the weights: the microbatch's work in this stage is complete.
    WeightGradient,
}

impl CellProgress {
    /// Returns the progress of a microbatch in a stage after a computation of this kind. `None` for
    /// recomputations and optimizer steps, which do not change it.
    #[must_use]
    pub const fn after(kind: ComputeKind) -> Option<Self> {
        match kind {
            ComputeKind::Forward => Some(Self::Forward),
            ComputeKind::BackwardInput => Some(Self::InputGradient),
            ComputeKind::BackwardWeight | ComputeKind::Backward => Some(Self::WeightGradient),
            ComputeKind::Recompute | ComputeKind::Step => None,
        }
    }

    /// Returns the number of the three computations that are left: forward pass, input gradient, weight
    /// gradients.
    #[must_use]
    pub const fn left(self) -> u32 {
        3 - self as u32
    }
}
