//! Error feedback: the part of a vector that a codec could not send is added to the next vector.

use std::ops::Range;

use crate::two_phase_buffer::TwoPhaseBuffer;
use crate::{
    CompressError, Compressor, HeldBytes, Memoryless, Payload, PayloadRef, RoundKey, State, StateMap,
};

/// A codec with error feedback: `v = x + e; send C(v); e = v - D(C(v))`. The sum of all decoded vectors equals
/// the sum of all inputs minus the last residual.
///
/// A compress is only prepared: [`State::commit`] makes it final, and [`State::rollback`] undoes every compress
/// since the last commit, so an aborted step loses nothing. Without commits the feedback is still correct, but
/// holds three buffers instead of two, and cannot be saved. The first vector fixes the length; a vector of
/// another length returns [`CompressError::LengthChanged`] and never resets the residual silently.
///
/// State: `residual` (`[n]`, f32). Memory: `8n` bytes.
///
/// Sources: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback
/// Fixes `SignSGD`", Alg. 2. Differs: the learning rate is not part of `x`, unless the caller multiplies by it.
#[derive(Debug, Clone, Default)]
pub struct ErrorFeedback<C> {
    inner: C,
    rule: Rule,
    memory: TwoPhaseBuffer,
}

/// The rule by which the residual changes before it is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum Rule {
    #[default]
    Whole,
    Decayed(f32),
    Ef21,
}

impl<C: Memoryless> ErrorFeedback<C> {
    /// Wraps `inner`, with a residual of zero.
    #[must_use]
    pub fn new(inner: C) -> Self {
        Self { inner, rule: Rule::Whole, memory: TwoPhaseBuffer::default() }
    }

    /// Wraps `inner`, with a residual that is multiplied by `decay` after each vector, so that old compression
    /// errors fade. The stored residual is already decayed.
    ///
    /// Source: Sarfi et al. 2025, "`SparseLoCo`", Alg. 1 (0.95 there).
    ///
    /// Errors: [`CompressError::Decay`] unless `decay` is in `0..=1`.
    pub fn decayed(inner: C, decay: f32) -> Result<Self, CompressError> {
        if (0.0..=1.0).contains(&decay) {
            return Ok(Self { rule: Rule::Decayed(decay), ..Self::new(inner) });
        }
        Err(CompressError::Decay { found: decay })
    }

    /// Wraps `inner` as EF21: sender and receiver keep an estimate `h` of the vector; `C(x - h)` is sent, and
    /// both update `h += D(C(x - h))`. The decoded vector is the change of the estimate, which the receiver
    /// must add up.
    ///
    /// Here [`Self::residual`] returns `-h`. The method does not assume bounded vectors, and `h` converges to
    /// `x` if the vectors converge.
    ///
    /// Source: Richtárik et al. 2021, "EF21", Alg. 1.
    #[must_use]
    pub fn ef21(inner: C) -> Self {
        Self { rule: Rule::Ef21, ..Self::new(inner) }
    }

    /// Returns the residual after the last compress, committed or not. It is empty before the first.
    #[must_use]
    pub fn residual(&self) -> &[f32] {
        self.memory.get()
    }

    /// Returns the wrapped codec.
    #[must_use]
    pub fn inner(&self) -> &C {
        &self.inner
    }

    /// Returns the wrapped codec and drops the residual.
    #[must_use]
    pub fn into_inner(self) -> C {
        self.inner
    }
}

impl<C: Memoryless> Compressor for ErrorFeedback<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        let mut next = self.memory.begin(x.len()).inspect_err(|_| out.clear())?;
        let mut result = self.inner.compress_residual(x, self.memory.now(), &mut next, key, out);
        match self.rule {
            Rule::Whole => {}
            Rule::Decayed(decay) => next.iter_mut().for_each(|e| *e *= decay),
            // `next` is `x - h - D(C(x - h))`; minus `x` it is the negated new estimate.
            Rule::Ef21 => {
                next.iter_mut().zip(x).for_each(|(e, x)| *e -= x);
                if let Some(index) = next.iter().position(|e| !e.is_finite()).filter(|_| result.is_ok()) {
                    out.clear();
                    let what = "its new estimate";
                    result = Err(CompressError::Overflow { index, value: x[index], what });
                }
            }
        }
        self.memory.end(next, result.is_ok());
        result
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        self.inner.decompress(p, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        self.inner.max_payload(len)
    }

    fn set_threads(&mut self, threads: usize) {
        self.inner.set_threads(threads);
    }
}

impl<C: Memoryless> State for ErrorFeedback<C> {
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        self.memory.save(format!("{prefix}residual"), into)
    }

    /// An empty residual is loaded as the state before the first vector.
    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let residual = TwoPhaseBuffer::load(format!("{prefix}residual"), from)?;
        self.memory.set(residual);
        Ok(())
    }

    fn reshard(&mut self, held: Range<usize>, wanted: Range<usize>) -> Result<(), CompressError> {
        self.memory.check_reshard(&held)?;
        self.memory.reshard(&held, &wanted);
        Ok(())
    }

    fn reset(&mut self) {
        self.memory.reset();
    }

    fn commit(&mut self) {
        self.memory.commit();
    }

    fn rollback(&mut self) {
        self.memory.rollback();
    }

    fn held(&self) -> HeldBytes {
        self.memory.held()
    }
}
