//! The sealed memory file and its mapping. All pointers into shared memory are created here.
#![expect(unsafe_code, reason = "shared memory is mapped and reached through pointers")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Size in bytes of a large slot, which holds a full frame.
pub(super) const LARGE_SLOT: usize = crate::FRAME_BYTES;
/// Number of large slots per direction, for frames that do not fit into a small one: enough for two turns of a
/// ring collective that sends four frames per turn.
pub(super) const LARGE_SLOTS: usize = 8;
/// Size in bytes of a small slot.
pub(super) const SMALL_SLOT: usize = 4096;
/// Number of small slots per direction.
pub(super) const SMALL_SLOTS: usize = 64;
/// Number of slots per direction; the small ones come first.
pub(super) const SLOTS: usize = SMALL_SLOTS + LARGE_SLOTS;
/// Maximum number of frames that were handed over and not read yet.
pub(super) const DEPTH: usize = 128;

/// Number of 64-bit words in an entry: four of the frame's header, and the slot's index.
pub(super) const WORDS: usize = 5;

/// A value alone in its cache line.
#[repr(C, align(64))]
pub(super) struct CacheLine<T>(pub(super) T);

/// Positions and entries of a direction. All fields are atomic, because the peer may write any bytes at any
/// time.
#[repr(C, align(64))]
pub(super) struct Ring {
    /// Number of entries written; set by the producer.
    pub(super) tail: CacheLine<AtomicU64>,
    /// Number of entries read; set by the consumer.
    pub(super) head: CacheLine<AtomicU64>,
    /// Not 0 while the consumer is blocked or about to block.
    pub(super) asleep: CacheLine<AtomicU32>,
    /// Not 0 while the producer waits for a free slot or entry.
    pub(super) starved: CacheLine<AtomicU32>,
    /// State of each slot: 0 is free, set by the consumer; 1 is full, set by the producer.
    pub(super) full: [CacheLine<AtomicU32>; SLOTS],
    pub(super) entries: [CacheLine<[AtomicU64; WORDS]>; DEPTH],
}

/// Size in bytes of the ring of a direction, which precedes its slots.
const RING_BYTES: usize = size_of::<Ring>().next_multiple_of(4096);
/// Size in bytes of a direction: its ring and its slots.
const DIRECTION_BYTES: usize = RING_BYTES + SMALL_SLOTS * SMALL_SLOT + LARGE_SLOTS * LARGE_SLOT;
/// Bytes of memory that two processes of one machine share for their messages: both directions.
pub const SEGMENT_BYTES: usize = 2 * DIRECTION_BYTES;

/// Sender and receiver of a direction. The maker is the process that created the segment, the guest the other
/// one.
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

/// A mapped memory file. The system frees it when no process maps it any more, also if processes are killed.
pub(crate) struct Segment {
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to the process, not to a thread. Its contents are accessed by atomics, and by
// pointers whose users state why the access is exclusive.
unsafe impl Send for Segment {}
// SAFETY: the same as for `Send`.
unsafe impl Sync for Segment {}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Segment")
    }
}

/// Required seals. Without them a peer could shrink the file, and the next access would kill this process.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn unfit(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Segment {
    /// Creates a segment with all slots free. Returns it with the file to hand over.
    ///
    /// # Errors
    /// If there is not enough memory. All of it is allocated now, so that no later access can fail.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("farflung", flags)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, SEGMENT_BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok((Self::map(file.as_fd())?, file))
    }

    /// Maps the segment that a peer created.
    ///
    /// # Errors
    /// If the file is not sealed or has a different size.
    pub(crate) fn of_peer(file: BorrowedFd<'_>) -> io::Result<Self> {
        if !rustix::fs::fcntl_get_seals(file)?.contains(SEALS) {
            return Err(unfit("the memory file is not sealed"));
        }
        if u64::try_from(rustix::fs::fstat(file)?.st_size) != Ok(SEGMENT_BYTES as u64) {
            return Err(unfit("the memory file has a wrong size"));
        }
        // Allocates the pages that the maker has not allocated, so that no later access can fail.
        rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, SEGMENT_BYTES as u64)?;
        Self::map(file)
    }

    fn map(file: BorrowedFd<'_>) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the system chooses the address, so no existing mapping is replaced.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), SEGMENT_BYTES, protection, flags, file, 0) }?;
        Ok(Self {
            base: NonNull::new(base.cast()).ok_or_else(|| unfit("the memory was mapped at address 0"))?,
        })
    }

    /// Returns the positions and entries of a direction.
    pub(super) fn ring(&self, direction: Direction) -> &Ring {
        // SAFETY: the ring lies within the mapping, which is valid as long as `self`. It is aligned, because a
        // mapping begins at a page and offsets are whole pages. All its fields are atomic.
        unsafe { self.base.add(direction.offset()).cast::<Ring>().as_ref() }
    }

    /// Returns the address of a slot, aligned to 4096, and its length in bytes.
    ///
    /// # Panics
    /// If there is no such slot.
    pub(super) fn slot(&self, direction: Direction, slot: usize) -> (NonNull<u8>, usize) {
        assert!(slot < SLOTS, "slot {slot} does not exist");
        let slots = direction.offset() + RING_BYTES;
        let (at, len) = match slot.checked_sub(SMALL_SLOTS) {
            None => (slots + slot * SMALL_SLOT, SMALL_SLOT),
            Some(large) => (slots + SMALL_SLOTS * SMALL_SLOT + large * LARGE_SLOT, LARGE_SLOT),
        };
        // SAFETY: the slots of both directions lie within the mapping.
        (unsafe { self.base.add(at) }, len)
    }

    /// Copies bytes into a slot.
    ///
    /// # Panics
    /// If there is no such slot, or it is too short.
    pub(super) fn write(&self, direction: Direction, slot: usize, bytes: &[u8]) {
        let (to, len) = self.slot(direction, slot);
        assert!(bytes.len() <= len, "the slot has only {len} bytes");
        // SAFETY: the slot is long enough and within the mapping. `bytes` is memory of this process and does
        // not overlap a free slot. The consumer does not read a free slot.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the segment was mapped with this length, and no borrow of it exists any more. If unmapping
        // fails, the mapping stays until the process ends.
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
            // SAFETY: the address lies within the mapping, which still exists, and nothing writes to it now.
            assert_eq!(unsafe { at.cast::<[u8; 3]>().read() }, *b"abc");
        }
        assert!(
            std::panic::catch_unwind(|| own.write(Direction::MakerToGuest, 0, &[0; SMALL_SLOT + 1])).is_err()
        );
    }
}
