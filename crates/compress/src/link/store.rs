//! Stores of the activations of samples: in memory, or in a file that outlives the process. This module does
//! not depend on any codec.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::Samples;
use crate::{CompressError, HeldBytes, State, StateMap, StateValue};

/// Stores an activation of a fixed length for each sample. Its state is the stored samples; a store that
/// outlives the process has nothing to save.
pub trait Store: State + std::fmt::Debug + Send {
    /// Returns the length and the storage format of the samples.
    fn samples(&self) -> Samples;

    /// Copies the stored bytes of `id` to `out` ([`Samples::bytes`]) and returns their [`checksum`]. Returns 0
    /// if nothing intact is stored; the contents of `out` are unspecified then.
    ///
    /// Errors: [`CompressError::Store`].
    fn read(&mut self, id: u64, out: &mut [u8]) -> Result<u32, CompressError>;

    /// Stores `bytes` as the sample `id`.
    ///
    /// Errors: [`CompressError::Store`].
    fn write(&mut self, id: u64, bytes: &[u8]) -> Result<(), CompressError>;

    /// Drops the stored bytes of `id`.
    ///
    /// Errors: [`CompressError::Store`].
    fn forget(&mut self, id: u64) -> Result<(), CompressError>;
}

/// Returns the CRC-32 of stored bytes, but 1 instead of 0.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes).max(1)
}

impl<S: Store + ?Sized> Store for Box<S> {
    fn samples(&self) -> Samples {
        (**self).samples()
    }

    fn read(&mut self, id: u64, out: &mut [u8]) -> Result<u32, CompressError> {
        (**self).read(id, out)
    }

    fn write(&mut self, id: u64, bytes: &[u8]) -> Result<(), CompressError> {
        (**self).write(id, bytes)
    }

    fn forget(&mut self, id: u64) -> Result<(), CompressError> {
        (**self).forget(id)
    }
}

/// Stores any number of samples in memory.
///
/// State: the bytes of each sample, under its number. Commit and rollback do nothing. There is nothing to
/// reshard: if samples move to other links, those detect by checksums that they have no copies.
#[derive(Debug, Clone)]
pub struct MemoryStore {
    samples: Samples,
    held: BTreeMap<u64, Vec<u8>>,
}

impl MemoryStore {
    /// Creates an empty store. A plain number is the length of samples stored as f16.
    #[must_use]
    pub fn new(samples: impl Into<Samples>) -> Self {
        Self { samples: samples.into(), held: BTreeMap::new() }
    }
}

impl State for MemoryStore {
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        let entry =
            |(id, held): (&u64, &'a Vec<u8>)| (format!("{prefix}{id}"), StateValue::Bytes(held.into()));
        into.extend(self.held.iter().map(entry));
        Ok(())
    }

    /// Errors: [`CompressError::LengthMismatch`] if a saved sample has another number of bytes.
    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let names =
            from.range(prefix.to_owned()..).map(|(name, _)| name).take_while(|n| n.starts_with(prefix));
        let ids: Vec<u64> = names.filter_map(|name| name[prefix.len()..].parse().ok()).collect();
        let mut held = BTreeMap::new();
        for id in ids {
            let Some(StateValue::Bytes(bytes)) = from.remove(&format!("{prefix}{id}")) else { continue };
            let (wanted, found) = (self.samples.bytes(), bytes.len());
            if wanted != found {
                return Err(CompressError::LengthMismatch {
                    what: "a saved sample (in bytes)",
                    wanted,
                    found,
                });
            }
            held.insert(id, bytes.into_owned());
        }
        self.held = held;
        Ok(())
    }

    fn reset(&mut self) {
        self.held.clear();
    }

    fn held(&self) -> HeldBytes {
        let entry = self.samples.bytes() + size_of::<(u64, Vec<u8>)>();
        HeldBytes { memory: self.held.len() * entry, files: 0 }
    }
}

impl Store for MemoryStore {
    fn samples(&self) -> Samples {
        self.samples
    }

    fn read(&mut self, id: u64, out: &mut [u8]) -> Result<u32, CompressError> {
        Ok(self.held.get(&id).map_or(0, |held| {
            out.copy_from_slice(held);
            checksum(held)
        }))
    }

    fn write(&mut self, id: u64, bytes: &[u8]) -> Result<(), CompressError> {
        let held = self.held.entry(id).or_default();
        held.clear();
        held.extend_from_slice(bytes);
        Ok(())
    }

    fn forget(&mut self, id: u64) -> Result<(), CompressError> {
        self.held.remove(&id);
        Ok(())
    }
}

/// The first bytes of a file of samples, and the version of its format.
const MAGIC: [u8; 5] = *b"ffaq\x01";
/// Number of bytes before the first sample: the magic number, the storage format, two zeros, and the number of
/// values in a sample as u64.
const HEAD: u64 = 16;
/// Number of bytes of the checksum before each sample.
pub(super) const SUM: usize = 4;

