//! Random numbers of the codecs: Philox streams keyed by a [`RoundKey`], and the offsets of stochastic
//! rounding, which are computed for a run of elements at a time in lanes that the compiler vectorizes.

use farflung_base::Philox;
use farflung_base::philox::philox4x32_10;

use crate::RoundKey;

/// Number of elements in a run of offsets.
pub(crate) const RUN: usize = 256;
/// Number of Philox blocks for a run. Each has four words of two offsets.
const LANES: usize = RUN / 8;

/// A stream of random words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    seed: u64,
    stream: u64,
}

impl Noise {
    /// Returns the stream of this rank alone.
    pub(crate) fn private(key: RoundKey) -> Self {
        Self::of(key, key.rank.0)
    }

    /// Returns the stream that is the same on all ranks.
    pub(crate) fn shared(key: RoundKey) -> Self {
        Self::of(key, u32::MAX)
    }

    /// Returns a number that is uniform in `0..bound`, as [`Philox::below`] does.
    pub(crate) fn below(self, position: u64, bound: u64) -> u64 {
        Philox::new(self.seed, self.stream).below(position, bound)
    }

    /// Returns the two words that identify the stream.
    pub(crate) fn halves(self) -> [u64; 2] {
        [self.seed, self.stream]
    }

    /// Returns the stream whose words [`Self::halves`] returned.
    pub(crate) fn of_halves([seed, stream]: [u64; 2]) -> Self {
        Self { seed, stream }
    }

    /// Creates the stream. Its number is taken from a Philox block of (round, shard, rank): 64 bits.
    fn of(key: RoundKey, rank: u32) -> Self {
        let counter = [key.round as u32, (key.round >> 32) as u32, key.shard, rank];
        let [low, high, ..] = philox4x32_10(counter, halves(key.seed));
        Self { seed: key.seed, stream: u64::from(high) << 32 | u64::from(low) }
    }

    /// Writes the offsets of run `index`, uniform on the odd multiples of `2^-17` in `(-1/2, 1/2)`. Adding an
    /// offset before rounding to the nearest integer is unbiased stochastic rounding.
    ///
    /// Element `32 (2 w + h) + c` of the run takes half `h` (0 is the lower) of word `w` of block
    /// `32 index + c`.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn offsets(self, index: u64, out: &mut [f32; RUN]) {
        let words = self.blocks(index.wrapping_mul(LANES as u64));
        for (words, out) in words.iter().zip(out.as_chunks_mut::<{ 2 * LANES }>().0) {
            let (low, high) = out.split_at_mut(LANES);
            for ((word, low), high) in words.iter().zip(low).zip(high) {
                // Each half is a signed number in -32768 ..= 32767; adding one half makes the offsets symmetric
                // about zero.
                *low = ((word << 16).cast_signed() >> 16) as f32 * (1.0 / 65536.0) + 1.0 / 131_072.0;
                *high = (word.cast_signed() >> 16) as f32 * (1.0 / 65536.0) + 1.0 / 131_072.0;
            }
        }
    }

    /// Returns the four words of `LANES` blocks from `first` on, grouped by word.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn blocks(self, first: u64) -> [[u32; LANES]; 4] {
        let (mut key, stream) = (halves(self.seed), halves(self.stream));
        let counter = |lane: usize| first.wrapping_add(lane as u64);
        let mut words = [
            std::array::from_fn(|lane| counter(lane) as u32),
            std::array::from_fn(|lane| (counter(lane) >> 32) as u32),
            [stream[0]; LANES],
            [stream[1]; LANES],
        ];
        for round in 0..10 {
            if round > 0 {
                key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
            }
            let [a, b, c, d] = &mut words;
            for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                let (p, q) = (0xD251_1F53 * u64::from(*a), 0xCD9E_8D57 * u64::from(*c));
                (*a, *b) = ((q >> 32) as u32 ^ *b ^ key[0], q as u32);
                (*c, *d) = ((p >> 32) as u32 ^ *d ^ key[1], p as u32);
            }
        }
        words
    }
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_the_blocks_of_philox() {
        let key = RoundKey { seed: 0x0123_4567_89ab_cdef, round: 1 << 33, shard: 7, ..RoundKey::default() };
        let noise = Noise::private(key);
        assert_ne!(noise, Noise::shared(key));
        let rng = Philox::new(noise.seed, noise.stream);
        let mut out = [0.0; RUN];
        noise.offsets(5, &mut out);
        for (i, offset) in out.into_iter().enumerate() {
            let (half, lane) = (i / LANES, i % LANES);
            let word = rng.block((5 * LANES + lane) as u64)[half / 2];
            let half = (word >> (16 * (half % 2))) as u16;
            assert!(offset.abs() < 0.5);
            assert!(
                (f64::from(offset) - (f64::from(half.cast_signed()) + 0.5) / 65536.0).abs() == 0.0,
                "{i}"
            );
        }
    }
}
