//! The prefix and the indices of a sparse body, which come before the values.

use super::index::{Chunking, Coding};
use super::{IndexCoding, Select};
use crate::CompressError;
use crate::wire::CodecId;

/// Number of bytes before the indices.
pub(super) const PREFIX: usize = 20;

/// A parsed sparse body, with the values still encoded. Public for decoders on devices.
#[derive(Debug, Clone, Copy)]
pub struct SparseIndices<'a> {
    kept: usize,
    chunking: Chunking,
    coding: Coding,
    coded: &'a [u8],
    inner: CodecId,
    values: &'a [u8],
    len: usize,
}

impl<'a> SparseIndices<'a> {
    /// Parses the untrusted body of a vector of `len` elements.
    ///
    /// Errors: [`CompressError::BodyLength`]; [`CompressError::Indices`].
    pub fn read(body: &'a [u8], len: usize) -> Result<Self, CompressError> {
        let wrong = |wanted: usize| CompressError::BodyLength {
            codec: CodecId::SPARSE,
            count: len,
            wanted: wanted as u64,
            found: body.len() as u64,
        };
        let (prefix, rest) = body.split_first_chunk::<PREFIX>().ok_or_else(|| wrong(PREFIX))?;
        let word = |at: usize| {
            u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]) as usize
        };
        let (kept, coded, chunking) = (word(0), word(4), Chunking { chunk: word(8), kept: word(12) });
        let coding = Coding::of_tag([prefix[16], prefix[17]])?;
        if kept > len || chunking.chunk == 0 || prefix[19] != 0 {
            return Err(CompressError::Indices {
                why: "are more than the elements, or have an invalid prefix",
            });
        }
        let (coded, values) =
            rest.split_at_checked(coded).ok_or_else(|| wrong(PREFIX.saturating_add(coded)))?;
        Ok(Self { kept, chunking, coding, coded, inner: CodecId(prefix[18]), values, len })
    }

    /// Returns the number of kept elements, at most the vector's length.
    #[must_use]
    pub const fn kept(&self) -> usize {
        self.kept
    }

    /// Returns the number of the values' codec.
    #[must_use]
    pub const fn inner(&self) -> CodecId {
        self.inner
    }

    /// Returns the values' body.
    #[must_use]
    pub const fn values(&self) -> &'a [u8] {
        self.values
    }

    /// Decodes the indices of the values: ascending, below the vector's length, one for each value.
    ///
    /// Errors: [`CompressError::Indices`].
    pub fn indices(&self) -> Result<Vec<u32>, CompressError> {
        let mut indices = Vec::with_capacity(self.kept);
        let mut next = 0;
        self.each(|index| {
            if index < next || index >= self.len as u64 || indices.len() == self.kept {
                return Err(UNORDERED);
            }
            next = index + 1;
            indices.push(index as u32);
            Ok(())
        })?;
        if indices.len() == self.kept { Ok(indices) } else { Err(MISSING_INDICES) }
    }

    /// Calls `f` with each decoded index. `f` must check the order and the number of indices.
    pub(super) fn each(&self, f: impl FnMut(u64) -> Result<(), CompressError>) -> Result<(), CompressError> {
        self.coding.read(self.coded, self.kept, self.len, self.chunking, f)
    }
}

/// Error for indices that are not ascending, out of range, or too many.
pub(super) const UNORDERED: CompressError = CompressError::Indices {
    why: "are not ascending, are outside of the vector, or are more than the values",
};
pub(super) const MISSING_INDICES: CompressError = CompressError::Indices { why: "are fewer than the values" };

impl Select {
    /// Appends the prefix and the indices of a sparse body to `out`. Public for encoders on devices. The
    /// ascending `indices` are those that the rule keeps of `len` elements; `inner` is the number of the
    /// values' codec.
    pub fn write(&self, coding: IndexCoding, indices: &[u32], len: usize, inner: CodecId, out: &mut Vec<u8>) {
        let (start, kept) = (out.len(), indices.len());
        let chunking = self.chunking(len, kept);
        let coding = Coding::choose(coding, indices, len, chunking);
        out.resize(start + PREFIX, 0);
        coding.write(indices, len, chunking, out);
        let (prefix, coded) = out[start..].split_at_mut(PREFIX);
        let words = [kept, coded.len(), chunking.chunk, chunking.kept];
        for (bytes, word) in prefix[..16].as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = (word as u32).to_le_bytes();
        }
        prefix[16..18].copy_from_slice(&coding.tag());
        prefix[18] = inner.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Amount;

    #[test]
    fn what_is_written_is_read() {
        let indices = [0, 5, 6, 99];
        for select in [Select::Largest(Amount::count(4)), Select::PerChunk { chunk: 50, kept: 2 }] {
            let indices = if matches!(select, Select::Largest(_)) { indices } else { [0, 5, 56, 99] };
            let mut body = Vec::new();
            select.write(IndexCoding::Smallest, &indices, 100, CodecId::SIGN, &mut body);
            body.extend_from_slice(b"values");
            let places = SparseIndices::read(&body, 100).unwrap();
            assert_eq!((places.kept(), places.inner(), places.values()), (4, CodecId::SIGN, &b"values"[..]));
            assert_eq!(places.indices().unwrap(), indices);
            assert!(SparseIndices::read(&body, 3).is_err());
        }
    }

    #[test]
    fn indices_of_too_short_a_vector_are_refused() {
        let mut body = Vec::new();
        let select = Select::Largest(Amount::count(2));
        select.write(IndexCoding::Varint, &[3, 200], 300, CodecId::F32, &mut body);
        assert_eq!(SparseIndices::read(&body, 200).unwrap().indices(), Err(UNORDERED));
        // A bitmask with fewer bits set than the prefix says.
        let mut body = Vec::new();
        select.write(IndexCoding::Bitmask, &[3, 20], 30, CodecId::F32, &mut body);
        body[0] = 3;
        assert_eq!(SparseIndices::read(&body, 30).unwrap().indices(), Err(MISSING_INDICES));
    }
}
