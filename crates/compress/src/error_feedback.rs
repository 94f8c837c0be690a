//! Memory of what was lost: the part of a vector that a codec could not send is added to the next one. Knows no codec.

use std::borrow::Cow;
use std::ops::Range;

use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State, StateMap, StateValue};

/// Any codec with error feedback: `v = x + e; send C(v); e = v - D(C(v))`, so that the sum of what was decoded is the
/// sum of what was given, less the last residual.
///
/// A compress is only prepared: [`State::commit`] makes it final, [`State::rollback`] takes back every compress since
/// the last commit, so that an aborted step loses nothing. Without any commit the feedback is just as right, but holds
/// three buffers instead of two, and cannot be saved. The first vector fixes the length; another one is
/// [`CompressError::LengthChanged`], never a silent reset.
///
/// State: `residual` (`[n]`, f32), and the codec's own under `inner.`. Memory: `8n` bytes.
///
/// Sources: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes
/// `SignSGD`", Alg. 2. Differs: the learning rate is not in `x`, unless the caller puts it there.
#[derive(Debug, Clone, Default)]
pub struct ErrorFeedback<C> {
    inner: C,
    /// The length of `committed`; `None` before the first commit, when the residual is zero, of any length.
    len: Option<usize>,
    committed: Vec<f32>,
    /// The residual after the last compress, if that was not committed yet.
    latest: Vec<f32>,
    pending: bool,
    /// Takes the next residual if `latest` is still needed to make it.
    spare: Vec<f32>,
}

impl<C: Compressor> ErrorFeedback<C> {
    /// Wraps `inner`, with a residual of zero.
    #[must_use]
    pub fn new(inner: C) -> Self {
        Self { inner, len: None, committed: vec![], latest: vec![], pending: false, spare: vec![] }
    }

    /// What was not sent so far, with the last compress, committed or not; empty before the first.
    #[must_use]
    pub fn residual(&self) -> &[f32] {
        match (self.pending, self.len) {
            (true, _) => &self.latest,
            (false, Some(_)) => &self.committed,
            (false, None) => &[],
        }
    }

    /// The codec.
    #[must_use]
    pub fn inner(&self) -> &C {
        &self.inner
    }

    /// The codec, without the residual.
    #[must_use]
    pub fn into_inner(self) -> C {
        self.inner
    }
}

impl<C: Compressor> Compressor for ErrorFeedback<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        let held = if self.pending { Some(self.latest.len()) } else { self.len };
        match held {
            Some(held) if held != x.len() => {
                out.clear();
                return Err(CompressError::LengthChanged { held, found: x.len() });
            }
            Some(_) => {}
            None => {
                self.committed.clear();
                self.committed.resize(x.len(), 0.0);
            }
        }
        let mut next = std::mem::take(if self.pending { &mut self.spare } else { &mut self.latest });
        next.resize(x.len(), 0.0);
        let e = if self.pending { &self.latest } else { &self.committed };
        let result = self.inner.compress_residual(x, e, &mut next, key, out);
        match (&result, self.pending) {
            (Ok(()), true) => self.spare = std::mem::replace(&mut self.latest, next),
            (Ok(()), false) => (self.latest, self.pending) = (next, true),
            (Err(_), true) => self.spare = next,
            (Err(_), false) => self.latest = next,
        }
        result
    }

    fn compress_residual(
        &mut self,
        _: &[f32],
        _: &[f32],
        _: &mut [f32],
        _: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        out.clear();
        Err(CompressError::NestedFeedback)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        self.inner.decompress(p, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        self.inner.max_payload(len)
    }
}

impl<C: Compressor> State for ErrorFeedback<C> {
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        if self.pending {
            return Err(CompressError::Uncommitted);
        }
        self.inner.save(&format!("{prefix}inner."), into)?;
        into.insert(format!("{prefix}residual"), StateValue::F32(Cow::Borrowed(self.residual())));
        Ok(())
    }

    /// An empty residual loads as one that has not met its first vector.
    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let name = format!("{prefix}residual");
        let Some(StateValue::F32(residual)) = from.remove(&name) else {
            return Err(CompressError::MissingState { name });
        };
        if let Some(index) = residual.iter().position(|e| !e.is_finite()) {
            return Err(CompressError::NonFinite { index, value: residual[index] });
        }
        self.inner.load(&format!("{prefix}inner."), from)?;
        self.rollback_own();
        self.committed = residual.into_owned();
        self.len = (!self.committed.is_empty()).then_some(self.committed.len());
        Ok(())
    }

    fn reshard(&mut self, held: Range<usize>, wanted: Range<usize>) -> Result<(), CompressError> {
        if self.pending {
            return Err(CompressError::Uncommitted);
        }
        if let Some(len) = self.len.filter(|len| *len != held.len()) {
            return Err(CompressError::LengthChanged { held: len, found: held.len() });
        }
        self.inner.reshard(held.clone(), wanted.clone())?;
        if self.len.is_some() {
            let mut moved = vec![0.0; wanted.len()];
            let common = held.start.max(wanted.start)..held.end.min(wanted.end);
            if !common.is_empty() {
                let source = common.start - held.start..common.end - held.start;
                moved[common.start - wanted.start..common.end - wanted.start]
                    .copy_from_slice(&self.committed[source]);
            }
            (self.len, self.committed) = (Some(moved.len()), moved);
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.inner.reset();
        self.rollback_own();
        self.len = None;
    }

    fn commit(&mut self) {
        self.inner.commit();
        if self.pending {
            std::mem::swap(&mut self.committed, &mut self.latest);
            self.len = Some(self.committed.len());
            self.pending = false;
        }
    }

    fn rollback(&mut self) {
        self.inner.rollback();
        self.rollback_own();
    }
}

impl<C> ErrorFeedback<C> {
    fn rollback_own(&mut self) {
        self.pending = false;
    }
}
