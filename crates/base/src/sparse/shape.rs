//! The rules of patterns, with their numbers.

use std::fmt;

/// The rule of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Shape {
    Full,
    /// Number of keys.
    Window(u32),
    /// Number of keys of the local part, and distance of the others.
    Strided(u32),
    /// Numbers of blocks, and of patterns.
    Fixed {
        local: u32,
        global: u32,
        patterns: u32,
    },
    /// Numbers of blocks of the windows, global blocks, and number of drawn ones.
    Variable {
        windows: List,
        global: List,
        random: u32,
    },
    /// Numbers of blocks.
    BigBird {
        window: u32,
        global: u32,
        random: u32,
    },
}

/// Most blocks of a list, in the text of a pattern.
pub(super) const LISTED: usize = 8;

/// A short list of numbers of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct List {
    len: usize,
    all: [u32; LISTED],
}

impl List {
    pub(super) const EMPTY: Self = Self { len: 0, all: [0; LISTED] };

    pub(super) fn new(numbers: &[u32]) -> Option<Self> {
        let mut all = [0; LISTED];
        all.get_mut(..numbers.len())?.copy_from_slice(numbers);
        Some(Self { len: numbers.len(), all })
    }

    pub(super) fn as_slice(&self) -> &[u32] {
        &self.all[..self.len]
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, number) in self.as_slice().iter().enumerate() {
            write!(f, "{}{number}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
