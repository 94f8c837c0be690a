//! Parameters modulo a bound, in a few bits per value. A receiver whose parameters are near the sender's can
//! recover them.

use farflung_base::philox::unit;
use farflung_base::{PeerId, Philox, Rank};
use farflung_comm::CommError;

use crate::OptimError;

/// Largest number of bits of an element.
const MOST_BITS: u32 = 24;
/// Number of bytes of the hash after the elements.
const CHECK: usize = 8;

/// Moniqua's quantiser. For an element `x` it sends which of `2^bits` cells of `[-1/2, 1/2)` contains
/// `x / B + u` modulo 1, where `B = 2 theta / (1 - 2^-bits)` and `u` is a random number that all ranks share. A
/// receiver whose own element is within `theta` of `x` recovers it to within `B / 2^(bits + 1)`.
///
/// A message consists of the cells, packed from the lowest bit on, and of eight bytes: a hash of the multiples
/// of `B` that the sender left out. A receiver that infers other multiples is too far away, and the hash shows
/// it.
///
/// Source: Lu and De Sa 2020, "Moniqua: Modulo Quantized Communication in Decentralized SGD", Alg. 1. Differs:
/// `u` makes the error independent of `x` (in the paper stochastic rounding with shared randomness does so on
/// average); the hash is added here.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Modulo {
    theta: f64,
    bits: u32,
    seed: u64,
}

/// Values that a receiver decodes from a message.
pub(super) struct Inferred {
    /// The sender's values.
    pub(super) values: Vec<f32>,
    /// The receiver's own values as other ranks decode them from its messages. Both ranks compute their changes
    /// from such decoded values, so the changes cancel and the mean is preserved.
    pub(super) own: Vec<f32>,
}

impl Modulo {
    /// Creates a quantiser for neighbours that are within `theta` of each other in each element.
    ///
    /// Errors: [`OptimError::Setting`] if `theta` is not above 0 and finite, or if `bits` is not between 1
    /// and 24.
    pub(super) fn new(theta: f64, bits: u32, seed: u64) -> Result<Self, OptimError> {
        let wrong =
            |field, value, expected| Err(OptimError::Setting { transform: "sync", field, value, expected });
        if !(theta > 0.0 && theta.is_finite()) {
            return wrong("theta", theta, "above 0");
        }
        if !(1..=MOST_BITS).contains(&bits) {
            return wrong("moniqua-bits", f64::from(bits), "between 1 and 24");
        }
        Ok(Self { theta, bits, seed })
    }

    fn cells(&self) -> f64 {
        f64::from(1_u32 << self.bits)
    }

    /// Returns the modulus `B`.
    fn modulus(&self) -> f64 {
        // A difference of at most theta, plus the quantiser's error of half a cell, fits into half of `B`.
        2.0 * self.theta / (1.0 - 1.0 / self.cells())
    }

    /// Returns the random numbers of all elements in a round: at most half a cell in either direction.
    fn draws(&self, round: u64, len: usize) -> Vec<f64> {
        let draws = Philox::new(self.seed ^ 0x4d6f_6e69_7175_6100, round);
        let words = (0..len.div_ceil(4) as u64).flat_map(|block| draws.block(block));
        words.take(len).map(|word| (f64::from(unit(word)) - 0.5) / self.cells()).collect()
    }

    /// Returns the cell of a value, the middle of the cell, and the multiple of the modulus that is left out.
    fn quantise(&self, x: f32, draw: f64) -> (u32, f64, i64) {
        let y = f64::from(x) / self.modulus() + draw;
        let whole = (y + 0.5).floor();
        let cell = ((y - whole + 0.5) * self.cells()).floor().clamp(0.0, self.cells() - 1.0);
        (cell as u32, self.middle(cell as u32), whole as i64)
    }

    fn middle(&self, cell: u32) -> f64 {
        (f64::from(cell) + 0.5) / self.cells() - 0.5
    }

    /// Returns the number of bytes of a message with `len` elements.
    pub(super) const fn message(&self, len: usize) -> usize {
        (len * self.bits as usize).div_ceil(8) + CHECK
    }

    /// Encodes the message of a round.
    pub(super) fn encode(&self, values: &[f32], round: u64) -> Vec<u8> {
        let draws = self.draws(round, values.len());
        let mut bytes = Vec::with_capacity(self.message(values.len()));
        let (mut held, mut count, mut check) = (0_u64, 0, 0);
        for (i, (&x, &draw)) in values.iter().zip(&draws).enumerate() {
            let (cell, _, whole) = self.quantise(x, draw);
            check = hash(check, i, whole);
            held |= u64::from(cell) << count;
            count += self.bits;
            while count >= 8 {
                bytes.push(held as u8);
                held >>= 8;
                count -= 8;
            }
        }
        if count > 0 {
            bytes.push(held as u8);
        }
        bytes.extend(check.to_le_bytes());
        bytes
    }

