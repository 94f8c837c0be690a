//! What wakes a thread that is blocked in `poll`, in this process or another: an event counter of the system.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl};

/// An event counter that never blocks.
#[derive(Debug)]
pub(crate) struct Doorbell(OwnedFd);

impl Doorbell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// A peer's.
    ///
    /// # Errors
    /// If writing to it could block this process.
    pub(crate) fn of_peer(fd: OwnedFd) -> io::Result<Self> {
        if fcntl_getfl(&fd)?.contains(OFlags::NONBLOCK) {
            Ok(Self(fd))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "a doorbell that may block"))
        }
    }

    /// Wakes whoever polls it.
    pub(crate) fn ring(&self) {
        // A full counter has woken the other side already, and a peer that is gone needs no waking.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Forgets that it rang.
    pub(crate) fn quiet(&self) {
        // One that has not rung has nothing to forget.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
