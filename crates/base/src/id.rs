//! Identifiers within a job. A process keeps its [`PeerId`]; its [`Rank`] can change when members join or
//! leave.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        pub struct $name(pub $inner);

        impl $name {
            /// Returns the number as a list index.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

id!(
    /// A position in a communicator or mesh, `0..world_size`.
    Rank, u32, "rank "
);
id!(
    /// A process, or simulated process, for its whole life. Its rank may change when members join or leave; its
    /// peer id does not.
    PeerId, u32, "peer "
);
id!(
    /// A pipeline stage. Stage 0 is at the model's input.
    StageId, u32, "stage "
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_what_they_are() {
        assert_eq!(Rank(3).to_string(), "rank 3");
        assert_eq!(PeerId(0).to_string(), "peer 0");
        assert_eq!(StageId(7).index(), 7);
    }
}
