//! Block codecs: fixed-width codes with a header for each block. All block quantizers share this loop; the
//! arithmetic of each method is a [`Quantizer`].

use crate::CompressError;
use crate::chunked::{Chunked, Chunks, Pass};
use crate::magnitude::{INFINITE, max_magnitude, sum};
use crate::noise::Noise;
use crate::pack::{GROUP, pack, packed_len, padding_is_zero, unpack};
use crate::simd::{Avx2Token, FiniteValues, Kernel, Level, prefetch};
use crate::staging::StagingBuffer;
use crate::values::Values;
use crate::wire::CodecId;

/// Largest block size in elements. A block should fit in a cache, and its size must fit in a header.
pub const MAX_BLOCK: u32 = 1 << 20;
/// Default block size of the integer codecs, in elements. A scale of two bytes then adds 0.8 % to eight-bit
/// codes.
pub const DEFAULT_BLOCK: u32 = 256;

/// A block whose largest magnitude is below this, `2^-100`, is encoded as zeros: its scale and its products
/// would come near the subnormals of f32, which not every device supports.
const MIN_MAX: f32 = f32::from_bits((127 - 100) << 23);

/// The bits of `2^126`. If a block's largest magnitude is below it, decoded values are below `2^127`, so no
/// compression error overflows.
const EDGE: i32 = (127 + 126) << 23;

/// The arithmetic of one method: what a block's header holds, and how an element becomes a code.
///
/// `encode`, `decode` and `is_invalid` are called for each element and must be `#[inline(always)]`. A loop is
/// vectorized only if they are branch-free, which the encoder of [`crate::Codebook`] is not. If a method has a
/// header, a block whose header is all zero bytes holds only zeros; the encoder writes it when the largest
/// magnitude is too small.
pub trait Quantizer<const BITS: u32>: Copy + std::fmt::Debug + Send + Sync {
    /// Number of the codec in the wire format.
    const ID: CodecId;
    /// Number of bytes in a block's header.
    const HEADER: usize;
    /// Additional parameter of the codec, sent in the highest byte of the parameter word; the block size is in
    /// the others.
    const PARAMETER: u8 = 0;
    /// True if a decoded value can have the opposite sign of its element, so that the error can be larger than
    /// the element.
    const OVERSHOOTS: bool = false;
    /// The header's contents in the form that `encode` and `decode` use.
    type Header: Copy;
    /// Returns true if [`Self::encode`] uses random offsets (stochastic rounding).
    fn noisy(&self) -> bool {
        false
    }
    /// Returns the bits of the largest magnitude, as `max_magnitude` does, and a statistic for [`Self::fit`].
    /// With feedback it also writes the sums `x + e` to `next`.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn survey(values: Values<'_>) -> (i32, f32) {
        match values {
            Values::Read(x) => (max_magnitude(x), 0.0),
            Values::Feedback { x, e, next } => (sum(x, e, next), 0.0),
        }
    }
    /// Returns the header for the finite values `x`. `max` is their largest magnitude, at least `MIN_MAX`;
    /// `surveyed` is the statistic from [`Self::survey`].
    fn fit(&self, max: f32, surveyed: f32, x: &[f32]) -> Self::Header;
    /// Writes the header.
    fn write(fit: &Self::Header, header: &mut [u8]);
    /// Reads a header that is not all zero. If no encoder writes that header, the error is a number in it.
    fn read(header: &[u8]) -> Result<Self::Header, f32>;
    /// Returns the code of a finite element of the block, in the low `BITS` bits. The offset is in the open
    /// interval (-1/2, 1/2), or 0 unless `NOISY`.
    fn encode<const NOISY: bool>(fit: &Self::Header, x: f32, offset: f32) -> u32;
    /// Returns the value of a code. It is always finite.
    fn decode(fit: &Self::Header, code: u32) -> f32;
    /// Returns true if no encoder writes this code.
    fn is_invalid(code: u32) -> bool;
    /// Encodes the first values with AVX2, without offsets: as many whole runs as there are, whose length
    /// depends on the method. Returns the number of elements encoded.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn encode_avx2(_: Avx2Token, _: &Self::Header, _: FiniteValues<'_>, _: &mut [u8]) -> usize {
        0
    }
    /// Decodes the first codes of a block with AVX2: as many whole runs as there are. Returns the number of
    /// elements decoded, and whether a code is one that no encoder writes.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn decode_avx2(_: Avx2Token, _: &Self::Header, _: &[u8], _: &mut [f32]) -> (usize, bool) {
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

    /// Returns the number of elements in a block.
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

