//! Reads one generation and writes the next, piece by piece in order: a thread reads ahead, another writes
//! behind, and the caller changes the pieces between them.

use std::fmt::{self, Debug};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::StoreError;
use crate::arrays::{Arrays, LateArrays};
use crate::store::{Root, Store};

/// A store that is read and rewritten again and again.
///
/// A cycle reads the newest generation and writes the next one: [`Stream::begin`], then [`Stream::take`] and
/// [`Stream::give`] for each piece in order, then [`Stream::commit`]. Pieces are read ahead and written behind
/// by as many buffers as there are; the caller waits only if it is faster than the disk.
///
/// After an error nothing more is written, and the newest generation stays as it was.
pub struct Stream<B: Arrays> {
    store: Arc<Store>,
    reads: Sender<Cycle>,
    filled: Receiver<B>,
    writes: Option<Sender<Work<B>>>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    newest: Option<u64>,
    /// The last generation that was given to the writer to commit.
    committing: Option<u64>,
    /// The generation that is being written.
    cycle: Option<Open>,
}

/// A cycle that has begun.
#[derive(Debug, Clone, Copy)]
struct Open {
    next: u64,
    taken: usize,
    given: usize,
}

/// A cycle of the reader.
#[derive(Debug, Clone, Copy)]
struct Cycle {
    /// The generation to read. `None`: there is none, and arrays are zeros.
    from: Option<u64>,
    /// Whether the stream wrote that generation itself, of which the writer may still have pieces.
    is_own: bool,
}

/// Work of the writer.
enum Work<B> {
    Piece { generation: u64, piece: usize, buffer: B, late: Vec<u32> },
    Commit { generation: u64, record: Vec<u8>, late: Option<LateWork> },
}

/// Arrays that are written after the pieces.
struct LateWork {
    /// The number of the first of them.
    first: usize,
    arrays: Box<dyn LateArrays>,
}

