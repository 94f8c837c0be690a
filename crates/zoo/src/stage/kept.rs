//! What is kept of a block between its forward and its backward pass: all of it on the device, all of it in the host's memory,
//! or what it takes to compute it again.

use farflung_tensor::{Offloaded, Result, Tensor};

use crate::block::TransformerSaved;

/// How a stage holds less on its device between the forward and the backward pass of a microbatch. The gradients are the same
/// to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Keeping {
    /// So many blocks, from the first on, keep their input alone, and run their forward pass again right before their
    /// backward pass (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
    pub recompute: usize,
    /// What so many blocks behind these keep goes to the host's memory, and comes back right before their backward pass (Rhu
    /// et al. 2016, "vDNN"). Where the device's memory is the host's, nothing moves.
    pub offload: usize,
}

impl Keeping {
    /// What is kept of a block, by its place in the stage.
    pub(super) fn keep(self, block: usize, saved: TransformerSaved) -> Kept {
        if block < self.recompute {
            Kept::Input(saved.into_input())
        } else if block - self.recompute < self.offload {
            Kept::Away(Box::new(saved.into_tensors().map(Tensor::offload)))
        } else {
            Kept::Here(saved)
        }
    }
}

/// What is kept of a block.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a stage has tens of them, most of them of the largest kind")]
pub(super) enum Kept {
    Here(TransformerSaved),
    Input(Tensor),
    Away(Box<[Offloaded; 11]>),
}

impl Kept {
    /// Decides anew on what is on the device.
    pub(super) fn again(self, keep: impl FnOnce(TransformerSaved) -> Self) -> Self {
        if let Self::Here(saved) = self { keep(saved) } else { self }
    }

    /// All of it on the device; `again` is the block's forward pass.
    pub(super) fn bring(
        self,
        again: impl FnOnce(Tensor) -> Result<(Tensor, TransformerSaved)>,
    ) -> Result<TransformerSaved> {
        match self {
            Self::Here(saved) => Ok(saved),
            Self::Input(x) => Ok(again(x)?.1),
            Self::Away(tensors) => {
                let tensors: Vec<_> = tensors.into_iter().map(Offloaded::restore).collect::<Result<_>>()?;
                Ok(TransformerSaved::from_tensors(tensors.try_into().expect("as many as went away")))
            }
        }
    }
}
