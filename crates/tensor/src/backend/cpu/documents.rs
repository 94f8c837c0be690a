//! The documents of sequences that hold several of them, one after another, and their prefixes.

use super::IN_HOST;
use crate::{Mask, Result, Shape, TensorError, View};

/// Tokens of a sequence that belong to one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Document {
    /// Position of the document's first token, which may be before the op's tokens.
    pub(super) start: usize,
    /// Its first token and the end of its last one, counted from the op's first token.
    pub(super) first: usize,
    pub(super) end: usize,
    /// Number of the document's tokens, from its first one on, that are read in both directions.
    pub(super) prefix: usize,
}

impl Document {
    /// Returns the only document of a sequence of `len` tokens.
    pub(super) const fn whole(len: usize) -> Self {
        Self { start: 0, first: 0, end: len, prefix: 0 }
    }
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
    /// sequence is one document without a prefix.
    ///
    /// Errors: [`TensorError::Documents`], [`TensorError::Prefix`].
    pub(super) fn of_tokens(
        op: &'static str,
        mask: &Mask<'_>,
        past: usize,
        shape: Shape,
    ) -> Result<Option<Self>> {
        let len = shape.dims().get(1).copied().unwrap_or(0);
        let documents = starts(op, mask.documents.as_ref(), past, len)?;
        let mut this = match (documents, &mask.prefixes) {
            (Some(starts), _) => Self::of_starts(starts, len),
            (None, Some(_)) => Self::undivided(shape.rows().checked_div(len).unwrap_or(0), len),
            (None, None) => return Ok(None),
        };
        if let Some(view) = &mask.prefixes {
            this.read_prefixes(op, view.host().expect(IN_HOST), past, len)?;
        }
        Ok(Some(this))
    }

    /// Returns sequences of `len` tokens that are one document each.
    fn undivided(sequences: usize, len: usize) -> Self {
        Self { all: vec![Document::whole(len); sequences], ends: (1..=sequences).collect() }
    }

    /// Reads where the prefix of each token's document ends.
    fn read_prefixes(&mut self, op: &'static str, ends: &[u32], past: usize, len: usize) -> Result<()> {
        for (sequence, ends) in ends.chunks_exact(len.max(1)).enumerate() {
            let from = if sequence == 0 { 0 } else { self.ends[sequence - 1] };
            for document in &mut self.all[from..self.ends[sequence]] {
                let most = past + document.end;
                for (token, &end) in (document.first..).zip(&ends[document.first..document.end]) {
                    if end as usize > most || end != ends[document.first] {
                        return Err(TensorError::Prefix { op, position: past + token, end, most });
                    }
                }
                document.prefix = (ends[document.first] as usize).saturating_sub(document.start);
            }
        }
        Ok(())
    }

    /// Reads the documents of sequences of `len` tokens from where the document of each token begins.
    pub(super) fn of_starts(starts: &[u32], len: usize) -> Self {
        let (mut all, mut ends): (Vec<Document>, Vec<usize>) = Default::default();
        for row in starts.chunks_exact(len.max(1)) {
            for (token, &start) in row.iter().enumerate() {
                let start = start as usize;
                match all.last_mut() {
                    Some(last) if token > 0 && last.start == start => last.end = token + 1,
                    _ => all.push(Document { start, first: token, end: token + 1, prefix: 0 }),
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
