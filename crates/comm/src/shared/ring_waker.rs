//! Wakes a thread, of this or another process, that is blocked in `poll`. Uses an event counter of the system
//! (eventfd).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl};

/// An event counter (eventfd) that never blocks.
#[derive(Debug)]
pub(crate) struct RingWaker(OwnedFd);

impl RingWaker {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// Wraps the descriptor that a peer sent.
    ///
    /// # Errors
    /// If a write to it could block this process.
    pub(crate) fn of_peer(fd: OwnedFd) -> io::Result<Self> {
        if fcntl_getfl(&fd)?.contains(OFlags::NONBLOCK) {
            Ok(Self(fd))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "writes to the peer's event descriptor may block"))
        }
    }

    /// Wakes the thread that polls this counter.
    pub(crate) fn ring(&self) {
        // Errors are ignored: if the counter is full, the other side was woken already, and a peer that is gone
        // needs no wake-up.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets the counter to 0.
    pub(crate) fn reset(&self) {
        // The error of a counter that is 0 is ignored.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for RingWaker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
