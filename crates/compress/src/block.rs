//! Codes of a fixed width under a header for each block: the one loop behind every quantiser. Knows no
//! arithmetic: that is a [`Quantizer`].

use crate::CompressError;
use crate::chunked::{Chunked, Chunks, Pass};
use crate::magnitude::{INFINITE, max_magnitude, sum};
use crate::noise::Noise;
use crate::pack::{GROUP, pack, packed_len, padding_is_zero, unpack};
use crate::simd::{Avx2Token, FiniteValues, Kernel, Level, prefetch};
use crate::staging::StagingBuffer;
use crate::values::Values;
use crate::wire::CodecId;

/// The largest block. A block should fit a cache, and its size a header.
pub const MAX_BLOCK: u32 = 1 << 20;
/// The block of the integer codecs where none is named: a scale of two bytes costs 0.8 % of eight-bit codes.
pub const DEFAULT_BLOCK: u32 = 256;

/// A block whose largest magnitude is below this, `2^-100`, becomes all zero: its scale and its products would
/// come near f32's subnormals, which not every device keeps.
const MIN_MAX: f32 = f32::from_bits((127 - 100) << 23);

/// The bits of `2^126`: in a block with a smaller largest magnitude no loss overflows, as what codes stand for
/// is less than `2^127` there.
const EDGE: i32 = (127 + 126) << 23;

/// The arithmetic of one method: what a block's header says, and how an element becomes a code under it.
///
/// All functions are part of kernels and must be `#[inline(always)]`; `encode`, `decode` and `refused` must be
/// branch-free, so that the loops become vector code. A block whose header is all zero bytes holds only zeros
/// (if there is a header): the largest magnitude is too small.
pub trait Quantizer<const BITS: u32>: Copy + std::fmt::Debug + Send + Sync {
    /// The number on the wire.
    const ID: CodecId;
    /// Bytes of a block's header.
    const HEADER: usize;
    /// The codec's parameter, beside the block, in the highest byte of the parameters' word.
    const PARAMETER: u8 = 0;
    /// Whether a code may stand for a number of the other sign than its element, so that more is lost than the
    /// element.
    const OVERSHOOTS: bool = false;
    /// What the header means, ready to be used.
    type Fit: Copy;
    /// Whether [`Self::encode`] wants offsets.
    fn noisy(&self) -> bool {
        false
    }
    /// The bits of the largest magnitude, as `max_magnitude` gives them, and a number for [`Self::fit`]. If
    /// there is a residual, the sums go to `next`.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn survey(values: Values<'_>) -> (i32, f32) {
        match values {
            Values::Read(x) => (max_magnitude(x), 0.0),
            Values::Feedback { x, e, next } => (sum(x, e, next), 0.0),
        }
    }
    /// The header of the finite `x` with the largest magnitude `max`, which is not too small, and what
    /// [`Self::survey`] found.
    fn fit(&self, max: f32, surveyed: f32, x: &[f32]) -> Self::Fit;
    /// Writes the header.
    fn write(fit: &Self::Fit, header: &mut [u8]);
    /// Reads a header that is not all zero; the offending number if no encoder writes it.
    fn read(header: &[u8]) -> Result<Self::Fit, f32>;
    /// The code of a finite element of the block, in the low `BITS` bits. The offset is in the open interval
    /// (-1/2, 1/2), or 0 unless `NOISY`.
    fn encode<const NOISY: bool>(fit: &Self::Fit, x: f32, offset: f32) -> u32;
    /// What a code stands for; finite.
    fn decode(fit: &Self::Fit, code: u32) -> f32;
    /// Whether no encoder writes this code.
    fn refused(code: u32) -> bool;
    /// Encodes full runs of values in the processor's own instructions; how many. Not for noise.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn encode_avx2(_: Avx2Token, _: &Self::Fit, _: FiniteValues<'_>, _: &mut [u8]) -> usize {
        0
    }
    /// Decodes full runs of a block's first codes in the processor's own instructions; how many elements, and
    /// whether one is refused.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn decode_avx2(_: Avx2Token, _: &Self::Fit, _: &[u8], _: &mut [f32]) -> (usize, bool) {
        (0, false)
    }
}

/// The method `Q` with codes of `BITS` bits, in blocks.
#[derive(Debug, Clone, Copy)]
pub struct Block<Q, const BITS: u32> {
    pub(crate) quantizer: Q,
    block: usize,
}

impl<Q: Quantizer<BITS>, const BITS: u32> Chunked<Block<Q, BITS>> {
    pub(crate) fn blocks(quantizer: Q, block: u32) -> Result<Self, CompressError> {
        Ok(Self::of(Block { quantizer, block: check_block(block)? }))
    }

