//! Computes each block's header, one cube (workgroup) per block.

use cubecl::prelude::*;

use super::exact::{INFINITE, MAGNITUDE, SCALE_BITS, SMALL, quotient, root, rounded, scale_up};
use super::{Form, value};
use crate::Code;

/// Number of elements in one run of a sum.
const RUN: u32 = 1024;
/// Number of lanes in which a run is summed.
const LANES: u32 = 32;
/// Bits of 2^-100. Blocks whose largest magnitude is smaller are encoded as zeros.
const LEAST: u32 = (127 - 100) << 23;
/// Bits of 2^100. Below it, magnitudes (not squares) are summed without scaling.
const UNSCALED: u32 = (127 + 100) << 23;
/// Marks a block with a value that is not finite. No scale has these bits.
pub(super) const REFUSED: u32 = 0xffff_ffff;

/// Writes two words per block: the bits of its scale (0 for a block of zeros, [`REFUSED`] for an invalid one),
/// and the bits of the factor by which its elements are multiplied.
#[cube(launch)]
pub(super) fn fit(
    x: &[u32],
    before: &[u32],
    fits: &mut [u32],
    len: u32,
    zero: u32,
    #[comptime] form: Form,
    #[comptime] units: u32,
) {
    let mut largest = Shared::<[u32]>::new_slice(units as usize);
    let block = comptime!(form.codec.block());
    let start = CUBE_POS as u32 * block;
    if CUBE_POS * 2 < fits.len() && start < len {
        let count = u32::min(block, len - start);
        let mut max = 0u32;
        let mut i = UNIT_POS;
        while i < count {
            max = u32::max(max, value(x, before, start + i, form) & MAGNITUDE);
            i += units;
        }
        largest[UNIT_POS as usize] = max;
        sync_cube();
        #[unroll]
        for step in 0..comptime!(units.ilog2()) {
            let width = comptime!((units >> (step + 1)) as usize);
            let unit = UNIT_POS as usize;
            if unit < width {
                largest[unit] = u32::max(largest[unit], largest[unit + width]);
            }
            sync_cube();
        }
        max = largest[0];
        let mut scale = 0u32;
        let mut factor = 0u32;
        if comptime!(matches!(form.codec.code(), Code::SignL1 | Code::SignL2)) {
            let l2 = comptime!(matches!(form.codec.code(), Code::SignL2));
            // `up` is a power of two near the largest magnitude, and `down` its inverse. Elements are
            // multiplied by `down` before the sum, and the mean by `up` after it. L1 needs this only for large
            // magnitudes.
            let small = max < SMALL;
            let field = u32::min(u32::max(max >> 23, 1), 253);
            let mut down = (254 - field) << 23;
            let mut up = field << 23;
            if comptime!(!l2) {
                down = select(max < UNSCALED, 127u32 << 23, down);
                up = select(max < UNSCALED, 127u32 << 23, up);
            }
            if small {
                if comptime!(l2) {
                    down -= SCALE_BITS;
                } else {
                    up -= SCALE_BITS;
                }
            }
            let sum = magnitudes(x, before, start, count, small, down, zero, form, l2, units);
            if max >= LEAST && max < INFINITE {
                let mut mean = quotient(u32::reinterpret(sum), u32::reinterpret(f32::cast_from(count)));
                if comptime!(l2) {
                    mean = root(mean);
                }
                scale = u32::min(u32::reinterpret(f32::reinterpret(mean) * f32::reinterpret(up)), max);
            }
        } else {
            let q = comptime!(form.most());
            let top = comptime!(form.top());
            if max >= LEAST && max < INFINITE {
                let raised = u32::reinterpret(f32::reinterpret(max) * f32::new(comptime!(1.0 / q))) + 0xffff;
                scale = raised & 0xffff_0000;
                if scale > top {
                    scale = top;
                    factor = quotient(u32::reinterpret(f32::new(q)), max);
                } else {
                    factor = quotient(0x3f80_0000, scale);
                }
            }
        }
        if max >= INFINITE {
            scale = REFUSED;
        }
        if UNIT_POS == 0 {
            fits[CUBE_POS * 2] = scale;
            fits[CUBE_POS * 2 + 1] = factor;
        }
    }
}

/// Returns the sum of magnitudes, or of squares, to all units (threads), in the order that the wire format
/// specifies. As many runs as the units allow are summed at the same time.
#[cube]
fn magnitudes(
    x: &[u32],
    before: &[u32],
    start: u32,
    count: u32,
    small: bool,
    down: u32,
    zero: u32,
    #[comptime] form: Form,
    #[comptime] l2: bool,
    #[comptime] units: u32,
) -> f32 {
    let runs = comptime!(if units > LANES { units / LANES } else { 1 });
    let slots = comptime!(runs * LANES);
    let each = comptime!(if units < slots { slots / units } else { 1 });
    let mut lanes = Shared::<[f32]>::new_slice(slots as usize);
    let mut total = 0.0f32;
    let mut first = 0u32;
    while first < count {
        #[unroll]
        for turn in 0..each {
            let slot = UNIT_POS + comptime!(turn * units);
            let mut i = first + slot / LANES * RUN + slot % LANES;
            let end = u32::min(count, first + slot / LANES * RUN + RUN);
            let mut lane = 0.0f32;
            while i < end {
                let bits = value(x, before, start + i, form) & MAGNITUDE;
                let scaled = f32::reinterpret(select(small, scale_up(bits), bits)) * f32::reinterpret(down);
                if comptime!(l2) {
                    let scaled = rounded(scaled, zero);
                    lane += rounded(scaled * scaled, zero);
                } else {
                    lane += rounded(scaled, zero);
                }
                i += LANES;
            }
            lanes[slot as usize] = lane;
        }
        sync_cube();
        #[unroll]
        for step in 0..5u32 {
            let width = comptime!(LANES >> (step + 1));
            #[unroll]
            for turn in 0..each {
                let slot = UNIT_POS + comptime!(turn * units);
                if slot % LANES < width {
                    lanes[slot as usize] += lanes[(slot + width) as usize];
                }
            }
            sync_cube();
        }
        #[unroll]
        for run in 0..runs {
            // Runs beyond the end of the block are 0 and change nothing.
            total += lanes[comptime!((run * LANES) as usize)];
        }
        sync_cube();
        first += comptime!(runs * RUN);
    }
    total
}
