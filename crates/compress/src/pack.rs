//! Packs codes of a few bits, with eight lanes side by side. This module does not depend on any codec.
//!
//! A width is split into planes of 8, 4, 2 and 1 bits: 3 bits are a plane of 2 bits and one of 1. A code's low
//! bits are in the widest plane. A plane of 8 bits holds the codes' low bytes, in order. A narrower plane of
//! width `w` is divided into runs of 32 bytes with `256 / w` codes each. The 32 bytes are eight little-endian
//! words, and code `8 i + j` of a run is in the bits from `w i` on of word `j`. So a register of eight codes is
//! shifted into a register of eight words without moving data between lanes, for any number of lanes. The codes
//! after the full runs are packed into bytes, the first code in the lowest bits.

/// Number of codes that are packed at a time; a multiple of every plane's run.
pub(crate) const GROUP: usize = 256;

/// Returns the number of bytes of `count` codes of `bits` bits each.
pub(crate) const fn packed_len(bits: u32, count: usize) -> usize {
    let (mut total, mut width) = (0_usize, 1);
    while width <= 8 {
        if bits & width != 0 {
            // `count * bits` could overflow, so whole bytes are counted, and the sum over the planes saturates.
            let per_byte = 8 / width as usize;
            total = total.saturating_add(count.div_ceil(per_byte));
        }
        width *= 2;
    }
    total
}

/// Packs some codes of a block, at most [`GROUP`]. `out` holds the planes of a block of `count` codes; `start`
/// is the index of the first code and a multiple of every plane's run. The bits of a code above the width are
/// ignored.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn pack<const BITS: u32>(codes: &[u32], start: usize, count: usize, out: &mut [u8]) {
    let mut rest = out;
    let mut shift = 0;
    macro_rules! plane {
        ($width:literal) => {
            if BITS & $width != 0 {
                let per_byte = 8 / $width;
                let (plane, after) = rest.split_at_mut(count.div_ceil(per_byte));
                let bytes = codes.len().div_ceil(per_byte);
                pack_plane::<$width>(codes, shift, &mut plane[start / per_byte..][..bytes]);
                (rest, shift) = (after, shift + $width);
            }
        };
    }
    plane!(8);
    plane!(4);
    plane!(2);
    plane!(1);
    let _ = (rest, shift);
}

/// Unpacks what [`pack`] packed.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn unpack<const BITS: u32>(bytes: &[u8], start: usize, count: usize, codes: &mut [u32]) {
    let mut rest = bytes;
    let mut shift = 0;
    macro_rules! plane {
        ($width:literal) => {
            if BITS & $width != 0 {
                let per_byte = 8 / $width;
                let (plane, after) = rest.split_at(count.div_ceil(per_byte));
                let bytes = codes.len().div_ceil(per_byte);
                unpack_plane::<$width>(&plane[start / per_byte..][..bytes], shift, codes);
                (rest, shift) = (after, shift + $width);
            }
        };
    }
    plane!(8);
    plane!(4);
    plane!(2);
    plane!(1);
    let _ = (rest, shift);
}

#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn pack_plane<const W: usize>(codes: &[u32], shift: usize, out: &mut [u8]) {
    if W == 8 {
        for (byte, code) in out.iter_mut().zip(codes) {
            *byte = *code as u8;
        }
        return;
    }
    let mask = (1 << W) - 1;
    let full = codes.len() / (GROUP / W);
    let (runs, tail) = codes.split_at(full * (GROUP / W));
    let (out, out_tail) = out.split_at_mut(full * 32);
    for (run, out) in runs.chunks_exact(GROUP / W).zip(out.as_chunks_mut::<32>().0) {
        let mut words = [0_u32; 8];
        for eight in run.as_chunks::<8>().0 {
            for (word, code) in words.iter_mut().zip(eight) {
                *word = *word >> W | (code >> shift) << (32 - W);
            }
        }
        for (out, word) in out.as_chunks_mut().0.iter_mut().zip(words) {
            *out = word.to_le_bytes();
        }
    }
    for (byte, codes) in out_tail.iter_mut().zip(tail.chunks(8 / W)) {
        let code = |(i, code): (usize, &u32)| (code >> shift & mask) << (W * i);
        *byte = codes.iter().enumerate().map(code).sum::<u32>() as u8;
    }
}

