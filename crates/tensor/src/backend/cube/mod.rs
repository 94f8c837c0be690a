//! Backend for GPUs through cubecl: any vendor through wgpu, NVIDIA through CUDA, with the same kernels.
//!
//! In cubecl's terms, a *unit* is a thread and a *cube* is a workgroup. This crate's own kernels use no planes
//! (warps) and no atomics, and access buffers as whole words from aligned offsets; where they need the number
//! of units per cube, it is a compile-time constant. Matrix products use the kernels of cubek. Kernels are
//! never selected by timing: equal shapes run equal kernels.

mod attend;
mod attention;
mod block;
mod bytes;
mod codec;
mod download;
mod embed;
mod join;
mod loss;
mod map;
mod matmul;
mod norm;
pub(crate) mod open;
mod operand;
mod positions;
mod product;
mod reduce;
mod rows;
mod run;
mod seen;
mod storage;
mod swiglu;
mod tiles;

use std::any::Any;

use cubecl::client::Client;
use cubecl::prelude::*;
use farflung_base::Pending;

use self::download::Download;
use self::storage::{ALIGN, Buffer, Pool};
use super::{Backend, BufferRange, Downloaded, Storage};
use crate::op::Op;
use crate::{DType, Precision, Result, Shape, TensorError, ViewMut};

/// Converts a size to the 32 bits that kernels use. Buffers are never larger.
fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("no buffer has more than 2^32 elements")
}

/// Units (threads) per cube (workgroup), if the device allows it: enough to hide latency, and few enough for
/// every device.
const UNITS: u32 = 64;
/// Maximum number of cubes (workgroups) along one axis that every device supports.
const MAX_AXIS: u32 = 65_535;
/// Number of words in the fault buffer: op, id, position, bound.
const FAULT: usize = 4;

/// A device accessed through cubecl.
pub(crate) struct Cube {
    name: String,
    client: Client,
    /// Units (threads) per cube (workgroup), a power of two.
    units: u32,
    pool: Pool,
    /// Holds the first out-of-range id since the last fence.
    fault: Buffer,
}

impl std::fmt::Debug for Cube {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cube")
            .field("name", &self.name)
            .field("memory", &self.pool.memory())
            .finish_non_exhaustive()
    }
}

/// Returns a launch grid with at least one unit (thread) per element.
fn grid(elements: usize, units: u32) -> (CubeCount, CubeDim) {
    (cubes(elements.div_ceil(units as usize)), CubeDim::new_1d(units))
}

/// Returns a grid of at least `count` cubes (workgroups), in two dimensions if necessary. Kernels ignore the
/// excess.
fn cubes(count: usize) -> CubeCount {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    if count <= MAX_AXIS {
        CubeCount::Static(count, 1, 1)
    } else {
        CubeCount::Static(MAX_AXIS, count.div_ceil(MAX_AXIS), 1)
    }
}

impl Cube {
    fn new(name: String, client: Client) -> Result<Self> {
        let most = client.properties().hardware.max_units_per_cube.max(1);
        let units = UNITS.min(1 << most.ilog2());
        let pool = Pool::default();
        let fault = allocate(&name, &client, &pool, FAULT * 4)?;
        let cube = Self { name, client, units, pool, fault };
        cube.clear_fault();
        cube.fence()?;
        Ok(cube)
    }

    fn failed(&self, op: &'static str, reason: String) -> TensorError {
        TensorError::Device { device: self.name.clone(), op, reason }
    }

    fn buffer<'a>(part: &BufferRange<'a>) -> &'a Buffer {
        let any: &dyn Any = part.storage;
        any.downcast_ref().expect("operands were checked to be on this device")
    }

    /// Allocates a temporary buffer for one op.
    fn scratch(&self, bytes: usize) -> Result<Buffer> {
        allocate(&self.name, &self.client, &self.pool, bytes)
    }

    /// Allocates a temporary buffer and fills it with `bytes`.
    fn upload_scratch(&self, mut bytes: Vec<u8>) -> Result<Buffer> {
        let buffer = self.scratch(bytes.len())?;
        bytes.resize(buffer.bytes, 0);
        self.client.write(&buffer.handle, cubecl::bytes::Bytes::from_bytes_vec(bytes));
        Ok(buffer)
    }

    fn clear_fault(&self) {
        self.client
            .write(&self.fault.handle, cubecl::bytes::Bytes::from_bytes_vec(vec![0; self.fault.bytes]));
    }
}

