//! Which keys a query attends to.

use cubecl::prelude::*;

/// Which keys queries attend to, as a compile-time argument of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Seen {
    /// Those up to its own, of its window.
    Before {
        /// Whether `from` says where the document of each query begins.
        divided: bool,
        /// Whether `to` says where the prefix of each query ends.
        prefixed: bool,
    },
    /// Those from `from` on and before `to`.
    Ranges,
    /// Those up to its own that tiles have: `to` has the words of a [`TileMask`](crate::TileMask).
    Tiles {
        /// Whether `from` says where the document of each query begins.
        divided: bool,
    },
}

impl Seen {
    /// Returns whether `from` is read.
    pub(super) const fn is_divided(self) -> bool {
        matches!(self, Self::Before { divided: true, .. } | Self::Tiles { divided: true } | Self::Ranges)
    }

    /// Returns whether `to` is read as ends of keys.
    pub(super) const fn is_prefixed(self) -> bool {
        matches!(self, Self::Before { prefixed: true, .. } | Self::Ranges)
    }

    pub(super) const fn is_ranges(self) -> bool {
        matches!(self, Self::Ranges)
    }

    pub(super) const fn has_tiles(self) -> bool {
        matches!(self, Self::Tiles { .. })
    }
}

/// Returns the first key that a token attends to: where its range begins; or where its document does, or
/// `window - 1` keys before it, and never after it.
#[cube]
pub(super) fn first_key(from: &[u32], at: u32, position: u32, window: u32, #[comptime] seen: Seen) -> u32 {
    if comptime!(seen.is_ranges()) {
        from[at as usize]
    } else {
        let end = position + 1;
        let mut first = end - u32::min(window, end);
        if comptime!(seen.is_divided()) {
            first = u32::max(first, u32::min(from[at as usize], position));
        }
        first
    }
}

/// Returns the end of the keys that a token attends to, of `keys` keys: where its range ends; or after its
/// own, or where its prefix ends.
#[cube]
pub(super) fn end_key(to: &[u32], at: u32, position: u32, keys: u32, #[comptime] seen: Seen) -> u32 {
    if comptime!(seen.is_ranges()) {
        u32::min(to[at as usize], keys)
    } else {
        let mut end = position + 1;
        if comptime!(seen.is_prefixed()) {
            end = u32::max(end, u32::min(to[at as usize], keys));
        }
        end
    }
}

/// Returns whether a key is in the range of a token.
#[cube]
pub(super) fn in_range(from: &[u32], to: &[u32], at: u32, key: u32) -> bool {
    from[at as usize] <= key && key < to[at as usize]
}