#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn unpack_plane<const W: usize>(bytes: &[u8], shift: usize, codes: &mut [u32]) {
    if W == 8 {
        for (byte, code) in bytes.iter().zip(codes) {
            *code = u32::from(*byte);
        }
        return;
    }
    let mask = (1 << W) - 1;
    let full = codes.len() / (GROUP / W);
    let (runs, tail) = codes.split_at_mut(full * (GROUP / W));
    let (bytes, bytes_tail) = bytes.split_at(full * 32);
    for (run, bytes) in runs.chunks_exact_mut(GROUP / W).zip(bytes.as_chunks::<32>().0) {
        let mut words = [0_u32; 8];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        for eight in run.as_chunks_mut::<8>().0 {
            for (word, code) in words.iter_mut().zip(eight) {
                // The first plane holds the lowest bits and overwrites the code.
                *code = if shift == 0 { 0 } else { *code } | (*word & mask) << shift;
                *word >>= W;
            }
        }
    }
    for (byte, codes) in bytes_tail.iter().zip(tail.chunks_mut(8 / W)) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = if shift == 0 { 0 } else { *code } | (u32::from(*byte) >> (W * i) & mask) << shift;
        }
    }
}

/// Returns true if the unused bits after the last code of each plane are zero, as encoders write them.
pub(crate) fn padding_is_zero(bits: u32, count: usize, bytes: &[u8]) -> bool {
    let mut end = 0;
    [8_usize, 4, 2, 1].into_iter().filter(|width| bits as usize & width != 0).all(|width| {
        end += count.div_ceil(8 / width);
        // Only the last byte of a plane can have padding, in its highest bits.
        let used = count % (8 / width) * width;
        used == 0 || bytes[end - 1] >> used == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<const BITS: u32>() {
        for count in [0, 1, 2, 7, 8, 9, 31, 32, 63, 64, 65, 127, 128, 255, 256, 257, 300, 512, 1000] {
            let codes: Vec<u32> =
                (0..count as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> (32 - BITS)).collect();
            let mut bytes = vec![0xAA; packed_len(BITS, count)];
            for (g, codes) in codes.chunks(GROUP).enumerate() {
                pack::<BITS>(codes, g * GROUP, count, &mut bytes);
            }
            assert!(padding_is_zero(BITS, count, &bytes), "{BITS} bits, {count}");
            let mut again = vec![0; count];
            for (g, codes) in again.chunks_mut(GROUP).enumerate() {
                unpack::<BITS>(&bytes, g * GROUP, count, codes);
            }
            assert_eq!(again, codes, "{BITS} bits, {count}");
        }
    }

    #[test]
    fn codes_come_back() {
        round_trip::<1>();
        round_trip::<2>();
        round_trip::<3>();
        round_trip::<4>();
        round_trip::<5>();
        round_trip::<6>();
        round_trip::<7>();
        round_trip::<8>();
        round_trip::<9>();
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        // Code 8 i + j of a run of 4-bit codes: bits 4 i of word j.
        let mut codes = [0; 64];
        codes[8 * 3 + 5] = 0xB;
        let mut bytes = [0; 32];
        pack::<4>(&codes, 0, 64, &mut bytes);
        let mut wanted = [0; 32];
        wanted[4 * 5 + 1] = 0xB0;
        assert_eq!(bytes, wanted);
        // Three bits after the runs: two low bits, four to a byte, then the high bit, eight to a byte.
        let mut bytes = [0; 3];
        pack::<3>(&[1, 2, 3, 4, 5], 0, 5, &mut bytes);
        assert_eq!(bytes, [0b00_11_10_01, 0b01, 0b11000]);
    }
}
