//! Eight bits an element and a scale a block: a quarter of f32's bytes, and an error relative to the block's largest
//! magnitude.

use crate::compressor::check_lengths;
use crate::identity::Sum;
use crate::simd::{Kernel, Level};
use crate::wire::{CodecId, HEADER, check_body};
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};

/// The largest block. A block should fit a cache, and its size a header.
pub const MAX_BLOCK: u32 = 1 << 20;
/// The block of [`Int8Block::default`]: one scale costs 1.6 % of the codes.
pub const DEFAULT_BLOCK: u32 = 256;

/// Elements, roughly, between two updates of the checksum.
const CHUNK: usize = 2048;
/// Bytes of the block size in front of the blocks.
const PREFIX: usize = 4;
/// Bytes of a scale.
const SCALE: usize = 4;
/// Blocks whose largest magnitude is below this (`2^-118`) are all zero: their scale would be near f32's subnormals,
/// which not every device keeps.
const MIN_MAX: f32 = f32::from_bits((127 - 118) << 23);
/// The largest scale with a finite `127 * scale`: the f32 below `f32::MAX / 127`.
const MAX_SCALE: f32 = f32::from_bits(0x7c01_0203);
/// `1.5 * 2^23`: adding it rounds to an integer, ties to even, and leaves the integer in the low bits.
const ROUND: f32 = 12_582_912.0;

/// Symmetric 8-bit quantisation, one `f32` scale per block of elements.
///
/// `m = max|x|` of the block, `scale = min(m / 127, MAX_SCALE)`, `code = round_ties_even(x * (127 / m))` in
/// `-127..=127`, decoded as `code * scale`: two divisions a block, one multiplication an element, nothing fused. A block
/// with `m < 2^-118` has scale 0 and codes 0. `4 + n + 4 ceil(n / block)` bytes for `n` elements; the last block may be
/// short and is not padded.
///
/// The error of an element is at most `0.50004 m / 127` of its block, and at most `2^-118` in a block of scale 0. NaN
/// and infinity are refused. The decoder takes any block size, and refuses scales and codes (-128) that no encoder
/// writes.
#[derive(Debug, Clone)]
pub struct Int8Block {
    block: usize,
    level: Level,
}

impl Int8Block {
    /// The codec with one scale for every `block` elements.
    ///
    /// Errors: [`CompressError::BlockSize`] unless `block` is in `1..=MAX_BLOCK`.
    pub fn new(block: u32) -> Result<Self, CompressError> {
        Ok(Self { block: check_block(block)?, level: Level::detect() })
    }

    /// Elements per scale.
    #[must_use]
    pub fn block(&self) -> u32 {
        self.block as u32
    }

    #[cfg(test)]
    pub(crate) fn portable(self) -> Self {
        Self { level: Level::PORTABLE, ..self }
    }

    /// Elements per chunk: whole blocks, at least one.
    fn chunk(&self) -> usize {
        self.block * (CHUNK / self.block).max(1)
    }

    /// Bytes of a chunk of that many elements.
    fn chunk_bytes(&self) -> usize {
        self.chunk() + SCALE * (self.chunk() / self.block)
    }
}

impl Default for Int8Block {
    fn default() -> Self {
        Self { block: DEFAULT_BLOCK as usize, level: Level::detect() }
    }
}

impl State for Int8Block {}

impl Compressor for Int8Block {
    fn compress(&mut self, x: &[f32], _: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        let (block, chunk) = (self.block, self.chunk());
        out.fill(CodecId::INT8_BLOCK, x.len(), body_len(x.len(), block), |body, crc| {
            let body = write_block_size(block, body, crc);
            for (i, (out, x)) in body.chunks_mut(self.chunk_bytes()).zip(x.chunks(chunk)).enumerate() {
                if self.level.run(Encode { block, x, out }) {
                    return Err(crate::identity::first_non_finite(x, i * chunk));
                }
                crc.update(out);
            }
            Ok(())
        })
    }

    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        _: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        check_lengths(x, e, next).inspect_err(|_| out.clear())?;
        let (block, chunk) = (self.block, self.chunk());
        out.fill(CodecId::INT8_BLOCK, x.len(), body_len(x.len(), block), |body, crc| {
            let body = write_block_size(block, body, crc);
            let chunks = body.chunks_mut(self.chunk_bytes()).zip(x.chunks(chunk)).zip(e.chunks(chunk));
            for (i, (((out, x), e), next)) in chunks.zip(next.chunks_mut(chunk)).enumerate() {
                if self.level.run(Sum { x, e, out: next }) {
                    return Err(crate::identity::first_non_finite(next, i * chunk));
                }
                self.level.run(EncodeResidual { block, v: next, out });
                crc.update(out);
            }
            Ok(())
        })
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let body = p.open(CodecId::INT8_BLOCK, out.len())?;
        let wanted = body_len(out.len(), self.block);
        let Some((prefix, blocks)) = body.split_first_chunk() else {
            return check_body(CodecId::INT8_BLOCK, out.len(), wanted, body.len());
        };
        let block = check_block(u32::from_le_bytes(*prefix))?;
        check_body(CodecId::INT8_BLOCK, out.len(), body_len(out.len(), block), body.len())?;
        for (i, (out, bytes)) in out.chunks_mut(block).zip(blocks.chunks(SCALE + block)).enumerate() {
            let (scale, codes) = bytes.split_first_chunk().expect("the body's length was checked");
            let scale = f32::from_le_bytes(*scale);
            if scale.to_bits() != 0 && !(MIN_MAX / 127.0..=MAX_SCALE).contains(&scale) {
                return Err(CompressError::Scale { block: i, found: scale });
            }
            let allowed = if scale == 0.0 { 0..=0 } else { -127..=127 };
            if self.level.run(Decode { codes, scale, out }) || scale == 0.0 && codes.iter().any(|c| *c != 0) {
                let at =
                    codes.iter().position(|c| !allowed.contains(&c.cast_signed())).expect("one was seen");
                return Err(CompressError::Code { index: i * block + at, code: u32::from(codes[at]) });
            }
        }
        Ok(())
    }

    fn max_payload(&self, len: usize) -> usize {
        body_len(len, self.block).saturating_add(HEADER)
    }
}

