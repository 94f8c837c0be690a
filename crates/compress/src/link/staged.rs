//! A store that writes only committed changes. This module does not depend on any codec.

use std::collections::BTreeMap;

use super::{Samples, Store, checksum};
use crate::{CompressError, HeldBytes, State, StateMap};

/// Keeps the changes since the last commit beside a store, so that an abandoned step can be rolled back. If
/// both ends roll back, they hold the same samples again.
///
/// Memory: the bytes of the samples of a step.
///
/// ```
/// use farflung_compress::State;
/// use farflung_compress::link::{MemoryStore, Staged, Store};
///
/// let mut store = Staged::new(MemoryStore::new(2));
/// let mut held = [0; 4];
/// store.write(7, &[1; 4])?;
/// store.commit();
/// store.write(7, &[2; 4])?;
/// store.rollback();
/// store.read(7, &mut held)?;
/// assert_eq!(held, [1; 4]);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Staged<S> {
    inner: S,
    /// Changes since the last commit. `None` means that the sample was dropped.
    changed: BTreeMap<u64, Option<Vec<u8>>>,
    /// Error of the last commit, if it failed.
    failed: Option<CompressError>,
}

impl<S: Store> Staged<S> {
    /// Wraps `inner`, to which changes are written at [`State::commit`].
    pub const fn new(inner: S) -> Self {
        Self { inner, changed: BTreeMap::new(), failed: None }
    }

    /// Returns the error of the last commit, if it failed.
    fn check(&self) -> Result<(), CompressError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Writes all changes to the store, in the order of the sample numbers. If one fails, it and the changes
    /// after it stay pending.
    fn flush(&mut self) -> Result<(), CompressError> {
        while let Some((id, change)) = self.changed.first_key_value() {
            match change {
                Some(bytes) => self.inner.write(*id, bytes)?,
                None => self.inner.forget(*id)?,
            }
            self.changed.pop_first();
        }
        Ok(())
    }
}

impl<S: Store> State for Staged<S> {
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        if !self.changed.is_empty() {
            return Err(CompressError::Uncommitted);
        }
        self.inner.save(prefix, into)
    }

    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        self.inner.load(prefix, from)?;
        (self.changed, self.failed) = (BTreeMap::new(), None);
        Ok(())
    }

    fn reset(&mut self) {
        (self.changed, self.failed) = (BTreeMap::new(), None);
        self.inner.reset();
    }

    /// Writes the changes to the store. If that fails, the remaining changes stay pending, and every read or
    /// write returns the error until a commit succeeds.
    fn commit(&mut self) {
        self.failed = self.flush().err();
    }

    fn rollback(&mut self) {
        self.changed.clear();
    }

    fn held(&self) -> HeldBytes {
        let changed: usize = self.changed.values().flatten().map(Vec::capacity).sum();
        self.inner.held() + HeldBytes { memory: changed, files: 0 }
    }
}

impl<S: Store> Store for Staged<S> {
    fn samples(&self) -> Samples {
        self.inner.samples()
    }

    fn read(&mut self, id: u64, out: &mut [u8]) -> Result<u32, CompressError> {
        self.check()?;
        match self.changed.get(&id) {
            None => self.inner.read(id, out),
            Some(None) => Ok(0),
            Some(Some(bytes)) => {
                out.copy_from_slice(bytes);
                Ok(checksum(bytes))
            }
        }
    }

    fn write(&mut self, id: u64, bytes: &[u8]) -> Result<(), CompressError> {
        self.check()?;
        self.changed.insert(id, Some(bytes.to_vec()));
        Ok(())
    }

    fn forget(&mut self, id: u64) -> Result<(), CompressError> {
        self.check()?;
        self.changed.insert(id, None);
        Ok(())
    }
}
