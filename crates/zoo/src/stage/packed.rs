//! What each stage's pass is told of its sequences, besides their tokens or hidden states.

use farflung_tensor::Tensor;

use super::{Input, Stage};
use crate::{Batch, ZooError};

/// Input of a stage, and what it is told of the sequences.
#[derive(Debug)]
pub struct Packed {
    /// Tokens or hidden states.
    pub input: Input,
    /// For each token of the pass, the position in its sequence at which its document begins: u32 `[B, T]`, as
    /// in [`Batch::documents`]. Tokens attend only to their own document, and positions are counted from its
    /// first token. `None` if each sequence is one document.
    pub documents: Option<Tensor>,
    /// Weight of each sequence in the means of the losses of routers
    /// ([`RouterLosses`](crate::spec::RouterLosses)): one over the number of sequences of a step. 0, the
    /// default, for no such losses.
    pub sequence_weight: f32,
}

impl Input {
    /// Adds where documents begin.
    #[must_use]
    pub const fn with_documents(self, documents: Option<Tensor>) -> Packed {
        Packed { input: self, documents, sequence_weight: 0.0 }
    }
}

impl Packed {
    /// Sets the weight of each sequence in the means of the losses of routers.
    #[must_use]
    pub fn with_sequence_weight(self, sequence_weight: f32) -> Self {
        Self { sequence_weight, ..self }
    }
}

impl From<Input> for Packed {
    fn from(input: Input) -> Self {
        input.with_documents(None)
    }
}

impl From<Tensor> for Packed {
    /// Token ids of sequences that are one document each.
    fn from(tokens: Tensor) -> Self {
        Input::Tokens(tokens).into()
    }
}

impl Stage {
    /// Creates the tensor `[B, T]` of where a batch's documents begin; `None` if each sequence is one document.
    ///
    /// Errors: as [`Stage::tokens`].
    pub fn documents(&self, batch: &Batch) -> Result<Option<Tensor>, ZooError> {
        batch.documents.as_ref().map(|documents| self.tokens(documents, batch.length)).transpose()
    }
}
