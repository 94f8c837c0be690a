//! Views as kernel arguments: whole words from an aligned offset. A view with an unaligned start is copied to a
//! temporary buffer for the op, and copied back if it was written.

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bytes::copy_words;
use super::storage::{ALIGN, Buffer};
use super::{Cube, grid};
use crate::backend::BufferRange;
use crate::{Result, View, ViewMut};

/// A kernel argument.
#[derive(Debug)]
pub(super) struct Operand {
    handle: Handle,
    /// Bytes from the start of `handle`, rounded up to whole words.
    bytes: usize,
    /// Temporary copy of an unaligned view, and the place to copy it back to if it is written.
    staging_copy: Option<(Buffer, Option<WriteBack>)>,
}

#[derive(Debug)]
struct WriteBack {
    handle: Handle,
    start: usize,
    len: usize,
    buffer: usize,
}

impl Operand {
    /// Returns the kernel argument, as 32-bit words.
    pub(super) fn arg(&self) -> BufferArg {
        #[expect(unsafe_code, reason = "a kernel argument is a raw range of device memory")]
        // SAFETY: `bytes` is the number of bytes between the offsets of the handle.
        unsafe {
            BufferArg::from_raw_parts(self.handle.clone(), self.bytes / 4)
        }
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

/// Maximum number of bytes that one kernel copies. The kernel counts bytes in 32 bits, also in the units
/// (threads) of its grid that are beyond the end.
const COPY: usize = 1 << 30;

/// Divides a copy of `len` bytes into parts of at most [`COPY`] bytes.
fn copies(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(COPY).map(move |start| start..len.min(start + COPY))
}

/// Returns a part of a buffer that begins at an aligned offset.
fn slice(handle: &Handle, buffer: usize, start: usize, bytes: usize) -> Operand {
    let bytes = bytes.next_multiple_of(4);
    let tail = buffer - start - bytes;
    let mut handle = handle.clone();
    if start > 0 {
        handle = handle.offset_start(start as u64);
    }
    if tail > 0 {
        handle = handle.offset_end(tail as u64);
    }
    Operand { handle, bytes, staging_copy: None }
}

impl Cube {
    /// Returns a whole buffer as an operand.
    pub(super) fn whole(buffer: &Buffer) -> Operand {
        slice(&buffer.handle, buffer.bytes, 0, buffer.bytes)
    }

    /// Creates an operand to read.
    pub(super) fn read(&self, view: &View<'_>) -> Result<Operand> {
        self.bind(&view.raw(), false)
    }

    /// Creates an operand to write, with its current contents. [`Cube::write_back`] must be called after the
    /// op.
    pub(super) fn write(&self, view: &ViewMut<'_>) -> Result<Operand> {
        self.bind(&view.as_view().raw(), true)
    }

    fn bind(&self, part: &BufferRange<'_>, written: bool) -> Result<Operand> {
        let buffer = Self::buffer(part);
        let (start, len) = (part.range.start, part.range.len());
        if start.is_multiple_of(ALIGN) {
            return Ok(slice(&buffer.handle, buffer.bytes, start, len));
        }
        let copy = self.scratch(len)?;
        self.copy((&buffer.handle, buffer.bytes, start), (&copy.handle, copy.bytes, 0), len);
        let mut operand = slice(&copy.handle, copy.bytes, 0, len);
        let back =
            written.then(|| WriteBack { handle: buffer.handle.clone(), start, len, buffer: buffer.bytes });
        operand.staging_copy = Some((copy, back));
        Ok(operand)
    }

    /// Ends the use of operands: copies written temporary buffers back and releases them.
    pub(super) fn write_back(&self, operands: impl IntoIterator<Item = Operand>) {
        for operand in operands {
            if let Some((copy, back)) = operand.staging_copy {
                if let Some(to) = back {
                    self.copy((&copy.handle, copy.bytes, 0), (&to.handle, to.buffer, to.start), to.len);
                }
                self.pool.give(copy);
            }
        }
    }

    /// Copies bytes between buffers at any offsets. Each place is (buffer, its size, first byte).
    pub(super) fn copy(&self, from: (&Handle, usize, usize), to: (&Handle, usize, usize), len: usize) {
        for part in copies(len) {
            let from = (from.0, from.1, from.2 + part.start);
            self.copy_part(from, (to.0, to.1, to.2 + part.start), part.len());
        }
    }

    /// Copies one part of [`copies`].
    fn copy_part(&self, from: (&Handle, usize, usize), to: (&Handle, usize, usize), len: usize) {
        // Kernel arguments start at aligned offsets; the kernel adds the remaining offset.
        let aligned = |(handle, size, start): (&Handle, usize, usize)| {
            let base = start / ALIGN * ALIGN;
            (slice(handle, size, base, start - base + len), start - base)
        };
        let ((from, from_at), (to, to_at)) = (aligned(from), aligned(to));
        let words = (to_at + len).div_ceil(4) - to_at / 4;
        let (count, units) = grid(words, self.units);
        copy_words::launch(
            &self.client,
            count,
            units,
            from.arg(),
            to.arg(),
            from_at as u32,
            to_at as u32,
            len as u32,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::{UNITS, cubes};
    use super::{ALIGN, COPY, CubeCount, copies};

    #[test]
    fn the_parts_of_a_copy_cover_all_its_bytes() {
        assert_eq!(copies(0).count(), 0);
        for len in [1, COPY - 1, COPY, COPY + 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 6, 16 << 30] {
            let mut end = 0;
            for part in copies(len) {
                assert_eq!(part.start, end, "{len}");
                assert!((1..=COPY).contains(&part.len()), "{len}");
                end = part.end;
            }
            assert_eq!(end, len);
        }
    }

    #[test]
    fn no_unit_of_a_part_counts_past_32_bits() {
        let words = (COPY + ALIGN).div_ceil(4);
        for units in [1, 8, UNITS as usize] {
            let CubeCount::Static(x, y, z) = cubes(words.div_ceil(units)) else {
                panic!("the grid has a fixed size");
            };
            let last = u64::from(x) * u64::from(y) * u64::from(z) * units as u64 + ALIGN as u64;
            assert!(u32::try_from(4 * last).is_ok(), "{units}: {last}");
        }
    }
}
