//! When a pipeline's weights change, and which version of them each microbatch sees. Versions are counted, not
//! held.

use std::fmt;

/// The rule by which a stage's weights change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Updates {
    /// All stages step once, when the last microbatch is done everywhere: as if there were no pipeline.
    #[default]
    Flush,
    /// A stage steps after each of its backwards and keeps the version that each microbatch went forward with.
    /// Source: Narayanan et al. 2019, "`PipeDream`", section 3.3.
    Stashed {
        /// Whether every stage takes the version that stage 0 had when the microbatch entered, and so all take
        /// the same one; else each takes its newest.
        sync: VersionSync,
    },
    /// A stage steps after each `every` microbatches and keeps two versions; all take the one before the
    /// newest. Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1.
    TwoVersions {
        /// Microbatches of one update, at least as many as stages.
        every: u32,
    },
}

/// Whether stages agree on the version that a microbatch sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VersionSync {
    /// Each stage takes its newest.
    Newest,
    /// All take the version that the first stage took ("vertical sync").
    Vertical,
}

impl Updates {
    /// The version, as the number of updates before it, that `microbatch` sees on part `part` of a model of
    /// `depth`.
    ///
    /// Forward and backward see the same one.
    #[must_use]
    pub const fn version(self, part: u32, depth: u32, microbatch: u32) -> u32 {
        match self {
            Self::Flush => 0,
            // In 1F1B, stage s starts microbatch i when i - (p - 1 - s) backwards are done there.
            Self::Stashed { sync: VersionSync::Newest } => microbatch.saturating_sub(depth - 1 - part),
            Self::Stashed { sync: VersionSync::Vertical } => microbatch.saturating_sub(depth - 1),
            Self::TwoVersions { every } => (microbatch / every).saturating_sub(1),
        }
    }

    /// The most versions that a part of the model holds at once.
    #[must_use]
    pub const fn versions_held(self, part: u32, depth: u32) -> u32 {
        match self {
            Self::Flush => 1,
            Self::Stashed { sync: VersionSync::Newest } => depth - part,
            // The newest of the part itself, back to the one that the first stage last gave out.
            Self::Stashed { sync: VersionSync::Vertical } => depth,
            Self::TwoVersions { .. } => 2,
        }
    }

    /// Whether a stage steps right after its backward of `microbatch`, the last of all being `count - 1`.
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
