//! Heads of an attention, and which keys a query attends to.

use crate::{TileMask, View};

/// Number of heads of an attention. `query` must be a multiple of `kv`: each head of keys and values serves
/// `query / kv` consecutive heads of queries (grouped-query attention, Ainslie et al. 2023).
///
/// With `D` values per head, queries, keys and values of a token lie side by side in
/// [`width`](Self::width)` * D` values, all queries first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Heads of queries.
    pub query: usize,
    /// Heads of keys, and of values.
    pub kv: usize,
}

impl Heads {
    /// As many heads of keys and values as of queries.
    #[must_use]
    pub const fn equal(heads: usize) -> Self {
        Self { query: heads, kv: heads }
    }

    /// Returns the number of heads of queries, keys and values together.
    #[must_use]
    pub const fn width(self) -> usize {
        self.query.saturating_add(self.kv.saturating_mul(2))
    }
}

/// Which keys a query attends to: those up to its own, without those that are left out here, and those of its
/// prefix.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mask<'a> {
    /// Where documents begin: a query attends only to keys of its own document.
    pub documents: Option<View<'a>>,
    /// Where the prefixes of documents end: a query in one attends to all keys of the prefix, those after its
    /// own included (Dong et al. 2019, "`UniLM`"; Raffel et al. 2020, "T5", prefix language models).
    pub prefixes: Option<View<'a>>,
    /// Which of the keys up to its own it attends to.
    pub keys: AttendedKeys<'a>,
}

/// Which of the keys of its document up to its own a query attends to.
#[derive(Debug, Clone, Copy, Default)]
pub enum AttendedKeys<'a> {
    /// All.
    #[default]
    All,
    /// At most so many up to its own, this included (Beltagy et al. 2020).
    Window(usize),
    /// The pairs of these tiles. Queries and keys are numbered from the first of their document, so that a
    /// document has the pairs that it has alone. Documents then have no prefixes.
    Tiles(&'a TileMask),
}

impl<'a> AttendedKeys<'a> {
    /// Returns a window of that many keys; `None` for all.
    #[must_use]
    pub const fn last(window: Option<usize>) -> Self {
        match window {
            Some(window) => Self::Window(window),
            None => Self::All,
        }
    }

    /// Returns the number of keys of a window.
    pub(crate) const fn window(self) -> Option<usize> {
        match self {
            Self::Window(window) => Some(window),
            Self::All | Self::Tiles(_) => None,
        }
    }

    /// Returns the tiles.
    pub(crate) const fn tiles(self) -> Option<&'a TileMask> {
        match self {
            Self::Tiles(tiles) => Some(tiles),
            Self::All | Self::Window(_) => None,
        }
    }
}

/// For each query, the range of keys that it attends to.
///
/// A rank of context parallelism has the queries of some positions of a sequence, and meets the keys of
/// others in blocks (Liu et al. 2023, "Ring Attention"). Whether positions follow each other or not, the keys
/// of a block that a query attends to are one range, as long as the block's keys are in the order of the
/// sequence.
#[derive(Debug, Clone, Copy)]
pub struct KeyRanges<'a> {
    /// The first key: u32 `[B, T]`.
    pub from: View<'a>,
    /// The key after the last: u32 `[B, T]`. A query attends to no key if it is not above `from`. A key after
    /// the last one of the op is taken as the end of the keys.
    pub to: View<'a>,
    /// Number of pairs of query and key in all ranges of all sequences, for one head. The cost is computed
    /// from it.
    pub pairs: u64,
}
