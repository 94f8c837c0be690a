//! Tokens in memory, stored in the narrowest sufficient integer type, and ranges of them.

use std::ops::Range;
use std::sync::Arc;

use super::token_rows::TokenRows;

/// A list of tokens of one, two or four bytes each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokens {
    /// Tokens of vocabularies of at most 256.
    U8(Vec<u8>),
    /// Tokens of vocabularies of at most 65536.
    U16(Vec<u16>),
    /// Tokens of larger vocabularies.
    U32(Vec<u32>),
}

impl Tokens {
    /// Creates an empty list for ids below `vocab`.
    #[must_use]
    pub const fn for_vocab(vocab: usize) -> Self {
        match vocab {
            0..=0x100 => Self::U8(Vec::new()),
            0x101..=0x1_0000 => Self::U16(Vec::new()),
            _ => Self::U32(Vec::new()),
        }
    }

    /// Returns the number of tokens.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::U8(t) => t.len(),
            Self::U16(t) => t.len(),
            Self::U32(t) => t.len(),
        }
    }

    /// Returns whether there are no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends ids. The caller has checked that they are below the vocabulary size.
    pub(super) fn extend(&mut self, ids: impl IntoIterator<Item = u32>) {
        match self {
            Self::U8(t) => t.extend(ids.into_iter().map(|id| id as u8)),
            Self::U16(t) => t.extend(ids.into_iter().map(|id| id as u16)),
            Self::U32(t) => t.extend(ids),
        }
    }

    /// Returns the last token.
    pub(super) fn last(&self) -> Option<u32> {
        match self {
            Self::U8(t) => t.last().map(|&id| u32::from(id)),
            Self::U16(t) => t.last().map(|&id| u32::from(id)),
            Self::U32(t) => t.last().copied(),
        }
    }

    /// Adds the tokens to a hash, each as four bytes.
    pub(super) fn hash(&self, hasher: &mut blake3::Hasher) {
        const AT_ONCE: usize = 1 << 14;
        let mut ids = Vec::with_capacity(AT_ONCE);
        for start in (0..self.len()).step_by(AT_ONCE) {
            ids.clear();
            self.append_to(start..(start + AT_ONCE).min(self.len()), &mut ids);
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
    }

    /// Returns the positions of a token.
    pub(super) fn positions(&self, token: u32) -> impl Iterator<Item = usize> {
        let at = move |i: usize| match self {
            Self::U8(t) => u32::from(t[i]),
            Self::U16(t) => u32::from(t[i]),
            Self::U32(t) => t[i],
        };
        (0..self.len()).filter(move |&i| at(i) == token)
    }

    /// Appends the tokens of a range to `out`.
    fn append_to(&self, range: Range<usize>, out: &mut Vec<u32>) {
        match self {
            Self::U8(t) => out.extend(t[range].iter().map(|&id| u32::from(id))),
            Self::U16(t) => out.extend(t[range].iter().map(|&id| u32::from(id))),
            Self::U32(t) => out.extend_from_slice(&t[range]),
        }
    }
}

/// A range of a corpus. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Split {
    pub(super) name: &'static str,
    pub(super) tokens: Arc<Tokens>,
    pub(super) range: Range<usize>,
    /// Start of each document of the whole corpus.
    pub(super) documents: Arc<[usize]>,
    /// The rows that the split is, if it is rows.
    pub(super) rows: Option<Arc<TokenRows>>,
    /// Whether each token of the whole corpus is a target, if the split is examples.
    pub(super) counts: Option<Arc<[bool]>>,
}

impl Split {
    /// Returns `training` or `held-out`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the rows that the split is; `None` if it is a text.
    #[must_use]
    pub const fn rows(&self) -> Option<&Arc<TokenRows>> {
        self.rows.as_ref()
    }

    /// Returns whether the split is examples, which its documents are then.
    #[must_use]
    pub const fn has_examples(&self) -> bool {
        self.counts.is_some()
    }

    /// Returns whether a token is a target.
    pub(super) fn counts(&self, at: usize) -> bool {
        self.counts.as_ref().is_none_or(|counts| counts[self.range.start + at])
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns the ranges of the split's documents, in order. The first and the last may be parts of the
    /// corpus's documents.
    ///
    /// A document is a file of a folder, or the text between end-of-text tokens. Without either, the whole
    /// split is one document.
    #[must_use]
    pub fn documents(&self) -> Vec<Range<usize>> {
        let starts: Vec<usize> = std::iter::once(0).chain(self.borders(1..self.len())).collect();
        let ends = starts[1..].iter().copied().chain([self.len()]);
        starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
    }

    /// Returns the positions in a range at which documents begin, in order.
    pub(super) fn borders(&self, range: Range<usize>) -> impl ExactSizeIterator<Item = usize> {
        let before = self.range.start;
        let first = |at: usize| self.documents.partition_point(|&start| start < before + at);
        let found = &self.documents[first(range.start)..first(range.end.max(range.start))];
        found.iter().map(move |start| start - before)
    }

    /// Appends `count` tokens from `offset` on to `out`.
    ///
    /// # Panics
    /// If the range exceeds the split.
    pub fn append_to(&self, offset: usize, count: usize, out: &mut Vec<u32>) {
        assert!(
            offset <= self.len() && count <= self.len() - offset,
            "{count} tokens at {offset} are out of bounds of a split of {} tokens",
            self.len()
        );
        let start = self.range.start + offset;
        self.tokens.append_to(start..start + count, out);
    }
}
