//! When a pipeline's weights change, and which version of the weights each microbatch uses. A version is
//! represented by its number.

use std::fmt;

/// The rule by which a stage's weights change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Updates {
    /// All stages update once, after the last microbatch is done everywhere. Gradients are the same as without
    /// a pipeline.
    #[default]
    Flush,
    /// A stage updates after each of its backwards, and keeps for each microbatch the version of its forward.
    /// Source: Narayanan et al. 2019, "`PipeDream`", section 3.3.
    Stashed {
        /// Whether all stages use the same version of the weights for a microbatch.
        sync: VersionSync,
    },
    /// A stage updates after each `every` microbatches and keeps two versions. All stages use the older one.
    /// Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1.
    TwoVersions {
        /// Number of microbatches per update, at least the number of stages.
        every: u32,
    },
}

/// Whether all stages use the same version of the weights for a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VersionSync {
    /// Each stage uses its newest version.
    Newest,
    /// All stages use the version that the first stage had when the microbatch entered ("vertical sync").
    Vertical,
}

impl Updates {
    /// Returns the version that `microbatch` uses on part `part` of a model of `depth` parts, as the number of
    /// updates before it.
    ///
    /// Forward and backward use the same version.
    #[must_use]
    pub const fn version(self, part: u32, depth: u32, microbatch: u32) -> u32 {
        match self {
            Self::Flush => 0,
            // In 1F1B, a stage s of p starts microbatch i when i - (p - 1 - s) of its backwards are done.
            Self::Stashed { sync: VersionSync::Newest } => microbatch.saturating_sub(depth - 1 - part),
            Self::Stashed { sync: VersionSync::Vertical } => microbatch.saturating_sub(depth - 1),
            Self::TwoVersions { every } => (microbatch / every).saturating_sub(1),
        }
    }

    /// Returns the maximum number of versions that a part of the model holds at once.
    #[must_use]
    pub const fn versions_held(self, part: u32, depth: u32) -> u32 {
        match self {
            Self::Flush => 1,
            Self::Stashed { sync: VersionSync::Newest } => depth - part,
            // After n backwards of a part, its newest version is n, and its next backward, of microbatch n,
            // uses version n - (depth - 1). It keeps all versions from that one to n.
            Self::Stashed { sync: VersionSync::Vertical } => depth,
            Self::TwoVersions { .. } => 2,
        }
    }

    /// Returns whether a stage updates right after its backward of `microbatch`. The last microbatch is
    /// `count - 1`.
    #[must_use]
    pub const fn steps_after(self, microbatch: u32, count: u32) -> bool {
        match self {
            Self::Flush => microbatch + 1 == count,
            Self::Stashed { .. } => true,
            Self::TwoVersions { every } => (microbatch + 1).is_multiple_of(every),
        }
    }
}

impl fmt::Display for Updates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flush => f.write_str("flush"),
            Self::Stashed { sync: VersionSync::Newest } => f.write_str("stashed"),
            Self::Stashed { sync: VersionSync::Vertical } => f.write_str("stashed, vertical sync"),
            Self::TwoVersions { every } => write!(f, "two versions, every {every}"),
        }
    }
}
