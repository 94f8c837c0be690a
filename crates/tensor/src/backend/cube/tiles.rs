//! The tiles of a sparse attention, as [`TileMask`](crate::TileMask) lays them out in words.

use cubecl::prelude::*;

use super::seen::Seen;

/// Number of queries, and of keys, of a tile.
pub(super) const TILE: u32 = crate::TileMask::TILE as u32;

/// The tiles of a list, as a range of words, two for each tile.
#[derive(CubeType, Clone, Copy)]
pub(super) struct List {
    pub(super) at: u32,
    pub(super) end: u32,
}

/// Returns the tiles of keys of a head's tile of queries, or if `by_keys` the tiles of queries of a tile of
/// keys.
#[cube]
fn list_of(words: &[u32], head: u32, tile: u32, #[comptime] by_keys: bool) -> List {
    let mut first = words[(1 + head) as usize] + tile;
    if comptime!(by_keys) {
        first += words[0] + 1;
    }
    List { at: words[first as usize], end: words[(first + 1) as usize] }
}

/// Returns the tiles over which a kernel goes: those of a list, or one without words, which stands for a whole
/// range, if there are no tiles.
#[cube]
pub(super) fn tiles_of(
    words: &[u32],
    head: u32,
    position: u32,
    #[comptime] by_keys: bool,
    #[comptime] seen: Seen,
) -> List {
    let mut at = 0u32;
    let mut end = 2u32;
    if comptime!(seen.has_tiles()) {
        let list = list_of(words, head, position / TILE, by_keys);
        at = list.at;
        end = list.end;
    }
    List { at, end }
}

/// Returns eight bits for the eight keys from `column` on of a query's row of a tile, whose word in its list
/// is `at`. `column` is a multiple of 8.
#[cube]
pub(super) fn eight_bits(words: &[u32], at: u32, row: u32, column: u32) -> u32 {
    let pairs = words[(at + 1) as usize];
    let mut bits = 255u32;
    if pairs != 0 {
        bits = (words[(pairs + 2 * row + column / 32) as usize] >> (column % 32)) & 255;
    }
    bits
}

/// Returns whether a query and a key of that tile are a pair.
#[cube]
pub(super) fn has_pair(words: &[u32], at: u32, row: u32, column: u32) -> bool {
    let pairs = words[(at + 1) as usize];
    let mut bit = 1u32;
    if pairs != 0 {
        bit = (words[(pairs + 2 * row + column / 32) as usize] >> (column % 32)) & 1;
    }
    bit == 1
}
