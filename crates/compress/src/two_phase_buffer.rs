//! A buffer of a codec's memory that is prepared, then committed or rolled back. [`crate::ErrorFeedback`] and
//! [`crate::MomentumCorrection`] hold their memory in it.

use std::borrow::Cow;
use std::ops::Range;

use crate::{CompressError, HeldBytes, StateMap, StateValue};

/// A vector of fixed length: its value at the last commit, and its latest value.
#[derive(Debug, Clone, Default)]
pub(crate) struct TwoPhaseBuffer {
    /// Length of `committed`. Before the first commit it is `None`, and the vector is zero with any length.
    len: Option<usize>,
    committed: Vec<f32>,
    /// The latest value, while it is not committed.
    latest: Vec<f32>,
    pending: bool,
    /// Buffer for the next value while `latest` is needed to compute it.
    spare: Vec<f32>,
}

impl TwoPhaseBuffer {
    /// Returns the latest value, committed or not. It is empty before the first vector.
    pub(crate) fn get(&self) -> &[f32] {
        match (self.pending, self.len) {
            (true, _) => &self.latest,
            (false, Some(_)) => &self.committed,
            (false, None) => &[],
        }
    }

    /// Returns a buffer for the next value, which the caller must pass to [`Self::end`]. Until then
    /// [`Self::now`] returns the value before it.
    ///
    /// Errors: [`CompressError::LengthChanged`].
    pub(crate) fn begin(&mut self, len: usize) -> Result<Vec<f32>, CompressError> {
        let held = if self.pending { Some(self.latest.len()) } else { self.len };
        match held {
            Some(held) if held != len => return Err(CompressError::LengthChanged { held, found: len }),
            Some(_) => {}
            None => {
                self.committed.clear();
                self.committed.resize(len, 0.0);
            }
        }
        let mut next = std::mem::take(if self.pending { &mut self.spare } else { &mut self.latest });
        next.resize(len, 0.0);
        Ok(next)
    }

    /// Returns the latest value, or zeros before the first vector. Call [`Self::begin`] first.
    pub(crate) fn now(&self) -> &[f32] {
        if self.pending { &self.latest } else { &self.committed }
    }

    /// Makes `next` the latest value if it is `good`; otherwise only reuses its allocation.
    pub(crate) fn end(&mut self, next: Vec<f32>, good: bool) {
        match (good, self.pending) {
            (true, true) => self.spare = std::mem::replace(&mut self.latest, next),
            (true, false) => (self.latest, self.pending) = (next, true),
            (false, true) => self.spare = next,
            (false, false) => self.latest = next,
        }
    }

    /// Returns the bytes of all buffers.
    pub(crate) fn held(&self) -> HeldBytes {
        HeldBytes::of_values([&self.committed, &self.latest, &self.spare])
    }

    pub(crate) fn save<'a>(&'a self, name: String, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        if self.pending {
            return Err(CompressError::Uncommitted);
        }
        into.insert(name, StateValue::F32(Cow::Borrowed(self.get())));
        Ok(())
    }

    /// Removes the entry `name` from a saved state and returns it. It changes nothing until [`Self::set`]. An
    /// empty entry means that there was no vector yet.
    pub(crate) fn load(name: String, from: &mut StateMap<'_>) -> Result<Vec<f32>, CompressError> {
        let Some(StateValue::F32(held)) = from.remove(&name) else {
            return Err(CompressError::MissingState { name });
        };
        match held.iter().position(|e| !e.is_finite()) {
            Some(index) => Err(CompressError::NonFinite { index, value: held[index] }),
            None => Ok(held.into_owned()),
        }
    }

    pub(crate) fn set(&mut self, held: Vec<f32>) {
        self.rollback();
        self.committed = held;
        self.len = (!self.committed.is_empty()).then_some(self.committed.len());
    }

    /// Checks that [`Self::reshard`] can be called.
    pub(crate) fn check_reshard(&self, held: &Range<usize>) -> Result<(), CompressError> {
        if self.pending {
            return Err(CompressError::Uncommitted);
        }
        match self.len.filter(|len| *len != held.len()) {
            Some(len) => Err(CompressError::LengthChanged { held: len, found: held.len() }),
            None => Ok(()),
        }
    }

    /// Moves the vector from the range `held` to the range `wanted`: the overlap is kept, the rest is zero.
    /// Call [`Self::check_reshard`] first.
    pub(crate) fn reshard(&mut self, held: &Range<usize>, wanted: &Range<usize>) {
        if self.len.is_none() {
            return;
        }
        let mut moved = vec![0.0; wanted.len()];
        let common = held.start.max(wanted.start)..held.end.min(wanted.end);
        if !common.is_empty() {
            let source = common.start - held.start..common.end - held.start;
            moved[common.start - wanted.start..common.end - wanted.start]
                .copy_from_slice(&self.committed[source]);
        }
        (self.len, self.committed) = (Some(moved.len()), moved);
    }

    pub(crate) fn reset(&mut self) {
        self.rollback();
        self.len = None;
    }

    pub(crate) fn commit(&mut self) {
        if self.pending {
            std::mem::swap(&mut self.committed, &mut self.latest);
            self.len = Some(self.committed.len());
            self.pending = false;
        }
    }

    pub(crate) fn rollback(&mut self) {
        self.pending = false;
    }
}
