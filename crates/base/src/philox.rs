//! Counter-based random numbers. The value at a position is a pure function of (seed, stream, position): any
//! rank, thread or device can compute any part of a sequence, in any order, and gets the same bits.

/// The Philox4x32-10 generator.
///
/// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Tested against the vectors of
/// Random123's `kat_vectors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
    stream: [u32; 2],
}

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Computes the four output words of one counter block, in ten rounds.
#[must_use]
pub const fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < 10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let a = MULTIPLIER[0] as u64 * counter[0] as u64;
        let b = MULTIPLIER[1] as u64 * counter[2] as u64;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        round += 1;
    }
    counter
}

impl Philox {
    /// Creates the generator of `seed`. `stream` separates independent uses of one seed (a round, a shard, a
    /// rank).
    #[must_use]
    pub const fn new(seed: u64, stream: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], stream: [stream as u32, (stream >> 32) as u32] }
    }

    /// Returns the four words of block `index`, that is, positions `4 * index` to `4 * index + 3`.
    #[must_use]
    pub const fn block(&self, index: u64) -> [u32; 4] {
        philox4x32_10([index as u32, (index >> 32) as u32, self.stream[0], self.stream[1]], self.key)
    }

    /// Returns the word at `position`.
    #[must_use]
    pub const fn word(&self, position: u64) -> u32 {
        self.block(position / 4)[(position % 4) as usize]
    }

    /// Returns a uniform value in `[0, 1)` with 24 random bits.
    #[must_use]
    pub fn uniform(&self, position: u64) -> f32 {
        unit(self.word(position))
    }

    /// Returns a uniform value in `0..bound` by a 64-bit multiply-shift, whose bias is negligible. `position`
    /// counts blocks here, not words.
    #[must_use]
    pub const fn below(&self, position: u64, bound: u64) -> u64 {
        let [a, b, ..] = self.block(position);
        let x = ((a as u64) << 32) | b as u64;
        ((x as u128 * bound as u128) >> 64) as u64
    }

    /// Fills `out` with normal values of mean 0 and the given standard deviation, from position 0 on
    /// (Box-Muller in f64).
    pub fn fill_normal(&self, std: f32, out: &mut [f32]) {
        for (i, four) in out.chunks_mut(4).enumerate() {
            let w = self.block(i as u64);
            for (pair, values) in four.chunks_mut(2).enumerate() {
                let u = (f64::from(w[2 * pair]) + 1.0) / 4_294_967_296.0;
                let v = f64::from(w[2 * pair + 1]) / 4_294_967_296.0;
                let radius = f64::from(std) * (-2.0 * u.ln()).sqrt();
                let (sin, cos) = (std::f64::consts::TAU * v).sin_cos();
                values[0] = (radius * cos) as f32;
                if let Some(second) = values.get_mut(1) {
                    *second = (radius * sin) as f32;
                }
            }
        }
    }
}

/// Maps a word to `[0, 1)` by its upper 24 bits.
#[must_use]
pub fn unit(word: u32) -> f32 {
    (word >> 8) as f32 / 16_777_216.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_random123() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32_10([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normal_has_its_moments_and_any_part_is_the_same() {
        let rng = Philox::new(7, 1);
        let mut x = vec![0.0; 100_001];
        rng.fill_normal(2.0, &mut x);
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64 - mean * mean;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((var - 4.0).abs() < 0.08, "{var}");
        let mut head = vec![0.0; 10];
        rng.fill_normal(2.0, &mut head);
        assert_eq!(head, x[..10]);
        assert_eq!(rng.word(9), rng.block(2)[1]);
        assert!((0..1000).all(|i| rng.below(i, 7) < 7 && rng.uniform(i) < 1.0));
    }
}
