//! What the table of methods has of each: its row. It depends on no method.

use super::{Lists, Settings};
use crate::ParallelError;
use crate::pipeline::{Arrivals, Placement};

/// A method.
pub(super) struct Row {
    /// On command lines.
    pub(super) name: &'static str,
    /// One line on what it is.
    pub(super) summary: &'static str,
    /// How many stages of each copy of the model a rank may hold.
    pub(super) chunks: Chunks,
    /// Where stages lie.
    pub(super) shape: Shape,
    /// When weights change.
    pub(super) weights: Weights,
    /// Whether it runs backward passes.
    pub(super) trains: bool,
    /// What it looks at besides sizes.
    pub(super) reads: &'static [Reads],
    /// What is wrong with the sizes, if anything.
    pub(super) needs: fn(&Settings) -> Option<Need>,
    /// The work of each rank.
    pub(super) lists: fn(&Asked<'_>) -> Result<Lists, ParallelError>,
    /// The most chunk activations that a rank holds at once.
    pub(super) peak: fn(&Settings, Sizes) -> u64,
    /// The rule by which ranks may follow arrivals.
    pub(super) arrivals: Option<fn(&Settings) -> Arrivals>,
}

impl Row {
    /// What most methods have in common: one stage a rank, a flush, no limits. A method says the rest.
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

    /// Two stages a rank, there and back.
    pub(super) const VEE: Self = Self { chunks: Chunks::Exactly(2), shape: Shape::Wave, ..Self::PLAIN };
}

/// How many stages of each copy of the model a rank may hold.
#[derive(Debug, Clone, Copy)]
pub(super) enum Chunks {
    /// So many.
    Exactly(u32),
    /// One of each of two copies: whoever counts both is right too.
    OneOfEach,
    /// Any number; 2 unless told.
    Any,
    /// Any even number; 2 unless told.
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

    /// What would do, if this does not.
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
            Self::Even => "an even number: two for each wave".to_owned(),
        })
    }
}

/// Where stages lie.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    /// [`Placement::looped`].
    Looped,
    /// [`Placement::wave`].
    Wave,
    /// [`Placement::both_ways`].
    BothWays,
}

/// A setting that only some methods look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reads {
    /// What stages take.
    Costs,
    /// How many activations a rank may hold.
    Memory,
    /// Slices of sequences.
    Slices,
}

/// When weights change.
#[derive(Debug, Clone, Copy)]
pub(super) enum Weights {
    /// Once all microbatches of a step are through.
    Flush,
    /// After each microbatch, with a version kept for each in flight.
    Stashed,
    /// After as many microbatches as ranks, with two versions.
    TwoVersions,
}

/// A setting that a method cannot do, and what it needs instead.
pub(super) struct Need {
    pub(super) field: &'static str,
    pub(super) given: u32,
    pub(super) needs: String,
}

/// What a method makes lists of.
pub(super) struct Asked<'a> {
    pub(super) settings: &'a Settings,
    pub(super) ranks: u32,
    pub(super) microbatches: u32,
    pub(super) chunks: u32,
    pub(super) placement: &'a Placement,
}

/// What a bound of memory depends on: ranks, microbatches, stages of a rank, and which rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) p: u64,
    pub(super) m: u64,
    pub(super) chunks: u64,
    pub(super) rank: u64,
}

/// A need of so many microbatches.
pub(super) fn microbatches(given: u32, good: bool, needs: impl FnOnce() -> String) -> Option<Need> {
    (!good).then(|| Need { field: "microbatches", given, needs: needs() })
}

/// What a method with microbatches from both ends needs.
pub(super) fn both_ways(settings: &Settings) -> Option<Need> {
    let (given, microbatches) = (settings.ranks, settings.microbatches);
    if !given.is_multiple_of(2) {
        return Some(Need { field: "stages", given, needs: "an even number".to_owned() });
    }
    let half = || "an even number: half go each way".to_owned();
    self::microbatches(microbatches, microbatches.is_multiple_of(2), half)
}

/// A need of twice as many microbatches as ranks.
pub(super) fn twice_the_ranks(settings: &Settings) -> Option<Need> {
    let (ranks, given) = (settings.ranks, settings.microbatches);
    let least = 2 * u64::from(ranks);
    microbatches(given, u64::from(given) >= least, || format!("at least {least} for {ranks} stages"))
}
