//! The published pipeline schedules by name: one table for command lines, trainers and tests. Each method is a
//! pure function from sizes to lists, in its own file together with its row. A new method needs that file and
//! one line in the table.

mod breadth_first;
mod chimera;
mod dual_pipe;
mod gpipe;
pub(super) mod greedy;
mod hanayo;
mod inference;
mod interleaved;
mod one_f_one_b;
mod row;
mod tera_pipe;
mod v_half;
mod v_one_f_one_b;
mod varuna;
mod zero_bubble;
mod zero_bubble_auto;
mod zero_bubble_v;

use std::fmt;
use std::str::FromStr;

use farflung_base::Nanos;

use super::{ArrivalRule, ComputeOrder, Op, Placement, StageCost, Updates, VersionSync};
use crate::ParallelError;

pub use gpipe::BackwardOrder;
pub use one_f_one_b::slope;
use row::{MethodInput, Row, Shape, Sizes, Unsupported, UsedSetting, Weights};
pub use tera_pipe::{Slicing, slice_tokens};

/// Declares the enum of methods and the row of each.
macro_rules! methods {
    ($($(#[doc = $doc:literal])+ $variant:ident => $row:expr,)+) => {
        /// A method of ordering a pipeline's work.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Method {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Method {
            /// All methods, in the order of tables.
            pub const ALL: [Self; [$($row.name,)+].len()] = [$(Self::$variant,)+];

            const fn row(self) -> &'static Row {
                match self {
                    $(Self::$variant => &$row,)+
                }
            }
        }
    };
}

methods! {
    /// Each rank runs all forwards, then all backwards. Source: Huang et al. 2019.
    GPipe => gpipe::ROW,
    /// One forward, one backward, with a flush. Source: Narayanan et al. 2021 (Megatron), Fan et al. 2021
    /// (DAPPLE).
    OneFOneB => one_f_one_b::ROW,
    /// 1F1B with a steeper warm-up that hides slow links.
    OneFOneBSlope => one_f_one_b::SLOPE,
    /// 1F1B without a flush, with stashed weights. Source: Narayanan et al. 2019.
    PipeDream => one_f_one_b::PIPE_DREAM,
    /// 1F1B without a flush, with two versions of the weights. Source: Narayanan et al. 2021.
    PipeDream2Bw => one_f_one_b::PIPE_DREAM_2BW,
    /// 1F1B with several chunks per rank. Source: Narayanan et al. 2021 (SC).
    Interleaved => interleaved::ROW,
    /// A rank runs all microbatches through one chunk, then through its next chunk. Source: Lamy-Poirier 2022.
    BreadthFirst => breadth_first::ROW,
    /// The backward is split into `I` and `W`; as much memory as 1F1B. Source: Qi et al. 2023.
    ZbH1 => zero_bubble::H1,
    /// The backward is split into `I` and `W`; twice the memory of 1F1B, no bubble. Source: Qi et al. 2023.
    ZbH2 => zero_bubble::H2,
    /// The backward is split into `I` and `W`, ordered by a heuristic under a memory limit. Source: Qi et al.
    /// 2023, section 3.1.
    ZbAuto => zero_bubble_auto::ROW,
    /// Stages go over the ranks and back (V shape), and the backward is split into `I` and `W`; as much memory
    /// as 1F1B, no bubble. Source: Qi et al. 2024.
    ZbV => zero_bubble_v::ROW,
    /// Stages go over the ranks and back (V shape), and the backward is split into `I` and `W`; half the memory
    /// of 1F1B. Source: Qi et al. 2024.
    VHalf => v_half::HALF,
    /// Stages go over the ranks and back (V shape), and the backward is split into `I` and `W`; a third of the
    /// memory of 1F1B. Source: Qi et al. 2024.
    VMin => v_half::MIN,
    /// Stages go over the ranks and back (V shape), and the backward is not split; two thirds of the memory of
    /// 1F1B. Source: `v1f1b.py` of zbpp, the zero-bubble authors' repository.
    VOneFOneB => v_one_f_one_b::ROW,
    /// Two copies of the model, one in each direction. Source: Li and Hoefler 2021.
    Chimera => chimera::ROW,
    /// Stages go over the ranks in several waves, forth and back. Source: Liu et al. 2023.
    Hanayo => hanayo::ROW,
    /// Two copies of the model, forwards and backwards in pairs. Source: DeepSeek-AI 2024.
    DualPipe => dual_pipe::ROW,
    /// `DualPipe` with one copy of the model, whose stages go over the ranks and back (V shape). Source: Sea AI
    /// Lab 2025, "cut-in-half".
    DualPipeV => dual_pipe::VEE,
    /// Each microbatch's tokens are divided into slices, which pass the stages one after the other. Source: Li
    /// et al. 2021.
    TeraPipe => tera_pipe::ROW,
    /// A rank runs a backward as soon as its gradient has arrived, else a forward. Source: Athlur et al. 2022.
    Varuna => varuna::ROW,
    /// Only forwards.
    Inference => inference::ROW,
}

