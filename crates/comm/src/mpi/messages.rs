//! MPI's messages: a buffer on its way to a process or from it. It does not depend on the format of frames.
#![expect(
    unsafe_code,
    reason = "MPI is a C library, and its requests use memory beyond the call that starts them"
)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use farflung_base::PeerId;
use mpi::ffi;

use crate::Frame;

/// Proof that MPI has begun and not ended, at a time when no other thread calls it: it stands behind a lock.
#[derive(Debug)]
pub(super) struct World(());

impl World {
    /// # Safety
    /// MPI has begun, with `MPI_THREAD_SERIALIZED` at least; it ends after this is dropped, and there is no
    /// other.
    pub(super) unsafe fn begun() -> Self {
        Self(())
    }
}

/// Ends all processes of the job, this one with it.
pub(super) fn abort(_: &World, code: u8) {
    // SAFETY: MPI has begun and not ended.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, c_int::from(code)) };
}

/// Two conversations with each process. MPI keeps the order of messages in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Headers, with short payloads behind them.
    Headers = 0,
    /// Long payloads.
    Payloads = 1,
}

/// What a message is sent from or received into. Its bytes lie on the heap, where they stay when it is moved.
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

/// A message on its way. Dropped before its end, it leaves its buffer to MPI for ever.
pub(super) struct Transfer {
    request: ffi::MPI_Request,
    /// None once it was handed back.
    buffer: Option<Buffer>,
}

// SAFETY: MPI's requests may be used by any thread, one at a time: MPI has begun with `MPI_THREAD_SERIALIZED`
// at least, and whoever uses a transfer has the `World`, which is behind a lock.
unsafe impl Send for Transfer {}

/// A buffer is a frame, or shorter.
fn count(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).expect("a frame is far shorter")
}

impl Transfer {
    /// Starts to send.
    pub(super) fn send(_: &World, to: PeerId, lane: Lane, buffer: Buffer) -> Self {
        let mut request = MaybeUninit::uninit();
        let bytes = buffer.bytes();
        let at = bytes.as_ptr().cast::<c_void>();
        let (to, lane) = (to.0.cast_signed(), lane as c_int);
        // SAFETY: MPI has begun and not ended, and the rank is one of its own. The bytes stay where they are
        // and as they are until the request is over: the buffer is handed back only then, and is not freed
        // before. Errors end the job, so that the request was written.
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
        // SAFETY: as above; nobody reads the bytes before the request is over.
        let request = unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            ffi::MPI_Irecv(at, length, ffi::RSMPI_UINT8_T, from, lane, world, request.as_mut_ptr());
            request.assume_init()
        };
        Self { request, buffer: Some(buffer) }
    }

    /// The buffer, and how many bytes were received into it, once it is over; this lets MPI go on. None before
    /// that, and after it was handed back.
    pub(super) fn poll(&mut self, _: &World) -> Option<(Buffer, usize)> {
        self.buffer.as_ref()?;
        let (mut over, mut length) = (0, 0);
        let mut status = MaybeUninit::uninit();
        // SAFETY: MPI has begun and not ended; the request is not over, or the buffer would have been handed
        // back. Where it is over now, the status was written.
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
        // MPI may still use it.
        std::mem::forget(self.buffer.take());
    }
}
