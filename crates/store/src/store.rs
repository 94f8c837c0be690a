//! A file with two generations of the same pieces.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::StoreError;
use crate::arrays::{Arrays, LateArrays};
use crate::blocks::{
    FileHeader, StoredRecord, blocks, bytes_of, bytes_of_mut, file_header, piece_header, read_file_header,
    read_piece_header,
};
use crate::layout::{BLOCK, Layout};
use crate::medium::{DirectFile, Medium, read_all, write_all};

/// A generation that is whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// Its number.
    pub number: u64,
    /// What was said when it was committed.
    pub record: Vec<u8>,
}

/// A file with two slots for each piece. Generation `n` is in the slots `n % 2`, so that writing it leaves
/// generation `n - 1` intact. A generation counts once its record is written, which is after all its pieces
/// have reached the disk.
///
/// The file is locked while the store is open.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    layout: Layout,
    medium: Arc<dyn Medium>,
    /// Keeps the lock.
    _lock: Option<File>,
    read: AtomicU64,
    written: AtomicU64,
}

impl Store {
    /// Opens the store in a file, or makes one without generations, for which it reserves the room.
    ///
    /// Errors: [`StoreError::Locked`]; [`StoreError::Foreign`] if the file is something else, or a store of
    /// another layout; [`StoreError::Room`] if the disk has no room for both generations.
    pub fn open(path: &Path, layout: Layout) -> Result<Self, StoreError> {
        let fail =
            |action| move |source| StoreError::Io { action, path: path.to_owned(), at: 0, bytes: 0, source };
        let options = || File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = options().map_err(fail("open"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(fail("lock")(source)),
        }
        let is_new = file.metadata().map_err(fail("open"))?.len() == 0;
        let medium = DirectFile::new(file.try_clone().map_err(fail("open"))?);
        let store = Self::over(path, layout, Arc::new(medium), Some(file))?;
        if is_new {
            // The name of the file reaches the disk, too.
            File::open(folder_of(path))
                .and_then(|folder| folder.sync_all())
                .map_err(fail("flush the folder of"))?;
        }
        Ok(store)
    }

    /// Opens a store on a medium, which a test may let fail. `path` is used in messages, and to ask how much
    /// room is free.
    ///
    /// Errors: as [`Store::open`].
    pub fn on(path: &Path, layout: Layout, medium: Arc<dyn Medium>) -> Result<Self, StoreError> {
        Self::over(path, layout, medium, None)
    }

    fn over(
        path: &Path,
        layout: Layout,
        medium: Arc<dyn Medium>,
        lock: Option<File>,
    ) -> Result<Self, StoreError> {
        let (read, written) = (AtomicU64::new(0), AtomicU64::new(0));
        let store = Self { path: path.to_owned(), layout, medium, _lock: lock, read, written };
        let length = store.medium.length().map_err(|source| store.io("open", 0, 0, source))?;
        let mut head = blocks(BLOCK);
        if length >= BLOCK as u64 {
            store.read_at(bytes_of_mut(&mut head), 0)?;
        }
        let path = path.to_owned();
        match read_file_header(bytes_of(&head), &store.layout) {
            FileHeader::Fits => store.reserve(length)?,
            FileHeader::Differs => return Err(StoreError::OtherLayout { path }),
            FileHeader::Empty if length == 0 || length >= BLOCK as u64 => {
                store.reserve(length)?;
                store.write_at(bytes_of(&file_header(&store.layout)), 0)?;
                store.flush()?;
            }
            FileHeader::Empty | FileHeader::Other => return Err(StoreError::Foreign { path }),
        }
        Ok(store)
    }

    /// Reserves the room of the file, of which `length` bytes are there.
    fn reserve(&self, length: u64) -> Result<(), StoreError> {
        let needed = self.layout.file_bytes();
        let free = free(folder_of(&self.path));
        let lacking = |free| StoreError::Room { path: self.path.clone(), needed, free };
        if let Some(free) = free
            && needed > length.saturating_add(free)
        {
            return Err(lacking(free));
        }
        self.medium.reserve(needed).map_err(|source| match (is_full(&source), free) {
            (true, Some(free)) => lacking(free),
            _ => self.io("reserve room in", 0, 0, source),
        })
    }

    /// Returns the generations that are whole, newest first. It reads the records and the headers of all
    /// pieces, not their arrays: see [`Store::check`].
    ///
    /// Errors: a file that cannot be read; [`StoreError::Damaged`] if the newest generation has lost a piece,
    /// which no crash explains: it counts only after all its pieces were on the disk.
    pub fn generations(&self) -> Result<Vec<Generation>, StoreError> {
        let records = (0..2).map(|slot| self.record(slot)).collect::<Result<Vec<_>, _>>()?;
        let mut records: Vec<StoredRecord> = records.into_iter().flatten().collect();
        records.sort_by_key(|record| std::cmp::Reverse(record.generation));
        let mut found = Vec::new();
        for (place, StoredRecord { generation: number, root, contents: record }) in
            records.into_iter().enumerate()
        {
            match self.unlike(number, root)? {
                None => found.push(Generation { number, record }),
                Some(piece) if place == 0 => {
                    return Err(self.damaged(number, piece, "does not fit the generation's record"));
                }
                // The next generation is being written over it.
                Some(_) => {}
            }
        }
        Ok(found)
    }

    /// Reads the record in a slot; `None` if there is none.
    fn record(&self, slot: u64) -> Result<Option<StoredRecord>, StoreError> {
        let mut bytes = blocks(self.layout.record_slot());
        self.read_at(bytes_of_mut(&mut bytes), self.layout.record_at(slot))?;
        Ok(StoredRecord::of_bytes(bytes_of(&bytes)).filter(|record| record.generation % 2 == slot))
    }

    /// Returns the number of the newest generation in a file whose records have at most `record` bytes,
    /// whatever its arrays are. `None` if there is none, or if the file is something else.
    ///
    /// Errors: a file that cannot be read.
    pub fn newest_in(path: &Path, record: usize) -> Result<Option<u64>, StoreError> {
        let layout = Layout::new([0; 32], 0, [], record);
        let fail = |source| StoreError::Io { action: "read", path: path.to_owned(), at: 0, bytes: 0, source };
        let file = File::open(path).map_err(fail)?;
        if file.metadata().map_err(fail)?.len() < layout.file_bytes() {
            return Ok(None);
        }
        let medium = Arc::new(DirectFile::new(file));
        let (read, written) = (AtomicU64::new(0), AtomicU64::new(0));
        let store = Self { path: path.to_owned(), layout, medium, _lock: None, read, written };
        let records = (0..2).map(|slot| store.record(slot)).collect::<Result<Vec<_>, _>>()?;
        Ok(records.into_iter().flatten().map(|record| record.generation).max())
    }

    /// Returns a piece whose header is of another generation, or some piece if the checksums in all headers
    /// have another hash than `root`; `None` if all fit.
    fn unlike(&self, generation: u64, root: [u8; 32]) -> Result<Option<usize>, StoreError> {
        let mut found = Root::default();
        for piece in 0..self.layout.pieces() {
            let Some(sums) = self.sums(generation, piece)? else { return Ok(Some(piece)) };
            found.add(&sums);
        }
        Ok((found.finish() != root).then_some(0))
    }

    /// Returns the checksums of a piece's arrays; `None` if the slot has another generation.
    fn sums(&self, generation: u64, piece: usize) -> Result<Option<Vec<u32>>, StoreError> {
        let mut header = blocks(BLOCK);
        self.read_at(bytes_of_mut(&mut header), self.layout.piece_at(generation, piece))?;
        Ok(read_piece_header(bytes_of(&header), generation, piece, self.layout.arrays()))
    }

    /// Reads all arrays of a generation, and compares their checksums. After power was lost while the next
    /// generation was written, headers of the one before it may be older than its arrays.
    ///
    /// Errors: [`StoreError::Damaged`].
    pub fn check(&self, generation: u64) -> Result<(), StoreError> {
        let most = (0..self.layout.pieces()).map(|piece| self.layout.array_bytes(piece)).max().unwrap_or(0);
        let mut array = blocks(most as usize);
        for piece in 0..self.layout.pieces() {
            let bytes = &mut bytes_of_mut(&mut array)[..self.layout.array_bytes(piece) as usize];
            (0..self.layout.arrays()).try_for_each(|number| self.read(generation, piece, number, bytes))?;
        }
        Ok(())
    }

    /// Reads an array of a piece. `bytes` is aligned to [`BLOCK`] if reads are to be direct.
    ///
    /// Errors: [`StoreError::Damaged`] if the slot has another generation, or if the checksum differs.
    ///
    /// # Panics
    /// If there is no such array, or if `bytes` has another length.
    pub fn read(
        &self,
        generation: u64,
        piece: usize,
        array: usize,
        bytes: &mut [u8],
    ) -> Result<(), StoreError> {
        assert_eq!(bytes.len() as u64, self.layout.array_bytes(piece), "the array's length");
        let sums = self.needed_sums(generation, piece)?;
        self.read_checked(generation, piece, (array, &sums), bytes)
    }

    /// Reads the first arrays of a piece into a buffer.
    pub(crate) fn read_piece<B: Arrays>(
        &self,
        generation: u64,
        piece: usize,
        reads: usize,
        buffer: &mut B,
    ) -> Result<(), StoreError> {
        let bytes = self.layout.array_bytes(piece) as usize;
        let sums = self.needed_sums(generation, piece)?;
        let read = |array| {
            self.read_checked(generation, piece, (array, &sums), &mut buffer.array_mut(array)[..bytes])
        };
        (0..reads).try_for_each(read)
    }

    fn needed_sums(&self, generation: u64, piece: usize) -> Result<Vec<u32>, StoreError> {
        self.sums(generation, piece)?.ok_or_else(|| self.damaged(generation, piece, "is missing"))
    }

    /// Reads an array, and compares its checksum.
    fn read_checked(
        &self,
        generation: u64,
        piece: usize,
        (array, sums): (usize, &[u32]),
        bytes: &mut [u8],
    ) -> Result<(), StoreError> {
        self.read_at(bytes, self.layout.array_at(generation, piece, array))?;
        if crc32fast::hash(bytes) != sums[array] {
            return Err(self.damaged(generation, piece, "has values that do not fit its checksum"));
        }
        Ok(())
    }

    fn damaged(&self, generation: u64, piece: usize, what: &'static str) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), generation, piece, what }
    }

    /// Writes the first arrays of a piece of a generation that is not committed yet; `late` are the checksums
    /// of the others. Returns the checksums of all.
    pub(crate) fn write_arrays<'a>(
        &self,
        generation: u64,
        piece: usize,
        arrays: impl Iterator<Item = &'a [u8]> + Clone,
        late: &[u32],
    ) -> Result<Vec<u32>, StoreError> {
        let sums: Vec<u32> = arrays.clone().map(crc32fast::hash).chain(late.iter().copied()).collect();
        // The header is first, so that a piece that is half written is not taken for the generation before.
        let header = piece_header(generation, piece, &sums);
        self.write_at(bytes_of(&header), self.layout.piece_at(generation, piece))?;
        for (array, bytes) in arrays.enumerate() {
            assert_eq!(bytes.len() as u64, self.layout.array_bytes(piece), "the array's length");
            self.write_at(bytes, self.layout.array_at(generation, piece, array))?;
        }
        Ok(sums)
    }

