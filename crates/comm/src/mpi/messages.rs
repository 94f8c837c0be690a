//! MPI messages: sends and receives of buffers. Independent of the format of frames.
#![expect(
    unsafe_code,
    reason = "MPI is a C library, and its requests use buffers after the call that starts them"
)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use farflung_base::PeerId;
use mpi::ffi;

use crate::Frame;

/// Proof that MPI is initialised and that no other thread calls it: it is kept behind a lock.
#[derive(Debug)]
pub(super) struct World(());

impl World {
    /// # Safety
    /// MPI must be initialised with at least `MPI_THREAD_SERIALIZED`, must not end before this is dropped, and
    /// there must be no other `World`.
    pub(super) unsafe fn begun() -> Self {
        Self(())
    }
}

/// Ends all processes of the job, including this one.
pub(super) fn abort(_: &World, code: u8) {
    // SAFETY: MPI is initialised and has not ended.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, c_int::from(code)) };
}

/// The two MPI tags used with each process. MPI keeps the order of messages in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Headers, followed by short payloads.
    Headers = 0,
    /// Long payloads.
    Payloads = 1,
}

/// Memory that a message is sent from or received into. Its bytes are on the heap, so they do not move when the
/// buffer does.
pub(super) enum Buffer {
    Short(Vec<u8>),
    Long(Frame),
}

impl Buffer {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Short(bytes) => bytes,
            Self::Long(frame) => frame.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Short(bytes) => bytes,
            Self::Long(frame) => frame.bytes_mut(),
        }
    }
}

/// A send or receive in progress. If it is dropped before it is complete, its buffer is leaked, because MPI may
/// still use it.
pub(super) struct Transfer {
    request: ffi::MPI_Request,
    /// `None` once the buffer has been handed back.
    buffer: Option<Buffer>,
}

// SAFETY: any thread may use MPI's requests, one at a time, because MPI is initialised with at least
// `MPI_THREAD_SERIALIZED`; a thread that uses a transfer has the `World`, which is behind a lock.
unsafe impl Send for Transfer {}

/// Returns the length as MPI's integer. A buffer is at most as long as a frame.
fn count(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).expect("a frame's length fits in a C int")
}

impl Transfer {
    /// Starts to send a buffer.
    pub(super) fn send(_: &World, to: PeerId, lane: Lane, buffer: Buffer) -> Self {
        let mut request = MaybeUninit::uninit();
        let bytes = buffer.bytes();
        let at = bytes.as_ptr().cast::<c_void>();
        let (to, lane) = (to.0.cast_signed(), lane as c_int);
        // SAFETY: MPI is initialised and has not ended, and the rank is in its communicator. The bytes neither
        // move nor change until the request is complete: the buffer is handed back only then, and not freed
        // before. Errors end the job, so the request was written.
        let request = unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            ffi::MPI_Isend(at, count(bytes), ffi::RSMPI_UINT8_T, to, lane, world, request.as_mut_ptr());
            request.assume_init()
        };
        Self { request, buffer: Some(buffer) }
    }

    /// Starts to receive at most as many bytes as the buffer has.
    pub(super) fn receive(_: &World, from: PeerId, lane: Lane, mut buffer: Buffer) -> Self {
        let mut request = MaybeUninit::uninit();
        let bytes = buffer.bytes_mut();
        let (at, length) = (bytes.as_mut_ptr().cast::<c_void>(), count(bytes));
        let (from, lane) = (from.0.cast_signed(), lane as c_int);
        // SAFETY: the same as in `send`; in addition, no code reads the bytes before the request is complete.
        let request = unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            ffi::MPI_Irecv(at, length, ffi::RSMPI_UINT8_T, from, lane, world, request.as_mut_ptr());
            request.assume_init()
        };
        Self { request, buffer: Some(buffer) }
    }

    /// Returns the buffer and the number of bytes received, once the request is complete. Returns `None` before
    /// that, and after the buffer was handed back. Each call lets MPI make progress.
    pub(super) fn poll(&mut self, _: &World) -> Option<(Buffer, usize)> {
        self.buffer.as_ref()?;
        let (mut over, mut length) = (0, 0);
        let mut status = MaybeUninit::uninit();
        // SAFETY: MPI is initialised and has not ended. The request is not complete, or the buffer would have
        // been handed back. If it is complete now, the status was written.
        unsafe {
            ffi::MPI_Test(&raw mut self.request, &raw mut over, status.as_mut_ptr());
            if over == 0 {
                return None;
            }
            ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &raw mut length);
        }
        Some((self.buffer.take()?, usize::try_from(length).unwrap_or(0)))
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // MPI may still use the buffer, so it is leaked.
        std::mem::forget(self.buffer.take());
    }
}
