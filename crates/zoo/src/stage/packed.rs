//! Sequences that hold several documents: what a stage's pass is told about them.

use farflung_tensor::Tensor;

use super::{Input, Stage};
use crate::{Batch, ZooError};

/// Input of a stage, and where the documents of its sequences begin. Tokens attend only to their own document,
/// and positions are counted from its first token.
#[derive(Debug)]
pub struct Packed {
    /// Tokens or hidden states.
    pub input: Input,
    /// For each token of the pass, the position in its sequence at which its document begins: u32 `[B, T]`, as
    /// in [`Batch::documents`]. `None` if each sequence is one document.
    pub documents: Option<Tensor>,
}

impl Input {
    /// Adds where documents begin.
    #[must_use]
    pub const fn with_documents(self, documents: Option<Tensor>) -> Packed {
        Packed { input: self, documents }
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
