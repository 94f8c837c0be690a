//! MPI's own collectives, non-blocking, on copies of the buffers: MPI uses them until the collective is
//! complete.
#![expect(
    unsafe_code,
    reason = "MPI is a C library, and its requests use buffers after the call that starts them"
)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;

use farflung_base::PeerId;
use mpi::ffi;

use super::messages::World;
use crate::ReduceOp;
use crate::native::{NativeCall, NativeKind};
use crate::steps::cut;

/// Bytes with the alignment of every element type.
#[derive(Debug)]
struct Aligned {
    words: Vec<u64>,
    bytes: usize,
}

impl Aligned {
    fn zeroed(bytes: usize) -> Self {
        Self { words: vec![0; bytes.div_ceil(8)], bytes }
    }

    fn copy_of(bytes: &[u8]) -> Self {
        let mut copy = Self::zeroed(bytes.len());
        copy.bytes_mut().copy_from_slice(bytes);
        copy
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// Memory that MPI uses until a collective is complete. The contents of the vectors are on the heap, so they do
/// not move with this value.
#[derive(Debug)]
struct Memory {
    send: Aligned,
    receive: Aligned,
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

/// A collective in progress. If it is dropped before it is complete, its memory is leaked, because MPI may
/// still use it.
struct Running {
    request: ffi::MPI_Request,
    is_done: bool,
    memory: Option<Box<Memory>>,
    /// Bytes of the caller's buffer that the result replaces.
    place: Range<usize>,
}

// SAFETY: any thread may use MPI's requests, one at a time, because MPI is initialised with at least
// `MPI_THREAD_SERIALIZED`; a thread that uses one has the `World`, which is behind a lock.
unsafe impl Send for Running {}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_done {
            std::mem::forget(self.memory.take());
        }
    }
}

/// A communicator of MPI.
#[derive(Clone, Copy)]
struct Group(ffi::MPI_Comm);

// SAFETY: a handle of MPI is a number or an address that only MPI uses, under the lock of the `World`.
unsafe impl Send for Group {}

/// MPI's communicators by our context, and the collectives in progress.
#[derive(Default)]
pub(super) struct Natives {
    groups: BTreeMap<u64, Group>,
    running: BTreeMap<u64, Running>,
    next: u64,
}

/// Returns MPI's type and the size of an element; `None` if MPI has no such type.
fn type_of(element: &str) -> Option<(ffi::MPI_Datatype, usize)> {
    // SAFETY: these are constants of the library.
    unsafe {
        Some(match element {
            "f32" => (ffi::RSMPI_FLOAT, 4),
            "f64" => (ffi::RSMPI_DOUBLE, 8),
            "i8" => (ffi::RSMPI_INT8_T, 1),
            "i16" => (ffi::RSMPI_INT16_T, 2),
            "i32" => (ffi::RSMPI_INT32_T, 4),
            "i64" => (ffi::RSMPI_INT64_T, 8),
            "u8" => (ffi::RSMPI_UINT8_T, 1),
            "u16" => (ffi::RSMPI_UINT16_T, 2),
            "u32" => (ffi::RSMPI_UINT32_T, 4),
            "u64" => (ffi::RSMPI_UINT64_T, 8),
            _ => return None,
        })
    }
}

/// Returns MPI's operation; `None` for those whose result for NaN is not ours, and for bitwise and logical
/// ones.
const fn op_of(op: ReduceOp) -> Option<ffi::MPI_Op> {
    // SAFETY: these are constants of the library.
    unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Mean => Some(ffi::RSMPI_SUM),
            ReduceOp::Product => Some(ffi::RSMPI_PROD),
            _ => None,
        }
    }
}

fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("`has` has checked the length")
}

impl Natives {
    /// Makes MPI's communicator of these processes. Blocks until all of them do.
    pub(super) fn add_group(&mut self, _: &World, context: u64, members: &[PeerId]) {
        let ranks: Vec<c_int> = members.iter().map(|peer| peer.0.cast_signed()).collect();
        let mut all = MaybeUninit::uninit();
        let mut some = MaybeUninit::uninit();
        let mut made = MaybeUninit::uninit();
        let tag = c_int::try_from(context & 0x7FFF).unwrap_or(0);
        // SAFETY: MPI is initialised and has not ended, and the ranks are in its communicator. Each call writes
        // its result before the next one reads it; errors end the job.
        let group = unsafe {
            ffi::MPI_Comm_group(ffi::RSMPI_COMM_WORLD, all.as_mut_ptr());
            ffi::MPI_Group_incl(all.assume_init(), int(ranks.len()), ranks.as_ptr(), some.as_mut_ptr());
            ffi::MPI_Comm_create_group(ffi::RSMPI_COMM_WORLD, some.assume_init(), tag, made.as_mut_ptr());
            ffi::MPI_Group_free(some.as_mut_ptr());
            ffi::MPI_Group_free(all.as_mut_ptr());
            Group(made.assume_init())
        };
        self.groups.insert(context, group);
    }

