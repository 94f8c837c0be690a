//! The documents of sequences that hold several of them, one after another.

use super::IN_HOST;
use crate::{Result, Shape, TensorError, View};

/// Tokens of a sequence that belong to one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Document {
    /// Position of the document's first token, which may be before the op's tokens.
    pub(super) start: usize,
    /// Its first token and the end of its last one, counted from the op's first token.
    pub(super) first: usize,
    pub(super) end: usize,
}

/// The documents of all sequences.
#[derive(Debug)]
pub(super) struct Documents {
    all: Vec<Document>,
    /// For each sequence, the number of documents in it and in those before.
    ends: Vec<usize>,
}

impl Documents {
    /// Reads the documents of the `[B, T, C]` tokens of an op that follow `past` others; `None` if each
    /// sequence is one document.
    ///
    /// Errors: [`TensorError::Documents`].
    pub(super) fn of_tokens(
        op: &'static str,
        view: Option<&View<'_>>,
        past: usize,
        shape: Shape,
    ) -> Result<Option<Self>> {
        let len = shape.dims().get(1).copied().unwrap_or(0);
        Ok(starts(op, view, past, len)?.map(|starts| Self::of_starts(starts, len)))
    }

    /// Reads the documents of sequences of `len` tokens from where the document of each token begins.
    pub(super) fn of_starts(starts: &[u32], len: usize) -> Self {
        let (mut all, mut ends): (Vec<Document>, Vec<usize>) = Default::default();
        for row in starts.chunks_exact(len.max(1)) {
            for (token, &start) in row.iter().enumerate() {
                let start = start as usize;
                match all.last_mut() {
                    Some(last) if token > 0 && last.start == start => last.end = token + 1,
                    _ => all.push(Document { start, first: token, end: token + 1 }),
                }
            }
            ends.push(all.len());
        }
        Self { all, ends }
    }

    /// Returns the documents of a sequence, in order.
    pub(super) fn of(&self, sequence: usize) -> &[Document] {
        let from = if sequence == 0 { 0 } else { self.ends[sequence - 1] };
        &self.all[from..self.ends[sequence]]
    }
}

/// Returns where the document of each token begins. Sequences have `len` tokens each, which follow `past`
/// others.
///
/// Errors: [`TensorError::Documents`] unless a token's document begins at the token, or where that of the token
/// before it does.
pub(super) fn starts<'a>(
    op: &'static str,
    view: Option<&View<'a>>,
    past: usize,
    len: usize,
) -> Result<Option<&'a [u32]>> {
    let Some(view) = view else { return Ok(None) };
    let starts: &[u32] = view.host().expect(IN_HOST);
    for row in starts.chunks_exact(len.max(1)) {
        let mut before = None;
        for (token, &start) in row.iter().enumerate() {
            let (position, found) = (past + token, start as usize);
            // The first token's document may begin at any earlier token.
            let continues = before.map_or(found < position, |before| before == start);
            if !continues && found != position {
                return Err(TensorError::Documents { op, position, start });
            }
            before = Some(start);
        }
    }
    Ok(Some(starts))
}
