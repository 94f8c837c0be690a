//! Momentum correction: momentum is accumulated before a selection rather than in the optimizer, so that
//! elements that are not sent accumulate momentum too.

use std::ops::Range;

use crate::compressor::{LARGE, first_non_finite};
use crate::magnitude::{INFINITE, magnitude};
use crate::two_phase_buffer::TwoPhaseBuffer;
use crate::{
    CompressError, Compressor, HeldBytes, Memoryless, Payload, PayloadRef, RoundKey, State, StateMap,
};

/// Deep Gradient Compression's memory around a selection `C`: `u = m u + x; v += u; send C(v)`. For each
/// element that decodes as non-zero, `u` becomes 0 and `v` becomes its compression error.
///
/// The optimizer must not apply momentum again. The caller is responsible for clipping (at `1 / sqrt(ranks)` of
/// the threshold) and for the warm-up of the density. Commit and rollback work as in [`crate::ErrorFeedback`];
/// with a factor of 0 the codec is equal to it.
///
/// State: `momentum` and `velocity` (`[n]`, f32). Memory: `20n` bytes.
///
/// Source: Lin et al. 2018, "Deep Gradient Compression", Alg. 4. Differs: no Nesterov momentum.
#[derive(Debug, Clone, Default)]
pub struct MomentumCorrection<C> {
    inner: C,
    factor: f32,
    momentum: TwoPhaseBuffer,
    velocity: TwoPhaseBuffer,
    sent: Vec<f32>,
}

impl<C: Memoryless> MomentumCorrection<C> {
    /// Wraps `inner`, with the momentum `factor`.
    ///
    /// Errors: [`CompressError::Decay`] unless `factor` is in `0..=1`.
    pub fn new(inner: C, factor: f32) -> Result<Self, CompressError> {
        if (0.0..=1.0).contains(&factor) {
            let (momentum, velocity) = (TwoPhaseBuffer::default(), TwoPhaseBuffer::default());
            return Ok(Self { inner, factor, momentum, velocity, sent: Vec::new() });
        }
        Err(CompressError::Decay { found: factor })
    }

    /// Returns `u` and `v` after the last compress, committed or not. They are empty before the first vector.
    #[must_use]
    pub fn memory(&self) -> (&[f32], &[f32]) {
        (self.momentum.get(), self.velocity.get())
    }

    /// Computes the next `u` and `v` and encodes the payload.
    fn step(
        &mut self,
        x: &[f32],
        [u, v]: [&mut [f32]; 2],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        let (before_u, before_v) = (self.momentum.now(), self.velocity.now());
        let mut largest = 0;
        for ((((u, v), x), before_u), before_v) in
            u.iter_mut().zip(&mut *v).zip(x).zip(before_u).zip(before_v)
        {
            *u = self.factor * before_u + x;
            *v = before_v + *u;
            largest = largest.max(magnitude(*v));
        }
        if largest >= INFINITE {
            out.clear();
            return Err(first_non_finite(v));
        }
        self.inner.compress(v, key, out)?;
        self.sent.resize(x.len(), 0.0);
        self.inner.decompress(out.view(), &mut self.sent).inspect_err(|_| out.clear())?;
        for ((u, v), sent) in u.iter_mut().zip(&mut *v).zip(&self.sent) {
            *u = if *sent == 0.0 { *u } else { 0.0 };
            *v -= sent;
        }
        if largest >= LARGE
            && let Some(index) = v.iter().position(|lost| !lost.is_finite())
        {
            out.clear();
            // `v` was overwritten, so its value before encoding is computed again.
            let value = before_v[index] + (self.factor * before_u[index] + x[index]);
            return Err(CompressError::Overflow { index, value, what: "its compression error" });
        }
        Ok(())
    }
}

impl<C: Memoryless> Compressor for MomentumCorrection<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        let mut u = self.momentum.begin(x.len()).inspect_err(|_| out.clear())?;
        let mut v = self.velocity.begin(x.len()).inspect_err(|_| out.clear())?;
        let result = self.step(x, [&mut u, &mut v], key, out);
        self.momentum.end(u, result.is_ok());
        self.velocity.end(v, result.is_ok());
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

impl<C: Memoryless> State for MomentumCorrection<C> {
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        self.momentum.save(format!("{prefix}momentum"), into)?;
        self.velocity.save(format!("{prefix}velocity"), into)
    }

    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let momentum = TwoPhaseBuffer::load(format!("{prefix}momentum"), from)?;
        let velocity = TwoPhaseBuffer::load(format!("{prefix}velocity"), from)?;
        if momentum.len() != velocity.len() {
            let (wanted, found) = (momentum.len(), velocity.len());
            return Err(CompressError::LengthMismatch { what: "the velocity", wanted, found });
        }
        self.momentum.set(momentum);
        self.velocity.set(velocity);
        Ok(())
    }

    fn reshard(&mut self, held: Range<usize>, wanted: Range<usize>) -> Result<(), CompressError> {
        self.momentum.check_reshard(&held)?;
        self.velocity.check_reshard(&held)?;
        self.momentum.reshard(&held, &wanted);
        self.velocity.reshard(&held, &wanted);
        Ok(())
    }

    fn reset(&mut self) {
        self.momentum.reset();
        self.velocity.reset();
    }

    fn commit(&mut self) {
        self.momentum.commit();
        self.velocity.commit();
    }

    fn rollback(&mut self) {
        self.momentum.rollback();
        self.velocity.rollback();
    }

    fn held(&self) -> HeldBytes {
        self.momentum.held() + self.velocity.held()
    }
}
