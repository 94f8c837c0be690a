//! Pooled buffers of at most [`FRAME_BYTES`], the unit in which everything travels. Bytes, never types.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use farflung_base::Nanos;

use crate::shared::Slot;
use crate::sizes::{FRAME_BYTES, HEADER_BYTES};

/// Buffers that a pool keeps for reuse; those beyond are given back to the system.
const KEPT: usize = 256;

/// What buffers are made of, so that they begin at a cache line. Processors with fast short moves (`rep movsb`,
/// by which the system copies out of sockets) are six times slower where a copy goes to 1 to 31 bytes beyond
/// its source's place in a page; behind full frames, the stream's bytes lie at multiples of a header's 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Where the buffers of frames come from and go back to.
#[derive(Default)]
pub struct Pool {
    free: Mutex<Vec<Vec<Line>>>,
}

impl Pool {
    /// An empty pool.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A frame of `len` bytes whose contents are arbitrary.
    ///
    /// # Panics
    /// If `len` is more than [`FRAME_BYTES`].
    #[must_use]
    pub fn lease(self: &Arc<Self>, len: usize) -> Frame {
        assert!(len <= FRAME_BYTES, "a frame of {len} bytes");
        let mut lines = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        // A buffer never shrinks, so that in a steady state nothing is allocated or cleared here.
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

    /// What came in a slot of shared memory, to be used where it lies.
    pub(crate) fn in_place(self: &Arc<Self>, slot: Slot, len: usize, check: u32) -> Frame {
        let (pool, body) = (Arc::clone(self), Body::Slot(slot));
        Frame { body, len: len as u32, check, arrived: Nanos::ZERO, came_with: None, pool }
    }

    /// A frame with these bytes and this check word.
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

/// Where a frame's bytes lie.
enum Body {
    /// A buffer of the pool.
    Lines(Vec<Line>),
    /// Memory that is shared with the process that has sent it.
    Slot(Slot),
}

/// A lease of a buffer; dropping it gives the buffer back. Aligned to 64 bytes.
pub struct Frame {
    body: Body,
    len: u32,
    /// A word that both ends of an operation compute alike, so that mismatched operations are noticed.
    pub check: u32,
    /// When it arrived, on the receiver's clock; set by the transport.
    pub arrived: Nanos,
    /// The header with which it came over a socket, for whoever passes it on unchanged.
    pub(crate) came_with: Option<Box<[u8; HEADER_BYTES]>>,
    pool: Arc<Pool>,
}

impl Frame {
    /// The payload.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.body {
            Body::Lines(lines) => &bytemuck::cast_slice(lines)[..self.len()],
            Body::Slot(slot) => slot.bytes(self.len()),
        }
    }

    /// The payload, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.came_with = None;
        let len = self.len();
        match &mut self.body {
            Body::Lines(lines) => &mut bytemuck::cast_slice_mut(lines)[..len],
            Body::Slot(slot) => slot.bytes_mut(len),
        }
    }

    /// Length of the payload in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there is no payload.
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
        // A slot goes back by itself.
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
        // Four of them are the least queue, and must stay below what the inbox counts for one.
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
