//! Memory of what was lost: the part of a vector that a codec could not send is added to the next one. Knows no
//! codec.

use std::ops::Range;

use crate::memory::Memory;
use crate::{CompressError, Compressor, Memoryless, Payload, PayloadRef, RoundKey, State, StateMap};

/// Any codec with error feedback: `v = x + e; send C(v); e = v - D(C(v))`, so that the sum of what was decoded
/// is the sum of what was given, less the last residual.
///
/// A compress is only prepared: [`State::commit`] makes it final, [`State::rollback`] takes back every compress
/// since the last commit, so that an aborted step loses nothing. Without any commit the feedback is just as
/// right, but holds three buffers instead of two, and cannot be saved. The first vector fixes the length;
/// another one is [`CompressError::LengthChanged`], never a silent reset.
///
/// State: `residual` (`[n]`, f32). Memory: `8n` bytes.
///
/// Sources: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback
/// Fixes `SignSGD`", Alg. 2. Differs: the learning rate is not in `x`, unless the caller puts it there.
#[derive(Debug, Clone, Default)]
pub struct ErrorFeedback<C> {
    inner: C,
    rule: Rule,
    memory: Memory,
}

/// What the residual becomes before it is kept.
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
        Self { inner, rule: Rule::Whole, memory: Memory::default() }
    }

    /// As [`Self::new`], but the residual is multiplied by `decay` from one vector to the next: what was not
    /// sent for long is forgotten. The residual that is kept is already decayed.
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

    /// EF21: both ends keep an estimate `h` of the vector, and what travels is `C(x - h)`, by which both move
    /// it: `h += D(C(x - h))`. What a receiver decodes is the estimate's change, which it adds up.
    ///
    /// [`Self::residual`] is `-h` here. Unlike a residual it needs no bound on the vectors, and goes to `-x` if
    /// they settle.
    ///
    /// Source: Richtárik et al. 2021, "EF21", Alg. 1.
    #[must_use]
    pub fn ef21(inner: C) -> Self {
        Self { rule: Rule::Ef21, ..Self::new(inner) }
    }

    /// What was not sent so far, with the last compress, committed or not; empty before the first.
    #[must_use]
    pub fn residual(&self) -> &[f32] {
        self.memory.get()
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

impl<C: Memoryless> Compressor for ErrorFeedback<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        let mut next = self.memory.begin(x.len()).inspect_err(|_| out.clear())?;
        let mut result = self.inner.compress_residual(x, self.memory.now(), &mut next, key, out);
        match self.rule {
            Rule::Whole => {}
            Rule::Decayed(decay) => next.iter_mut().for_each(|e| *e *= decay),
            // `x - h` less what was sent of it, less `x`: minus the new estimate.
            Rule::Ef21 => {
                next.iter_mut().zip(x).for_each(|(e, x)| *e -= x);
                if let Some(index) = next.iter().position(|e| !e.is_finite()).filter(|_| result.is_ok()) {
                    out.clear();
                    let what = "the estimate of it";
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

    /// An empty residual loads as one that has not met its first vector.
    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let residual = Memory::load(format!("{prefix}residual"), from)?;
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
}
