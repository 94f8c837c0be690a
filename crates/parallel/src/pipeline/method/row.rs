//! The type of an entry in the table of pipeline methods. It does not depend on any method.

use super::{Lists, Settings};
use crate::ParallelError;
use crate::pipeline::{ArrivalRule, Placement};

/// Entry of the table of pipeline methods: the description of one method.
pub(super) struct Row {
    /// Name on command lines.
    pub(super) name: &'static str,
    /// One-line description.
    pub(super) summary: &'static str,
    /// How many stages a rank may hold, for each copy of the model.
    pub(super) chunks: Chunks,
    /// How stages are placed on ranks.
    pub(super) shape: Shape,
    /// When weights change.
    pub(super) weights: Weights,
    /// Whether the method runs backward passes.
    pub(super) trains: bool,
    /// Settings that the method uses besides sizes.
    pub(super) reads: &'static [UsedSetting],
    /// Returns the first setting that the method does not support, if any.
    pub(super) needs: fn(&Settings) -> Option<Unsupported>,
    /// Generates the list of each rank.
    pub(super) lists: fn(&MethodInput<'_>) -> Result<Lists, ParallelError>,
    /// Returns the maximum number of activations that a rank holds at once, each of one stage and one
    /// microbatch.
    pub(super) peak: fn(&Settings, Sizes) -> u64,
    /// Returns the rule by which ranks may work in the order of arrivals.
    pub(super) arrivals: Option<fn(&Settings) -> ArrivalRule>,
}

impl Row {
    /// Defaults for most methods: one stage per rank, a flush, no limits. Each method overrides what differs.
    pub(super) const PLAIN: Self = Self {
        name: "",
        summary: "",
        chunks: Chunks::Exactly(1),
        shape: Shape::Looped,
        weights: Weights::Flush,
        trains: true,
        reads: &[],
        needs: |_| None,
        lists: |_| Ok(Vec::new()),
        peak: |_, sizes| sizes.m,
        arrivals: None,
    };

    /// Defaults for methods with a V-shaped placement: two stages per rank, where stages go over the ranks and
    /// back.
    pub(super) const VEE: Self = Self { chunks: Chunks::Exactly(2), shape: Shape::Wave, ..Self::PLAIN };
}

/// How many stages a rank may hold, for each copy of the model.
#[derive(Debug, Clone, Copy)]
pub(super) enum Chunks {
    /// Exactly this number of stages.
    Exactly(u32),
    /// Only 1: a rank holds one stage of each of two copies of the model. The number 2, which counts both
    /// copies, is accepted too.
    OneOfEach,
    /// Any number of stages; 2 by default.
    Any,
    /// Any even number of stages; 2 by default.
    Even,
}

impl Chunks {
    pub(super) const fn unless_told(self) -> u32 {
        match self {
            Self::Exactly(chunks) => chunks,
            Self::OneOfEach => 1,
            Self::Any | Self::Even => 2,
        }
    }

    /// Returns a description of the supported numbers if `chunks` is not one of them.
    pub(super) fn refuses(self, chunks: u32) -> Option<String> {
        let good = match self {
            Self::Exactly(needed) => chunks == needed,
            Self::OneOfEach => chunks == 1 || chunks == 2,
            Self::Any => chunks > 0,
            Self::Even => chunks > 0 && chunks.is_multiple_of(2),
        };
        (!good).then(|| match self {
            Self::Exactly(needed) => needed.to_string(),
            Self::OneOfEach => "1".to_owned(),
            Self::Any => "at least 1".to_owned(),
            Self::Even => "an even number, two for each wave".to_owned(),
        })
    }
}

/// How stages are placed on ranks.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    /// [`Placement::looped`].
    Looped,
    /// [`Placement::wave`].
    Wave,
    /// [`Placement::both_ways`].
    BothWays,
}

/// A setting that only some methods use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UsedSetting {
    /// Costs of stages.
    Costs,
    /// Maximum number of activations that a rank may hold.
    Memory,
    /// Slices of sequences.
    Slices,
}

/// When weights change.
#[derive(Debug, Clone, Copy)]
pub(super) enum Weights {
    /// After all microbatches of a step.
    Flush,
    /// After each microbatch, with a version of the weights for each microbatch in flight.
    Stashed,
    /// After as many microbatches as ranks, with two versions of the weights.
    TwoVersions,
}

/// A setting that a method does not support, and the values that the method needs instead.
pub(super) struct Unsupported {
    pub(super) field: &'static str,
    pub(super) given: u32,
    pub(super) needs: String,
}

/// Input of [`Row::lists`].
pub(super) struct MethodInput<'a> {
    pub(super) settings: &'a Settings,
    pub(super) ranks: u32,
    pub(super) microbatches: u32,
    pub(super) chunks: u32,
    pub(super) placement: &'a Placement,
}

/// Input of [`Row::peak`]: ranks, microbatches, stages per rank, and the rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) p: u64,
    pub(super) m: u64,
    pub(super) chunks: u64,
    pub(super) rank: u64,
}

/// Returns an error that describes the supported numbers of microbatches, unless `good` is true.
pub(super) fn microbatches(given: u32, good: bool, needs: impl FnOnce() -> String) -> Option<Unsupported> {
    (!good).then(|| Unsupported { field: "microbatches", given, needs: needs() })
}

/// Returns an error if the number of ranks or of microbatches is odd, for methods whose microbatches enter from
/// both ends.
pub(super) fn both_ways(settings: &Settings) -> Option<Unsupported> {
    let (given, microbatches) = (settings.ranks, settings.microbatches);
    if !given.is_multiple_of(2) {
        return Some(Unsupported { field: "stages", given, needs: "an even number".to_owned() });
    }
    let half = || "an even number, because half go in each direction".to_owned();
    self::microbatches(microbatches, microbatches.is_multiple_of(2), half)
}

/// Returns an error if there are fewer than twice as many microbatches as ranks.
pub(super) fn twice_the_ranks(settings: &Settings) -> Option<Unsupported> {
    let (ranks, given) = (settings.ranks, settings.microbatches);
    let least = 2 * u64::from(ranks);
    microbatches(given, u64::from(given) >= least, || format!("at least {least} for {ranks} stages"))
}
