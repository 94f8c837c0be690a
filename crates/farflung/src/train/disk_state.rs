//! The state of a part's optimizer on disk (Rajbhandari et al. 2021, "ZeRO-Infinity"): an update reads it piece
//! by piece, and writes it back with the updated parameters as the next generation of the file, one for each
//! step. So a run that is killed continues from its last step. It does not depend on how a step is computed.
//!
//! All ranks commit a generation before any of them overwrites the one before it: [`DiskState::wait`] is called
//! before the vote on each step.

mod late;
mod memory;
mod stored;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::Bytes;
use farflung_optim::{ChainBuilder, Shard};
use farflung_store::{Generation, Layout, Store, StoreError, Stream};
use farflung_tensor::{Device, MemoryByKind, ParamLayout, Tensor};

use super::totals::Totals;
use crate::{Error, Result, StateError};
use late::LateParams;
use memory::{PieceMemory, PieceTensors, padded};
use stored::StoredPieces;

/// Elements of a piece at most, unless a tensor that the optimizer needs whole has more.
const PIECE: usize = 1 << 20;
/// Pieces in memory at most: one that is updated, and others that are read or written.
const BUFFERS: usize = 6;
/// Room for the record of a generation, in bytes.
const RECORD: usize = 1 << 16;

/// The states of a part's optimizer, and its parameters, in pieces on disk. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct DiskState {
    shared: Arc<Mutex<Shared>>,
    /// Names of the optimizer's states: the first arrays of the file. Its parameters follow.
    names: Vec<String>,
    pieces: Vec<Range<usize>>,
    identity: [u8; 32],
}

#[derive(Debug)]
struct Shared {
    memory: PieceMemory,
    file: StateFile,
    /// The piece that is being updated.
    taken: Option<PieceTensors>,
    /// The array that was read last, for reads of several tensors in one piece.
    last_read: Option<LastRead>,
    /// Number of the next piece of the update.
    next: usize,
}

#[derive(Debug)]
enum StateFile {
    /// Not opened yet.
    Closed,
    /// Opened; the step from which it continues is not known yet.
    Opened(Arc<Store>),
    Streaming(Stream<PieceTensors>),
    /// No file: the buffers of a device that only counts.
    Counted(Vec<PieceTensors>),
}

#[derive(Debug)]
struct LastRead {
    generation: u64,
    piece: usize,
    array: usize,
    values: PieceTensors,
}

impl DiskState {
    /// Makes the state of the optimizer `chain` of a shard of a layout. No file is opened yet. `device` is the
    /// one on which updates are computed.
    pub(super) fn new(
        chain: &ChainBuilder,
        device: &Device,
        layout: &ParamLayout,
        shard: &Shard,
    ) -> Result<Self> {
        Self::of_pieces(chain, device, layout, shard, PIECE)
    }

    /// Like [`DiskState::new`], with pieces of at most `most` elements.
    fn of_pieces(
        chain: &ChainBuilder,
        device: &Device,
        layout: &ParamLayout,
        shard: &Shard,
        most: usize,
    ) -> Result<Self> {
        let names = chain.state_names();
        let pieces = chain.pieces(layout, shard, most);
        let longest = pieces.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let is_whole = shard.is_whole(layout.len());
        let memory = PieceMemory::new(device, names.len(), (longest, is_whole))?;
        let file = if device.is_counting() {
            StateFile::Counted(memory.buffers(BUFFERS.min(pieces.len() + 1))?)
        } else {
            StateFile::Closed
        };
        let identity = identity(&names, layout, shard);
        let shared = Shared { memory, file, taken: None, last_read: None, next: 0 };
        Ok(Self { shared: Arc::new(Mutex::new(shared)), names, pieces, identity })
    }

