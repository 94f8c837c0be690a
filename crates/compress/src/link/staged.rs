//! A store whose writes wait until a step is final. It depends on no codec.

use std::collections::BTreeMap;

use super::{Samples, Store, checksum};
use crate::{CompressError, State, StateMap};

/// Holds what was written since the last commit beside a store, so that a step that is given up leaves no
/// trace: both ends that roll back hold the same again.
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
    /// What changed since the last commit; `None` for what was forgotten.
    changed: BTreeMap<u64, Option<Vec<u8>>>,
    /// Why the last commit did not reach the store.
    failed: Option<CompressError>,
}

impl<S: Store> Staged<S> {
    /// Changes to `inner` wait for [`State::commit`].
    pub const fn new(inner: S) -> Self {
        Self { inner, changed: BTreeMap::new(), failed: None }
    }

    /// The error of the last commit, if it failed.
    fn check(&self) -> Result<(), CompressError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Hands all changes on, those of the smallest numbers first; one that fails and those behind it stay.
    fn hand_on(&mut self) -> Result<(), CompressError> {
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

    /// Changes that the store does not take wait for the next commit, and its error is that of the next call.
    fn commit(&mut self) {
        self.failed = self.hand_on().err();
    }

    fn rollback(&mut self) {
        self.changed.clear();
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
