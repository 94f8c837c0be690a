//! What several crates choose by name, and the error for a name that does not exist.

use std::fmt;
use std::str::FromStr;

/// A name that is not in a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownName {
    /// What the name should be of, such as `all-reduce algorithm`.
    pub kind: &'static str,
    /// The name that was given.
    pub name: String,
    /// The names that exist.
    pub known: Vec<&'static str>,
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no {} `{}` (known: {})", self.kind, self.name, self.known.join(", "))
    }
}

impl std::error::Error for UnknownName {}

/// Finds a value by its name in a table of all values.
fn find<T: Copy>(
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

/// How an all-reduce is carried out. `farflung-comm` has the steps of each, and prices them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Algorithm {
    /// Each rank sends to the next; large blocks a frame at a time.
    #[default]
    Ring,
    /// Two rings in opposite directions, each with half of the values.
    BidirectionalRing,
    /// Whole vectors between partners at doubling distance.
    RecursiveDoubling,
    /// Recursive halving, then doubling (Rabenseifner).
    HalvingDoubling,
    /// Two binary trees, each with half of the values.
    DoubleTree,
    /// Inside each region, then between regions, then inside again.
    Hierarchical,
    /// Each rank reduces an equal shard and sends it to all.
    Direct,
    /// Each rank reduces a shard as large as its access link allows.
    Butterfly,
    /// Along the axes of a grid of ranks, one after the other.
    Moshpit,
    /// Each rank sends what a codec made of its values to all others, and all add them up. Plain values go by
    /// [`Algorithm::Ring`].
    AllGather,
    /// The cheapest of them on the declared topology; ties go to the one named first.
    Auto,
}

impl Algorithm {
    /// Every algorithm for plain values, in the order of the choice; without `Auto`.
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

    /// Those by which values can be averaged through a codec, in the order of the choice: equal shards, shards
    /// by access links, plain inside a region and coded between regions, a ring that encodes anew at each hop,
    /// and everything to all.
    pub const CODED: [Self; 5] =
        [Self::Direct, Self::Butterfly, Self::Hierarchical, Self::Ring, Self::AllGather];

    /// The name on command lines and in plans.
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

    /// Reads a name such as `double-tree` or `auto`.
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let all: Vec<Self> = Self::ALL.into_iter().chain([Self::AllGather, Self::Auto]).collect();
        find("all-reduce algorithm", text, &all, Self::name)
    }
}

/// What the operands of a matrix product are rounded to, to nearest, ties to even. Products add up in f32 and
/// results are f32 whatever it is, and so is all else: parameters, their gradients, norms, softmaxes and
/// optimizer states. This is mixed precision with f32 master weights (Micikevicius et al. 2018), where the
/// rounding belongs to the product and not to the tensor, as PyTorch's `set_float32_matmul_precision` has it.
///
/// A device with tensor cores for the type computes on them; any other gives the same products, without the
/// speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// As they are.
    #[default]
    F32,
    /// 8 bits of mantissa and the range of f32.
    Bf16,
    /// 11 bits of mantissa; beyond 65504 it is infinite, and below 6e-8 zero, so gradients need a loss scale.
    F16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// The name on command lines and in plans.
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

/// Which element of each stratum of a mask is sent in a round: of several consecutive elements, one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// The same in all strata, the next in the next round: every element is sent once in as many rounds as a
    /// stratum has elements.
    Rolling,
    /// In each stratum from another start, drawn anew when every element has been sent once.
    Permuted,
    /// Any, drawn in each round.
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