    /// Returns whether MPI has this collective.
    pub(super) fn has(&self, call: &NativeCall) -> bool {
        let length: usize = call.shards.iter().sum();
        let is_known = self.groups.contains_key(&call.context) && type_of(call.element).is_some();
        is_known && op_of(call.op).is_some() && c_int::try_from(length).is_ok()
    }

    /// Starts a collective on a copy of these bytes; returns its number. Panics unless [`Natives::has`] returns
    /// true for the call.
    pub(super) fn start(&mut self, _: &World, call: &NativeCall, data: &[u8]) -> u64 {
        let (kind, size) = type_of(call.element).expect("`has` has checked it");
        let op = op_of(call.op).expect("`has` has checked it");
        let Group(comm) = self.groups[&call.context];
        let length: usize = call.shards.iter().sum();
        let (ranks, me) = (call.shards.len(), call.rank);
        let own = cut(length, me, ranks) * size..cut(length, me + 1, ranks) * size;
        let whole = 0..data.len();
        let (sent, place) = match call.kind {
            NativeKind::AllReduce => (whole.clone(), whole),
            NativeKind::ReduceScatter => (whole, own),
            NativeKind::AllGather => (own, whole),
            NativeKind::Broadcast(_) => (0..0, whole),
        };
        let receive = match call.kind {
            NativeKind::Broadcast(_) => Aligned::copy_of(data),
            _ => Aligned::zeroed(place.len()),
        };
        let mut memory = Box::new(Memory {
            send: Aligned::copy_of(&data[sent]),
            receive,
            counts: call.shards.iter().copied().map(int).collect(),
            starts: (0..ranks).map(|rank| int(cut(length, rank, ranks))).collect(),
        });
        let mut request = MaybeUninit::uninit();
        let into = memory.receive.bytes_mut().as_mut_ptr().cast::<c_void>();
        let from = memory.send.bytes().as_ptr().cast::<c_void>();
        let (counts, starts) = (memory.counts.as_ptr(), memory.starts.as_ptr());
        let at = request.as_mut_ptr();
        // SAFETY: MPI is initialised and has not ended. The buffers have the lengths that the counts say, with
        // the alignment of the type; they and the counts neither move nor are freed before the request is
        // complete. Errors end the job, so the request was written.
        let request = unsafe {
            match call.kind {
                NativeKind::AllReduce => ffi::MPI_Iallreduce(from, into, int(length), kind, op, comm, at),
                NativeKind::ReduceScatter => ffi::MPI_Ireduce_scatter(from, into, counts, kind, op, comm, at),
                NativeKind::AllGather => {
                    let count = int(call.shards[me]);
                    ffi::MPI_Iallgatherv(from, count, kind, into, counts, starts, kind, comm, at)
                }
                NativeKind::Broadcast(root) => {
                    ffi::MPI_Ibcast(into, int(length), kind, int(root.index()), comm, at)
                }
            };
            request.assume_init()
        };
        let number = self.next;
        self.next += 1;
        self.running.insert(number, Running { request, is_done: false, memory: Some(memory), place });
        number
    }

    /// Lets MPI progress; returns whether a collective has become complete.
    pub(super) fn progress(&mut self, _: &World) -> bool {
        let mut moved = false;
        for running in self.running.values_mut().filter(|running| !running.is_done) {
            let (mut over, mut status) = (0, MaybeUninit::uninit());
            // SAFETY: MPI is initialised and has not ended, and the request is not complete.
            unsafe { ffi::MPI_Test(&raw mut running.request, &raw mut over, status.as_mut_ptr()) };
            running.is_done = over != 0;
            moved |= running.is_done;
        }
        moved
    }

    /// Returns whether a collective is in progress.
    pub(super) fn is_running(&self) -> bool {
        self.running.values().any(|running| !running.is_done)
    }

    /// Writes the result of a complete collective to the caller's buffer; false if it is not complete.
    pub(super) fn finish(&mut self, number: u64, data: &mut [u8]) -> bool {
        if self.running.get(&number).is_none_or(|running| !running.is_done) {
            return false;
        }
        let running = self.running.remove(&number);
        if let Some(Running { memory: Some(memory), place, .. }) = &running {
            data[place.clone()].copy_from_slice(memory.receive.bytes());
        }
        true
    }
}
