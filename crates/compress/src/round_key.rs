//! The key of a codec's randomness.

use farflung_base::Rank;

/// Identifies one call of a codec, and keys all randomness in it.
///
/// Masks that all ranks share are a function of (seed, round, shard); private noise is a function of the rank
/// too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RoundKey {
    /// The run's seed.
    pub seed: u64,
    /// Number of the synchronisation, from 0.
    pub round: u64,
    /// Index of the shard within the vector.
    pub shard: u32,
    /// The rank that compresses.
    pub rank: Rank,
}