    /// Decodes the message of a round for a receiver with the values `mine`.
    ///
    /// Errors: [`CommError::Mismatch`] if the message has another length; [`OptimError::TooFar`] if the
    /// sender's values are too far from `mine` to be recovered.
    pub(super) fn decode(
        &self,
        bytes: &[u8],
        mine: &[f32],
        round: u64,
        from: Rank,
    ) -> Result<Inferred, OptimError> {
        let (want, got) = (self.message(mine.len()), bytes.len());
        let Some((cells, sent)) = bytes.split_last_chunk::<CHECK>().filter(|_| want == got) else {
            return Err(CommError::Mismatch { op: "moniqua", peer: PeerId(from.0), want, got }.into());
        };
        let (draws, modulus) = (self.draws(round, mine.len()), self.modulus());
        let mut inferred =
            Inferred { values: Vec::with_capacity(mine.len()), own: Vec::with_capacity(mine.len()) };
        let (mut rest, mut held, mut count, mut check) = (cells.iter(), 0_u64, 0, 0);
        for (i, (&x, &draw)) in mine.iter().zip(&draws).enumerate() {
            while count < self.bits {
                held |= u64::from(*rest.next().unwrap_or(&0)) << count;
                count += 8;
            }
            let cell = (held & ((1 << self.bits) - 1)) as u32;
            held >>= self.bits;
            count -= self.bits;
            let theirs = self.middle(cell) - draw;
            let whole = -(theirs - f64::from(x) / modulus).round();
            check = hash(check, i, whole as i64);
            let (_, middle, own) = self.quantise(x, draw);
            inferred.values.push((modulus * (theirs + whole)) as f32);
            inferred.own.push((modulus * (middle - draw + own as f64)) as f32);
        }
        if check.to_le_bytes() == *sent {
            Ok(inferred)
        } else {
            Err(OptimError::TooFar { from: from.0, theta: self.theta })
        }
    }
}

/// Adds the multiple of element `i` to the hash of all elements. A multiple of 0 adds nothing.
const fn hash(check: u64, i: usize, whole: i64) -> u64 {
    // Odd factor of the element, by SplitMix64.
    let mut z = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    check.wrapping_add(whole.cast_unsigned().wrapping_mul((z ^ (z >> 31)) | 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, len: usize, scale: f64) -> Vec<f32> {
        let draw = Philox::new(seed, 0);
        (0..len).map(|i| ((f64::from(draw.uniform(i as u64)) - 0.5) * scale) as f32).collect()
    }

    #[test]
    fn a_neighbour_within_the_bound_is_known_to_half_a_cell_and_one_beyond_is_noticed() {
        let (theta, len) = (0.05, 301);
        for bits in [1, 2, 3, 5, 8, 16, 24] {
            let codec = Modulo::new(theta, bits, 9).unwrap();
            // Parameters may have any size: multiples of the modulus are left out.
            let theirs = values(1, len, 7.0);
            let apart = values(2, len, 2.0 * theta * 0.999);
            let mine: Vec<f32> = theirs.iter().zip(&apart).map(|(x, d)| x + d).collect();
            for round in 0..5 {
                let bytes = codec.encode(&theirs, round);
                assert_eq!(bytes.len(), (len * bits as usize).div_ceil(8) + 8);
                let seen = codec.decode(&bytes, &mine, round, Rank(1)).unwrap();
                // The last term is for values up to 3.5 that are rounded to f32.
                let most = codec.modulus() / f64::from(1 << (bits + 1).min(30)) + 5e-7;
                let off = |a: &[f32], b: &[f32]| {
                    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
                };
                assert!(off(&seen.values, &theirs) <= most, "{bits}");
                assert!(off(&seen.own, &mine) <= most, "{bits}");
                // The mean is preserved: each side decodes its own values to what the other side decodes them
                // to.
                let there = codec.decode(&codec.encode(&mine, round), &theirs, round, Rank(0)).unwrap();
                assert_eq!((there.values, there.own), (seen.own, seen.values));
                // One element that is too far away is enough.
                for i in [0, 100, len - 1] {
                    let mut far = mine.clone();
                    far[i] = theirs[i] + (codec.modulus() * 1.2) as f32;
                    let refused = codec.decode(&bytes, &far, round, Rank(1)).err().unwrap();
                    assert!(matches!(refused, OptimError::TooFar { from: 1, .. }), "{refused}");
                }
            }
        }
    }

    #[test]
    fn hostile_messages_are_refused() {
        let codec = Modulo::new(0.1, 3, 0).unwrap();
        let mine = values(3, 10, 1.0);
        for len in 0..30 {
            let refused = codec.decode(&vec![0xff; len], &mine, 0, Rank(2)).is_err();
            // Twelve bytes are a message of the right length, but the hash does not match.
            assert!(refused, "{len}");
        }
        for (theta, bits) in [(0.0, 8), (-1.0, 8), (f64::NAN, 8), (f64::INFINITY, 8), (0.1, 0), (0.1, 25)] {
            assert!(Modulo::new(theta, bits, 0).is_err());
        }
    }

    /// The error is up to half a cell either way, whatever the value, so the mean over rounds is the value.
    #[test]
    fn one_bit_is_right_on_average() {
        let codec = Modulo::new(0.1, 1, 5).unwrap();
        let (theirs, mine) = ([0.037_f32], [0.0_f32]);
        let rounds = 20_000;
        let seen = |round| {
            f64::from(codec.decode(&codec.encode(&theirs, round), &mine, round, Rank(1)).unwrap().values[0])
        };
        let mean = (0..rounds).map(seen).sum::<f64>() / rounds as f64;
        // Six standard deviations of a uniform error of width B / 2.
        let most = 6.0 * codec.modulus() / 2.0 / 12.0_f64.sqrt() / (rounds as f64).sqrt();
        assert!((mean - 0.037).abs() < most, "{mean}");
    }
}