/// What the threads tell each other.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// The generation of which pieces are being written, and how many of them are; `None` before the first.
    written: Option<(u64, usize)>,
    /// The newest generation that was committed by this stream.
    committed: Option<u64>,
    error: Option<StoreError>,
    /// Whether an error was there, which the caller may have taken.
    failed: bool,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Ends all work, because of an error.
    fn fail(&self, error: StoreError) {
        self.update(|progress| {
            progress.error = progress.error.take().or(Some(error));
            progress.failed = true;
        });
    }

    /// Waits until something is so, or until the work has failed or ended.
    fn wait(&self, until: impl Fn(&Progress) -> bool) -> MutexGuard<'_, Progress> {
        let goes_on = |progress: &mut Progress| !until(progress) && !progress.failed && !progress.closed;
        self.changed.wait_while(self.lock(), goes_on).unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Arrays> Stream<B> {
    /// Returns a stream over a store of which `newest` is the newest generation, with these buffers: at least
    /// one, and more to read and write at the same time. The first `reads` arrays of a piece are read, the
    /// others are written only.
    ///
    /// # Panics
    /// If there is no buffer.
    #[must_use]
    pub fn new(store: Arc<Store>, newest: Option<u64>, buffers: Vec<B>, reads: usize) -> Self {
        assert!(!buffers.is_empty(), "a stream needs a buffer");
        let shared = Arc::new(Shared::default());
        let (free, spare) = channel();
        for buffer in buffers {
            free.send(buffer).expect("the receiver is here");
        }
        let (fill, filled) = channel();
        let (reads_to, cycles) = channel();
        let (writes, work) = channel();
        let reader = {
            let (store, shared) = (Arc::clone(&store), Arc::clone(&shared));
            move || read_cycles(&store, &shared, &cycles, &spare, &fill, reads)
        };
        let writer = {
            let (store, shared) = (Arc::clone(&store), Arc::clone(&shared));
            move || write_pieces(&store, &shared, &work, free)
        };
        let threads = vec![std::thread::spawn(reader), std::thread::spawn(writer)];
        Self {
            store,
            reads: reads_to,
            filled,
            writes: Some(writes),
            shared,
            threads,
            newest,
            committing: None,
            cycle: None,
        }
    }

    /// Returns the store.
    #[must_use]
    pub const fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Returns the newest generation, which a commit may still be making whole: see [`Stream::wait`].
    #[must_use]
    pub const fn newest(&self) -> Option<u64> {
        self.newest
    }

    /// Begins to write generation `next`, and to read the newest one ahead. Does nothing if that has begun.
    ///
    /// # Panics
    /// If `next` is not the number after the newest generation's, or if another has begun.
    pub fn begin(&mut self, next: u64) {
        if let Some(open) = self.cycle {
            assert_eq!(open.next, next, "another generation has begun");
            return;
        }
        assert!(self.newest.is_none_or(|newest| newest + 1 == next), "generations follow each other");
        self.cycle = Some(Open { next, taken: 0, given: 0 });
        // A reader that has ended has failed, which `take` reports.
        let _ = self.reads.send(Cycle { from: self.newest, is_own: self.committing.is_some() });
    }

    /// Returns the next piece: its first arrays hold the newest generation's values, or zeros if there is none.
    ///
    /// Errors: what a read, or a write before it, failed with.
    ///
    /// # Panics
    /// If no generation has begun, or if all pieces were taken.
    pub fn take(&mut self) -> Result<B, StoreError> {
        self.check()?;
        let open = self.cycle.as_mut().expect("a generation has begun");
        assert!(open.taken < self.store.layout().pieces(), "a piece is taken once");
        open.taken += 1;
        self.filled.recv().map_err(|_| self.error())
    }

    /// Writes back a piece, the oldest that was taken and not given back. `late` are the
    /// [checksums](crate::checksum) of its last arrays, if those are written by [`Stream::commit_late`].
    ///
    /// Errors: what an earlier write failed with.
    ///
    /// # Panics
    /// If it was not taken.
    pub fn give(&mut self, buffer: B, late: &[u32]) -> Result<(), StoreError> {
        self.check()?;
        let open = self.cycle.as_mut().expect("a generation has begun");
        assert!(open.given < open.taken, "a piece is taken before it is given back");
        let piece = open.given;
        open.given += 1;
        let work = Work::Piece { generation: open.next, piece, buffer, late: late.to_vec() };
        self.send(work)
    }

    /// Commits the generation with a record, once all pieces are on the disk. Returns at once: see
    /// [`Stream::wait`].
    ///
    /// Errors: what an earlier write failed with; [`StoreError::Record`].
    ///
    /// # Panics
    /// If some piece was not given back.
    pub fn commit(&mut self, record: Vec<u8>) -> Result<(), StoreError> {
        self.commit_with(record, None)
    }

    /// Like [`Stream::commit`], after writing the arrays from number `first` on, of which [`Stream::give`] got
    /// the checksums. They are dropped once they are written.
    ///
    /// Errors, panics: as [`Stream::commit`].
    pub fn commit_late(
        &mut self,
        record: Vec<u8>,
        first: usize,
        arrays: impl LateArrays + 'static,
    ) -> Result<(), StoreError> {
        self.commit_with(record, Some(LateWork { first, arrays: Box::new(arrays) }))
    }

    fn commit_with(&mut self, record: Vec<u8>, late: Option<LateWork>) -> Result<(), StoreError> {
        self.check()?;
        self.store.check_record(&record)?;
        let open = self.cycle.take().expect("a generation has begun");
        assert_eq!(open.given, self.store.layout().pieces(), "all pieces are given back");
        (self.newest, self.committing) = (Some(open.next), Some(open.next));
        self.send(Work::Commit { generation: open.next, record, late })
    }

    /// Returns when the newest generation is whole on the disk.
    ///
    /// Errors: what a write or a flush failed with. The generation before is then the newest.
    pub fn wait(&mut self) -> Result<(), StoreError> {
        drop(self.shared.wait(|progress| progress.committed == self.committing));
        self.check()
    }

    fn send(&self, work: Work<B>) -> Result<(), StoreError> {
        let writes = self.writes.as_ref().expect("it is there until the end");
        writes.send(work).map_err(|_| self.error())
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.shared.lock().failed { Err(self.error()) } else { Ok(()) }
    }

    fn error(&self) -> StoreError {
        self.shared.lock().error.take().unwrap_or_else(|| self.store.stopped())
    }
}