    /// Elements per block.
    #[must_use]
    pub fn block(&self) -> u32 {
        self.chunks.block as u32
    }
}

fn check_block(block: u32) -> Result<usize, CompressError> {
    if (1..=MAX_BLOCK).contains(&block) {
        return Ok(block as usize);
    }
    Err(CompressError::BlockSize { found: block, max: MAX_BLOCK })
}

/// Bytes of a whole block.
const fn format_bytes<Q: Quantizer<BITS>, const BITS: u32>(block: usize) -> usize {
    Q::HEADER + packed_len(BITS, block)
}

impl<Q: Quantizer<BITS>, const BITS: u32> Block<Q, BITS> {
    fn block_bytes(&self) -> usize {
        format_bytes::<Q, BITS>(self.block)
    }

    fn encode_blocks<const NOISY: bool>(
        &self,
        pass: &mut Pass,
        at: usize,
        values: Values<'_>,
        out: &mut [u8],
        noise: Noise,
    ) -> bool {
        let Pass { level, staging } = pass;
        let group = (at / self.block) as u64 * self.block.div_ceil(GROUP) as u64;
        let token = if NOISY { None } else { level.avx2_token() };
        let blocks = Blocks::<Q, BITS, NOISY> { format: self, noise, group, token };
        match values {
            Values::Read(x) => level.run(Encode { blocks, x, out }),
            Values::Feedback { x, e, next } => level.run(EncodeSums { blocks, x, e, next, out, staging }),
        }
    }

    /// The error for what is wrong in a block of `count` elements, the first of which is `at`.
    fn culprit(block: usize, at: usize, count: usize, bytes: &[u8]) -> CompressError {
        let (header, codes) = bytes.split_at(Q::HEADER);
        let zero = is_zero::<Q, BITS>(header);
        if !zero && let Err(found) = Q::read(header) {
            return CompressError::Scale { block, found };
        }
        let mut group = [0; GROUP];
        for start in (0..count).step_by(GROUP) {
            let group = &mut group[..GROUP.min(count - start)];
            unpack::<BITS>(codes, start, count, group);
            if let Some(i) = group.iter().position(|code| if zero { *code != 0 } else { Q::refused(*code) }) {
                return CompressError::Code { index: at + start + i, code: group[i] };
            }
        }
        CompressError::Padding { block }
    }
}

impl<Q: Quantizer<BITS>, const BITS: u32> Chunks for Block<Q, BITS> {
    const ID: CodecId = Q::ID;

    fn unit(&self) -> usize {
        self.block
    }

    fn bytes(&self, len: usize) -> usize {
        let (full, rest) = (len / self.block, len % self.block);
        let tail = if rest == 0 { 0 } else { Q::HEADER + packed_len(BITS, rest) };
        full.saturating_mul(self.block_bytes()).saturating_add(tail)
    }

    fn parameters(&self) -> Option<[u8; 4]> {
        Some((self.block as u32 | u32::from(Q::PARAMETER) << 24).to_le_bytes())
    }

    fn with_parameters(&self, parameters: [u8; 4]) -> Result<Self, CompressError> {
        let word = u32::from_le_bytes(parameters);
        if (word >> 24) as u8 != Q::PARAMETER {
            let (wanted, found) = (Q::PARAMETER, (word >> 24) as u8);
            return Err(CompressError::Parameter { codec: Q::ID, wanted, found });
        }
        Ok(Self { block: check_block(word & 0xff_ffff)?, ..*self })
    }

    fn encode(&self, pass: &mut Pass, at: usize, values: Values<'_>, out: &mut [u8], noise: Noise) -> bool {
        if self.quantizer.noisy() {
            self.encode_blocks::<true>(pass, at, values, out, noise)
        } else {
            self.encode_blocks::<false>(pass, at, values, out, noise)
        }
    }

    fn decode(&self, pass: &mut Pass, at: usize, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
        let (count, Pass { level, staging }) = (out.len(), pass);
        let Some(bad) = level.run(Decode::<Q, BITS> { format: self, bytes, out, level: *level, staging })
        else {
            return Ok(());
        };
        let (start, bytes) = (bad * self.block, &bytes[bad * self.block_bytes()..]);
        let count = self.block.min(count - start);
        Err(Self::culprit((at + start) / self.block, at + start, count, &bytes[..self.bytes(count)]))
    }
}

