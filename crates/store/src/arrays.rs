//! Memory that a caller gives to a store.

use crate::layout::BLOCK;

/// Memory for the arrays of one piece, the longest of the store.
pub trait Arrays: Send + 'static {
    /// Returns the bytes of an array.
    fn array(&self, number: usize) -> &[u8];

    /// Returns the bytes of an array for writing.
    fn array_mut(&mut self, number: usize) -> &mut [u8];
}

/// The last arrays of all pieces, which are elsewhere in memory and do not change: they are written after the
/// pieces, while the caller goes on.
pub trait LateArrays: Send {
    /// Writes an array of a piece to `bytes`: its values, and zeros up to whole blocks.
    fn fill(&self, piece: usize, array: usize, bytes: &mut [u8]);
}

/// Returns the checksum of an array with these bytes, which zeros make whole blocks.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(bytes);
    sum.update(&[0; BLOCK][..bytes.len().next_multiple_of(BLOCK) - bytes.len()]);
    sum.finalize()
}
