//! Codings of ascending indices. The encoder can choose the smallest one for the given indices.

use super::bits::{BitReader, BitWriter};
use crate::CompressError;

/// Coding of ascending indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum IndexCoding {
    /// The smallest of the other codings for the given indices.
    #[default]
    Smallest,
    /// This many bits for each index, but at least as many as the largest index needs, and at most 32. An index
    /// is relative to its chunk for a selection per chunk, else to the vector.
    Fixed(u8),
    /// One bit for each element of the vector.
    Bitmask,
    /// The gap to the previous index as a varint: seven bits in each byte, the lowest first; the highest bit is
    /// set if more bytes follow.
    Varint,
    /// The gap to the previous index in a Golomb-Rice code, whose parameter depends on the density. Below a
    /// density of 0.1 its size is within 6 % (and 2 bytes) of the entropy of independent random positions.
    Rice,
}

/// A coding with its parameter, as in the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Coding {
    kind: Kind,
    /// Number of bits of an index, or the Rice parameter; 0 for other codings.
    width: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Fixed,
    Bitmask,
    Varint,
    Rice,
}

/// The chunks of a selection that keeps the same number of elements in each chunk (the last chunk may be
/// short). The fixed coding encodes an index relative to its chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunking {
    pub(crate) chunk: usize,
    pub(crate) kept: usize,
}

impl Chunking {
    /// Treats the whole vector as one chunk.
    pub(crate) fn whole(len: usize, kept: usize) -> Self {
        Self { chunk: len.max(1), kept }
    }

    /// Returns the number of elements that are kept of `len`.
    pub(crate) fn total(self, len: usize) -> usize {
        len / self.chunk * self.kept.min(self.chunk) + self.kept.min(len % self.chunk)
    }

    /// Returns the number of bits that an index within a chunk needs.
    fn width(self) -> u8 {
        (usize::BITS - (self.chunk - 1).leading_zeros()) as u8
    }
}

impl Coding {
    /// Returns the coding for these indices, which are ascending and below `len`.
    pub(crate) fn choose(wanted: IndexCoding, indices: &[u32], len: usize, chunking: Chunking) -> Self {
        let coding = |kind, width| Self { kind, width };
        let rice = coding(Kind::Rice, rice_parameter(indices.len(), len));
        let fixed = coding(Kind::Fixed, chunking.width());
        match wanted {
            IndexCoding::Fixed(width) => coding(Kind::Fixed, width.clamp(chunking.width(), 32)),
            IndexCoding::Bitmask => coding(Kind::Bitmask, 0),
            IndexCoding::Varint => coding(Kind::Varint, 0),
            IndexCoding::Rice => rice,
            IndexCoding::Smallest => {
                let all = [fixed, coding(Kind::Bitmask, 0), coding(Kind::Varint, 0), rice];
                all.into_iter().min_by_key(|c| c.bytes(indices, len)).unwrap_or(fixed)
            }
        }
    }

    /// Returns the largest number of bytes that `kept` indices below `len` can take.
    pub(crate) fn most(wanted: IndexCoding, kept: usize, len: usize, chunking: Chunking) -> usize {
        let fixed = |width: u8| bit_bytes(kept.saturating_mul(width as usize));
        match wanted {
            IndexCoding::Fixed(width) => fixed(width.clamp(chunking.width(), 32)),
            IndexCoding::Bitmask => bit_bytes(len),
            // The gaps add up to less than `len`, so at most `len >> 7 m` of them need more than `m` bytes.
            IndexCoding::Varint => kept.saturating_add((1..5).map(|more| len >> (7 * more)).sum()),
            // The parameter `r` is chosen only for at most about `len / 2^r` indices.
            IndexCoding::Rice => {
                let bits = |r: usize| kept.min((len >> r) + 1).saturating_mul(r + 1).saturating_add(len >> r);
                bit_bytes((0..32).map(bits).max().unwrap_or(0))
            }
            IndexCoding::Smallest => {
                let varint = Self::most(IndexCoding::Varint, kept, len, chunking);
                fixed(chunking.width()).min(bit_bytes(len)).min(varint)
            }
        }
    }