/// How whole blocks are encoded.
struct Blocks<'a, Q, const BITS: u32, const NOISY: bool> {
    format: &'a Block<Q, BITS>,
    noise: Noise,
    /// The number of the first block's first group of noise.
    group: u64,
    token: Option<Avx2Token>,
}

impl<Q: Quantizer<BITS>, const BITS: u32, const NOISY: bool> Blocks<'_, Q, BITS, NOISY> {
    /// Writes the header of `x`; `None` if it says that all is zero, whose codes are zeros too.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(
        &self,
        (max, surveyed): (i32, f32),
        x: &[f32],
        head: &mut [u8],
        codes: &mut [u8],
    ) -> Option<Q::Fit> {
        let max = f32::from_bits(max.cast_unsigned());
        if max >= MIN_MAX {
            let fit = self.format.quantizer.fit(max, surveyed, x);
            Q::write(&fit, head);
            // What a header of zeros says is zero, also where a table of values happens to be.
            if !is_zero::<Q, BITS>(head) {
                return Some(fit);
            }
        }
        head.fill(0);
        codes.fill(0);
        None
    }

    /// The offsets of the group of the block that begins at `start`, if there is noise.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn offsets(&self, block: usize, start: usize, offsets: &mut [f32; GROUP]) {
        if NOISY {
            let group = block * self.format.block.div_ceil(GROUP) + start / GROUP;
            self.noise.offsets(self.group + group as u64, offsets);
        }
    }

    /// Encodes full runs of the group that begins at `start` by hand; how many elements.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode_group_avx2(
        &self,
        fit: &Q::Fit,
        start: usize,
        values: FiniteValues<'_>,
        codes: &mut [u8],
    ) -> usize {
        match self.token {
            Some(token) => Q::encode_avx2(token, fit, values, &mut codes[start * BITS as usize / 8..]),
            None => 0,
        }
    }
}

/// The bytes of whole blocks; true if something is not finite.
struct Encode<'a, Q, const BITS: u32, const NOISY: bool> {
    blocks: Blocks<'a, Q, BITS, NOISY>,
    x: &'a [f32],
    out: &'a mut [u8],
}

impl<Q: Quantizer<BITS>, const BITS: u32, const NOISY: bool> Kernel for Encode<'_, Q, BITS, NOISY> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let Self { blocks, mut x, mut out } = self;
        let (block, whole) = (blocks.format.block, blocks.format.block_bytes());
        let (mut codes, mut offsets, mut i) = ([0; GROUP], [0.0; GROUP], 0);
        while !x.is_empty() {
            let (values, next) = x.split_at(block.min(x.len()));
            let (head, rest) = out.split_at_mut(Q::HEADER);
            let (bytes, next_out) = rest.split_at_mut((whole - Q::HEADER).min(rest.len()));
            let surveyed = Q::survey(Values::Read(values));
            if surveyed.0 >= INFINITE {
                return true;
            }
            if let Some(fit) = blocks.fit(surveyed, values, head, bytes) {
                let (len, mut start) = (values.len(), 0);
                while start < len {
                    let group = &values[start..len.min(start + GROUP)];
                    come_near(group, start, len);
                    let done = blocks.encode_group_avx2(&fit, start, FiniteValues::Read(group), bytes);
                    if done < group.len() {
                        blocks.offsets(i, start, &mut offsets);
                        for ((code, x), offset) in codes.iter_mut().zip(&group[done..]).zip(&offsets) {
                            *code = Q::encode::<NOISY>(&fit, *x, *offset);
                        }
                        pack::<BITS>(&codes[..group.len() - done], start + done, len, bytes);
                    }
                    start += GROUP;
                }
            }
            (x, out, i) = (next, next_out, i + 1);
        }
        false
    }
}

/// As [`Encode`], of sums `x + e`, whose losses go to `next`; true if one of them is not finite, too.
struct EncodeSums<'a, Q, const BITS: u32, const NOISY: bool> {
    blocks: Blocks<'a, Q, BITS, NOISY>,
    x: &'a [f32],
    e: &'a [f32],
    next: &'a mut [f32],
    out: &'a mut [u8],
    staging: &'a mut StagingBuffer,
}

