//! Where the largest magnitudes are. Counts of their digits, the highest first, lead to the least one that is
//! kept, and to how many of its equals are; then units write what they find where it belongs, for each knows
//! how much is found before it. A chunk is one cube's work, or that of as many as it has tiles.

use cubecl::prelude::*;

use super::exact::MAGNITUDE;

/// Bits of a digit, so few that each unit counts for itself, and what a digit may be.
pub(super) const DIGIT: u32 = 4;
pub(super) const DIGITS: u32 = 16;
/// Digits of a magnitude's 31 bits, and where the first one is.
pub(super) const ROUNDS: u32 = 8;
pub(super) const FIRST: u32 = 28;

/// How a vector is cut, and what is kept of a chunk.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Chunks {
    len: u32,
    chunk: u32,
    /// At most the chunk.
    kept: u32,
    /// Chunks.
    count: u32,
}

#[cube]
impl Chunks {
    fn end(&self, index: u32) -> u32 {
        let start = index * self.chunk;
        start + u32::min(self.chunk, self.len - start)
    }
}

/// Parts of a chunk, each of them a cube's.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Tiles {
    /// Elements of one.
    tile: u32,
    /// How many a chunk has; the last may be short or empty.
    count: u32,
    /// How many there are in all.
    all: u32,
}

#[cube]
impl Tiles {
    /// The first element of a cube's.
    fn start(&self, chunks: &Chunks, cube: u32) -> u32 {
        let index = cube / self.count;
        u32::min(index * chunks.chunk + cube % self.count * self.tile, chunks.end(index))
    }
}

/// Where a digit cuts: more than `wanted` have this one or a larger one, `rest` of them this one.
#[derive(CubeType, Clone, Copy)]
struct Cut {
    digit: u32,
    rest: u32,
}

/// How many lie above the least that is kept, and how many equal it.
#[derive(CubeType, Clone, Copy)]
struct Found {
    above: u32,
    equal: u32,
}

/// What is written of a range, and where.
#[derive(CubeType, Clone, Copy)]
struct Range {
    from: u32,
    to: u32,
    /// The least magnitude that is kept, and how many of those in the chunk that equal it.
    least: u32,
    rest: u32,
    /// Where the chunk's indices begin.
    at: u32,
}

#[cube]
fn clear(tallies: &mut Shared<[u32]>, #[comptime] units: u32) {
    for digit in 0..DIGITS {
        tallies[(digit * units + UNIT_POS) as usize] = 0u32;
    }
}

/// Counts digits of those magnitudes that begin as `least` does, each unit for itself.
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
        // All that differs is the digit, and what comes behind it.
        let magnitude = x[i as usize] & MAGNITUDE;
        if ((magnitude ^ least) >> shift) < DIGITS {
            tallies[((magnitude >> shift) % DIGITS * units + UNIT_POS) as usize] += 1u32;
        }
        i += units;
    }
}

/// Adds up what all units have counted.
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

/// What the units before `unit` have found.
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

/// Writes the indices of a range, `earlier` being what is found of its chunk before it.
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

/// All of a chunk's work by one cube.
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

/// Counts the digits in a tile. In `cuts`, a chunk has for each round the least magnitude so far, and how many
/// are kept of those that begin like it.
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

/// Cuts a chunk by the digits in its tiles, and adds up what each of these has above the cut and at it.
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

/// Writes the indices of a tile.
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
        // What the chunk's tiles before this one have.
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
