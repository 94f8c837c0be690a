//! A plan: how a job's ranks train one model, as data. Nothing here carries it out.

use std::borrow::Cow;
use std::fmt;

use farflung_base::Bytes;

use crate::{Algorithm, Axis, Mesh, ParallelError};

/// What a vector of parameters takes on the wire: `block_bytes` for each started block of `block` values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Codec {
    /// The codec's name, for printing and for whoever binds the plan.
    pub name: Cow<'static, str>,
    /// Values in a block.
    pub block: u64,
    /// Bytes of a block with its scales.
    pub block_bytes: u64,
}

impl Codec {
    /// Four bytes a value.
    pub const F32: Self = Self::fixed("f32", 1, 4);
    /// Two bytes a value.
    pub const F16: Self = Self::fixed("f16", 1, 2);
    /// Two bytes a value.
    pub const BF16: Self = Self::fixed("bf16", 1, 2);
    /// A byte a value, and an f32 scale for each 256.
    pub const INT8: Self = Self::fixed("int8", 256, 260);

    const fn fixed(name: &'static str, block: u64, block_bytes: u64) -> Self {
        Self { name: Cow::Borrowed(name), block, block_bytes }
    }

    /// Bytes of `values` values. A block of no values counts as one of 1.
    #[must_use]
    pub fn bytes(&self, values: u64) -> Bytes {
        Bytes(values.div_ceil(self.block.max(1)).saturating_mul(self.block_bytes))
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// What a model is computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// 32-bit floats throughout.
    F32,
    /// bf16 compute, f32 parameters.
    Bf16,
    /// f16 compute with a loss scale, f32 parameters.
    F16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

/// Whether gradients travel while others are still being computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlap {
    /// A bucket leaves as soon as all ranks have it.
    WithBackward,
    /// The first bucket leaves after the whole backward.
    None,
}

/// How replicas stay one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sync {
    /// Gradients are averaged in each step.
    Ddp {
        /// When they travel.
        overlap: Overlap,
        /// In how many parts.
        buckets: u32,
    },
    /// Parameters are averaged through an outer optimizer every so many local steps. Source: Douillard et al. 2023.
    DiLoCo {
        /// Local steps between two averages, at least 1.
        every: u32,
    },
}

impl Sync {
    /// Steps after which the pattern of compute and communication repeats.
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

/// How the ranks of a mesh train one model.
///
/// The fields are what exists today; a mesh with other axes than data, or a precision besides f32, is refused by
/// [`Plan::check`] and not ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Plan {
    /// Who is what.
    pub mesh: Mesh,
    /// How replicas stay one model.
    pub sync: Sync,
    /// How their averages are computed.
    pub algorithm: Algorithm,
    /// What they send.
    pub sync_codec: Codec,
    /// What they compute in.
    pub precision: Precision,
    /// Microbatches of each rank in one step.
    pub share_per_rank: Vec<u32>,
}

impl Plan {
    /// Whether all of the plan can be carried out.
    ///
    /// Errors: [`ParallelError::NotBuilt`] with the part; shares that are not one per rank or all zero; no buckets,
    /// no steps between synchronisations, an empty codec block.
    pub fn check(&self) -> Result<(), ParallelError> {
        let not_built = |what: String| Err(ParallelError::NotBuilt { what });
        if let Some((axis, size)) = self.mesh.axes().iter().find(|(a, n)| *a != Axis::Data && *n > 1) {
            return not_built(format!("a mesh with {axis}={size}"));
        }
        if self.precision != Precision::F32 {
            return not_built(format!("a plan in {}", self.precision));
        }
        let zero = |of: &str, field| Err(ParallelError::Zero { of: of.to_owned(), field });
        match self.sync {
            Sync::Ddp { buckets: 0, .. } => return zero("ddp", "buckets"),
            Sync::DiLoCo { every: 0 } => return zero("diloco", "every"),
            _ => {}
        }
        if self.sync_codec.block == 0 {
            return zero("the codec", "block");
        }
        let ranks = self.mesh.size() as usize;
        if self.share_per_rank.len() != ranks {
            let given = self.share_per_rank.len();
            return Err(ParallelError::PerRank { what: "share_per_rank", given, ranks });
        }
        if self.share_per_rank.iter().all(|&share| share == 0) {
            return zero("the plan", "share_per_rank");
        }
        Ok(())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "mesh            {}", self.mesh)?;
        writeln!(f, "sync            {}", self.sync)?;
        writeln!(f, "algorithm       {}", self.algorithm)?;
        writeln!(f, "sync_codec      {}", self.sync_codec)?;
        writeln!(f, "precision       {}", self.precision)?;
        write!(f, "share_per_rank ")?;
        self.share_per_rank.iter().try_for_each(|share| write!(f, " {share}"))?;
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ddp() -> Plan {
        Plan {
            mesh: Mesh::data(2).unwrap(),
            sync: Sync::Ddp { overlap: Overlap::WithBackward, buckets: 4 },
            algorithm: Algorithm::Ring,
            sync_codec: Codec::F32,
            precision: Precision::F32,
            share_per_rank: vec![3, 1],
        }
    }

    #[test]
    fn what_is_not_built_is_refused() {
        assert_eq!(ddp().check(), Ok(()));
        let refused = |plan: Plan| plan.check().unwrap_err().to_string();
        let mesh = "pipeline=2,data=1".parse().unwrap();
        assert_eq!(refused(Plan { mesh, ..ddp() }), "a mesh with pipeline=2 is not built yet");
        assert!(refused(Plan { precision: Precision::Bf16, ..ddp() }).contains("bf16"));
        assert!(refused(Plan { share_per_rank: vec![1], ..ddp() }).contains("1 entries for 2 ranks"));
        assert!(refused(Plan { share_per_rank: vec![0, 0], ..ddp() }).contains("share_per_rank"));
        assert!(refused(Plan { sync: Sync::DiLoCo { every: 0 }, ..ddp() }).contains("every"));
        let sync = Sync::Ddp { overlap: Overlap::None, buckets: 0 };
        assert!(refused(Plan { sync, ..ddp() }).contains("buckets"));
    }

    #[test]
    fn codecs_count_started_blocks() {
        assert_eq!(Codec::F32.bytes(1 << 20), Bytes(4 << 20));
        assert_eq!(Codec::INT8.bytes(257), Bytes(520));
        assert_eq!(Codec::INT8.bytes(0), Bytes(0));
    }
}