impl<Q: Quantizer<BITS>, const BITS: u32, const NOISY: bool> Kernel for EncodeSums<'_, Q, BITS, NOISY> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let Self { blocks, x, e, next, mut out, staging } = self;
        let (block, whole, all) = (blocks.format.block, blocks.format.block_bytes(), x.len());
        let (e, next) = (&e[..all], &mut next[..all]);
        let (mut codes, mut offsets, mut i, mut at) = ([0; GROUP], [0.0; GROUP], 0, 0);
        while at < all {
            let end = all.min(at + block);
            let (x, e) = (&x[at..end], &e[at..end]);
            let (head, rest) = out.split_at_mut(Q::HEADER);
            let (bytes, next_out) = rest.split_at_mut((whole - Q::HEADER).min(rest.len()));
            let (sums, mut copy_back) = staging.target(&mut next[at..end]);
            let surveyed = Q::survey(Values::Feedback { x, e, next: &mut *sums });
            if surveyed.0 >= INFINITE {
                return true;
            }
            match blocks.fit(surveyed, sums, head, bytes) {
                // Nothing is sent of these.
                None => copy_back.write(0, sums),
                Some(fit) => {
                    let (len, mut start) = (x.len(), 0);
                    while start < len {
                        let end = len.min(start + GROUP);
                        let group = &mut sums[start..end];
                        come_near(&x[start..end], start, len);
                        come_near(&e[start..end], start, len);
                        let done =
                            blocks.encode_group_avx2(&fit, start, FiniteValues::IntoResidual(group), bytes);
                        if done < group.len() {
                            blocks.offsets(i, start, &mut offsets);
                            for ((code, v), offset) in codes.iter_mut().zip(&mut group[done..]).zip(&offsets)
                            {
                                *code = Q::encode::<NOISY>(&fit, *v, *offset);
                                *v -= Q::decode(&fit, *code);
                            }
                            pack::<BITS>(&codes[..group.len() - done], start + done, len, bytes);
                        }
                        copy_back.write(start, group);
                        start += GROUP;
                    }
                    if Q::OVERSHOOTS && surveyed.0 >= EDGE && overflows(sums) {
                        return true;
                    }
                }
            }
            (out, i, at) = (next_out, i + 1, end);
        }
        false
    }
}

/// Whether something is not finite.
#[cold]
#[inline(never)]
fn overflows(lost: &[f32]) -> bool {
    max_magnitude(lost) >= INFINITE
}

/// How many elements ahead of what is encoded the memory is asked, at least: a page, which it does not go
/// beyond by itself.
const AHEAD: usize = 1024;
/// Elements of a block, at least, that fill the first cache together with the next one.
const LONG: usize = 4096;

/// Asks for what lies a while behind the group that begins at `start` of its block. Of the block behind a long
/// one it is the first half: the other comes while that is gone over for the first time.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn come_near(group: &[f32], start: usize, block: usize) {
    if block < LONG {
        prefetch(group, block.max(AHEAD));
    } else {
        prefetch(&group[..group.len() / 2], block - start / 2);
    }
}

/// The values of whole blocks; the index of the first block in which something is refused.
struct Decode<'a, Q, const BITS: u32> {
    format: &'a Block<Q, BITS>,
    bytes: &'a [u8],
    out: &'a mut [f32],
    level: Level,
    staging: &'a mut StagingBuffer,
}

impl<Q: Quantizer<BITS>, const BITS: u32> Kernel for Decode<'_, Q, BITS> {
    type Output = Option<usize>;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> Option<usize> {
        let block = self.format.block;
        let mut codes = [0; GROUP];
        let blocks = self.out.chunks_mut(block).zip(self.bytes.chunks(format_bytes::<Q, BITS>(block)));
        for (i, (out, bytes)) in blocks.enumerate() {
            let (head, bytes) = bytes.split_at(Q::HEADER);
            if is_zero::<Q, BITS>(head) {
                out.fill(0.0);
                if bytes.iter().any(|b| *b != 0) {
                    return Some(i);
                }
                continue;
            }
            let Ok(fit) = Q::read(head) else { return Some(i) };
            let (count, token) = (out.len(), self.staging.avx2_token(self.level, out));
            let (done, refused) = token.map_or((0, false), |token| Q::decode_avx2(token, &fit, bytes, out));
            let mut bad = refused | !padding_is_zero(BITS, count, bytes);
            for (g, out) in out[done..].chunks_mut(GROUP).enumerate() {
                let codes = &mut codes[..out.len()];
                unpack::<BITS>(bytes, done + g * GROUP, count, codes);
                let (values, mut copy_back) = self.staging.target(out);
                for (value, code) in values.iter_mut().zip(&*codes) {
                    bad |= Q::refused(*code);
                    *value = Q::decode(&fit, *code);
                }
                copy_back.write(0, values);
            }
            if bad {
                return Some(i);
            }
        }
        None
    }
}

/// Whether a block with that header holds only zeros.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn is_zero<Q: Quantizer<BITS>, const BITS: u32>(header: &[u8]) -> bool {
    Q::HEADER > 0 && header.iter().all(|b| *b == 0)
}