    fn bytes(self, indices: &[u32], len: usize) -> usize {
        match self.kind {
            Kind::Fixed => bit_bytes(indices.len() * self.width as usize),
            Kind::Bitmask => bit_bytes(len),
            Kind::Varint => {
                gaps(indices).map(|gap| (38 - gap.leading_zeros() as usize) / 7).map(|b| b.max(1)).sum()
            }
            Kind::Rice => {
                let quotients: usize = gaps(indices).map(|gap| (gap >> self.width) as usize).sum();
                bit_bytes(quotients + indices.len() * (self.width as usize + 1))
            }
        }
    }

    pub(crate) fn write(self, indices: &[u32], len: usize, chunking: Chunking, out: &mut Vec<u8>) {
        match self.kind {
            Kind::Fixed => {
                let mut bits = BitWriter::new(out);
                let chunk = chunking.chunk as u32;
                for index in indices {
                    bits.push(u64::from(index % chunk), u32::from(self.width));
                }
                bits.finish();
            }
            Kind::Bitmask => {
                let start = out.len();
                out.resize(start + bit_bytes(len), 0);
                for index in indices {
                    out[start + *index as usize / 8] |= 1 << (index % 8);
                }
            }
            Kind::Varint => {
                for mut gap in gaps(indices) {
                    while gap >= 0x80 {
                        out.push(gap as u8 | 0x80);
                        gap >>= 7;
                    }
                    out.push(gap as u8);
                }
            }
            Kind::Rice => {
                let mut bits = BitWriter::new(out);
                for gap in gaps(indices) {
                    bits.push_zeros(gap >> self.width);
                    let low = u64::from(gap & ((1 << self.width) - 1));
                    bits.push(low << 1 | 1, u32::from(self.width) + 1);
                }
                bits.finish();
            }
        }
    }

    /// Returns the two bytes that identify the coding in the wire format.
    pub(crate) fn tag(self) -> [u8; 2] {
        [self.kind as u8, self.width]
    }

    pub(crate) fn of_tag([kind, width]: [u8; 2]) -> Result<Self, CompressError> {
        let (kind, widths) = match kind {
            0 => (Kind::Fixed, 0..=32),
            1 => (Kind::Bitmask, 0..=0),
            2 => (Kind::Varint, 0..=0),
            3 => (Kind::Rice, 0..=31),
            _ => return Err(CompressError::Indices { why: "have an unknown coding" }),
        };
        if widths.contains(&width) {
            return Ok(Self { kind, width });
        }
        Err(CompressError::Indices { why: "have a width that no encoder writes" })
    }

    /// Calls `f` with each index decoded from `bytes`, which must hold nothing else. `f` must check the order
    /// and the number of indices.
    pub(crate) fn read(
        self,
        bytes: &[u8],
        kept: usize,
        len: usize,
        chunking: Chunking,
        mut f: impl FnMut(u64) -> Result<(), CompressError>,
    ) -> Result<(), CompressError> {
        let wrong = Err(CompressError::Indices { why: "have the wrong number of bytes" });
        match self.kind {
            Kind::Fixed => {
                if bytes.len() != bit_bytes(kept * self.width as usize) {
                    return wrong;
                }
                let mut bits = BitReader::new(bytes);
                let per_chunk = chunking.kept.min(chunking.chunk).max(1);
                for base in (0..).step_by(chunking.chunk).take(kept.div_ceil(per_chunk)) {
                    let rest = kept - base / chunking.chunk * per_chunk;
                    for _ in 0..per_chunk.min(rest) {
                        let index = bits.take(u32::from(self.width))?;
                        if index >= chunking.chunk as u64 {
                            return Err(CompressError::Indices { why: "are outside of their chunk" });
                        }
                        f(base as u64 + index)?;
                    }
                }
                bits.end()
            }
            Kind::Bitmask => {
                if bytes.len() != bit_bytes(len) {
                    return wrong;
                }
                for (i, word) in bytes.chunks(8).enumerate() {
                    let mut le = [0; 8];
                    le[..word.len()].copy_from_slice(word);
                    let mut word = u64::from_le_bytes(le);
                    while word != 0 {
                        f((64 * i) as u64 + u64::from(word.trailing_zeros()))?;
                        word &= word - 1;
                    }
                }
                Ok(())
            }
            Kind::Varint => {
                let (mut bytes, mut next) = (bytes.iter(), 0);
                for _ in 0..kept {
                    let (mut gap, mut shift) = (0_u64, 0);
                    loop {
                        let Some(byte) = bytes.next() else { return wrong };
                        gap |= u64::from(byte & 0x7f) << shift;
                        if *byte < 0x80 {
                            break;
                        }
                        shift += 7;
                        if shift > 28 {
                            return Err(CompressError::Indices {
                                why: "have a gap that takes more than five bytes",
                            });
                        }
                    }
                    f(next + gap)?;
                    next += gap + 1;
                }
                if bytes.len() == 0 { Ok(()) } else { wrong }
            }
            Kind::Rice => {
                let (mut bits, mut next) = (BitReader::new(bytes), 0);
                for _ in 0..kept {
                    let gap = u64::from(bits.zeros()?) << self.width | bits.take(u32::from(self.width))?;
                    f(next + gap)?;
                    next += gap + 1;
                }
                bits.end()
            }
        }
    }
}

