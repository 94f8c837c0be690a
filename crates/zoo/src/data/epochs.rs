//! Order of windows in shuffled epochs: the window of a sequence is a pure function of (seed, sequence).

use farflung_base::Philox;

/// Shuffled epochs of windows. A step has one window per lane. Each lane has its own windows and takes them in
/// a new order in each epoch, so a worker that always trains on the same lane gets the same windows again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Epochs {
    seed: u64,
    lanes: u64,
    /// Number of windows per lane, which is also the number of steps per epoch.
    steps: u64,
}

impl Epochs {
    /// Creates the epochs; `None` if there are fewer windows than lanes.
    pub(super) const fn new(seed: u64, lanes: u64, windows: u64) -> Option<Self> {
        if lanes == 0 || windows < lanes {
            return None;
        }
        Some(Self { seed, lanes, steps: windows / lanes })
    }

    /// Returns the number of windows of all lanes.
    pub(super) const fn windows(&self) -> u64 {
        self.lanes * self.steps
    }

    /// Returns the window of a sequence. Sequences are numbered over all steps.
    pub(super) fn window(&self, sequence: u64) -> u64 {
        let (step, lane) = (sequence / self.lanes, sequence % self.lanes);
        let (epoch, step) = (step / self.steps, step % self.steps);
        let [a, b, c, d] = Philox::new(self.seed, STREAM).block(epoch);
        let word = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        lane * self.steps + shuffled(Philox::new(word(a, b), word(c, d) ^ lane), self.steps, step)
    }
}

/// Stream of the random numbers for epochs.
const STREAM: u64 = u64::from_le_bytes(*b"epochs\0\0");

/// Rounds of the Feistel network. Four rounds already give a permutation that is hard to distinguish from a
/// random one.
const ROUNDS: u64 = 8;

/// Returns the position of `index` in a random permutation of `0..len`: a Feistel network over the next power
/// of four, applied again until the result is below `len` (cycle walking).
///
/// Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", methods 2 and 3.
fn shuffled(rng: Philox, len: u64, index: u64) -> u64 {
    // At least 64 values, because a network with one bit per half cannot generate all permutations.
    let bits = (u64::BITS - len.saturating_sub(1).leading_zeros()).div_ceil(2).max(3);
    let mask = (1 << bits) - 1;
    let mut at = index;
    loop {
        let (mut left, mut right) = (at >> bits, at & mask);
        for round in 0..ROUNDS {
            let [word, ..] = rng.block(round << 32 | right);
            (left, right) = (right, left ^ (u64::from(word) & mask));
        }
        at = left << bits | right;
        if at < len {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn an_epoch_has_each_window_once_and_a_lane_keeps_its_own() {
        for windows in 1..200 {
            for lanes in [1, 2, 3, 7, 64].into_iter().filter(|&lanes| lanes <= windows) {
                let epochs = Epochs::new(5, lanes, windows).unwrap();
                let steps = windows / lanes;
                for epoch in 0..2 {
                    let mut seen = BTreeSet::new();
                    for sequence in 0..epochs.windows() {
                        let window = epochs.window(epoch * epochs.windows() + sequence);
                        assert_eq!(window / steps, sequence % lanes, "{windows} windows, {lanes} lanes");
                        assert!(seen.insert(window), "{windows} windows, {lanes} lanes: {window} twice");
                    }
                }
            }
        }
        assert_eq!(Epochs::new(5, 3, 2), None);
    }

    /// Each order of three windows is equally frequent: of 6000 epochs, 1000 each, with a standard deviation of
    /// 29.
    #[test]
    fn all_orders_are_equally_likely() {
        let epochs = Epochs::new(11, 1, 3).unwrap();
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..6000 {
            let order = [0, 1, 2].map(|step| epochs.window(3 * epoch + step));
            *counts.entry(order).or_insert(0_i32) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (count - 1000).abs() < 120), "{counts:?}");
    }

    /// Counts how often a window directly follows its predecessor: in a random order of 1000, once per epoch.
    #[test]
    fn neighbours_do_not_stay_together() {
        let epochs = Epochs::new(3, 1, 1000).unwrap();
        let order: Vec<u64> = (0..100_000).map(|sequence| epochs.window(sequence)).collect();
        let together = order.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!((60..140).contains(&together), "{together}");
    }
}
