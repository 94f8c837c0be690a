//! Buffers of a device: kept for reuse by size, so that a steady-state training step asks the driver for
//! nothing.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use cubecl::server::Handle;

use crate::backend::Storage;

/// Sizes are rounded up to this; it is also where a binding may start on every device.
pub(super) const ALIGN: usize = 256;

/// A buffer of a device.
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

/// The buffers that nobody uses now, and how much there is of all.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Kept>);

impl Pool {
    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A kept buffer of this size.
    pub(super) fn take(&self, bytes: usize) -> Option<Buffer> {
        let handle = self.kept().free.get_mut(&bytes)?.pop()?;
        Some(Buffer { handle, bytes })
    }

    /// Counts a buffer that the driver gave.
    pub(super) fn grew(&self, bytes: usize) {
        let mut kept = self.kept();
        kept.held += bytes;
        kept.peak = kept.peak.max(kept.held);
    }

    /// Keeps a buffer. Work that was queued on it runs before work queued later, so it may be taken at once.
    pub(super) fn give(&self, buffer: Buffer) {
        self.kept().free.entry(buffer.bytes).or_default().push(buffer.handle);
    }

    /// Lets go of all kept buffers, when the device is full.
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
