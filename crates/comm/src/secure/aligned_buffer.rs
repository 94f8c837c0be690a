//! Byte buffer aligned to a cache line, for data that goes through sockets.

use std::ops::{Deref, DerefMut};

const LINE: usize = 64;

/// A byte buffer whose first byte is at the start of a cache line. It never shrinks.
#[derive(Default)]
pub(super) struct AlignedBuffer {
    bytes: Vec<u8>,
    first: usize,
}

impl AlignedBuffer {
    /// Grows the buffer to at least `len` bytes, and keeps its content.
    pub(super) fn grow(&mut self, len: usize) {
        if self.len() >= len {
            return;
        }
        let mut bytes = vec![0; len + LINE - 1];
        // `align_offset` may return `usize::MAX` if it cannot compute the offset. The buffer is then not
        // aligned, which is only slower.
        let first = bytes.as_ptr().align_offset(LINE).min(LINE - 1);
        bytes[first..first + self.len()].copy_from_slice(self);
        bytes.truncate(first + len);
        *self = Self { bytes, first };
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.first..]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.first..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_and_keeps_what_it_has() {
        let mut room = AlignedBuffer::default();
        assert!(room.is_empty());
        for len in [5, 4096, 100_000] {
            let before = room.get(4).copied().unwrap_or(0);
            room.grow(len);
            assert_eq!((room.len(), room.as_ptr().align_offset(LINE)), (len, 0));
            assert_eq!(room[4], before);
            room[4] = 7;
            room.grow(3);
            assert_eq!((room.len(), room[4]), (len, 7));
        }
    }
}