/// Returns the number of elements skipped before each index.
fn gaps(indices: &[u32]) -> impl Iterator<Item = u32> {
    let before = std::iter::once(0).chain(indices.iter().map(|i| i + 1));
    indices.iter().zip(before).map(|(index, next)| index - next)
}

/// Returns the Rice parameter: `log2(mean * ln 2)` of the mean gap, rounded down, and at least 0.
fn rice_parameter(kept: usize, len: usize) -> u8 {
    let mean = (len - kept.min(len)) as u64 * 45_426 / (kept.max(1) as u64 * 65_536);
    mean.checked_ilog2().unwrap_or(0).min(31) as u8
}

fn bit_bytes(bits: usize) -> usize {
    bits.div_ceil(8)
}

#[cfg(test)]
mod tests {
    use farflung_base::Philox;

    use super::*;

    #[test]
    fn every_coding_round_trips_within_its_bound_and_the_smallest_is() {
        let rng = Philox::new(1, 2);
        for (len, density) in
            [(1_u32, 1.0), (100, 0.5), (5000, 0.01), (70_000, 0.001), (70_000, 0.3), (300, 0.0)]
        {
            let indices: Vec<u32> = (0..len).filter(|i| rng.uniform(u64::from(*i)) < density).collect();
            let (len, kept) = (len as usize, indices.len());
            let chunking = Chunking::whole(len, kept);
            let mut sizes = Vec::new();
            for wanted in [
                IndexCoding::Fixed(0),
                IndexCoding::Fixed(32),
                IndexCoding::Bitmask,
                IndexCoding::Varint,
                IndexCoding::Rice,
                IndexCoding::Smallest,
            ] {
                let coding = Coding::choose(wanted, &indices, len, chunking);
                assert_eq!(Coding::of_tag(coding.tag()), Ok(coding));
                let mut bytes = Vec::new();
                coding.write(&indices, len, chunking, &mut bytes);
                assert_eq!(bytes.len(), coding.bytes(&indices, len), "{wanted:?}");
                assert!(bytes.len() <= Coding::most(wanted, kept, len, chunking), "{wanted:?} {len} {kept}");
                let mut again = Vec::new();
                let mut take = |i: u64| {
                    again.push(i as u32);
                    Ok(())
                };
                coding.read(&bytes, kept, len, chunking, &mut take).unwrap();
                assert_eq!(again, indices, "{wanted:?}");
                sizes.push(bytes.len());
            }
            assert_eq!(sizes.last(), sizes.iter().min());
            // The Rice code is close to the entropy for sparse selections.
            if density < 0.1 && kept > 10 {
                let p = kept as f64 / len as f64;
                let entropy = -(p * p.log2() + (1.0 - p) * (1.0 - p).log2()) * len as f64 / 8.0;
                assert!(sizes[4] as f64 <= 1.06 * entropy + 2.0, "{} {entropy}", sizes[4]);
            }
        }
    }

    #[test]
    fn chunked_indices_of_twelve_bits_are_pairs_in_three_bytes() {
        let chunking = Chunking { chunk: 4096, kept: 2 };
        let indices = [0x123, 0xabc, 4096 + 5, 4096 + 6];
        let coding = Coding::choose(IndexCoding::Fixed(0), &indices, 2 * 4096, chunking);
        let mut bytes = Vec::new();
        coding.write(&indices, 2 * 4096, chunking, &mut bytes);
        assert_eq!(bytes, [0x23, 0xc1, 0xab, 0x05, 0x60, 0x00]);
    }
}
