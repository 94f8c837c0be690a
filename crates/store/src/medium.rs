//! The file under a store: positioned reads and writes that do not go through the page cache where the file
//! system allows that.

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// What a store is written to. A test can give one that fails.
pub trait Medium: Debug + Send + Sync {
    /// Reads bytes from an offset on. Returns how many.
    ///
    /// Errors: those of the device.
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes bytes from an offset on. Returns how many.
    ///
    /// Errors: those of the device.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize>;

    /// Returns when all that was written is on the device.
    ///
    /// Errors: those of the device. What was written before may then be lost.
    fn flush(&self) -> io::Result<()>;

    /// Reserves room up to a length.
    ///
    /// Errors: too little room.
    fn reserve(&self, bytes: u64) -> io::Result<()>;

    /// Returns the length in bytes.
    ///
    /// Errors: those of the device.
    fn length(&self) -> io::Result<u64>;

    /// Returns whether reads and writes bypass the page cache.
    fn is_direct(&self) -> bool {
        false
    }
}

/// A file that is read and written past the page cache (`O_DIRECT`), which keeps a machine's memory free and
/// writes at the speed of the disk; through the cache if the file system refuses that.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
    direct: AtomicBool,
}

impl DirectFile {
    /// Takes an open file.
    #[must_use]
    pub fn new(file: File) -> Self {
        let direct = AtomicBool::new(set_direct(&file, true));
        Self { file, direct }
    }

    /// Runs an operation, and repeats it through the page cache if the file system refuses it otherwise.
    fn run<T>(&self, mut operation: impl FnMut(&File) -> io::Result<T>) -> io::Result<T> {
        match operation(&self.file) {
            Err(error)
                if error.raw_os_error() == Some(Errno::INVAL.raw_os_error())
                    && self.direct.swap(false, Ordering::Relaxed) =>
            {
                set_direct(&self.file, false);
                operation(&self.file)
            }
            done => done,
        }
    }
}

/// Switches direct reads and writes of a file on or off. Returns whether that succeeded.
fn set_direct(file: &File, on: bool) -> bool {
    let flags = fcntl_getfl(file).map(|flags| if on { flags | DIRECT } else { flags - DIRECT });
    flags.and_then(|flags| fcntl_setfl(file, flags)).is_ok() && !DIRECT.is_empty()
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const DIRECT: OFlags = OFlags::DIRECT;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const DIRECT: OFlags = OFlags::empty();

impl Medium for DirectFile {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        self.run(|file| file.read_at(bytes, at))
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.run(|file| file.write_at(bytes, at))
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn reserve(&self, bytes: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            // This file system cannot reserve. A hole would fail later: the first generations fill it.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.file.set_len(bytes),
            done => Ok(done?),
        }
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }
}

/// Reads all of `bytes`.
pub(crate) fn read_all(medium: &dyn Medium, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match medium.read_at(bytes, at) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => (bytes, at) = (&mut bytes[read..], at + read as u64),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes`.
pub(crate) fn write_all(medium: &dyn Medium, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match medium.write_at(bytes, at) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => (bytes, at) = (&bytes[written..], at + written as u64),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
