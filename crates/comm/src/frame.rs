//! Pooled buffers of at most [`FRAME_BYTES`] bytes: the unit in which all data is sent. A frame is untyped
//! bytes.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use farflung_base::Nanos;

use crate::shared::Slot;
use crate::sizes::{FRAME_BYTES, HEADER_BYTES};

/// Maximum number of free buffers that a pool keeps. Further buffers are deallocated.
const KEPT: usize = 256;

/// Allocation unit of buffers, 64 bytes, so that a buffer begins at a cache line. Processors with fast short
/// `rep movsb`, which the kernel uses to copy out of sockets, copy six times slower if the destination's offset
/// in its page is 1 to 31 bytes above the source's. Behind full frames, the bytes of a stream lie at multiples
/// of the header's 32 bytes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Allocates the buffers of frames and takes them back for reuse.
#[derive(Default)]
pub struct Pool {
    free: Mutex<Vec<Vec<Line>>>,
}

impl Pool {
    /// Creates an empty pool.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns a frame of `len` bytes with arbitrary contents.
    ///
    /// # Panics
    /// If `len` is more than [`FRAME_BYTES`].
    #[must_use]
    pub fn lease(self: &Arc<Self>, len: usize) -> Frame {
        assert!(len <= FRAME_BYTES, "a frame of {len} bytes is too long");
        let mut lines = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        // A buffer is never made smaller, so in a steady state nothing is allocated or cleared here.
        if lines.len() * size_of::<Line>() < len {
            lines.resize(len.div_ceil(size_of::<Line>()), Line::zeroed());
        }
        Frame {
            body: Body::Lines(lines),
            len: len as u32,
            check: 0,
            arrived: Nanos::ZERO,
            came_with: None,
            pool: Arc::clone(self),
        }
    }

    /// Wraps `len` bytes of a shared memory slot as a frame, without a copy.
    pub(crate) fn in_place(self: &Arc<Self>, slot: Slot, len: usize, check: u32) -> Frame {
        let (pool, body) = (Arc::clone(self), Body::Slot(slot));
        Frame { body, len: len as u32, check, arrived: Nanos::ZERO, came_with: None, pool }
    }

    /// Returns a frame with a copy of `bytes` and this check word.
    pub(crate) fn copy_of(self: &Arc<Self>, bytes: &[u8], check: u32) -> Frame {
        let mut frame = self.lease(bytes.len());
        frame.bytes_mut().copy_from_slice(bytes);
        frame.check = check;
        frame
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pool")
    }
}

/// Storage of a frame's bytes.
enum Body {
    /// A buffer of the pool.
    Lines(Vec<Line>),
    /// A slot of memory shared with the process that sent the frame.
    Slot(Slot),
}

/// Up to [`FRAME_BYTES`] bytes, in a buffer leased from a [`Pool`] (aligned to 64 bytes) or in a slot of shared
/// memory. Dropping the frame gives the buffer or the slot back.
pub struct Frame {
    body: Body,
    len: u32,
    /// Check word, which both ends of an operation compute in the same way. If the words differ, the ends run
    /// different operations.
    pub check: u32,
    /// Time of arrival on the receiver's clock; set by the transport.
    pub arrived: Nanos,
    /// Header with which the frame arrived over a socket. A rank that forwards the frame unchanged reuses the
    /// header's checksum.
    pub(crate) came_with: Option<Box<[u8; HEADER_BYTES]>>,
    pool: Arc<Pool>,
}

impl Frame {
    /// Returns the payload.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.body {
            Body::Lines(lines) => &bytemuck::cast_slice(lines)[..self.len()],
            Body::Slot(slot) => slot.bytes(self.len()),
        }
    }

    /// Returns the payload for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.came_with = None;
        let len = self.len();
        match &mut self.body {
            Body::Lines(lines) => &mut bytemuck::cast_slice_mut(lines)[..len],
            Body::Slot(slot) => slot.bytes_mut(len),
        }
    }

    /// Returns the length of the payload in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns whether the payload is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({} bytes)", self.len())
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        // A slot of shared memory is returned by the `Drop` of `Slot`.
        let Body::Lines(lines) = &mut self.body else { return };
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < KEPT {
            free.push(std::mem::take(lines));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_of_nothing_is_small() {
        // The smallest capacity of a queue is four frames. It must stay below the bytes that the inbox counts
        // for a frame.
        assert!(4 * size_of::<Frame>() < 256);
    }

    #[test]
    fn buffers_come_back_and_are_aligned() {
        let pool = Pool::new();
        let mut frame = pool.lease(13);
        frame.bytes_mut().fill(7);
        let address = frame.bytes().as_ptr();
        assert_eq!(address.align_offset(64), 0);
        drop(frame);
        let again = pool.lease(5);
        assert_eq!((again.bytes().as_ptr(), again.bytes()), (address, &[7; 5][..]));
    }
}
