//! Codes of a fixed width under a header for each block: the one loop behind every quantiser. Knows no arithmetic: that
//! is a [`Quantizer`].

use crate::CompressError;
use crate::aside::{Aside, Way};
use crate::chunked::{Chunked, Chunks, INFINITE, Pass, Values, max_magnitude, sum};
use crate::noise::Noise;
use crate::pack::{GROUP, pack, packed_len, padding_is_zero, unpack};
use crate::simd::{Hand, Kernel, Level, Lossy, prefetch};
use crate::wire::CodecId;

/// The largest block. A block should fit a cache, and its size a header.
pub const MAX_BLOCK: u32 = 1 << 20;
/// The block of the integer codecs where none is named: a scale of two bytes costs 0.8 % of eight-bit codes.
pub const DEFAULT_BLOCK: u32 = 256;

/// A block whose largest magnitude is below this, `2^-100`, becomes all zero: its scale and its products would come near
/// f32's subnormals, which not every device keeps.
const MIN_MAX: f32 = f32::from_bits((127 - 100) << 23);

/// The arithmetic of one method: what a block's header says, and how an element becomes a code under it.
///
/// All functions are part of kernels and must be `#[inline(always)]`; `encode`, `decode` and `refused` must be branch-free,
/// so that the loops become vector code.
/// A block whose header is all zero bytes holds only zeros (if there is a header): the largest magnitude is too small.
pub trait Quantizer<const BITS: u32>: Copy + std::fmt::Debug + Send + Sync {
    /// The number on the wire.
    const ID: CodecId;
    /// Bytes of a block's header.
    const HEADER: usize;
    /// The codec's parameter, beside the block, in the highest byte of the parameters' word.
    const PARAMETER: u8 = 0;
    /// What the header means, ready to be used.
    type Fit: Copy;
    /// Whether [`Self::encode`] wants offsets.
    fn noisy(&self) -> bool {
        false
    }
    /// The bits of the largest magnitude, as `max_magnitude` gives them, and a number for [`Self::fit`]. If there is a
    /// residual, the sums go to `next`.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn survey(values: Values<'_>) -> (i32, f32) {
        match values {
            Values::Read(x) => (max_magnitude(x), 0.0),
            Values::Feedback { x, e, next } => (sum(x, e, next), 0.0),
        }
    }
    /// The header of the finite `x` with the largest magnitude `max`, which is not too small, and what [`Self::survey`] found.
    fn fit(&self, max: f32, surveyed: f32, x: &[f32]) -> Self::Fit;
    /// Writes the header.
    fn write(fit: &Self::Fit, header: &mut [u8]);
    /// Reads a header that is not all zero; the offending number if no encoder writes it.
    fn read(header: &[u8]) -> Result<Self::Fit, f32>;
    /// The code of a finite element of the block, in the low `BITS` bits. The offset is in the open interval (-1/2, 1/2),
    /// or 0 unless `NOISY`.
    fn encode<const NOISY: bool>(fit: &Self::Fit, x: f32, offset: f32) -> u32;
    /// What a code stands for; finite.
    fn decode(fit: &Self::Fit, code: u32) -> f32;
    /// Whether no encoder writes this code.
    fn refused(code: u32) -> bool;
    /// Encodes full runs of values in the processor's own instructions; how many. Not for noise.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn encode_by_hand(_: Hand, _: &Self::Fit, _: Lossy<'_>, _: &mut [u8]) -> usize {
        0
    }
    /// Decodes full runs of a block's first codes in the processor's own instructions; how many elements, and whether one is
    /// refused.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    #[must_use]
    fn decode_by_hand(_: Hand, _: &Self::Fit, _: &[u8], _: &mut [f32]) -> (usize, bool) {
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
        let group = (at / self.block) as u64 * self.block.div_ceil(GROUP) as u64;
        let Pass { level, aside } = pass;
        if self.quantizer.noisy() {
            level.run(Encode::<Q, BITS, true> {
                format: self,
                values,
                out,
                noise,
                group,
                level: *level,
                aside,
            })
        } else {
            level.run(Encode::<Q, BITS, false> {
                format: self,
                values,
                out,
                noise,
                group,
                level: *level,
                aside,
            })
        }
    }

    fn decode(&self, pass: &mut Pass, at: usize, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
        let (count, Pass { level, aside }) = (out.len(), pass);
        let Some(bad) = level.run(Decode::<Q, BITS> { format: self, bytes, out, level: *level, aside })
        else {
            return Ok(());
        };
        let (start, bytes) = (bad * self.block, &bytes[bad * self.block_bytes()..]);
        let count = self.block.min(count - start);
        Err(Self::culprit((at + start) / self.block, at + start, count, &bytes[..self.bytes(count)]))
    }
}

/// The bytes of whole blocks; true if something is not finite.
struct Encode<'a, Q, const BITS: u32, const NOISY: bool> {
    format: &'a Block<Q, BITS>,
    values: Values<'a>,
    out: &'a mut [u8],
    noise: Noise,
    /// The number of the first block's first group of noise.
    group: u64,
    level: Level,
    aside: &'a mut Aside,
}

