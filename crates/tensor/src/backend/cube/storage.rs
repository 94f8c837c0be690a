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
}

#[derive(Debug, Default)]
struct Kept {
    free: BTreeMap<usize, Vec<Handle>>,
    held: usize,
    peak: usize,
}

/// Buffers kept for reuse, and the total number of bytes allocated.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Kept>);

impl Pool {
    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a kept buffer of exactly this size.
    pub(super) fn take(&self, bytes: usize) -> Option<Buffer> {
        let handle = self.kept().free.get_mut(&bytes)?.pop()?;
        Some(Buffer { handle, bytes })
    }

    /// Counts a buffer newly allocated by the driver.
    pub(super) fn grew(&self, bytes: usize) {
        let mut kept = self.kept();
        kept.held += bytes;
        kept.peak = kept.peak.max(kept.held);
    }

    /// Keeps a buffer for reuse. It may be reused at once, because work queued on it runs before work queued
    /// later.
    pub(super) fn give(&self, buffer: Buffer) {
        self.kept().free.entry(buffer.bytes).or_default().push(buffer.handle);
    }

    /// Drops all kept buffers, to make room on a full device.
    pub(super) fn forget(&self) {
        let mut kept = self.kept();
        let free: usize = kept.free.iter().map(|(bytes, handles)| bytes * handles.len()).sum();
        kept.held -= free;
        kept.free.clear();
    }

    pub(super) fn memory(&self) -> (usize, usize) {
        let kept = self.kept();
        (kept.held, kept.peak)
    }
}
