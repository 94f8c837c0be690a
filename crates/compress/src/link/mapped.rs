//! A memory-mapped file of samples.
#![expect(
    unsafe_code,
    reason = "other programs could change the mapped file: the caller promises that none does"
)]

use std::path::Path;

use memmap2::MmapMut;

use super::store::{SUM, open, read_slot, slot_at, slot_bytes, store_error, write_slot};
use super::{Samples, Store};
use crate::{CompressError, HeldBytes, State};

/// Stores samples in [`super::FileStore`]'s file format, mapped into memory, which avoids the system's copies.
/// Either store can open the other's file.
#[derive(Debug)]
pub struct MappedStore {
    map: MmapMut,
    samples: Samples,
    capacity: u64,
}

impl MappedStore {
    /// Maps the file, or creates it.
    ///
    /// # Safety
    ///
    /// While the file is mapped, nothing else may write to it or shorten it: neither another store nor another
    /// program.
    ///
    /// Errors: as [`super::FileStore::open`].
    pub unsafe fn open(
        path: &Path,
        samples: impl Into<Samples>,
        capacity: u64,
    ) -> Result<Self, CompressError> {
        let samples = samples.into();
        let file = open(path, samples, capacity)?;
        // SAFETY: the caller promises that nothing else changes the file while it is mapped.
        let map = unsafe { MmapMut::map_mut(&file) }.map_err(|source| store_error("map", &source))?;
        Ok(Self { map, samples, capacity })
    }

    fn slot(&mut self, id: u64, action: &'static str) -> Result<&mut [u8], CompressError> {
        let at = slot_at(id, self.samples, self.capacity, action)? as usize;
        Ok(&mut self.map[at..at + slot_bytes(self.samples)])
    }
}

/// The state needs no saving, since the file outlives the process.
impl State for MappedStore {
    fn reset(&mut self) {
        for id in 0..self.capacity {
            _ = self.forget(id);
        }
    }

    fn held(&self) -> HeldBytes {
        HeldBytes { memory: 0, files: self.map.len() }
    }
}

impl Store for MappedStore {
    fn samples(&self) -> Samples {
        self.samples
    }

    fn read(&mut self, id: u64, out: &mut [u8]) -> Result<u32, CompressError> {
        Ok(read_slot(self.slot(id, "read")?, out))
    }

    fn write(&mut self, id: u64, bytes: &[u8]) -> Result<(), CompressError> {
        write_slot(self.slot(id, "write")?, bytes);
        Ok(())
    }

    fn forget(&mut self, id: u64) -> Result<(), CompressError> {
        self.slot(id, "write")?[..SUM].fill(0);
        Ok(())
    }
}
