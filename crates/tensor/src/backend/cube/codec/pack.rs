//! Writes and reads the body of a block codec.

use cubecl::prelude::*;

use super::super::bytes::byte;
use super::exact::{MAGNITUDE, rounded, sum};
use super::fit::REFUSED;
use super::{Form, value};

/// Bits of the smallest normal number.
const NORMAL: u32 = 0x0080_0000;
/// Bits of the largest finite number.
const MAX: u32 = 0x7f7f_ffff;
/// Bits of 2^-116, the least scale that an integer encoder writes.
const LEAST_SCALE: u32 = (127 - 116) << 23;

/// Returns the code of a value.
#[cube]
fn code_of(bits: u32, factor: f32, zero: u32, #[comptime] form: Form) -> u32 {
    let sign = bits >> 31;
    let mut code = sign;
    if comptime!(!form.signs()) {
        let mask = comptime!((1u32 << form.codec.code().bits()) - 1);
        let exact = rounded(f32::reinterpret(bits & MAGNITUDE) * factor, zero);
        let whole = u32::cast_from(exact);
        let rest = exact - f32::cast_from(whole);
        let up = rest > 0.5 || (rest == 0.5 && whole % 2 == 1);
        let count = whole + u32::cast_from(up);
        code = select(sign == 1, 0 - count, count) & mask;
    }
    code
}

/// Returns the bits of the value that a code represents.
#[cube]
fn meaning(code: u32, scale: u32, #[comptime] form: Form) -> u32 {
    let mut bits = scale | (code << 31);
    if comptime!(!form.signs()) {
        let width = comptime!(form.codec.code().bits());
        let sign = code >> comptime!(width - 1);
        let count = select(sign == 1, comptime!(1u32 << width) - code, code);
        let product = u32::reinterpret(f32::cast_from(count) * f32::reinterpret(scale));
        bits = select(count == 0, 0u32, product | (sign << 31));
    }
    bits
}

/// Encodes blocks. Each unit (thread) writes one word of the body, and the encoding errors of the elements in
/// it. The word before the body is set to 0.
#[cube(launch)]
pub(super) fn encode(
    x: &[u32],
    before: &[u32],
    fits: &[u32],
    lost: &mut [u32],
    out: &mut [u32],
    len: u32,
    zero: u32,
    #[comptime] form: Form,
) {
    let codec = comptime!(form.codec);
    let width = comptime!(codec.code().bits());
    let block = comptime!(codec.block());
    let header = comptime!(codec.code().header() as u32);
    let block_bytes = comptime!(codec.block_bytes(codec.block() as usize) as u32);
    let run = comptime!(256 / width);
    let per_byte = comptime!(8 / width);
    let word = ABSOLUTE_POS as u32;
    if ABSOLUTE_POS + 1 < out.len() {
        let mut bits = 0u32;
        if word == 0 {
            bits = comptime!(u32::from_le_bytes(codec.parameters()));
            out[0] = 0u32;
        } else {
            #[unroll]
            for b in 0..4u32 {
                let at = (word - 1) * 4 + b;
                let index = at / block_bytes;
                let start = index * block;
                if start < len {
                    let place = at % block_bytes;
                    let count = u32::min(block, len - start);
                    let scale = fits[(index * 2) as usize];
                    let mut byte = (scale >> (comptime!(32 - header * 8) + place % header * 8)) & 0xff;
                    if place >= header {
                        byte = 0u32;
                        let factor = f32::reinterpret(fits[(index * 2 + 1) as usize]);
                        let place = place - header;
                        #[unroll]
                        for s in 0..per_byte {
                            let element = element(place, s, count, width, run);
                            if element < count {
                                let from = start + element;
                                let v = value(x, before, from, form);
                                let code = select(scale == 0, 0u32, code_of(v, factor, zero, form));
                                if comptime!(form.loses) {
                                    let minus = meaning(code, scale, form) ^ 0x8000_0000u32;
                                    lost[from as usize] =
                                        select(scale == 0 || minus == 0x8000_0000u32, v, sum(v, minus));
                                }
                                byte |= code << comptime!(s * width);
                            }
                        }
                    }
                    bits |= byte << comptime!(b * 8);
                }
            }
        }
        out[ABSOLUTE_POS + 1] = bits;
    }
}

/// Returns the index within the block of the `s`-th code in byte `place` of the block's codes.
#[cube]
fn element(place: u32, #[comptime] s: u32, count: u32, #[comptime] width: u32, #[comptime] run: u32) -> u32 {
    let mut element = place;
    if comptime!(width < 8) {
        let per_byte = comptime!(8 / width);
        let full = count / run;
        // In a full run, the bits from `width * i` of word `j` hold code `8 i + j`.
        let within = place % 32;
        element = place / 32 * run + (within % 4 * per_byte + s) * 8 + within / 4;
        if place >= full * 32 {
            element = full * run + (place - full * 32) * per_byte + s;
        }
    }
    element
}

/// Sets the first word to 1 if any block is invalid. All units (threads) that find one write the same value.
#[cube(launch)]
pub(super) fn refuse(fits: &[u32], out: &mut [u32], blocks: u32) {
    if (ABSOLUTE_POS as u32) < blocks && fits[ABSOLUTE_POS * 2] == REFUSED {
        out[0] = 1u32;
    }
}

/// Decodes one element per unit (thread). A unit that finds something that no encoder writes sets `verdict` to
/// 1.
#[cube(launch)]
pub(super) fn decode(body: &[u32], y: &mut [u32], verdict: &mut [u32], len: u32, #[comptime] form: Form) {
    let codec = comptime!(form.codec);
    let width = comptime!(codec.code().bits());
    let block = comptime!(codec.block());
    let header = comptime!(codec.code().header() as u32);
    let block_bytes = comptime!(codec.block_bytes(codec.block() as usize) as u32);
    let run = comptime!(256 / width);
    let per_byte = comptime!(8 / width);
    let mask = comptime!((1u32 << width) - 1);
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let index = at / block;
        let element = at % block;
        let count = u32::min(block, len - index * block);
        let start = 4 + index * block_bytes;
        let mut scale = 0u32;
        #[unroll]
        for b in 0..header {
            scale |= byte(body, start + b) << comptime!(32 - header * 8 + b * 8);
        }
        let codes = start + header;
        // 8-bit codes are stored in order.
        let mut place = element;
        let mut shift = 0u32;
        if comptime!(width < 8) {
            let full = count / run;
            let inside = element / run < full;
            let within = element % run;
            // In a full run, code `8 i + j` is in the bits from `width * i` of word `j`. After the full runs,
            // codes are stored in order.
            let bit = within / 8 * width;
            let tail = element - full * run;
            place =
                select(inside, element / run * 32 + within % 8 * 4 + bit / 8, full * 32 + tail / per_byte);
            shift = select(inside, bit % 8, tail % per_byte * width);
        }
        let held = byte(body, codes + place);
        let code = (held >> shift) & mask;
        let mut bad = scale == 0 && code != 0;
        // Unused bits after the last code must be zero.
        let used = count % per_byte * width;
        if element + 1 == count && used != 0 {
            bad = bad || (held >> used) != 0;
        }
        if comptime!(form.signs()) {
            bad = bad || (scale != 0 && (scale < NORMAL || scale > MAX));
        } else {
            let top = comptime!(form.top());
            bad = bad || (scale != 0 && (scale < LEAST_SCALE || scale > top));
            bad = bad || code == comptime!(1u32 << (width - 1));
        }
        if bad {
            verdict[0] = 1u32;
        }
        y[ABSOLUTE_POS] = select(scale == 0, 0u32, meaning(code, scale, form));
    }
}
