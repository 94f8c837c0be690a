//! Counts allocations: the program's allocator counts on threads that ask for it ([`counted`]), or for each
//! rank of a job ([`by_rank`]).

mod ranks;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

pub(crate) use ranks::{by_rank, this_is_rank};

/// The system's allocator, with counters.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    /// Allocations of this thread since [`counted`] began; `None` if it is not counting.
    static COUNT: Cell<Option<Count>> = const { Cell::new(None) };
}

/// Allocations of one thread during [`counted`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    /// Bytes allocated, including those that were freed again.
    pub(crate) total: usize,
    /// Largest number of bytes that were allocated and not yet freed at one time.
    pub(crate) peak: usize,
    held: usize,
}

fn count(freed: usize, allocated: usize) {
    let step = |count: Count| {
        // A freed allocation may be from before the counting began.
        let held = count.held.saturating_sub(freed) + allocated;
        Count { total: count.total + allocated, peak: count.peak.max(held), held }
    };
    // A thread that is ending has no counter any more, and may still allocate.
    let _ = COUNT.try_with(|count| count.set(count.get().map(step)));
}

#[expect(unsafe_code, reason = "`GlobalAlloc` is an unsafe trait")]
// SAFETY: every call goes to the system allocator. Counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller keeps the contract of this function, which is that of `System`.
        let at = unsafe { System.alloc(layout) };
        ranks::allocated(at.addr(), layout);
        at
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller keeps the contract, which is that of `System`.
        let at = unsafe { System.alloc_zeroed(layout) };
        ranks::allocated(at.addr(), layout);
        at
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(layout.size(), 0);
        ranks::freed(at.addr());
        // SAFETY: the caller keeps the contract, which is that of `System`.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout.size(), size);
        let owner = ranks::moves(at.addr());
        // SAFETY: the caller keeps the contract, which is that of `System`.
        let moved = unsafe { System.realloc(at, layout, size) };
        // If there was no memory, the old allocation is still valid.
        let (at_now, size_now) = if moved.is_null() { (at, layout.size()) } else { (moved, size) };
        if let Ok(layout) = Layout::from_size_align(size_now, layout.align()) {
            ranks::moved(at_now.addr(), layout, owner);
        }
        moved
    }
}

/// Runs `work`, and returns its result and what this thread allocated in it.
pub(crate) fn counted<T>(work: impl FnOnce() -> T) -> (T, Count) {
    COUNT.set(Some(Count::default()));
    let result = work();
    (result, COUNT.replace(None).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allocated_is_counted() {
        let (kept, count) = counted(|| {
            drop(vec![0_u8; 1000]);
            Vec::<u8>::with_capacity(24)
        });
        assert_eq!((kept.capacity(), count), (24, Count { total: 1024, peak: 1000, held: 24 }));
        assert_eq!(counted(|| ()).1, Count::default());
    }
}
