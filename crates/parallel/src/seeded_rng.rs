//! A sequential random generator with a seed.

use farflung_base::Philox;

/// Counter over a Philox generator. The same seed and stream give the same numbers on every machine, except
/// that [`SeededRng::exponential`] depends on the platform's logarithm.
#[derive(Debug, Clone)]
pub(crate) struct SeededRng {
    philox: Philox,
    at: u64,
}

impl SeededRng {
    pub(crate) const fn new(seed: u64, stream: u64) -> Self {
        Self { philox: Philox::new(seed, stream), at: 0 }
    }

    /// Draws uniformly from `0..bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.at += 1;
        self.philox.below(self.at, bound as u64) as usize
    }

    /// Draws uniformly from (0, 1].
    pub(crate) fn unit(&mut self) -> f64 {
        const FINE: usize = 1 << 53;
        (self.below(FINE) + 1) as f64 / FINE as f64
    }

    /// Draws from the exponential distribution with this mean.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Shuffles `items`; every order is equally likely (Fisher-Yates).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
