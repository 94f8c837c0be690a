//! Enums that several crates select by name, and the error for an unknown name.

use std::fmt;
use std::str::FromStr;

/// Error: the name is not in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownName {
    /// Kind of thing that the name should select, such as `all-reduce algorithm`.
    pub kind: &'static str,
    /// Name that was not found.
    pub name: String,
    /// All valid names.
    pub known: Vec<&'static str>,
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no {} `{}` (known: {})", self.kind, self.name, self.known.join(", "))
    }
}

impl std::error::Error for UnknownName {}

/// Returns the value in `all` whose name is `text`.
pub(crate) fn find<T: Copy>(
    kind: &'static str,
    text: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, UnknownName> {
    all.iter().copied().find(|&value| name(value) == text).ok_or_else(|| UnknownName {
        kind,
        name: text.to_owned(),
        known: all.iter().map(|&value| name(value)).collect(),
    })
}

/// Algorithm of an all-reduce. `farflung-comm` implements each and computes its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Algorithm {
    /// Each rank sends to the next one. Large blocks are cut into frames.
    #[default]
    Ring,
    /// Two rings in opposite directions, each with half of the values.
    BidirectionalRing,
    /// Pairs of ranks at doubling distances exchange whole vectors.
    RecursiveDoubling,
    /// Recursive halving, then doubling (Rabenseifner).
    HalvingDoubling,
    /// Two binary trees, each with half of the values.
    DoubleTree,
    /// All-reduce inside each region, then between regions, then distribution inside each region.
    Hierarchical,
    /// Each rank reduces an equal shard and sends the result to all.
    Direct,
    /// Each rank reduces a shard. Ranks with faster access links get larger shards.
    Butterfly,
    /// All-reduce along each axis of a grid of ranks, one axis after the other.
    Moshpit,
    /// Each rank sends its encoded values to all others, and every rank adds them up. Without a codec,
    /// [`Algorithm::Ring`] is used instead.
    AllGather,
    /// The cheapest algorithm on the declared topology. On a tie, the one that comes first in
    /// [`Algorithm::ALL`] (with a codec, in [`Algorithm::CODED`]).
    Auto,
}

impl Algorithm {
    /// Every algorithm for uncompressed values, in the order in which `Auto` tries them.
    pub const ALL: [Self; 9] = [
        Self::Ring,
        Self::BidirectionalRing,
        Self::RecursiveDoubling,
        Self::HalvingDoubling,
        Self::DoubleTree,
        Self::Hierarchical,
        Self::Direct,
        Self::Butterfly,
        Self::Moshpit,
    ];

    /// Every algorithm that can average values through a codec: equal shards; shards by access link;
    /// uncompressed inside a region and encoded between regions; a ring that re-encodes at each hop; all values
    /// to all ranks. `Auto` tries them in this order, except for the ring.
    pub const CODED: [Self; 5] =
        [Self::Direct, Self::Butterfly, Self::Hierarchical, Self::Ring, Self::AllGather];

    /// Returns the name used on command lines and in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::BidirectionalRing => "bidirectional-ring",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::HalvingDoubling => "halving-doubling",
            Self::DoubleTree => "double-tree",
            Self::Hierarchical => "hierarchical",
            Self::Direct => "direct",
            Self::Butterfly => "butterfly",
            Self::Moshpit => "moshpit",
            Self::AllGather => "all-gather",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownName;

    /// Parses a name such as `double-tree` or `auto`.
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let all: Vec<Self> = Self::ALL.into_iter().chain([Self::AllGather, Self::Auto]).collect();
        find("all-reduce algorithm", text, &all, Self::name)
    }
}

/// Type to which the operands of a matrix product are rounded (to nearest, ties to even). Sums are accumulated
/// in f32 and results are f32 in every case. Parameters, gradients, norms, softmaxes and optimizer states are
/// f32 too.
///
/// This is mixed precision with f32 master weights (Micikevicius et al. 2018). As with PyTorch's
/// `set_float32_matmul_precision`, the precision is a property of the product, not of the tensor.
///
/// A device with tensor cores for the type uses them. Other devices compute the same products without the
/// speed-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// No rounding.
    #[default]
    F32,
    /// bfloat16: 8 bits of significand and the exponent range of f32.
    Bf16,
    /// IEEE half precision: 11 bits of significand. Magnitudes of 65520 and more become infinite, magnitudes of
    /// 3e-8 (`2^-25`) and less become zero, so gradients need a loss scale.
    F16,
}

impl Precision {
    /// All precisions.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Returns the name used on command lines and in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Precision {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        find("precision", text, &Self::ALL, Self::name)
    }
}

/// How a mask selects one element of each stratum (a run of consecutive elements) in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// The same index in every stratum, advanced by one each round. With strata of n elements, every element is
    /// sent once in n rounds.
    Rolling,
    /// As `Rolling`, but each stratum starts at its own random index, redrawn after every element has been sent
    /// once.
    Permuted,
    /// An index drawn at random for each stratum and round.
    Random,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_refused_with_what_exists() {
        for algorithm in Algorithm::ALL.into_iter().chain([Algorithm::Auto]) {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        for precision in Precision::ALL {
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        let message = "fp8".parse::<Precision>().unwrap_err().to_string();
        assert_eq!(message, "there is no precision `fp8` (known: f32, bf16, f16)");
        assert!("rings".parse::<Algorithm>().unwrap_err().to_string().contains("bidirectional-ring"));
    }
}