    /// Returns the pieces, and a store from which a chain takes its states.
    pub(super) fn stored(&self) -> (Vec<Range<usize>>, Box<dyn farflung_optim::StateStore>) {
        (self.pieces.clone(), Box::new(StoredPieces::new(Arc::clone(&self.shared), self.pieces.clone())))
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the layout of the file.
    fn layout(&self) -> Layout {
        let bytes = self.pieces.iter().map(|piece| padded(piece.len()) as u64);
        Layout::new(self.identity, self.names.len() + 1, bytes, RECORD)
    }

    /// Returns the bytes of the file, and those that a step reads and writes.
    pub(super) fn sizes(&self) -> DiskSizes {
        let layout = self.layout();
        let states = self.pieces.iter().map(|piece| padded(piece.len()) as u64).sum::<u64>();
        DiskSizes {
            file: layout.file_bytes(),
            read: states * self.names.len() as u64,
            written: layout.generation_bytes(),
        }
    }

    /// Returns the bytes of its buffers in the host's memory, beside the device's.
    pub(super) fn held_on_host(&self) -> MemoryByKind {
        self.lock().memory.held_on_host()
    }

    /// Returns the bytes of the file; 0 before it is opened.
    pub(super) fn held_in_file(&self) -> Bytes {
        let is_open = matches!(self.lock().file, StateFile::Opened(_) | StateFile::Streaming(_));
        Bytes(if is_open { self.sizes().file } else { 0 })
    }

    /// Opens the file, for which both generations have room. Returns the generations that are whole, newest
    /// first.
    ///
    /// Errors: those of [`Store::open`].
    pub(super) fn open(&self, path: &Path) -> Result<Vec<Generation>, StoreError> {
        let store = Arc::new(Store::open(path, self.layout())?);
        let generations = store.generations()?;
        self.lock().file = StateFile::Opened(store);
        Ok(generations)
    }

    /// Returns the opened file, while the step from which it continues is not known.
    fn opened(&self) -> Arc<Store> {
        match &self.lock().file {
            StateFile::Opened(store) => Arc::clone(store),
            other => unreachable!("the state is not opened, or already used: {other:?}"),
        }
    }

    /// Reads all values of a generation, to check that they are as they were written.
    ///
    /// Errors: [`StoreError::Damaged`].
    pub(super) fn check(&self, generation: u64) -> Result<(), StoreError> {
        self.opened().check(generation)
    }

    /// Begins to use the file, whose newest generation is this one; all others are forgotten. `None`: all
    /// states are zero.
    ///
    /// Errors: those of the file; no memory for its pieces.
    pub(super) fn start(&self, newest: Option<u64>) -> Result<()> {
        let store = self.opened();
        store.keep_only(newest)?;
        let mut shared = self.lock();
        let buffers = shared.memory.buffers(BUFFERS.min(self.pieces.len() + 1))?;
        shared.file = StateFile::Streaming(Stream::new(store, newest, buffers, self.names.len()));
        Ok(())
    }

    /// Returns whether the file is in use.
    pub(super) fn is_started(&self) -> bool {
        matches!(self.lock().file, StateFile::Streaming(_))
    }

    /// Begins the update to a step: pieces are read ahead.
    pub(super) fn begin(&self, step: u64) {
        if let StateFile::Streaming(stream) = &mut self.lock().file {
            stream.begin(step);
        }
    }

    /// Commits the step that was begun, of which the optimizer has updated all pieces of the parameters.
    /// Returns before it is on the disk; whatever changes the parameters waits for that.
    ///
    /// Errors: those of the file.
    pub(super) fn commit(&self, record: Vec<u8>, params: &Tensor) -> Result<(), StoreError> {
        let mut shared = self.lock();
        (shared.next, shared.last_read) = (0, None);
        let Shared { memory, file, .. } = &mut *shared;
        let StateFile::Streaming(stream) = file else { return Ok(()) };
        if memory.copies_params {
            return stream.commit(record);
        }
        let params = LateParams { params: params.share(), pieces: self.places_in(params) };
        stream.commit_late(record, self.names.len(), params)
    }

    /// Returns when the last committed step is on the disk.
    ///
    /// Errors: those of the file.
    pub(super) fn wait(&self) -> Result<(), StoreError> {
        match &mut self.lock().file {
            StateFile::Streaming(stream) => stream.wait(),
            _ => Ok(()),
        }
    }

    /// Returns the places of the pieces in a buffer of all parameters, or of those of the shard.
    fn places_in(&self, params: &Tensor) -> Vec<Range<usize>> {
        if params.shape().len() != self.len() {
            return self.pieces.clone();
        }
        let mut end = 0;
        let place = |piece: &Range<usize>| {
            end += piece.len();
            end - piece.len()..end
        };
        self.pieces.iter().map(place).collect()
    }

    /// Returns the names of the optimizer's states.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the number of elements of each state.
    pub(super) fn len(&self) -> usize {
        self.pieces.iter().map(ExactSizeIterator::len).sum()
    }

    /// Reads elements of a state, by its number, or of the parameters, which follow the states. They are those
    /// of the newest committed step, and zeros before the first.
    ///
    /// Errors: those of the file.
    pub(super) fn read(&self, array: usize, range: Range<usize>) -> Result<Vec<f32>> {
        self.wait()?;
        let mut values = vec![0.0; range.len()];
        let mut shared = self.lock();
        let Shared { memory, file, last_read, .. } = &mut *shared;
        let (store, newest) = match file {
            StateFile::Streaming(stream) => (stream.store(), stream.newest()),
            StateFile::Closed | StateFile::Opened(_) | StateFile::Counted(_) => return Ok(values),
        };
        let Some(generation) = newest else { return Ok(values) };
        let mut end = 0;
        for (piece, of_layout) in self.pieces.iter().enumerate() {
            let own = end..end + of_layout.len();
            end = own.end;
            let common = own.start.max(range.start)..own.end.min(range.end);
            if common.is_empty() {
                continue;
            }
            let is_there = last_read
                .as_ref()
                .is_some_and(|last| (last.generation, last.piece, last.array) == (generation, piece, array));
            if !is_there {
                let mut read = match last_read.take() {
                    Some(last) => last.values,
                    None => memory.single()?,
                };
                store.read(generation, piece, array, read.bytes_mut(0, padded(own.len())))?;
                *last_read = Some(LastRead { generation, piece, array, values: read });
            }
            let read = last_read.as_ref().expect("it was read").values.values(0);
            values[common.start - range.start..common.end - range.start]
                .copy_from_slice(&read[common.start - own.start..common.end - own.start]);
        }
        Ok(values)
    }

    /// Writes a whole generation with these parameters: `fill` sets the values of a state, by its number, of a
    /// range of the layout.
    ///
    /// Errors: those of `fill` and of the file.
    pub(super) fn fill(
        &self,
        (step, record): (u64, Vec<u8>),
        params: &Tensor,
        mut fill: impl FnMut(usize, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut shared = self.lock();
        let StateFile::Streaming(stream) = &mut shared.file else { return Ok(()) };
        stream.begin(step);
        for (piece, place) in self.pieces.iter().zip(self.places_in(params)) {
            let mut values = stream.take()?;
            for array in 0..self.names.len() {
                fill(array, piece.clone(), &mut values.values_mut(array)[..piece.len()])?;
            }
            let late = values.take_params(params.view().part(place.start, place.len())?, self.names.len())?;
            stream.give(values, &late)?;
        }
        drop(shared);
        self.commit(record, params)?;
        Ok(self.wait()?)
    }

    /// Returns the bytes read and written so far.
    pub(super) fn moved(&self) -> [u64; 2] {
        match &self.lock().file {
            StateFile::Streaming(stream) => stream.store().moved(),
            _ => [0; 2],
        }
    }

    /// Returns whether the file is read and written past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        match &self.lock().file {
            StateFile::Streaming(stream) => stream.store().is_direct(),
            _ => false,
        }
    }
}