    /// Writes the arrays of a generation from number `first` on.
    pub(crate) fn write_late(
        &self,
        generation: u64,
        first: usize,
        late: &dyn LateArrays,
    ) -> Result<(), StoreError> {
        let most = (0..self.layout.pieces()).map(|piece| self.layout.array_bytes(piece)).max().unwrap_or(0);
        let mut memory = blocks(most as usize);
        for piece in 0..self.layout.pieces() {
            let bytes = &mut bytes_of_mut(&mut memory)[..self.layout.array_bytes(piece) as usize];
            for array in first..self.layout.arrays() {
                late.fill(piece, array, bytes);
                self.write_at(bytes, self.layout.array_at(generation, piece, array))?;
            }
        }
        Ok(())
    }

    /// Makes a generation count whose pieces are all written.
    pub(crate) fn commit(&self, number: u64, root: [u8; 32], record: Vec<u8>) -> Result<(), StoreError> {
        self.flush()?;
        let record = StoredRecord { generation: number, root, contents: record };
        self.write_at(bytes_of(&record.to_blocks()), self.layout.record_at(number))?;
        self.flush()
    }

    /// Forgets all generations but one, or all: for work that goes on from an older one, or from elsewhere.
    ///
    /// Errors: a file that cannot be written.
    pub fn keep_only(&self, generation: Option<u64>) -> Result<(), StoreError> {
        if let Some(record) = generation.map(|kept| self.record(kept % 2)).transpose()?.flatten() {
            // After a flush that failed, what was read may be in memory alone.
            self.write_at(bytes_of(&record.to_blocks()), self.layout.record_at(record.generation))?;
            self.flush()?;
        }
        for slot in (0..2).filter(|slot| generation.is_none_or(|kept| kept % 2 != *slot)) {
            let empty = blocks(self.layout.record_slot());
            self.write_at(bytes_of(&empty), self.layout.record_at(slot))?;
        }
        self.flush()
    }