/// Returns the number of bytes in a full block.
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

    /// Returns the error that explains why the bytes of one block are invalid. `block` is its index, `count`
    /// its number of elements, and `at` the index of its first element.
    fn invalid_block(block: usize, at: usize, count: usize, bytes: &[u8]) -> CompressError {
        let (header, codes) = bytes.split_at(Q::HEADER);
        let zero = is_zero::<Q, BITS>(header);
        if !zero && let Err(found) = Q::read(header) {
            return CompressError::Scale { block, found };
        }
        let mut group = [0; GROUP];
        for start in (0..count).step_by(GROUP) {
            let group = &mut group[..GROUP.min(count - start)];
            unpack::<BITS>(codes, start, count, group);
            if let Some(i) =
                group.iter().position(|code| if zero { *code != 0 } else { Q::is_invalid(*code) })
            {
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
        Err(Self::invalid_block((at + start) / self.block, at + start, count, &bytes[..self.bytes(count)]))
    }
}

/// Settings shared by the encoders of whole blocks.
struct Blocks<'a, Q, const BITS: u32, const NOISY: bool> {
    format: &'a Block<Q, BITS>,
    noise: Noise,
    /// Index of the first block's first group of noise.
    group: u64,
    token: Option<Avx2Token>,
}

impl<Q: Quantizer<BITS>, const BITS: u32, const NOISY: bool> Blocks<'_, Q, BITS, NOISY> {
    /// Writes the block's header. Returns `None` if the block is encoded as zeros; its codes are then written
    /// as zeros too.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(
        &self,
        (max, surveyed): (i32, f32),
        x: &[f32],
        head: &mut [u8],
        codes: &mut [u8],
    ) -> Option<Q::Header> {
        let max = f32::from_bits(max.cast_unsigned());
        if max >= MIN_MAX {
            let fit = self.format.quantizer.fit(max, surveyed, x);
            Q::write(&fit, head);
            // A header of zeros means a block of zeros, so a fit whose header happens to be all zero bytes
            // cannot be sent.
            if !is_zero::<Q, BITS>(head) {
                return Some(fit);
            }
        }
        head.fill(0);
        codes.fill(0);
        None
    }

    /// Fills `offsets` for the group that begins at `start` of the block, if the method is noisy.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn offsets(&self, block: usize, start: usize, offsets: &mut [f32; GROUP]) {
        if NOISY {
            let group = block * self.format.block.div_ceil(GROUP) + start / GROUP;
            self.noise.offsets(self.group + group as u64, offsets);
        }
    }

    /// Encodes the first elements of the group that begins at `start` with AVX2, if it was detected and the
    /// method rounds without offsets. Returns the number of elements encoded.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode_group_avx2(
        &self,
        fit: &Q::Header,
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

/// Kernel: encodes whole blocks. Returns true if a value is not finite.
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
                    prefetch_input(group, start, len);
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

/// Kernel: encodes whole blocks of the sums `x + e` and writes the compression errors to `next`. Returns true
/// if a sum or an error is not finite.
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
                // The block is sent as zeros, so its sums are the new residual.
                None => copy_back.write(0, sums),
                Some(fit) => {
                    let (len, mut start) = (x.len(), 0);
                    while start < len {
                        let end = len.min(start + GROUP);
                        let group = &mut sums[start..end];
                        prefetch_input(&x[start..end], start, len);
                        prefetch_input(&e[start..end], start, len);
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

/// Returns true if an element is not finite.
#[cold]
#[inline(never)]
fn overflows(lost: &[f32]) -> bool {
    max_magnitude(lost) >= INFINITE
}

/// Smallest distance, in elements, from the encoded position to the prefetched one. It is one page, since the
/// hardware prefetcher stops at page boundaries.
const AHEAD: usize = 1024;
/// Smallest block, in elements, that fills a first-level cache of 32 KiB together with the next block.
const LONG: usize = 4096;

/// Prefetches input that comes after the group which begins at `start` of its block. For long blocks only the
/// first half of the next block is prefetched here; the second half is loaded during the first pass over that
/// block.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn prefetch_input(group: &[f32], start: usize, block: usize) {
    if block < LONG {
        prefetch(group, block.max(AHEAD));
    } else {
        prefetch(&group[..group.len() / 2], block - start / 2);
    }
}

/// Kernel: decodes whole blocks. Returns the index of the first block that holds something no encoder writes.
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
                    bad |= Q::is_invalid(*code);
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

/// Returns true if a block with this header holds only zeros.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn is_zero<Q: Quantizer<BITS>, const BITS: u32>(header: &[u8]) -> bool {
    Q::HEADER > 0 && header.iter().all(|b| *b == 0)
}