/// Returns a buffer of at least `bytes`, reused or new. The allocation of a new one is checked at once, so that
/// a full device fails here and not in a later op.
fn allocate(name: &str, client: &Client, pool: &Pool, bytes: usize) -> Result<Buffer> {
    let out_of_memory = |bytes| TensorError::OutOfMemory { device: name.to_owned(), bytes };
    let bytes = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or_else(|| out_of_memory(bytes))?;
    if let Some(buffer) = pool.take(bytes) {
        return Ok(buffer);
    }
    // Kernels index elements with 32 bits, and the device limits the size of a buffer.
    let most = client.properties().memory.max_page_size;
    if bytes as u64 > most || bytes / 4 > u32::MAX as usize {
        return Err(out_of_memory(bytes));
    }
    let mut handle = client.empty(bytes);
    if client.check([&handle]).is_err() {
        // Retry after freeing the buffers kept for reuse.
        pool.forget();
        let _ = client.memory_cleanup();
        handle = client.empty(bytes);
        client.check([&handle]).map_err(|_| out_of_memory(bytes))?;
    }
    pool.count_allocated(bytes);
    Ok(Buffer { handle, bytes })
}

impl Backend for Cube {
    fn name(&self) -> &str {
        &self.name
    }

    fn allocate(&self, dtype: DType, shape: Shape) -> Result<Box<dyn Storage>> {
        let too_large = TensorError::OutOfMemory { device: self.name.clone(), bytes: usize::MAX };
        let bytes = shape.len().checked_mul(dtype.size()).ok_or(too_large)?;
        Ok(Box::new(self.scratch(bytes)?))
    }

    fn release(&self, storage: Box<dyn Storage>) {
        let any: Box<dyn Any> = storage;
        if let Ok(buffer) = any.downcast() {
            self.pool.give(*buffer);
        }
    }

    fn upload(&self, bytes: &[u8], to: ViewMut<'_>) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let view = to.as_view();
        let part = view.raw();
        let buffer = Self::buffer(&part);
        let mut padded = Vec::with_capacity(bytes.len().next_multiple_of(ALIGN));
        padded.extend_from_slice(bytes);
        let staging = self.upload_scratch(padded)?;
        self.copy(
            (&staging.handle, staging.bytes, 0),
            (&buffer.handle, buffer.bytes, part.range.start),
            bytes.len(),
        );
        self.pool.give(staging);
        Ok(())
    }

    fn start_download(&self, from: BufferRange<'_>) -> Pending<Result<Box<dyn Downloaded>>> {
        if from.range.is_empty() {
            return Pending::ready(Ok(Box::new(Vec::new())));
        }
        let buffer = Self::buffer(&from);
        let first = from.range.start / 4 * 4;
        let last = from.range.end.next_multiple_of(4);
        let handle =
            buffer.handle.clone().offset_start(first as u64).offset_end((buffer.bytes - last) as u64);
        Download::start(&self.name, &self.client, handle, from.range.start - first..from.range.end - first)
    }

    fn run(&self, op: Op<'_>, precision: Precision) -> Result<()> {
        run::run(self, op, precision)
    }

    fn codecs(&self) -> Option<&dyn super::Codecs> {
        Some(self)
    }

    fn fence(&self) -> Result<()> {
        // Reading the fault buffer waits for everything queued before.
        let read = self
            .client
            .read_one(self.fault.handle.clone())
            .map_err(|e| self.failed("fence", error_message(&e)))?;
        let words: Vec<u32> =
            read.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        match *words {
            [op, id, position, bound, ..] if op != 0 => {
                self.clear_fault();
                let op = run::FAULTING.get(op as usize - 1).copied().unwrap_or("an op");
                Err(TensorError::IdOutOfRange { op, id, position: position as usize, bound: bound as usize })
            }
            _ => Ok(()),
        }
    }

    fn memory(&self) -> (usize, usize) {
        self.pool.memory()
    }
}

/// Returns the message of an error without the backtrace that cubecl appends.
fn error_message(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text
        .lines()
        .take_while(|l| !l.starts_with("Backtrace"))
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    lines.join("; ")
}