/// Sizes and options for a method. A method ignores the fields that it does not use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of microbatches in a step, over all copies of the model.
    pub microbatches: u32,
    /// Number of stages of each copy of the model on each rank. `None`: [`Method::default_chunks`].
    pub chunks: Option<u32>,
    /// Number of slices of each microbatch's tokens ([`Method::TeraPipe`]).
    pub slices: u16,
    /// Order in which [`Method::GPipe`] runs its backwards.
    pub backward: BackwardOrder,
    /// Cost of each stage, for methods that use costs ([`Method::ZbAuto`], [`Method::Varuna`],
    /// [`Method::OneFOneBSlope`]): one entry for all stages, or one per stage.
    pub cost: Vec<StageCost>,
    /// Time from the end of a stage on one rank to the start of the next stage on another rank, for the methods
    /// that use costs.
    pub hop: Nanos,
    /// Warm-up slope of [`Method::OneFOneBSlope`]. `None`: the [`slope`] for the costs, limited by `memory` if
    /// it is given.
    pub slope: Option<u32>,
    /// Maximum number of microbatches whose activations a rank may hold, where `I` frees half of them
    /// ([`Method::ZbAuto`]), or maximum number of microbatches in flight ([`Method::Varuna`]). `None`: the
    /// number of ranks, as 1F1B needs. For [`Method::OneFOneBSlope`] see `slope`.
    pub memory: Option<u32>,
}

impl Settings {
    /// Creates settings with forwards and backward halves of one millisecond, free links and unsliced
    /// microbatches.
    #[must_use]
    pub fn new(ranks: u32, microbatches: u32) -> Self {
        Self {
            ranks,
            microbatches,
            chunks: None,
            slices: 1,
            backward: BackwardOrder::Descending,
            cost: vec![StageCost::UNIT],
            hop: Nanos::ZERO,
            slope: None,
            memory: None,
        }
    }

    /// Returns the cost of a stage.
    fn cost(&self, stage: u32) -> StageCost {
        self.cost[if self.cost.len() == 1 { 0 } else { stage as usize }]
    }
}

type Lists = Vec<Vec<Op>>;

