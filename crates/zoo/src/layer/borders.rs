//! Borders within the sequences of a pass.

use std::sync::Arc;

use farflung_tensor::{AttendedKeys, Mask, Tensor, View};

use super::context::ContextBorders;

/// Borders within the sequences of a pass.
#[derive(Debug, Default)]
pub struct Borders {
    /// For each token of the pass, the position in its sequence at which its document begins: u32 `[B, T]`, as
    /// in [`Batch::documents`](crate::Batch::documents). Tokens attend only to their own document, and
    /// positions are counted from its first token. `None` if each sequence is one document.
    pub documents: Option<Tensor>,
    /// For each token of the pass, the position in its sequence at which its document's prefix ends: u32 `[B,
    /// T]`, as in [`Batch::prefixes`](crate::Batch::prefixes). Tokens of a prefix attend to all of it. `None`
    /// if there are no prefixes.
    pub prefixes: Option<Tensor>,
    /// What passes are told besides where ranks divide the positions of sequences; it has the borders of
    /// documents and prefixes in it. `None` to let the stage make it for sequences that are one document
    /// each.
    pub context: Option<Arc<ContextBorders>>,
}

impl Borders {
    /// Returns where documents begin, as ops take it.
    pub(crate) fn documents(&self) -> Option<View<'_>> {
        self.documents.as_ref().map(Tensor::view)
    }

    /// Returns which keys a query attends to, as ops take it: `keys` are those of a document.
    pub(crate) fn mask<'a>(&'a self, keys: AttendedKeys<'a>) -> Mask<'a> {
        Mask { documents: self.documents(), prefixes: self.prefixes.as_ref().map(Tensor::view), keys }
    }
}