/// A step whose record is written with the states.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecordedStep<'a> {
    pub(super) step: u64,
    pub(super) outer_step: u64,
    pub(super) rounds: u64,
    pub(super) loss_scale: &'a [f32],
}

/// Makes the records of steps: what a run needs besides arrays to continue from them.
pub(super) trait StepRecords: Debug + Send {
    /// Sets the resources that the run has used up to the step before.
    fn set_totals(&mut self, totals: Totals);

    /// Returns the record of a step.
    fn of(&mut self, step: RecordedStep<'_>) -> Vec<u8>;
}

/// Returns the bytes of memory of an optimizer with `states` states on disk, which updates `parameters` bytes
/// of parameters and needs `work` more buffers of a piece. `whole` are the bytes of the largest tensor, if it
/// works on whole tensors. `is_late` tells whether the parameters are written from where they are.
pub(super) fn memory(
    parameters: u128,
    (states, work): (u128, u128),
    whole: Option<u128>,
    is_late: bool,
) -> u128 {
    let most = (PIECE * size_of::<f32>()) as u128;
    let piece = whole.map_or(most, |whole| whole.max(most)).min(parameters);
    let pieces = parameters.div_ceil(piece.max(1));
    let buffers = (pieces + 1).min(BUFFERS as u128);
    let arrays = states + u128::from(!is_late);
    piece.saturating_mul(buffers * arrays + work + 1)
}

/// Bytes of state on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DiskSizes {
    /// Of the file.
    pub(super) file: u64,
    /// That a step reads.
    pub(super) read: u64,
    /// That a step writes.
    pub(super) written: u64,
}

impl DiskSizes {
    /// Returns the sizes of both together.
    pub(super) const fn and(self, other: Self) -> Self {
        Self {
            file: self.file + other.file,
            read: self.read + other.read,
            written: self.written + other.written,
        }
    }
}

/// Returns the newest step in a file of state, whatever it is of; `None` if there is none.
///
/// Errors: a file that cannot be read.
pub(super) fn newest_in(path: &Path) -> Result<Option<u64>> {
    Ok(Store::newest_in(path, RECORD)?)
}

/// Returns a hash of what the file is of: the names of states, and the tensors of the shard.
fn identity(names: &[String], layout: &ParamLayout, shard: &Shard) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    for name in names {
        hash.update(name.as_bytes()).update(&[0]);
    }
    for param in layout.params() {
        hash.update(format!("{} {} {}\n", param.name, param.shape, param.start).as_bytes());
    }
    let ranges: Vec<String> = shard.ranges().iter().map(|r| format!("{}..{}", r.start, r.end)).collect();
    hash.update(ranges.join(";").as_bytes());
    hash.finalize().into()
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        StateError::from(error).into()
    }
}