impl Method {
    /// Returns the name used on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns a one-line description.
    #[must_use]
    pub const fn summary(self) -> &'static str {
        self.row().summary
    }

    /// Returns the default number of stages of each copy of the model on a rank.
    #[must_use]
    pub const fn default_chunks(self) -> u32 {
        self.row().chunks.unless_told()
    }

    /// Returns the number of copies of the model in a pipeline.
    #[must_use]
    pub const fn copies(self) -> u32 {
        match self.row().shape {
            Shape::BothWays => 2,
            Shape::Looped | Shape::Wave => 1,
        }
    }

    /// Returns whether the method gives the same gradients as one process. False if weights change between
    /// microbatches.
    #[must_use]
    pub const fn is_synchronous(self) -> bool {
        matches!(self.row().weights, Weights::Flush)
    }

    /// Returns whether the number of activations that a rank may hold can be limited.
    #[must_use]
    pub fn is_limited(self) -> bool {
        self.row().reads.contains(&UsedSetting::Memory)
    }

    /// Returns whether the method works on slices of sequences.
    #[must_use]
    pub fn slices(self) -> bool {
        self.row().reads.contains(&UsedSetting::Slices)
    }

    /// Returns when weights change in a pipeline of `ranks` ranks. `sync` is used by methods that keep a
    /// version of the weights for each microbatch.
    #[must_use]
    pub const fn updates(self, ranks: u32, sync: VersionSync) -> Updates {
        match self.row().weights {
            Weights::Flush => Updates::Flush,
            Weights::Stashed => Updates::Stashed { sync },
            Weights::TwoVersions => Updates::TwoVersions { every: ranks },
        }
    }

    /// Returns whether the method keeps a version of the weights for each microbatch in flight.
    #[must_use]
    pub const fn stashes(self) -> bool {
        matches!(self.row().weights, Weights::Stashed)
    }

    /// Returns whether the method runs backward passes.
    #[must_use]
    pub const fn trains(self) -> bool {
        self.row().trains
    }

    /// Returns the rule by which ranks may work in the order of arrivals, for methods that are defined by such
    /// a rule.
    #[must_use]
    pub fn arrivals(self, settings: &Settings) -> Option<ArrivalRule> {
        self.row().arrivals.map(|rule| rule(settings))
    }

    /// Generates the order for these sizes.
    ///
    /// Errors: [`ParallelError::NotAdmitted`] with the setting that the method does not support and what it
    /// needs instead; [`ParallelError::PerStage`] for costs of the wrong length; [`ParallelError::TooLarge`];
    /// [`ParallelError::TooManyRanks`].
    pub fn order(self, settings: &Settings) -> Result<ComputeOrder, ParallelError> {
        let row = self.row();
        let chunks = settings.chunks.unwrap_or(self.default_chunks());
        let (ranks, microbatches) = (settings.ranks, settings.microbatches);
        self.admits(settings, chunks)?;
        let slices = if self.slices() { settings.slices } else { 1 };
        ComputeOrder::check_cells(u64::from(ranks) * u64::from(chunks), microbatches, slices)?;
        ComputeOrder::check_ranks(ranks)?;
        let placement = match row.shape {
            Shape::Looped => Placement::looped(ranks, chunks),
            Shape::Wave => Placement::wave(ranks, chunks),
            Shape::BothWays => Placement::both_ways(ranks),
        };
        let asked = MethodInput { settings, ranks, microbatches, chunks, placement: &placement };
        let lists = (row.lists)(&asked)?;
        let order = ComputeOrder::new(placement, microbatches, slices, lists)?;
        Ok(order.with_updates(self.updates(ranks, VersionSync::Newest)))
    }

    /// Checks that the method supports the sizes.
    fn admits(self, settings: &Settings, chunks: u32) -> Result<(), ParallelError> {
        let row = self.row();
        let (ranks, microbatches) = (settings.ranks, settings.microbatches);
        let refuse = |Unsupported { field, given, needs }| {
            Err(ParallelError::NotAdmitted { method: self, field, given: u64::from(given), needs })
        };
        for (field, given) in [("stages", ranks), ("microbatches", microbatches)] {
            if given == 0 {
                return refuse(Unsupported { field, given, needs: "at least 1".to_owned() });
            }
        }
        if let Some(needs) = row.chunks.refuses(chunks) {
            return refuse(Unsupported { field: "chunks", given: chunks, needs });
        }
        if let Some(need) = (row.needs)(settings) {
            return refuse(need);
        }
        let stages = u64::from(ranks) * u64::from(chunks);
        if row.reads.contains(&UsedSetting::Costs)
            && settings.cost.len() != 1
            && settings.cost.len() as u64 != stages
        {
            let given = settings.cost.len();
            return Err(ParallelError::PerStage { what: "cost", given, stages: stages as usize });
        }
        Ok(())
    }

    /// Returns the bound that the method guarantees on the number of activations that `rank` holds at once,
    /// counted as in [`peaks`](super::peaks).
    #[must_use]
    pub fn peak_bound(self, settings: &Settings, rank: u32) -> u64 {
        let chunks = u64::from(settings.chunks.unwrap_or(self.default_chunks()));
        let sizes =
            Sizes { p: settings.ranks.into(), m: settings.microbatches.into(), chunks, rank: rank.into() };
        (self.row().peak)(settings, sizes)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Method {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let known = Self::ALL.into_iter().find(|method| method.name() == text);
        known.ok_or_else(|| ParallelError::UnknownName {
            kind: "schedule",
            name: text.to_owned(),
            known: Self::ALL.map(|method| method.name().to_owned()).to_vec(),
        })
    }
}