/// Stores samples in a file with a slot for each number below a capacity. The file has
/// `16 + capacity (4 + bytes)` bytes, but the system allocates disk blocks only for slots that were written.
///
/// A slot is a checksum and the sample. A slot that a crash left half written does not match its checksum, and
/// counts as empty.
///
/// The file is read and written at an offset. With the feature `mmap`, `MappedStore` maps it instead, which
/// avoids the system's copies: encoding a sample of 256 KiB in 16 bits is then as fast as from memory, and
/// takes 1.6 times as long without.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    samples: Samples,
    capacity: u64,
    slot: Vec<u8>,
}

/// Opens a file of samples, or creates it, and sets its full length.
pub(super) fn open(path: &Path, samples: Samples, capacity: u64) -> Result<File, CompressError> {
    let failed = |source: io::Error| store_error("open", &source);
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
    let mut head = [0; HEAD as usize];
    head[..5].copy_from_slice(&MAGIC);
    head[5] = samples.tag();
    head[8..].copy_from_slice(&(samples.len() as u64).to_le_bytes());
    if file.metadata().map_err(failed)?.len() == 0 {
        file.write_all(&head).map_err(failed)?;
    }
    file.rewind().map_err(failed)?;
    let mut found = [0; HEAD as usize];
    file.read_exact(&mut found).map_err(failed)?;
    if found != head {
        return Err(failed(io::Error::new(
            io::ErrorKind::InvalidData,
            "not a file of samples of this length and format",
        )));
    }
    file.set_len(FileStore::file_bytes(samples, capacity)).map_err(failed)?;
    Ok(file)
}

/// Returns the number of bytes of a slot: a checksum and a sample.
pub(super) fn slot_bytes(samples: Samples) -> usize {
    SUM + samples.bytes()
}

/// Returns the offset of the slot of `id` in the file.
pub(super) fn slot_at(
    id: u64,
    samples: Samples,
    capacity: u64,
    action: &'static str,
) -> Result<u64, CompressError> {
    if id >= capacity {
        let why = format!("sample {id} is outside the capacity of {capacity} samples");
        return Err(store_error(action, &io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    Ok(HEAD + id * slot_bytes(samples) as u64)
}

/// Copies the sample of an intact slot to `out` and returns its checksum, or returns 0, as [`Store::read`]
/// does.
pub(super) fn read_slot(slot: &[u8], out: &mut [u8]) -> u32 {
    let (sum, held) = slot.split_first_chunk().expect("a slot begins with its checksum");
    let sum = u32::from_le_bytes(*sum);
    if sum != checksum(held) {
        return 0;
    }
    out.copy_from_slice(held);
    sum
}

/// Writes `bytes` and their checksum to a slot.
pub(super) fn write_slot(slot: &mut [u8], bytes: &[u8]) {
    let (sum, held) = slot.split_at_mut(SUM);
    held.copy_from_slice(bytes);
    sum.copy_from_slice(&checksum(bytes).to_le_bytes());
}

impl FileStore {
    /// Opens the file, or creates it.
    ///
    /// Errors: [`CompressError::Store`], also if the file is not a file of samples, or of other samples.
    pub fn open(path: &Path, samples: impl Into<Samples>, capacity: u64) -> Result<Self, CompressError> {
        let samples = samples.into();
        let file = open(path, samples, capacity)?;
        Ok(Self { file, samples, capacity, slot: vec![0; slot_bytes(samples)] })
    }

    /// Returns the bytes of a file for this many samples.
    #[must_use]
    pub fn file_bytes(samples: impl Into<Samples>, capacity: u64) -> u64 {
        HEAD + capacity * slot_bytes(samples.into()) as u64
    }

    fn seek(&mut self, id: u64, action: &'static str) -> Result<(), CompressError> {
        let at = slot_at(id, self.samples, self.capacity, action)?;
        self.file.seek(SeekFrom::Start(at)).map(|_| ()).map_err(|source| store_error(action, &source))
    }
}

pub(super) fn store_error(action: &'static str, source: &io::Error) -> CompressError {
    CompressError::Store { action, kind: source.kind(), why: source.to_string() }
}

/// The state needs no saving, since the file outlives the process.
impl State for FileStore {
    /// Ignores errors: the ends compare checksums, so a sample that could not be dropped at one end is used
    /// only if the other end has the same copy.
    fn reset(&mut self) {
        for id in 0..self.capacity {
            _ = self.forget(id);
        }
    }

    fn held(&self) -> HeldBytes {
        let files = Self::file_bytes(self.samples, self.capacity);
        HeldBytes { memory: self.slot.capacity(), files: files as usize }
    }
}

impl Store for FileStore {
    fn samples(&self) -> Samples {
        self.samples
    }

    fn read(&mut self, id: u64, out: &mut [u8]) -> Result<u32, CompressError> {
        self.seek(id, "read")?;
        self.file.read_exact(&mut self.slot).map_err(|source| store_error("read", &source))?;
        Ok(read_slot(&self.slot, out))
    }

    fn write(&mut self, id: u64, bytes: &[u8]) -> Result<(), CompressError> {
        write_slot(&mut self.slot, bytes);
        self.seek(id, "write")?;
        self.file.write_all(&self.slot).map_err(|source| store_error("write", &source))
    }

    fn forget(&mut self, id: u64) -> Result<(), CompressError> {
        self.seek(id, "write")?;
        self.file.write_all(&[0; SUM]).map_err(|source| store_error("write", &source))
    }
}
