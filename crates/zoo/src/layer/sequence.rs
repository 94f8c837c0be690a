//! The positions of sequences divided among the ranks that divide the width of layers, where each has whole
//! layers: in norms, residuals, and between layers (Korthikanti et al. 2022, "Reducing Activation Recomputation
//! in Large Transformer Models", section 4.2.2). A sum over ranks becomes a scatter of the sum, and a gather
//! before the next divided layer. The gathered states are not kept: the backward pass gathers them again.

use std::ops::Deref;

use farflung_base::Axis;
use farflung_tensor::Tensor;

use super::{Result, StageContext};
use crate::cut::AxisShare;

/// The positions of a sequence that each rank has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequencePieces {
    rank: usize,
    /// Number of positions of each rank.
    lengths: Vec<usize>,
}

impl SequencePieces {
    /// Divides sequences of `len` positions in proportion to the shares of ranks.
    #[must_use]
    pub fn of(share: &AxisShare, len: usize) -> Self {
        Self { rank: share.rank(), lengths: share.all().map(|share| share.of(len).len()).collect() }
    }

    /// Returns the number of positions of this rank.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lengths[self.rank]
    }

    /// Returns whether this rank has no position.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Hidden states of all positions.
pub(super) enum Whole<'a> {
    /// No positions are divided.
    Same(&'a Tensor),
    Gathered(Tensor),
}

impl Whole<'_> {
    /// Returns the hidden states that were gathered.
    pub(super) fn gathered(self) -> Option<Tensor> {
        match self {
            Self::Same(_) => None,
            Self::Gathered(x) => Some(x),
        }
    }
}

impl Deref for Whole<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Self::Same(x) => x,
            Self::Gathered(x) => x,
        }
    }
}

impl StageContext<'_> {
    /// Returns the hidden states of all positions, of which `x` are this rank's.
    pub(super) fn whole<'x>(&self, x: &'x Tensor) -> Result<Whole<'x>> {
        Ok(match self.sequence {
            None => Whole::Same(x),
            Some(pieces) => Whole::Gathered(self.exchange.gather(Axis::Tensor, x, 1, &pieces.lengths)?),
        })
    }

    /// Returns the sum of `partial` over the ranks that divide a layer's width: of all positions, or of this
    /// rank's.
    pub(super) fn reduced(&self, mut partial: Tensor) -> Result<Tensor> {
        match self.sequence {
            None => {
                self.sum(&mut partial)?;
                Ok(partial)
            }
            Some(pieces) => self.exchange.scatter(Axis::Tensor, partial, 1, &pieces.lengths),
        }
    }

    /// Returns what this rank adds to its part of a sum over ranks: `beside`, or nothing if `beside` has only
    /// this rank's positions.
    pub(super) fn before_sum<'x>(&self, beside: &'x Tensor) -> Option<&'x Tensor> {
        self.sequence.is_none().then_some(beside)
    }

    /// Adds to a sum what [`StageContext::before_sum`] has left.
    pub(super) fn after_sum(&self, y: &mut Tensor, beside: &Tensor) -> Result<()> {
        if self.sequence.is_none() || y.shape().is_empty() {
            return Ok(());
        }
        self.add(y, beside)
    }

    /// Returns whether this rank computes the gradient of what all ranks have and add once, such as a bias:
    /// where positions are divided, gradients of whole tensors are parts of a sum.
    pub(super) fn has_gradient_of_whole(&self) -> bool {
        self.sequence.is_none() || self.exchange.rank(Axis::Tensor) == 0
    }
}