fn check_block(block: u32) -> Result<usize, CompressError> {
    if (1..=MAX_BLOCK).contains(&block) {
        return Ok(block as usize);
    }
    Err(CompressError::BlockSize { found: block, max: MAX_BLOCK })
}

fn body_len(count: usize, block: usize) -> usize {
    count.saturating_add(PREFIX).saturating_add(count.div_ceil(block).saturating_mul(SCALE))
}

fn write_block_size<'a>(block: usize, body: &'a mut [u8], crc: &mut crc32fast::Hasher) -> &'a mut [u8] {
    let (prefix, blocks) = body.split_at_mut(PREFIX);
    prefix.copy_from_slice(&(block as u32).to_le_bytes());
    crc.update(prefix);
    blocks
}

/// The largest magnitude as bits: among magnitudes the order of bits is the order of numbers, with infinity and then NaN
/// above all finite ones.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn max_magnitude(x: &[f32]) -> u32 {
    // As i32, for which every instruction set has a maximum.
    x.iter().fold(0, |max: i32, x| max.max((x.to_bits() & 0x7fff_ffff).cast_signed())) as u32
}

/// (scale, what an element is multiplied by) of a block with that largest magnitude.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn scales(max: f32) -> (f32, f32) {
    if max < MIN_MAX { (0.0, 0.0) } else { ((max / 127.0).min(MAX_SCALE), 127.0 / max) }
}

/// The payload of whole blocks; true if something in `x` is not finite.
struct Encode<'a> {
    block: usize,
    x: &'a [f32],
    out: &'a mut [u8],
}

impl Kernel for Encode<'_> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        for (out, x) in self.out.chunks_mut(SCALE + self.block).zip(self.x.chunks(self.block)) {
            let max = max_magnitude(x);
            if max >= f32::INFINITY.to_bits() {
                return true;
            }
            let (scale, factor) = scales(f32::from_bits(max));
            let (head, codes) = out.split_at_mut(SCALE);
            head.copy_from_slice(&scale.to_le_bytes());
            for (code, x) in codes.iter_mut().zip(x) {
                *code = (x * factor + ROUND).to_bits() as u8;
            }
        }
        false
    }
}

/// The payload of whole blocks of the finite `v`, which becomes what the payload lost.
struct EncodeResidual<'a> {
    block: usize,
    v: &'a mut [f32],
    out: &'a mut [u8],
}

impl Kernel for EncodeResidual<'_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) {
        for (out, v) in self.out.chunks_mut(SCALE + self.block).zip(self.v.chunks_mut(self.block)) {
            let (scale, factor) = scales(f32::from_bits(max_magnitude(v)));
            let (head, codes) = out.split_at_mut(SCALE);
            head.copy_from_slice(&scale.to_le_bytes());
            for (code, v) in codes.iter_mut().zip(v) {
                let rounded = *v * factor + ROUND;
                *code = rounded.to_bits() as u8;
                *v -= (rounded - ROUND) * scale;
            }
        }
    }
}

/// `out = codes * scale`; true if a code is -128.
struct Decode<'a> {
    codes: &'a [u8],
    scale: f32,
    out: &'a mut [f32],
}

impl Kernel for Decode<'_> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        for (out, code) in self.out.iter_mut().zip(self.codes) {
            *out = f32::from(code.cast_signed()) * self.scale;
        }
        self.codes.iter().fold(0, |bad, code| bad | u8::from(*code == 0x80)) != 0
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these laws are equalities")]
mod tests {
    use super::*;

    #[test]
    fn the_largest_scale_is_the_last_finite_one() {
        assert!((127.0 * MAX_SCALE).is_finite());
        assert!((127.0 * MAX_SCALE.next_up()).is_infinite());
        assert_eq!(MAX_SCALE.next_up(), f32::MAX / 127.0);
    }

    #[test]
    fn rounding_by_addition_is_to_nearest_even() {
        for i in -1_270_000..=1_270_000 {
            let y = i as f32 / 10_000.0;
            assert_eq!((y + ROUND) - ROUND, y.round_ties_even(), "{y}");
            assert_eq!(((y + ROUND).to_bits() as u8).cast_signed(), y.round_ties_even() as i8, "{y}");
        }
    }

    #[test]
    fn the_largest_magnitude_always_gets_the_last_code() {
        // Every power of two with fractions in between, up to the largest number.
        for bits in (MIN_MAX.to_bits()..f32::INFINITY.to_bits()).step_by(40_009).chain([f32::MAX.to_bits()]) {
            let max = f32::from_bits(bits);
            let (scale, factor) = scales(max);
            assert_eq!((max * factor).round_ties_even(), 127.0, "{max:e}");
            assert!((scale * 127.0 - max).abs() <= max * 2.0_f32.powi(-22), "{max:e}");
        }
    }
}
