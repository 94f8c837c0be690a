//! Indices of the largest magnitudes, by radix selection: counting digits, the highest first, determines the
//! least magnitude that is kept (the threshold) and how many elements equal to it are kept. Then each unit
//! (thread) writes its indices at the position given by the number found before it. A small chunk is processed
//! by one cube (workgroup), a large one by one cube per tile.

use cubecl::prelude::*;

use super::exact::MAGNITUDE;

/// Bits per digit, few enough for every unit (thread) to count separately.
pub(super) const DIGIT: u32 = 4;
/// Number of values of a digit.
pub(super) const DIGITS: u32 = 16;
/// Number of digits in the 31 bits of a magnitude.
pub(super) const ROUNDS: u32 = 8;
/// Bit position of the first (highest) digit.
pub(super) const FIRST: u32 = 28;

/// Division of a vector into chunks, and number of elements kept per chunk.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Chunks {
    len: u32,
    chunk: u32,
    /// At most `chunk`.
    kept: u32,
    /// Number of chunks.
    count: u32,
}

#[cube]
impl Chunks {
    fn end(&self, index: u32) -> u32 {
        let start = index * self.chunk;
        start + u32::min(self.chunk, self.len - start)
    }
}

/// Division of a chunk into tiles, one cube (workgroup) each.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Tiles {
    /// Number of elements per tile.
    tile: u32,
    /// Tiles per chunk. The last ones may be short or empty.
    count: u32,
    /// Number of tiles of all chunks.
    all: u32,
}

#[cube]
impl Tiles {
    /// Returns the index of the first element of a cube's tile.
    fn start(&self, chunks: &Chunks, cube: u32) -> u32 {
        let index = cube / self.count;
        u32::min(index * chunks.chunk + cube % self.count * self.tile, chunks.end(index))
    }
}

/// Result of one digit: the digit of the threshold, and the number of elements with this digit that are kept.
#[derive(CubeType, Clone, Copy)]
struct Cut {
    digit: u32,
    rest: u32,
}

/// Number of elements above the threshold, and equal to it.
#[derive(CubeType, Clone, Copy)]
struct Found {
    above: u32,
    equal: u32,
}

/// A range of elements whose kept indices are written.
#[derive(CubeType, Clone, Copy)]
struct Range {
    from: u32,
    to: u32,
    /// The threshold, and the number of elements of the chunk equal to it that are kept.
    least: u32,
    rest: u32,
    /// Position of the chunk's first index in the output.
    at: u32,
}

#[cube]
fn clear(tallies: &mut Shared<[u32]>, #[comptime] units: u32) {
    for digit in 0..DIGITS {
        tallies[(digit * units + UNIT_POS) as usize] = 0u32;
    }
}

/// Counts the current digit of those magnitudes whose higher digits equal those of `least`. Each unit (thread)
/// counts separately.
#[cube]
fn tally(
    x: &[u32],
    from: u32,
    to: u32,
    least: u32,
    shift: u32,
    tallies: &mut Shared<[u32]>,
    #[comptime] units: u32,
) {
    let mut i = from + UNIT_POS;
    while i < to {
        // True if only the current digit and the lower ones differ.
        let magnitude = x[i as usize] & MAGNITUDE;
        if ((magnitude ^ least) >> shift) < DIGITS {
            tallies[((magnitude >> shift) % DIGITS * units + UNIT_POS) as usize] += 1u32;
        }
        i += units;
    }
}

/// Sums the counts of all units (threads).
#[cube]
fn total(tallies: &Shared<[u32]>, totals: &mut Shared<[u32]>, #[comptime] units: u32) {
    sync_cube();
    let mut digit = UNIT_POS;
    while digit < DIGITS {
        let mut sum = 0u32;
        for unit in 0..units {
            sum += tallies[(digit * units + unit) as usize];
        }
        totals[digit as usize] = sum;
        digit += units;
    }
    sync_cube();
}

#[cube]
fn cut(totals: &Shared<[u32]>, wanted: u32) -> Cut {
    let mut digit = 15u32;
    let mut rest = wanted;
    while digit > 0 && totals[digit as usize] < rest {
        rest -= totals[digit as usize];
        digit -= 1u32;
    }
    Cut { digit, rest }
}

/// Returns what the units (threads) before `unit` have found.
#[cube]
fn before(found: Found, unit: u32, shared: &mut Shared<[u32]>, #[comptime] units: u32) -> Found {
    shared[UNIT_POS as usize] = found.above;
    shared[(units + UNIT_POS) as usize] = found.equal;
    sync_cube();
    let mut above = 0u32;
    let mut equal = 0u32;
    for other in 0..unit {
        above += shared[other as usize];
        equal += shared[(units + other) as usize];
    }
    sync_cube();
    Found { above, equal }
}

/// Writes the indices of the elements of a range that are kept. `earlier`: the counts of that part of the same
/// chunk that precedes the range.
#[cube]
fn write(
    x: &[u32],
    range: Range,
    earlier: Found,
    shared: &mut Shared<[u32]>,
    indices: &mut [u32],
    #[comptime] units: u32,
) {
    let each = (range.to - range.from).div_ceil(units);
    let from = u32::min(range.from + UNIT_POS * each, range.to);
    let to = u32::min(from + each, range.to);
    let mut above = 0u32;
    let mut equal = 0u32;
    for i in from..to {
        let magnitude = x[i as usize] & MAGNITUDE;
        above += u32::cast_from(magnitude > range.least);
        equal += u32::cast_from(magnitude == range.least);
    }
    let here = before(Found { above, equal }, UNIT_POS, shared, units);
    above = earlier.above + here.above;
    equal = earlier.equal + here.equal;
    for i in from..to {
        let magnitude = x[i as usize] & MAGNITUDE;
        let ties = magnitude == range.least;
        if magnitude > range.least || (ties && equal < range.rest) {
            indices[(range.at + above + u32::min(equal, range.rest)) as usize] = i;
        }
        above += u32::cast_from(magnitude > range.least);
        equal += u32::cast_from(ties);
    }
}

