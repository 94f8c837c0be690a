//! The order of shuffled epochs: which window each sequence of a run is, as a pure function of (seed,
//! sequence).

use farflung_base::Philox;

/// Windows in shuffled epochs. A step takes one window from each of its `lanes` (its sequences), and each lane
/// has windows of its own, in another order in each epoch: whoever trains on a lane sees the same windows
/// again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Epochs {
    seed: u64,
    lanes: u64,
    /// Windows of a lane, which are the steps of an epoch.
    steps: u64,
}

impl Epochs {
    /// `None` where there are fewer windows than lanes.
    pub(super) const fn new(seed: u64, lanes: u64, windows: u64) -> Option<Self> {
        if lanes == 0 || windows < lanes {
            return None;
        }
        Some(Self { seed, lanes, steps: windows / lanes })
    }

    /// Windows of all lanes together.
    pub(super) const fn windows(&self) -> u64 {
        self.lanes * self.steps
    }

    /// The window of a sequence, counted over all steps.
    pub(super) fn window(&self, sequence: u64) -> u64 {
        let (step, lane) = (sequence / self.lanes, sequence % self.lanes);
        let (epoch, step) = (step / self.steps, step % self.steps);
        let [a, b, c, d] = Philox::new(self.seed, STREAM).block(epoch);
        let word = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        lane * self.steps + shuffled(Philox::new(word(a, b), word(c, d) ^ lane), self.steps, step)
    }
}

/// The epochs' stream of a seed.
const STREAM: u64 = u64::from_le_bytes(*b"epochs\0\0");

/// Rounds of the network; four already make a permutation that cannot be told from a random one by few looks.
const ROUNDS: u64 = 8;

/// Where `index` goes in a permutation of `0..len`: a Feistel network over the next power of four, walked until
/// it ends below `len`.
///
/// Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", methods 2 and 3.
fn shuffled(rng: Philox, len: u64, index: u64) -> u64 {
    // Not less than 64 values: a network of one bit a side cannot make all permutations.
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

    /// Each order of three windows comes as often as the others: 6000 epochs, 1000 each, a deviation of 29.
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

    /// How often a window comes right behind its neighbour: in a random order of 1000, once an epoch.
    #[test]
    fn neighbours_do_not_stay_together() {
        let epochs = Epochs::new(3, 1, 1000).unwrap();
        let order: Vec<u64> = (0..100_000).map(|sequence| epochs.window(sequence)).collect();
        let together = order.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!((60..140).contains(&together), "{together}");
    }
}
