//! Memory of a CPU device. Buffers are cut from large chunks, zeroed once, aligned to [`GRAIN`] bytes, and
//! kept for reuse by size: after the first training step, nothing is allocated.
//!
//! On Linux, chunks request huge pages: matrix products read matrices across their rows, and with 4 KiB pages
//! such reads wait for page-table lookups. Buffers smaller than a chunk are placed one after the other. If each
//! began at a huge page, buffers that are read together would compete for the same cache lines.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::Storage;
use crate::{Result, TensorError};

/// Granularity of buffer sizes in bytes, so that nearly equal sizes share buffers; also the alignment of
/// buffers.
pub(in crate::backend) const GRAIN: usize = 4096;
/// Size of a huge page on most machines; alignment of chunks.
const HUGE_PAGE: usize = 2 << 20;
/// Size of a chunk, unless a single buffer is larger. Linux provides physical memory only for those huge pages
/// of a chunk that buffers were cut from.
const CHUNK: usize = 32 << 20;

/// Memory from the system allocator, uninitialised.
#[derive(Debug)]
struct Chunk {
    pointer: NonNull<u8>,
    layout: Layout,
}

#[expect(unsafe_code, reason = "owns raw memory")]
// SAFETY: a chunk owns its memory and exposes only its address; each part of it belongs to one buffer.
unsafe impl Send for Chunk {}
#[expect(unsafe_code, reason = "owns raw memory")]
// SAFETY: as for `Send`.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Allocates a chunk; `None` if the system cannot. `bytes` must not be zero.
    fn new(bytes: usize) -> Option<Self> {
        let size = bytes.checked_next_multiple_of(HUGE_PAGE)?;
        let layout = Layout::from_size_align(size, HUGE_PAGE).ok()?;
        #[expect(unsafe_code, reason = "owns raw memory")]
        // SAFETY: the size is not zero.
        let pointer = NonNull::new(unsafe { alloc(layout) })?;
        #[cfg(target_os = "linux")]
        {
            use rustix::mm::{Advice, madvise};
            #[expect(unsafe_code, reason = "advice on raw memory")]
            // SAFETY: the chunk owns the memory, and this advice does not change its contents. If the kernel
            // does not support the advice, memory is used without huge pages.
            let _ = unsafe { madvise(pointer.as_ptr().cast(), size, Advice::LinuxHugepage) };
        }
        Some(Self { pointer, layout })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        #[expect(unsafe_code, reason = "owns raw memory")]
        // SAFETY: allocated with this layout in `Chunk::new`, and freed once: every buffer cut from it has been
        // dropped.
        unsafe {
            dealloc(self.pointer.as_ptr(), self.layout);
        }
    }
}

/// A part of a chunk.
#[derive(Debug)]
struct Buffer {
    chunk: Arc<Chunk>,
    start: usize,
    len: usize,
}

impl Storage for Buffer {
    fn host(&self) -> Option<(NonNull<u8>, usize)> {
        #[expect(unsafe_code, reason = "a part of raw memory")]
        // SAFETY: the part is within the chunk.
        Some((unsafe { self.chunk.pointer.add(self.start) }, self.len))
    }

    fn bytes(&self) -> usize {
        self.len
    }
}

#[derive(Debug, Default)]
struct Free {
    by_size: BTreeMap<usize, Vec<Box<dyn Storage>>>,
    held: usize,
    peak: usize,
    /// The chunk from which the next buffer is cut, and the first free byte of it.
    rest: Option<(Arc<Chunk>, usize)>,
}

impl Free {
    /// Cuts a new buffer of zeros; `None` if the system is out of memory. `len` must be a multiple of
    /// [`GRAIN`].
    fn cut(&mut self, len: usize) -> Option<Buffer> {
        let rest = self.rest.take_if(|(chunk, start)| chunk.layout.size() - *start >= len);
        let (chunk, start) = match rest {
            Some(rest) => rest,
            // If the system cannot allocate a whole chunk, try the buffer alone.
            None => (Arc::new(Chunk::new(len.max(CHUNK)).or_else(|| Chunk::new(len))?), 0),
        };
        let end = start + len;
        let room = |(chunk, start): &(Arc<Chunk>, usize)| chunk.layout.size() - start;
        let rest = (Arc::clone(&chunk), end);
        if self.rest.as_ref().is_none_or(|old| room(old) < room(&rest)) {
            self.rest = Some(rest);
        }
        let buffer = Buffer { chunk, start, len };
        let (pointer, len) = buffer.host()?;
        #[expect(unsafe_code, reason = "initialises raw memory")]
        // SAFETY: the part belongs to this buffer alone.
        unsafe {
            pointer.write_bytes(0, len);
        }
        self.held += len;
        self.peak = self.peak.max(self.held);
        Some(buffer)
    }
}

/// All buffers of one device.
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
        Ok(Box::new(free.cut(size).ok_or_else(out_of_memory)?))
    }

    pub(super) fn give(&self, buffer: Box<dyn Storage>) {
        let size = buffer.bytes();
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.by_size.entry(size).or_default().push(buffer);
    }

    pub(super) fn memory(&self) -> (usize, usize) {
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (free.held, free.peak)
    }
}

#[cfg(test)]
mod tests {
    use super::{Buffers, CHUNK, GRAIN};
    use std::collections::HashSet;

    #[test]
    #[expect(unsafe_code, reason = "reads and writes raw memory")]
    fn buffers_are_zeros_of_their_own_and_outlive_the_pool() {
        let pool = Buffers::default();
        let sizes =
            [1, GRAIN, CHUNK - GRAIN, 5 * GRAIN, CHUNK + 1, GRAIN + 1, CHUNK / 2, CHUNK / 2, 3, 2 * CHUNK];
        let buffers: Vec<_> = sizes.iter().map(|&bytes| pool.take(bytes).unwrap()).collect();
        let held: usize = sizes.iter().map(|bytes| bytes.next_multiple_of(GRAIN)).sum();
        assert_eq!(pool.memory(), (held, held));
        drop(pool);
        let mut starts = HashSet::new();
        for (buffer, bytes) in buffers.iter().zip(sizes) {
            let (pointer, len) = buffer.host().unwrap();
            assert_eq!((len, pointer.addr().get() % GRAIN), (bytes.next_multiple_of(GRAIN), 0));
            // SAFETY: only the test uses the buffer, and it has this length.
            let contents = unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), len) };
            assert!(contents.iter().all(|&x| x == 0), "no earlier buffer wrote here");
            contents.fill(1);
            assert!((0..len / GRAIN).all(|page| starts.insert(pointer.addr().get() + page * GRAIN)));
        }
    }

    #[test]
    fn a_buffer_that_was_given_back_is_taken_again() {
        let pool = Buffers::default();
        let first = pool.take(10 * GRAIN).unwrap();
        let at = first.host().unwrap();
        pool.give(first);
        assert_eq!(pool.take(9 * GRAIN + 1).unwrap().host().unwrap(), at);
        assert_eq!(pool.memory(), (10 * GRAIN, 10 * GRAIN));
        assert!(pool.take(usize::MAX - 2 * CHUNK).is_err(), "more than there are addresses");
    }
}