/// Processes one chunk per cube (workgroup).
#[cube(launch)]
pub(super) fn small(x: &[u32], indices: &mut [u32], chunks: &Chunks, #[comptime] units: u32) {
    let mut tallies = Shared::<[u32]>::new_slice(comptime!((DIGITS * units) as usize));
    let mut totals = Shared::<[u32]>::new_slice(comptime!(DIGITS as usize));
    let index = CUBE_POS as u32;
    if index < chunks.count {
        let from = index * chunks.chunk;
        let to = chunks.end(index);
        let mut least = 0u32;
        let mut rest = u32::min(chunks.kept, to - from);
        for round in 0..ROUNDS {
            let shift = FIRST - round * DIGIT;
            clear(&mut tallies, units);
            tally(x, from, to, least, shift, &mut tallies, units);
            total(&tallies, &mut totals, units);
            let cut = cut(&totals, rest);
            least |= cut.digit << shift;
            rest = cut.rest;
        }
        let range = Range { from, to, least, rest, at: index * chunks.kept };
        write(x, range, Found { above: 0u32, equal: 0u32 }, &mut tallies, indices, units);
    }
}

/// Counts the digits of one tile. `cuts` holds for each round and chunk the prefix of the threshold found so
/// far, and how many elements with this prefix are kept.
#[cube(launch)]
pub(super) fn count(
    x: &[u32],
    cuts: &[u32],
    counts: &mut [u32],
    chunks: &Chunks,
    tiles: &Tiles,
    round: u32,
    #[comptime] units: u32,
) {
    let mut tallies = Shared::<[u32]>::new_slice(comptime!((DIGITS * units) as usize));
    let mut totals = Shared::<[u32]>::new_slice(comptime!(DIGITS as usize));
    let cube = CUBE_POS as u32;
    let index = cube / tiles.count;
    if cube < tiles.all {
        let from = tiles.start(chunks, cube);
        let to = u32::min(from + tiles.tile, chunks.end(index));
        let least = cuts[((round * chunks.count + index) * 2) as usize];
        clear(&mut tallies, units);
        tally(x, from, to, least, FIRST - round * DIGIT, &mut tallies, units);
        total(&tallies, &mut totals, units);
        let mut digit = UNIT_POS;
        while digit < DIGITS {
            counts[(cube * DIGITS + digit) as usize] = totals[digit as usize];
            digit += units;
        }
    }
}

/// Determines the next digit of a chunk's threshold from the counts of its tiles, and updates each tile's
/// numbers of elements above it and equal to it.
#[cube(launch)]
pub(super) fn pick(
    counts: &[u32],
    cuts: &mut [u32],
    found: &mut [u32],
    chunks: &Chunks,
    tiles: &Tiles,
    round: u32,
    #[comptime] units: u32,
) {
    let mut tallies = Shared::<[u32]>::new_slice(comptime!((DIGITS * units) as usize));
    let mut totals = Shared::<[u32]>::new_slice(comptime!(DIGITS as usize));
    let index = CUBE_POS as u32;
    if index < chunks.count {
        clear(&mut tallies, units);
        let first = index * tiles.count;
        let end = first + tiles.count;
        let mut tile = first + UNIT_POS;
        while tile < end {
            for digit in 0..DIGITS {
                tallies[(digit * units + UNIT_POS) as usize] += counts[(tile * DIGITS + digit) as usize];
            }
            tile += units;
        }
        total(&tallies, &mut totals, units);
        let at = ((round * chunks.count + index) * 2) as usize;
        let cut = cut(&totals, cuts[at + 1]);
        if UNIT_POS == 0 {
            let next = (((round + 1) * chunks.count + index) * 2) as usize;
            cuts[next] = cuts[at] | (cut.digit << (FIRST - round * DIGIT));
            cuts[next + 1] = cut.rest;
        }
        tile = first + UNIT_POS;
        while tile < end {
            let mut above = 0u32;
            if round > 0 {
                above = found[(tile * 2) as usize];
            }
            for digit in cut.digit + 1..DIGITS {
                above += counts[(tile * DIGITS + digit) as usize];
            }
            found[(tile * 2) as usize] = above;
            found[(tile * 2 + 1) as usize] = counts[(tile * DIGITS + cut.digit) as usize];
            tile += units;
        }
    }
}

/// Writes the kept indices of a tile.
#[cube(launch)]
pub(super) fn place(
    x: &[u32],
    cuts: &[u32],
    found: &[u32],
    indices: &mut [u32],
    chunks: &Chunks,
    tiles: &Tiles,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[u32]>::new_slice(comptime!((2 * units) as usize));
    let cube = CUBE_POS as u32;
    let index = cube / tiles.count;
    if cube < tiles.all {
        // What was found in the chunk's earlier tiles.
        let mut above = 0u32;
        let mut equal = 0u32;
        let mut tile = index * tiles.count + UNIT_POS;
        while tile < cube {
            above += found[(tile * 2) as usize];
            equal += found[(tile * 2 + 1) as usize];
            tile += units;
        }
        let earlier = before(Found { above, equal }, units, &mut shared, units);
        let from = tiles.start(chunks, cube);
        let to = u32::min(from + tiles.tile, chunks.end(index));
        let at = ((ROUNDS * chunks.count + index) * 2) as usize;
        let range = Range { from, to, least: cuts[at], rest: cuts[at + 1], at: index * chunks.kept };
        write(x, range, earlier, &mut shared, indices, units);
    }
}