impl<B: Arrays> Drop for Stream<B> {
    /// Lets the threads finish what they were given.
    fn drop(&mut self) {
        self.writes = None;
        self.shared.update(|progress| progress.closed = true);
        let (gone, _) = channel();
        self.reads = gone;
        for thread in self.threads.drain(..) {
            // A panic of a thread was printed.
            let _ = thread.join();
        }
    }
}

impl<B: Arrays> Debug for Stream<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, newest, cycle, .. } = self;
        f.debug_struct("Stream").field("store", store).field("newest", newest).field("cycle", cycle).finish()
    }
}

/// Marks the work as failed if its thread panics. Otherwise the other thread and the caller would wait for
/// ever.
struct Unwinding<'a>(&'a Shared);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.update(|progress| progress.failed = true);
        }
    }
}

/// Reads the pieces of each cycle into free buffers.
fn read_cycles<B: Arrays>(
    store: &Store,
    shared: &Shared,
    cycles: &Receiver<Cycle>,
    spare: &Receiver<B>,
    fill: &Sender<B>,
    reads: usize,
) {
    let _guard = Unwinding(shared);
    while let Ok(Cycle { from, is_own }) = cycles.recv() {
        for piece in 0..store.layout().pieces() {
            // A piece of a generation that is still being written can be read once it is written itself.
            let is_there = |progress: &Progress| !is_own || progress.written > from.map(|from| (from, piece));
            let ended = {
                let progress = shared.wait(is_there);
                progress.failed || progress.closed
            };
            let Some(mut buffer) = spare.recv().ok().filter(|_| !ended) else { return };
            if let Some(from) = from {
                if let Err(error) = store.read_piece(from, piece, reads, &mut buffer) {
                    return shared.fail(error);
                }
            } else {
                let bytes = store.layout().array_bytes(piece) as usize;
                (0..reads).for_each(|array| buffer.array_mut(array)[..bytes].fill(0));
            }
            if fill.send(buffer).is_err() {
                return;
            }
        }
    }
}

/// Writes pieces and records in the order in which they come.
fn write_pieces<B: Arrays>(store: &Store, shared: &Shared, work: &Receiver<Work<B>>, free: Sender<B>) {
    let _guard = Unwinding(shared);
    let mut root = Root::default();
    let arrays = store.layout().arrays();
    // After an error, no buffers come back: the reader and the caller do not wait for them.
    let mut free = Some(free);
    while let Ok(work) = work.recv() {
        let failed = shared.lock().failed;
        let done = match work {
            Work::Piece { .. } | Work::Commit { .. } if failed => Ok(()),
            Work::Piece { generation, piece, buffer, late } => {
                let bytes = store.layout().array_bytes(piece) as usize;
                let now = (0..arrays - late.len()).map(|array| &buffer.array(array)[..bytes]);
                store.write_arrays(generation, piece, now, &late).map(|sums| {
                    root.add(&sums);
                    shared.update(|progress| progress.written = Some((generation, piece + 1)));
                    // If the reader has ended, the buffer is not needed.
                    let _ = free.as_ref().map(|free| free.send(buffer));
                })
            }
            Work::Commit { generation, record, late } => {
                let root = std::mem::take(&mut root).finish();
                let written = late.map(|late| store.write_late(generation, late.first, &*late.arrays));
                written.unwrap_or(Ok(())).and_then(|()| store.commit(generation, root, record)).map(|()| {
                    shared.update(|progress| progress.committed = Some(generation));
                })
            }
        };
        if let Err(error) = done {
            shared.fail(error);
            free = None;
        }
    }
}
