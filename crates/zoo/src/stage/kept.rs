//! What is kept of a block between its forward and its backward pass: all of it on the device, all of it in the
//! host's memory, or what it takes to compute it again.

use std::sync::Arc;

use farflung_base::ChainStep;
use farflung_tensor::{Offloaded, Result, Tensor};

use crate::block::TransformerSaved;

/// How a stage holds less on its device between the forward and the backward pass of a microbatch. The
/// gradients are the same to the bit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Keeping {
    /// So many blocks, from the first on, keep their input alone, and run their forward pass again right before
    /// their backward pass (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
    pub recompute: usize,
    /// What so many blocks behind these keep goes to the host's memory, and comes back right before their
    /// backward pass (Rhu et al. 2016, "vDNN"). Where the device's memory is the host's, nothing moves.
    pub offload: usize,
    /// Instead of both: what is kept and computed again, step by step, with every block once forward and once
    /// backward at least. Blocks are counted from the stage's first.
    pub steps: Option<Arc<[ChainStep]>>,
}

impl Keeping {
    /// What is kept of a block, by its place in the stage.
    ///
    /// # Panics
    /// If there are steps and none of them runs the block forward.
    pub(super) fn keep(&self, block: usize, saved: TransformerSaved) -> Kept {
        if let Some(steps) = &self.steps {
            let runs = |step: &ChainStep| match step {
                ChainStep::Forward(i) | ChainStep::ForwardAll(i) => *i as usize == block,
                _ => false,
            };
            let at = steps.iter().position(runs).expect("each block has a forward step");
            return Kept::by(&steps[at..], saved);
        }
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
    /// Steps compute it again from the input of a block before it.
    Nothing,
}

/// The rest of a pass that keeps what its steps say.
#[derive(Debug)]
pub(super) struct Chain {
    steps: Arc<[ChainStep]>,
    /// Steps done.
    at: usize,
    /// What the next block takes, where its forward pass comes next.
    x: Option<Tensor>,
}

impl Chain {
    /// Before the first backward step.
    pub(super) fn after_forward(keeping: &Keeping) -> Option<Self> {
        let steps = Arc::clone(keeping.steps.as_ref()?);
        let backward = |step: &ChainStep| matches!(step, ChainStep::Backward(_));
        let at = steps.iter().position(backward).unwrap_or(steps.len());
        Some(Self { steps, at, x: None })
    }

    /// Takes the steps up to the backward pass of a block: what that needs.
    ///
    /// # Panics
    /// If the steps are not those of a pass over these blocks.
    fn bring(
        &mut self,
        block: usize,
        blocks: &mut [Kept],
        mut forward: impl FnMut(usize, Tensor) -> Result<(Tensor, TransformerSaved)>,
    ) -> Result<TransformerSaved> {
        loop {
            let step = self.steps.get(self.at).expect("each block has a backward step");
            match *step {
                ChainStep::Forward(i) | ChainStep::ForwardAll(i) => {
                    let x = self
                        .x
                        .take()
                        .expect("a block runs on the output of the one before, or on a kept input");
                    let (y, saved) = forward(i as usize, x)?;
                    blocks[i as usize] = Kept::by(&self.steps[self.at..], saved);
                    self.x = Some(y);
                }
                ChainStep::Restore(i) => {
                    let kept = std::mem::replace(&mut blocks[i as usize], Kept::Nothing);
                    let Kept::Input(x) = kept else { unreachable!("a kept input is gone back to") };
                    self.x = Some(x);
                }
                // Whether an input is gone back to follows from the steps behind.
                ChainStep::Keep(_) | ChainStep::Drop(_) => {}
                ChainStep::Backward(i) => {
                    (self.at, self.x) = (self.at + 1, None);
                    let kept = std::mem::replace(&mut blocks[i as usize], Kept::Nothing);
                    match kept {
                        Kept::Here(saved) if i as usize == block => return Ok(saved),
                        _ => {
                            unreachable!("blocks go backward from the last to the first, with all they need")
                        }
                    }
                }
            }
            self.at += 1;
        }
    }
}

/// What the backward pass of the last of `blocks` needs; it is taken from there.
pub(super) fn bring_last(
    blocks: &mut Vec<Kept>,
    chain: &mut Option<Chain>,
    mut forward: impl FnMut(usize, Tensor) -> Result<(Tensor, TransformerSaved)>,
) -> Result<TransformerSaved> {
    let last = blocks.len() - 1;
    let saved = chain.as_mut().map(|chain| chain.bring(last, blocks, &mut forward)).transpose()?;
    let kept = blocks.pop().expect("it has a last one");
    match saved {
        Some(saved) => Ok(saved),
        None => kept.bring(|x| forward(last, x)),
    }
}

impl Kept {
    /// What the first of some steps, a forward pass, keeps of its block: its input where a later step goes back
    /// to that.
    fn by(steps: &[ChainStep], saved: TransformerSaved) -> Self {
        let ChainStep::Forward(block) = steps[0] else { return Self::Here(saved) };
        let fate = |step: &ChainStep| match *step {
            ChainStep::Restore(i) if i == block => Some(true),
            ChainStep::Keep(i) if i == block => Some(false),
            _ => None,
        };
        let needed = steps[1..].iter().find_map(fate).unwrap_or(false);
        if needed { Self::Input(saved.into_input()) } else { Self::Nothing }
    }

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
            Self::Nothing => unreachable!("only steps keep nothing, and they bring it back themselves"),
            Self::Away(tensors) => {
                let tensors: Vec<_> = tensors.into_iter().map(Offloaded::restore).collect::<Result<_>>()?;
                Ok(TransformerSaved::from_tensors(tensors.try_into().expect("as many as went away")))
            }
        }
    }
}
