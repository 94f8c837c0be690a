//! Storage of a block's saved values between its forward and backward pass: on the device, in host memory, or
//! only the inputs that are needed to recompute them.

use std::sync::Arc;

use farflung_base::ChainStep;
use farflung_tensor::{Offloaded, Tensor};

use crate::layer::{Activations, Kept, Result};

/// How a stage saves device memory between the forward and the backward pass of a microbatch. Gradients are
/// bit-identical for all settings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ActivationPolicy {
    /// Number of blocks, from the first on, that save only their input. Their forward pass is run again right
    /// before their backward pass (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
    pub recompute: usize,
    /// Number of following blocks whose saved values are moved to host memory, and back right before their
    /// backward pass (Rhu et al. 2016, "vDNN"). On a device whose memory is host memory, nothing moves.
    pub offload: usize,
    /// Replaces both other fields: the steps of the whole pass, which say what is kept and what is recomputed.
    /// Every block must have a forward and a backward step. Blocks are counted from the stage's first one.
    pub steps: Option<Arc<[ChainStep]>>,
}

impl ActivationPolicy {
    /// Converts the saved values of a block to the form in which they are kept. `block` is its index in the
    /// stage.
    ///
    /// # Panics
    /// If `steps` is set and has no forward step of the block.
    pub(super) fn store(&self, block: usize, saved: Activations) -> StoredActivations {
        if let Some(steps) = &self.steps {
            let runs = |step: &ChainStep| match step {
                ChainStep::Forward(i) | ChainStep::ForwardAll(i) => *i as usize == block,
                _ => false,
            };
            let at = steps.iter().position(runs).expect("each block has a forward step");
            return StoredActivations::by(&steps[at..], saved);
        }
        if block < self.recompute {
            StoredActivations::Input(input_of(saved))
        } else if block - self.recompute < self.offload {
            StoredActivations::Offloaded(
                saved.into_iter().map(|(name, tensor)| (name, tensor.offload())).collect(),
            )
        } else {
            StoredActivations::OnDevice(saved)
        }
    }
}

/// The form in which a block's saved values are kept.
#[derive(Debug)]
pub(super) enum StoredActivations {
    OnDevice(Activations),
    Input(Tensor),
    Offloaded(Vec<(Kept, Offloaded)>),
    /// Nothing is kept; steps recompute the values from the input of an earlier block.
    Nothing,
}

/// Progress of a pass with [`ActivationPolicy::steps`]: its steps, and how many of them are done.
#[derive(Debug)]
pub(super) struct Chain {
    steps: Arc<[ChainStep]>,
    /// Number of steps done; the next step is `steps[at]`.
    at: usize,
    /// Input of the next block, if its forward pass is the next step.
    x: Option<Tensor>,
}

impl Chain {
    /// Returns the state before the first backward step; `None` without steps.
    pub(super) fn after_forward(keeping: &ActivationPolicy) -> Option<Self> {
        let steps = Arc::clone(keeping.steps.as_ref()?);
        let backward = |step: &ChainStep| matches!(step, ChainStep::Backward(_));
        let at = steps.iter().position(backward).unwrap_or(steps.len());
        Some(Self { steps, at, x: None })
    }

    /// Executes the steps up to the backward step of a block, and returns its saved values.
    ///
    /// # Panics
    /// If the steps are not those of a pass over these blocks.
    fn load(
        &mut self,
        block: usize,
        blocks: &mut [StoredActivations],
        mut forward: impl FnMut(usize, Tensor) -> Result<(Tensor, Activations)>,
    ) -> Result<Activations> {
        loop {
            let step = self.steps.get(self.at).expect("each block has a backward step");
            match *step {
                ChainStep::Forward(i) | ChainStep::ForwardAll(i) => {
                    let x = self.x.take().expect(
                        "a forward step follows that of the block before, or the restoring of an input",
                    );
                    let (y, saved) = forward(i as usize, x)?;
                    blocks[i as usize] = StoredActivations::by(&self.steps[self.at..], saved);
                    self.x = Some(y);
                }
                ChainStep::Restore(i) => {
                    let kept = std::mem::replace(&mut blocks[i as usize], StoredActivations::Nothing);
                    let StoredActivations::Input(x) = kept else {
                        unreachable!("only inputs that were kept are restored")
                    };
                    self.x = Some(x);
                }
                // Nothing to do: an input is kept if a later step restores it (`StoredActivations::by`).
                ChainStep::Keep(_) | ChainStep::Drop(_) => {}
                ChainStep::Backward(i) => {
                    (self.at, self.x) = (self.at + 1, None);
                    let kept = std::mem::replace(&mut blocks[i as usize], StoredActivations::Nothing);
                    match kept {
                        StoredActivations::OnDevice(saved) if i as usize == block => return Ok(saved),
                        _ => {
                            unreachable!(
                                "backward steps go from the last block to the first, each with all saved \
                                 values"
                            )
                        }
                    }
                }
            }
            self.at += 1;
        }
    }
}

/// Removes the last of `blocks` and returns its saved values.
pub(super) fn restore_last(
    blocks: &mut Vec<StoredActivations>,
    chain: &mut Option<Chain>,
    mut forward: impl FnMut(usize, Tensor) -> Result<(Tensor, Activations)>,
) -> Result<Activations> {
    let last = blocks.len() - 1;
    let saved = chain.as_mut().map(|chain| chain.load(last, blocks, &mut forward)).transpose()?;
    let kept = blocks.pop().expect("there is a block left");
    match saved {
        Some(saved) => Ok(saved),
        None => kept.restore(|x| forward(last, x)),
    }
}

impl StoredActivations {
    /// Converts the saved values of a block after `steps[0]`, its forward step. With [`ChainStep::Forward`],
    /// only its input is kept, and only if a later step restores it.
    fn by(steps: &[ChainStep], saved: Activations) -> Self {
        let ChainStep::Forward(block) = steps[0] else { return Self::OnDevice(saved) };
        let fate = |step: &ChainStep| match *step {
            ChainStep::Restore(i) if i == block => Some(true),
            ChainStep::Keep(i) if i == block => Some(false),
            _ => None,
        };
        let needed = steps[1..].iter().find_map(fate).unwrap_or(false);
        if needed { Self::Input(input_of(saved)) } else { Self::Nothing }
    }

    /// Applies `keep` to values that are on the device; returns others unchanged.
    pub(super) fn map_on_device(self, keep: impl FnOnce(Activations) -> Self) -> Self {
        if let Self::OnDevice(saved) = self { keep(saved) } else { self }
    }

    /// Returns the saved values on the device. `again` is the block's forward pass.
    pub(super) fn restore(
        self,
        again: impl FnOnce(Tensor) -> Result<(Tensor, Activations)>,
    ) -> Result<Activations> {
        match self {
            Self::OnDevice(saved) => Ok(saved),
            Self::Input(x) => Ok(again(x)?.1),
            Self::Nothing => unreachable!("only with `steps` is nothing kept, and then they recompute it"),
            Self::Offloaded(tensors) => {
                tensors.into_iter().map(|(name, tensor)| Ok((name, tensor.restore()?))).collect()
            }
        }
    }
}

/// Returns the input of a block, from which its forward pass can be run again.
fn input_of(mut saved: Activations) -> Tensor {
    saved.take(Kept::Input)
}
