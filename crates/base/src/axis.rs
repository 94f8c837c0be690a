//! The axes along which the ranks of a job divide a model and its batch.

use std::fmt;
use std::str::FromStr;

use crate::name::{UnknownName, find};

/// What the ranks along an axis divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Axis {
    /// The batch. All ranks along this axis hold a copy of the same parameters.
    Data,
    /// The layers, into stages.
    Pipeline,
    /// The positions of a sequence, along a ring. In a plan it is a view of the data axis.
    Context,
    /// The width of each layer.
    Tensor,
    /// The experts of mixture layers. A view of data x tensor: experts divide the ranks of these two axes, so a
    /// grid of ranks has no axis of this name.
    Expert,
    /// The heads of an attention, while others exchange positions for heads: a view of the data axis, too.
    Ulysses,
}

impl Axis {
    /// The axes of a grid of ranks, in the order of every plan: from the axis that tolerates slow links best to
    /// the one that needs the fastest. Rank numbers vary slowest along the first.
    pub const ALL: [Self; 4] = [Self::Data, Self::Pipeline, Self::Context, Self::Tensor];

    /// Returns the name used on command lines and in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Pipeline => "pipeline",
            Self::Context => "context",
            Self::Tensor => "tensor",
            Self::Expert => "expert",
            Self::Ulysses => "ulysses",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Axis {
    type Err = UnknownName;

    /// Parses the name of an axis or of a view.
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let [data, pipeline, context, tensor] = Self::ALL;
        find("mesh axis", text, &[data, pipeline, context, tensor, Self::Expert, Self::Ulysses], Self::name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for axis in Axis::ALL.into_iter().chain([Axis::Expert, Axis::Ulysses]) {
            assert_eq!(axis.to_string().parse(), Ok(axis));
        }
        let unknown = "row".parse::<Axis>().unwrap_err().to_string();
        let known = "data, pipeline, context, tensor, expert, ulysses";
        assert_eq!(unknown, format!("there is no mesh axis `row` (known: {known})"));
    }
}
