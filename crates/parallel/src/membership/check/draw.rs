//! Random numbers of a simulation.

use farflung_base::{Nanos, Philox};

/// A counter-based random number generator.
#[derive(Debug)]
pub(super) struct EventRng {
    philox: Philox,
    at: u64,
}

impl EventRng {
    pub(super) const fn new(seed: u64, stream: u64) -> Self {
        Self { philox: Philox::new(seed, stream), at: 0 }
    }

    /// Draws uniformly from `0..bound`, or from `0..2^32` if `bound` is higher. Returns 0 if `bound` is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.at += 1;
        (u64::from(self.philox.word(self.at)) * bound.min(1 << 32)) >> 32
    }

    /// Returns true with a probability of `percent` percent.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Draws uniformly from `low` to `high`.
    pub(super) fn between(&mut self, low: Nanos, high: Nanos) -> Nanos {
        // Drawn in microseconds: 32 random bits are enough for an hour.
        low.saturating_add(Nanos(1000 * self.below(1 + high.saturating_sub(low).0 / 1000)))
    }

    /// Draws from the exponential distribution with this mean.
    pub(super) fn exponential(&mut self, mean: Nanos) -> Nanos {
        let uniform = (self.below(1 << 32) as f64 + 1.0) / (1_u64 << 32) as f64;
        Nanos((-uniform.ln() * mean.0 as f64) as u64)
    }

    /// Draws one of these; `None` if there are none.
    pub(super) fn one_of<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let at = self.below(of.len() as u64);
        of.get(at as usize).copied()
    }
}