impl<Q: Quantizer<BITS>, const BITS: u32, const NOISY: bool> Kernel for Encode<'_, Q, BITS, NOISY> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let Self { format: &Block { quantizer, block }, values, out, noise, mut group, level, aside } = self;
        let hand = if NOISY { None } else { level.hand() };
        let (mut rest, mut codes, mut offsets) = (values, [0; GROUP], [0.0; GROUP]);
        for out in out.chunks_mut(format_bytes::<Q, BITS>(block)) {
            let len = block.min(rest.len());
            let (head, bytes) = out.split_at_mut(Q::HEADER);
            let (values, next) = rest.split_at(len);
            // The values are `x`, or sums, which then become what is lost.
            let ((max, surveyed), mut values) = match values {
                Values::Read(x) => (Q::survey(Values::Read(x)), Source::Read(x)),
                Values::Feedback { x, e, next } => {
                    let (sums, way) = aside.lend(next);
                    (Q::survey(Values::Feedback { x, e, next: &mut *sums }), Source::Rest { sums, x, e, way })
                }
            };
            if max >= INFINITE {
                return true;
            }
            let max = f32::from_bits(max as u32);
            let fit = (max >= MIN_MAX).then(|| quantizer.fit(max, surveyed, values.get()));
            if let Some(fit) = &fit {
                Q::write(fit, head);
            }
            match fit {
                // What a header of zeros says is zero, also where a table of values happens to be.
                Some(fit) if !is_zero::<Q, BITS>(head) => {
                    let by_hand = |values: Lossy<'_>, start: usize, bytes: &mut [u8]| {
                        let bytes = &mut bytes[start * BITS as usize / 8..];
                        hand.map_or(0, |hand| Q::encode_by_hand(hand, &fit, values, bytes))
                    };
                    let mut start = 0;
                    while start < len {
                        if NOISY {
                            noise.offsets(group + (start / GROUP) as u64, &mut offsets);
                        }
                        let end = len.min(start + GROUP);
                        let done = match &mut values {
                            Source::Read(x) => {
                                let x = &x[start..end];
                                come_near(x, len);
                                let done = by_hand(Lossy::Read(x), start, bytes);
                                for ((code, x), offset) in codes.iter_mut().zip(&x[done..]).zip(&offsets) {
                                    *code = Q::encode::<NOISY>(&fit, *x, *offset);
                                }
                                done
                            }
                            Source::Rest { sums, x, e, way } => {
                                let v = &mut sums[start..end];
                                come_near(&x[start..end], len);
                                come_near(&e[start..end], len);
                                let done = by_hand(Lossy::Lose(v), start, bytes);
                                for ((code, v), offset) in codes.iter_mut().zip(&mut v[done..]).zip(&offsets)
                                {
                                    *code = Q::encode::<NOISY>(&fit, *v, *offset);
                                    *v -= Q::decode(&fit, *code);
                                }
                                way.take(start, v);
                                done
                            }
                        };
                        if start + done < end {
                            pack::<BITS>(&codes[..end - start - done], start + done, len, bytes);
                        }
                        start = end;
                    }
                }
                _ => {
                    head.fill(0);
                    bytes.fill(0);
                    values.keep();
                }
            }
            (rest, group) = (next, group + block.div_ceil(GROUP) as u64);
        }
        false
    }
}

/// Of how many elements a block is too long for the processor to see the next one coming while it goes over this one again.
const LONG: usize = 1024;

/// Asks for the group a block behind the one that `x` begins with.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn come_near(x: &[f32], block: usize) {
    if block >= LONG
        && let Some(group) = x.first_chunk::<GROUP>()
    {
        prefetch(group, block);
    }
}

/// The finite values of a block.
enum Source<'a> {
    /// To be encoded.
    Read(&'a [f32]),
    /// Sums `x + e`, to be encoded, and replaced by what is lost, which then goes its way.
    Rest { sums: &'a mut [f32], x: &'a [f32], e: &'a [f32], way: Way<'a> },
}

impl Source<'_> {
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn get(&self) -> &[f32] {
        match self {
            Self::Read(x) => x,
            Self::Rest { sums, .. } => sums,
        }
    }

    /// Nothing was sent of these values.
    fn keep(&mut self) {
        if let Self::Rest { sums, way, .. } = self {
            way.take(0, sums);
        }
    }
}

/// The values of whole blocks; the index of the first block in which something is refused.
struct Decode<'a, Q, const BITS: u32> {
    format: &'a Block<Q, BITS>,
    bytes: &'a [u8],
    out: &'a mut [f32],
    level: Level,
    aside: &'a mut Aside,
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
            let (count, hand) = (out.len(), self.aside.hand(self.level, out));
            let (done, refused) = hand.map_or((0, false), |hand| Q::decode_by_hand(hand, &fit, bytes, out));
            let mut bad = refused | !padding_is_zero(BITS, count, bytes);
            for (g, out) in out[done..].chunks_mut(GROUP).enumerate() {
                let codes = &mut codes[..out.len()];
                unpack::<BITS>(bytes, done + g * GROUP, count, codes);
                let (values, mut way) = self.aside.lend(out);
                for (value, code) in values.iter_mut().zip(&*codes) {
                    bad |= Q::refused(*code);
                    *value = Q::decode(&fit, *code);
                }
                way.take(0, values);
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
