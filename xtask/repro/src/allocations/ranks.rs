//! Counts the memory that each rank of a job holds. Every allocation is stored with the rank that made it,
//! since another rank may free it (a message, for example).
//!
//! Chunks from which the CPU device cuts its buffers are not counted. They are reserved 32 MiB at a time and
//! use memory only as buffers are cut from them, and the device counts those itself (`Device::memory`).

use std::alloc::Layout;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Allocations with at least this alignment are chunks of a device's buffers.
const CHUNK_ALIGN: usize = 2 << 20;
/// Capacity of the table, in allocations.
const CAPACITY: usize = 1 << 20;

thread_local! {
    /// Owner of this thread's allocations: its rank plus one, or 0 if it belongs to no rank.
    static OWNER: Cell<usize> = const { Cell::new(0) };
    /// True while this thread uses the table. The thread's allocations are not counted then.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

static COUNTING: AtomicBool = AtomicBool::new(false);
static TABLE: Mutex<Option<Table>> = Mutex::new(None);

/// Memory that a rank held, without its device's chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RankCount {
    /// Largest number of bytes held at one time since the rank last called [`this_is_rank`].
    pub(crate) peak: usize,
    held: usize,
}

/// A stored allocation. Its address is 0 in an empty slot.
#[derive(Clone, Copy, Default)]
struct Entry {
    address: usize,
    size: usize,
    owner: usize,
}

struct Table {
    entries: Vec<Entry>,
    used: usize,
    /// True if an allocation found no free slot.
    full: bool,
    /// One count for each owner. The first is for threads that belong to no rank.
    counts: Vec<RankCount>,
}

/// A hash table with linear probing. Removal leaves no mark: later entries move back to fill the gap.
impl Table {
    fn find(&self, address: usize) -> Option<usize> {
        let mut at = slot(address);
        while self.entries[at].address != address {
            if self.entries[at].address == 0 {
                return None;
            }
            at = (at + 1) % CAPACITY;
        }
        Some(at)
    }

    fn add(&mut self, address: usize, size: usize, owner: usize) {
        // One slot stays empty, so that every search ends.
        if self.used + 1 >= CAPACITY {
            self.full = true;
            return;
        }
        let mut at = slot(address);
        while self.entries[at].address != 0 {
            at = (at + 1) % CAPACITY;
        }
        self.used += 1;
        self.entries[at] = Entry { address, size, owner };
        let count = &mut self.counts[owner];
        count.held += size;
        count.peak = count.peak.max(count.held);
    }

    fn remove(&mut self, address: usize) -> Option<usize> {
        let mut gap = self.find(address)?;
        let Entry { size, owner, .. } = self.entries[gap];
        self.counts[owner].held -= size;
        self.used -= 1;
        let mut at = gap;
        loop {
            at = (at + 1) % CAPACITY;
            let place = self.entries[at];
            if place.address == 0 {
                break;
            }
            // The entry may move to the gap if its own slot is not after the gap.
            let from = slot(place.address);
            if (at + CAPACITY - from) % CAPACITY >= (at + CAPACITY - gap) % CAPACITY {
                self.entries[gap] = place;
                gap = at;
            }
        }
        self.entries[gap] = Entry::default();
        Some(owner)
    }
}

fn slot(address: usize) -> usize {
    (address >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (usize::BITS - CAPACITY.ilog2())
}

fn table() -> MutexGuard<'static, Option<Table>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work` with the table and this thread's owner, unless counting is off or this thread is already using
/// the table.
fn with(work: impl FnOnce(&mut Table, usize)) {
    if !COUNTING.load(Ordering::Acquire) || INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) {
        return;
    }
    if let Some(table) = table().as_mut() {
        let owner = OWNER.try_with(Cell::get).unwrap_or(0);
        work(table, if owner < table.counts.len() { owner } else { 0 });
    }
    INSIDE.set(false);
}

pub(super) fn allocated(address: usize, layout: Layout) {
    if address != 0 && layout.align() < CHUNK_ALIGN {
        with(|table, owner| table.add(address, layout.size(), owner));
    }
}

pub(super) fn freed(address: usize) {
    with(|table, _| {
        table.remove(address);
    });
}

/// Removes an allocation that is about to be reallocated, since another thread may get its address at once.
/// Returns its owner.
pub(super) fn moves(address: usize) -> Option<usize> {
    let mut found = None;
    with(|table, _| found = table.remove(address));
    found
}

pub(super) fn moved(address: usize, layout: Layout, owner: Option<usize>) {
    with(|table, mine| table.add(address, layout.size(), owner.unwrap_or(mine)));
}

/// Assigns this thread's further allocations to the rank, and resets the rank's peak to what it holds now.
pub(crate) fn this_is_rank(rank: usize) {
    OWNER.set(rank + 1);
    with(|table, owner| table.counts[owner].peak = table.counts[owner].held);
}

/// Runs `work`, in which the threads of `ranks` ranks call [`this_is_rank`]. Returns the result of `work`, what
/// each rank held, and last what threads without a rank held.
///
/// Only one job can be counted at a time.
pub(crate) fn by_rank<T>(ranks: usize, work: impl FnOnce() -> T) -> (T, Vec<RankCount>) {
    let made = Table {
        entries: vec![Entry::default(); CAPACITY],
        used: 0,
        full: false,
        counts: vec![RankCount::default(); ranks + 1],
    };
    *table() = Some(made);
    COUNTING.store(true, Ordering::Release);
    let result = work();
    COUNTING.store(false, Ordering::Release);
    let made = table().take();
    assert!(
        made.as_ref().is_none_or(|table| !table.full),
        "more allocations at one time than the table has slots"
    );
    let mut counts = made.map_or_else(Vec::new, |table| table.counts);
    counts.rotate_left(1);
    (result, counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_rank_frees_was_still_held_by_its_maker() {
        let (sent, received) = std::sync::mpsc::channel::<Vec<u8>>();
        let ((), counts) = by_rank(2, || {
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    this_is_rank(0);
                    sent.send(vec![0; 100_000]).unwrap();
                });
                scope.spawn(move || {
                    this_is_rank(1);
                    drop(received.recv().unwrap());
                    drop(vec![0_u8; 50_000]);
                });
            });
        });
        assert!((100_000..110_000).contains(&counts[0].peak), "{counts:?}");
        assert!((50_000..60_000).contains(&counts[1].peak), "{counts:?}");
        assert!(counts[0].held < 10_000 && counts[1].held < 10_000, "{counts:?}");
    }
}
