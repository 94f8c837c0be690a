//! The file of samples as memory. Knows no codec.
#![expect(
    unsafe_code,
    reason = "a mapped file is memory that others could change: that they do not is the caller's promise"
)]

use std::path::Path;

use memmap2::MmapMut;

use super::store::{SUM, open, read_slot, slot_at, slot_bytes, store_error, write_slot};
use super::{Samples, Store};
use crate::{CompressError, State};

/// [`super::FileStore`]'s file, mapped: the same bytes at the same places, without a copy by the system. Either
/// may open what the other has left.
#[derive(Debug)]
pub struct MappedStore {
    map: MmapMut,
    samples: Samples,
    capacity: u64,
}

impl MappedStore {
    /// Maps the file, or makes it.
    ///
    /// # Safety
    ///
    /// Nobody else writes to the file or shortens it while it is mapped: not through another store, and not
    /// from outside.
    ///
    /// Errors: as of [`super::FileStore::open`].
    pub unsafe fn open(
        path: &Path,
        samples: impl Into<Samples>,
        capacity: u64,
    ) -> Result<Self, CompressError> {
        let samples = samples.into();
        let file = open(path, samples, capacity)?;
        // SAFETY: the caller promises that nobody changes the file under us.
        let map = unsafe { MmapMut::map_mut(&file) }.map_err(|source| store_error("map", &source))?;
        Ok(Self { map, samples, capacity })
    }

    fn slot(&mut self, id: u64, action: &'static str) -> Result<&mut [u8], CompressError> {
        let at = slot_at(id, self.samples, self.capacity, action)? as usize;
        Ok(&mut self.map[at..at + slot_bytes(self.samples)])
    }
}

/// What it holds is in the file, which outlives the process.
impl State for MappedStore {
    fn reset(&mut self) {
        for id in 0..self.capacity {
            _ = self.forget(id);
        }
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
