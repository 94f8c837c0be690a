//! The sealed memory file and its mapping. All pointers into shared memory are made here.
#![expect(unsafe_code, reason = "shared memory is mapped and reached through pointers")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes of a slot for a whole frame.
pub(super) const LARGE_SLOT: usize = crate::FRAME_BYTES;
/// Slots for frames that do not fit into a small one: two turns of a ring of four frames.
pub(super) const LARGE_SLOTS: usize = 8;
/// Bytes of a slot for a short frame.
pub(super) const SMALL_SLOT: usize = 4096;
/// Slots for short frames.
pub(super) const SMALL_SLOTS: usize = 64;
/// All slots of a direction, the small ones first.
pub(super) const SLOTS: usize = SMALL_SLOTS + LARGE_SLOTS;
/// Frames that may be handed over and not be looked at yet.
pub(super) const DEPTH: usize = 128;

/// Words of an entry: the header of the frame, and its slot.
pub(super) const WORDS: usize = 5;

/// What no other value shares a cache line with.
#[repr(C, align(64))]
pub(super) struct Line<T>(pub(super) T);

/// The positions of a direction, and what is handed over. Every field is atomic, so that any bytes are valid
/// and none is read twice by accident.
#[repr(C, align(64))]
pub(super) struct Ring {
    /// Entries written, by the producer.
    pub(super) tail: Line<AtomicU64>,
    /// Entries read, by the consumer.
    pub(super) head: Line<AtomicU64>,
    /// Not 0: the consumer is blocked, or about to be.
    pub(super) asleep: Line<AtomicU32>,
    /// Not 0: the producer waits for a free slot or entry.
    pub(super) starved: Line<AtomicU32>,
    /// By slot: 0 is free, set by the consumer; 1 is full, set by the producer.
    pub(super) full: [Line<AtomicU32>; SLOTS],
    pub(super) entries: [Line<[AtomicU64; WORDS]>; DEPTH],
}

/// Bytes of a direction before its slots.
const RING_BYTES: usize = size_of::<Ring>().next_multiple_of(4096);
/// Bytes of a direction.
const DIRECTION_BYTES: usize = RING_BYTES + SMALL_SLOTS * SMALL_SLOT + LARGE_SLOTS * LARGE_SLOT;
/// Bytes of a segment: both directions.
const SEGMENT_BYTES: usize = 2 * DIRECTION_BYTES;

/// From whom to whom: the process that made the segment is the maker, the other one the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    MakerToGuest,
    GuestToMaker,
}

impl Direction {
    const fn offset(self) -> usize {
        match self {
            Self::MakerToGuest => 0,
            Self::GuestToMaker => DIRECTION_BYTES,
        }
    }
}

/// A mapped memory file. It is gone when the last process that maps it has ended, however that ends.
pub(crate) struct Segment {
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to the process, not to a thread; what lies in it is reached by atomics, and by
// pointers whose users say why nobody else uses them.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Segment")
    }
}

/// Seals without which a peer could take memory away that is mapped here, which would kill this process.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn unfit(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Segment {
    /// Makes one, all free, and the file to be handed over.
    ///
    /// # Errors
    /// If there is no memory for it: all of it is taken now, so that no later access can fail.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("farflung", flags)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, SEGMENT_BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok((Self::map(file.as_fd())?, file))
    }

    /// Maps a peer's.
    ///
    /// # Errors
    /// If it is not sealed, or of another size.
    pub(crate) fn of_peer(file: BorrowedFd<'_>) -> io::Result<Self> {
        if !rustix::fs::fcntl_get_seals(file)?.contains(SEALS) {
            return Err(unfit("a memory file that is not sealed"));
        }
        if u64::try_from(rustix::fs::fstat(file)?.st_size) != Ok(SEGMENT_BYTES as u64) {
            return Err(unfit("a memory file of another size"));
        }
        // Where its maker has left holes they are filled, so that no later access can fail.
        rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, SEGMENT_BYTES as u64)?;
        Self::map(file)
    }

    fn map(file: BorrowedFd<'_>) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the system chooses the place, so nothing that is mapped is replaced.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), SEGMENT_BYTES, protection, flags, file, 0) }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or_else(|| unfit("a mapping at address 0"))? })
    }

    /// The positions of a direction.
    pub(super) fn ring(&self, direction: Direction) -> &Ring {
        // SAFETY: the place lies within the mapping, which lives as long as `self`; it is aligned, since a
        // mapping begins at a page and offsets are whole pages; all fields are atomic.
        unsafe { self.base.add(direction.offset()).cast::<Ring>().as_ref() }
    }

    /// Where a slot lies, and its bytes. Aligned to 4096.
    ///
    /// # Panics
    /// If there is no such slot.
    pub(super) fn slot(&self, direction: Direction, slot: usize) -> (NonNull<u8>, usize) {
        assert!(slot < SLOTS, "slot {slot}");
        let slots = direction.offset() + RING_BYTES;
        let (at, len) = match slot.checked_sub(SMALL_SLOTS) {
            None => (slots + slot * SMALL_SLOT, SMALL_SLOT),
            Some(large) => (slots + SMALL_SLOTS * SMALL_SLOT + large * LARGE_SLOT, LARGE_SLOT),
        };
        // SAFETY: the slots of both directions lie within the mapping.
        (unsafe { self.base.add(at) }, len)
    }

    /// Writes into a slot.
    ///
    /// # Panics
    /// If there is no such slot, or it is too short.
    pub(super) fn write(&self, direction: Direction, slot: usize, bytes: &[u8]) {
        let (to, len) = self.slot(direction, slot);
        assert!(bytes.len() <= len, "a slot of {len} bytes");
        // SAFETY: the slot is long enough and within the mapping; `bytes` is memory of this process and not of
        // a free slot. The consumer does not read a slot that is free.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nothing borrows from it any more.
        // A mapping that cannot be taken away stays until the process ends.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), SEGMENT_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_could_be_cut_short_or_has_another_size_is_not_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&file, SEGMENT_BYTES as u64).unwrap();
        assert!(Segment::of_peer(file.as_fd()).unwrap_err().to_string().contains("sealed"));
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert!(Segment::of_peer(file.as_fd()).is_err());
        rustix::fs::fcntl_add_seals(&file, SEALS).unwrap();
        assert!(Segment::of_peer(file.as_fd()).is_ok());
        let short = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&short, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&short, SEALS).unwrap();
        assert!(Segment::of_peer(short.as_fd()).unwrap_err().to_string().contains("size"));
        let pipe = io::pipe().unwrap().0;
        assert!(Segment::of_peer(pipe.as_fd()).is_err());
    }

    #[test]
    fn what_is_made_is_sealed_and_both_see_it() {
        let (own, file) = Segment::new().unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let theirs = Segment::of_peer(file.as_fd()).unwrap();
        for (direction, slot) in [(Direction::MakerToGuest, 0), (Direction::GuestToMaker, SLOTS - 1)] {
            own.write(direction, slot, b"abc");
            let (at, _) = theirs.slot(direction, slot);
            // SAFETY: within the mapping, which lives, and nobody writes at this time.
            assert_eq!(unsafe { at.cast::<[u8; 3]>().read() }, *b"abc");
        }
        assert!(
            std::panic::catch_unwind(|| own.write(Direction::MakerToGuest, 0, &[0; SMALL_SLOT + 1])).is_err()
        );
    }
}
