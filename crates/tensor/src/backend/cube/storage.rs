//! Device buffers, kept for reuse by size: after the first training step, no more memory is requested from the
//! driver.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use cubecl::server::Handle;

use crate::backend::Storage;

/// Granularity of buffer sizes in bytes, and alignment of kernel arguments that every device supports.
pub(super) const ALIGN: usize = 256;

/// A device buffer.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) handle: Handle,
    pub(super) bytes: usize,
}

impl Storage for Buffer {
    fn host(&self) -> Option<(NonNull<u8>, usize)> {
        None
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

#[derive(Debug, Default)]
struct FreeBuffers {
    free: BTreeMap<usize, Vec<Handle>>,
    held: usize,
    peak: usize,
}

/// Buffers kept for reuse, and the total number of bytes allocated.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<FreeBuffers>);

impl Pool {
    fn lock(&self) -> std::sync::MutexGuard<'_, FreeBuffers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a kept buffer of exactly this size.
    pub(super) fn take(&self, bytes: usize) -> Option<Buffer> {
        let handle = self.lock().free.get_mut(&bytes)?.pop()?;
        Some(Buffer { handle, bytes })
    }

    /// Counts a buffer newly allocated by the driver.
    pub(super) fn count_allocated(&self, bytes: usize) {
        let mut kept = self.lock();
        kept.held += bytes;
        kept.peak = kept.peak.max(kept.held);
    }

    /// Keeps a buffer for reuse. It may be reused at once, because work queued on it runs before work queued
    /// later.
    pub(super) fn give(&self, buffer: Buffer) {
        self.lock().free.entry(buffer.bytes).or_default().push(buffer.handle);
    }

    /// Drops all kept buffers, to make room on a full device.
    pub(super) fn forget(&self) {
        let mut kept = self.lock();
        let free: usize = kept.free.iter().map(|(bytes, handles)| bytes * handles.len()).sum();
        kept.held -= free;
        kept.free.clear();
    }

    pub(super) fn memory(&self) -> (usize, usize) {
        let kept = self.lock();
        (kept.held, kept.peak)
    }
}