    /// Checks that a record has room.
    pub(crate) fn check_record(&self, record: &[u8]) -> Result<(), StoreError> {
        let (found, most) = (record.len(), self.layout.record_bytes());
        let error = || StoreError::Record { path: self.path.clone(), found, most };
        if found > most { Err(error()) } else { Ok(()) }
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> Result<(), StoreError> {
        let count = bytes.len();
        read_all(&*self.medium, bytes, at).map_err(|source| self.io("read", at, count, source))?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> Result<(), StoreError> {
        write_all(&*self.medium, bytes, at).map_err(|source| self.io("write", at, bytes.len(), source))?;
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.medium.flush().map_err(|source| self.io("flush", 0, 0, source))
    }

    fn io(&self, action: &'static str, at: u64, bytes: usize, source: io::Error) -> StoreError {
        StoreError::Io { action, path: self.path.clone(), at, bytes: bytes as u64, source }
    }

    /// Returns the error of work on a store that has failed before.
    pub(crate) fn stopped(&self) -> StoreError {
        StoreError::Stopped { path: self.path.clone() }
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the layout.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns whether reads and writes bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.medium.is_direct()
    }

    /// Returns the bytes read and written so far.
    #[must_use]
    pub fn moved(&self) -> [u64; 2] {
        [&self.read, &self.written].map(|bytes| bytes.load(Ordering::Relaxed))
    }
}

/// Hash of the checksums of a generation's arrays.
#[derive(Debug, Default)]
pub(crate) struct Root(blake3::Hasher);

impl Root {
    /// Adds the checksums of the next piece.
    pub(crate) fn add(&mut self, sums: &[u32]) {
        for sum in sums {
            self.0.update(&sum.to_le_bytes());
        }
    }

    pub(crate) fn finish(&self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// Returns the folder of a file.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the bytes that this user may still write in a folder; `None` if the file system does not tell.
fn free(folder: &Path) -> Option<u64> {
    let known = rustix::fs::statvfs(folder).ok()?;
    (known.f_blocks > 0).then(|| known.f_bavail.saturating_mul(known.f_frsize))
}

/// Returns whether an error says that the disk is full, or that a limit is reached.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
