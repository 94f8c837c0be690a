//! Memory of a cpu device: zeroed once when it comes from the system, aligned to 256 bytes, and kept for reuse by size,
//! so that a steady-state training step allocates nothing.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::backend::Storage;
use crate::{Result, TensorError};

const ALIGN: usize = 256;
/// Sizes are rounded up to this, so that nearly equal sizes share buffers.
const GRAIN: usize = 4096;

/// One buffer.
#[derive(Debug)]
struct Buffer {
    pointer: NonNull<u8>,
    layout: Layout,
}

#[expect(unsafe_code, reason = "owns raw memory")]
// SAFETY: a buffer owns its memory; who reads and writes it is settled by the views of its tensor.
unsafe impl Send for Buffer {}
#[expect(unsafe_code, reason = "owns raw memory")]
// SAFETY: as above; the buffer itself gives nothing away but its address.
unsafe impl Sync for Buffer {}

impl Storage for Buffer {
    fn host(&self) -> Option<(NonNull<u8>, usize)> {
        Some((self.pointer, self.layout.size()))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        #[expect(unsafe_code, reason = "owns raw memory")]
        // SAFETY: allocated with this layout in `Pool::take`, and freed once.
        unsafe {
            dealloc(self.pointer.as_ptr(), self.layout);
        }
    }
}

#[derive(Debug, Default)]
struct Free {
    by_size: BTreeMap<usize, Vec<Box<dyn Storage>>>,
    held: usize,
    peak: usize,
}

/// The buffers of one device.
#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<Free>);

impl Buffers {
    pub(super) fn take(&self, bytes: usize) -> Result<Box<dyn Storage>> {
        let out_of_memory = || TensorError::OutOfMemory { device: "cpu".to_owned(), bytes };
        let size = bytes.max(1).checked_next_multiple_of(GRAIN).ok_or_else(out_of_memory)?;
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = free.by_size.get_mut(&size).and_then(Vec::pop) {
            return Ok(buffer);
        }
        let layout = Layout::from_size_align(size, ALIGN).map_err(|_| out_of_memory())?;
        #[expect(unsafe_code, reason = "owns raw memory")]
        // SAFETY: the size is not zero.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        free.held += size;
        free.peak = free.peak.max(free.held);
        Ok(Box::new(Buffer { pointer, layout }))
    }

    pub(super) fn give(&self, buffer: Box<dyn Storage>) {
        let size = buffer.host().map_or(0, |(_, size)| size);
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.by_size.entry(size).or_default().push(buffer);
    }

    pub(super) fn memory(&self) -> (usize, usize) {
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (free.held, free.peak)
    }
}
