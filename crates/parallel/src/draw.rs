//! Numbers drawn one after another from a seed.

use farflung_base::Philox;

/// A counter over a generator: the same seed and stream give the same numbers on every machine.
#[derive(Debug, Clone)]
pub(crate) struct Draw {
    philox: Philox,
    at: u64,
}

impl Draw {
    pub(crate) const fn new(seed: u64, stream: u64) -> Self {
        Self { philox: Philox::new(seed, stream), at: 0 }
    }

    /// Uniform in `0..bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.at += 1;
        self.philox.below(self.at, bound as u64) as usize
    }

    /// Uniform in (0, 1].
    pub(crate) fn unit(&mut self) -> f64 {
        const FINE: usize = 1 << 53;
        (self.below(FINE) + 1) as f64 / FINE as f64
    }

    /// The time to the next event of a process without memory.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Every order of `items` is equally likely (Fisher-Yates).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
