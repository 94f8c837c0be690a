//! Replicas of a model, as input of the simulator of data-parallel training: shares, buckets, and the codec of
//! the values that they send.

use std::borrow::Cow;
use std::fmt;

use farflung_base::Bytes;

use crate::{Algorithm, Mesh, ParallelError};

/// Size of encoded values: `header` bytes, and `block_bytes` for each started block of `block` values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Codec {
    /// Name of the codec, for display and to select the implementation.
    pub name: Cow<'static, str>,
    /// Bytes of a message with values besides those of its blocks.
    pub header: u64,
    /// Number of values in a block.
    pub block: u64,
    /// Bytes of a block, including its scales.
    pub block_bytes: u64,
}

impl Codec {
    /// Four bytes per value.
    pub const F32: Self = Self::fixed("f32", 1, 4);
    /// Two bytes per value.
    pub const F16: Self = Self::fixed("f16", 1, 2);
    /// Two bytes per value.
    pub const BF16: Self = Self::fixed("bf16", 1, 2);
    /// One byte per value, and an f32 scale for each 256 values.
    pub const INT8: Self = Self::fixed("int8", 256, 260);

    const fn fixed(name: &'static str, block: u64, block_bytes: u64) -> Self {
        Self { name: Cow::Borrowed(name), header: 0, block, block_bytes }
    }

    /// Returns the bytes of `values` encoded values, 0 for none. A block of 0 values is treated as a block of
    /// 1.
    #[must_use]
    pub fn bytes(&self, values: u64) -> Bytes {
        if values == 0 {
            return Bytes(0);
        }
        let blocks = values.div_ceil(self.block.max(1)).saturating_mul(self.block_bytes);
        Bytes(blocks.saturating_add(self.header))
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// Whether gradients are sent while other gradients are still being computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlap {
    /// A bucket is sent as soon as its gradients are complete on all ranks.
    WithBackward,
    /// The first bucket is sent after the whole backward.
    None,
}

/// How replicas synchronise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sync {
    /// Averages gradients in each step.
    Ddp {
        /// Whether sending overlaps with the backward.
        overlap: Overlap,
        /// Number of parts in which gradients are sent.
        buckets: u32,
    },
    /// Averages parameters through an outer optimizer after a number of local steps. Source: Douillard et al.
    /// 2023.
    DiLoCo {
        /// Number of local steps between two averages, at least 1.
        every: u32,
    },
}

impl Sync {
    /// Returns the number of steps after which the pattern of compute and communication repeats.
    #[must_use]
    pub const fn period(&self) -> u32 {
        match *self {
            Self::Ddp { .. } => 1,
            Self::DiLoCo { every } => every,
        }
    }
}

impl fmt::Display for Sync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ddp { overlap, buckets } => {
                let when = if *overlap == Overlap::None { "no overlap" } else { "overlap" };
                write!(f, "ddp({when}, {buckets} bucket{})", if *buckets == 1 { "" } else { "s" })
            }
            Self::DiLoCo { every } => write!(f, "diloco(every {every})"),
        }
    }
}

/// Replicas that train one model side by side, one rank each.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Replicas {
    /// How the replicas synchronise.
    pub sync: Sync,
    /// Algorithm that averages values.
    pub algorithm: Algorithm,
    /// Codec of the values that replicas send.
    pub codec: Codec,
    /// Number of microbatches of each rank in one step.
    pub shares: Vec<u32>,
}

impl Replicas {
    /// Returns the number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.shares.len() as u32
    }

    /// Checks the settings.
    ///
    /// Errors: [`ParallelError::Zero`] for shares that are all zero, no buckets, no local steps, or an empty
    /// codec block; [`ParallelError::EmptyAxis`] without ranks; [`ParallelError::TooManyRanks`] above
    /// [`Mesh::MAX_RANKS`].
    pub fn check(&self) -> Result<(), ParallelError> {
        Mesh::data(u32::try_from(self.shares.len()).unwrap_or(u32::MAX))?;
        let zero = |of: &str, field| Err(ParallelError::Zero { of: of.to_owned(), field });
        match self.sync {
            Sync::Ddp { buckets: 0, .. } => return zero("ddp", "buckets"),
            Sync::DiLoCo { every: 0 } => return zero("diloco", "every"),
            _ => {}
        }
        if self.codec.block == 0 {
            return zero("the codec", "block");
        }
        if self.shares.iter().all(|&share| share == 0) {
            return zero("the replicas", "shares");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ddp() -> Replicas {
        Replicas {
            sync: Sync::Ddp { overlap: Overlap::WithBackward, buckets: 4 },
            algorithm: Algorithm::Ring,
            codec: Codec::F32,
            shares: vec![3, 1],
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert_eq!(ddp().check(), Ok(()));
        let refused = |replicas: Replicas| replicas.check().unwrap_err().to_string();
        assert!(refused(Replicas { shares: Vec::new(), ..ddp() }).contains("size 0"));
        assert!(refused(Replicas { shares: vec![0, 0], ..ddp() }).contains("shares"));
        assert!(refused(Replicas { sync: Sync::DiLoCo { every: 0 }, ..ddp() }).contains("every"));
        let sync = Sync::Ddp { overlap: Overlap::None, buckets: 0 };
        assert!(refused(Replicas { sync, ..ddp() }).contains("buckets"));
    }

    #[test]
    fn codecs_count_started_blocks() {
        assert_eq!(Codec::F32.bytes(1 << 20), Bytes(4 << 20));
        assert_eq!(Codec::INT8.bytes(257), Bytes(520));
        assert_eq!(Codec::INT8.bytes(0), Bytes(0));
    }
}
