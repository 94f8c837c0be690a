//! The schedules of the literature by name: one table for command lines, trainers and tests. Each method is a
//! short pure function from sizes to lists, in a file of its own with its row: a new one is that file and a
//! line in the table.

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

use super::{Arrivals, ComputeOrder, Op, Placement, StageCost, Updates, VersionSync};
use crate::ParallelError;

pub use gpipe::BackwardOrder;
pub use one_f_one_b::slope;
use row::{Asked, Need, Reads, Row, Shape, Sizes, Weights};
pub use tera_pipe::{Slicing, slice_tokens};

/// Declares the methods, each with its row.
macro_rules! methods {
    ($($(#[doc = $doc:literal])+ $variant:ident => $row:expr,)+) => {
        /// A way to order a pipeline's work.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Method {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Method {
            /// All of them, in the order of tables.
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
    /// All forwards, then all backwards. Source: Huang et al. 2019.
    GPipe => gpipe::ROW,
    /// One forward, one backward, with a flush. Source: Narayanan et al. 2021 (Megatron), Fan et al. 2021
    /// (DAPPLE).
    OneFOneB => one_f_one_b::ROW,
    /// 1F1B with a steeper warm-up, so that slow links stay hidden.
    OneFOneBSlope => one_f_one_b::SLOPE,
    /// 1F1B without a flush, with stashed weights. Source: Narayanan et al. 2019.
    PipeDream => one_f_one_b::PIPE_DREAM,
    /// 1F1B without a flush, with two versions of the weights. Source: Narayanan et al. 2021.
    PipeDream2Bw => one_f_one_b::PIPE_DREAM_2BW,
    /// 1F1B over several chunks a rank. Source: Narayanan et al. 2021 (SC).
    Interleaved => interleaved::ROW,
    /// Chunk by chunk, all microbatches. Source: Lamy-Poirier 2022.
    BreadthFirst => breadth_first::ROW,
    /// Split backward, the memory of 1F1B. Source: Qi et al. 2023.
    ZbH1 => zero_bubble::H1,
    /// Split backward, twice the memory, no bubble. Source: Qi et al. 2023.
    ZbH2 => zero_bubble::H2,
    /// Split backward, ordered by a heuristic under a memory limit. Source: Qi et al. 2023, section 3.1.
    ZbAuto => zero_bubble_auto::ROW,
    /// Split backward on a V of stages, the memory of 1F1B, no bubble. Source: Qi et al. 2024.
    ZbV => zero_bubble_v::ROW,
    /// Split backward on a V of stages, half the memory of 1F1B. Source: Qi et al. 2024.
    VHalf => v_half::HALF,
    /// Split backward on a V of stages, a third of the memory of 1F1B. Source: Qi et al. 2024.
    VMin => v_half::MIN,
    /// Whole backward on a V of stages, two thirds of the memory of 1F1B. Source: zbpp's `v1f1b.py`.
    VOneFOneB => v_one_f_one_b::ROW,
    /// Two copies of the model, one each way. Source: Li and Hoefler 2021.
    Chimera => chimera::ROW,
    /// Stages in waves. Source: Liu et al. 2023.
    Hanayo => hanayo::ROW,
    /// Two copies of the model, forwards and backwards in pairs. Source: DeepSeek-AI 2024.
    DualPipe => dual_pipe::ROW,
    /// `DualPipe` on a V of stages, with one copy. Source: Sea AI Lab 2025, "cut-in-half".
    DualPipeV => dual_pipe::VEE,
    /// Slices of each microbatch's tokens one after the other. Source: Li et al. 2021.
    TeraPipe => tera_pipe::ROW,
    /// Backward as soon as a gradient is there, else forward. Source: Athlur et al. 2022.
    Varuna => varuna::ROW,
    /// Forwards alone.
    Inference => inference::ROW,
}

/// What a method is asked for; what it has no use for is not looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Ranks.
    pub ranks: u32,
    /// Microbatches of one step, over all copies of the model.
    pub microbatches: u32,
    /// Stages on each rank, of each copy of the model; `None` is the method's least, 2 where it needs several.
    pub chunks: Option<u32>,
    /// Slices of each microbatch's tokens ([`Method::TeraPipe`]).
    pub slices: u16,
    /// In which order [`Method::GPipe`] runs its backwards.
    pub backward: BackwardOrder,
    /// What each stage takes, for methods that look at costs ([`Method::ZbAuto`], [`Method::Varuna`],
    /// [`Method::OneFOneBSlope`]): one entry, or one for each stage.
    pub cost: Vec<StageCost>,
    /// From the end of a stage on one rank to the start of its successor on the next, for the same methods.
    pub hop: Nanos,
    /// Warm-up slope of [`Method::OneFOneBSlope`]; `None`: [`slope`] of the costs, within `memory` if that is
    /// given.
    pub slope: Option<u32>,
    /// Chunk activations that a rank may hold, where `I` gives back half of one ([`Method::ZbAuto`]), or
    /// microbatches in flight ([`Method::Varuna`]); `None` is as many as ranks, what 1F1B takes.
    pub memory: Option<u32>,
}

impl Settings {
    /// Equal forwards and backward halves of one millisecond, free links, whole microbatches.
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

    /// The cost of a stage.
    fn cost(&self, stage: u32) -> StageCost {
        self.cost[if self.cost.len() == 1 { 0 } else { stage as usize }]
    }
}

type Lists = Vec<Vec<Op>>;

impl Method {
    /// The name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// One line on what it is.
    #[must_use]
    pub const fn summary(self) -> &'static str {
        self.row().summary
    }

    /// How many stages of each copy of the model a rank holds when nobody says.
    #[must_use]
    pub const fn default_chunks(self) -> u32 {
        self.row().chunks.unless_told()
    }

    /// Copies of the model that a pipeline holds.
    #[must_use]
    pub const fn copies(self) -> u32 {
        match self.row().shape {
            Shape::BothWays => 2,
            Shape::Looped | Shape::Wave => 1,
        }
    }

    /// Whether it gives the same gradients as one process: false where weights change between microbatches.
    #[must_use]
    pub const fn is_synchronous(self) -> bool {
        matches!(self.row().weights, Weights::Flush)
    }

    /// Whether it can be told how many activations a rank may hold.
    #[must_use]
    pub fn is_limited(self) -> bool {
        self.row().reads.contains(&Reads::Memory)
    }

    /// Whether it works on slices of sequences.
    #[must_use]
    pub fn slices(self) -> bool {
        self.row().reads.contains(&Reads::Slices)
    }

    /// When weights change in a pipeline of so many ranks; `sync` is for methods that keep a version for each
    /// microbatch.
    #[must_use]
    pub const fn updates(self, ranks: u32, sync: VersionSync) -> Updates {
        match self.row().weights {
            Weights::Flush => Updates::Flush,
            Weights::Stashed => Updates::Stashed { sync },
            Weights::TwoVersions => Updates::TwoVersions { every: ranks },
        }
    }

    /// Whether microbatches may choose between versions of the weights.
    #[must_use]
    pub const fn stashes(self) -> bool {
        matches!(self.row().weights, Weights::Stashed)
    }

    /// Whether it runs backward passes.
    #[must_use]
    pub const fn trains(self) -> bool {
        self.row().trains
    }

    /// The rule by which ranks may follow arrivals instead of the order's lists, for a method that is one.
    #[must_use]
    pub fn arrivals(self, settings: &Settings) -> Option<Arrivals> {
        self.row().arrivals.map(|rule| rule(settings))
    }

    /// The order for these sizes.
    ///
    /// Errors: [`ParallelError::NotAdmitted`] with the setting that the method cannot do and what it needs
    /// instead; [`ParallelError::TooLarge`].
    pub fn order(self, settings: &Settings) -> Result<ComputeOrder, ParallelError> {
        let row = self.row();
        let chunks = settings.chunks.unwrap_or(self.default_chunks());
        let (ranks, microbatches) = (settings.ranks, settings.microbatches);
        self.admits(settings, chunks)?;
        let slices = if self.slices() { settings.slices } else { 1 };
        let cells = u128::from(ranks) * u128::from(chunks) * u128::from(microbatches) * u128::from(slices);
        if cells > ComputeOrder::MAX_CELLS as u128 {
            return Err(ParallelError::TooLarge { actions: cells, limit: ComputeOrder::MAX_CELLS });
        }
        let placement = match row.shape {
            Shape::Looped => Placement::looped(ranks, chunks),
            Shape::Wave => Placement::wave(ranks, chunks),
            Shape::BothWays => Placement::both_ways(ranks),
        };
        let asked = Asked { settings, ranks, microbatches, chunks, placement: &placement };
        let lists = (row.lists)(&asked)?;
        let order = ComputeOrder::new(placement, microbatches, slices, lists)?;
        Ok(order.with_updates(self.updates(ranks, VersionSync::Newest)))
    }

    /// Whether the sizes are such that the method makes sense.
    fn admits(self, settings: &Settings, chunks: u32) -> Result<(), ParallelError> {
        let row = self.row();
        let (ranks, microbatches) = (settings.ranks, settings.microbatches);
        let refuse = |Need { field, given, needs }| {
            Err(ParallelError::NotAdmitted { method: self, field, given: u64::from(given), needs })
        };
        for (field, given) in [("stages", ranks), ("microbatches", microbatches)] {
            if given == 0 {
                return refuse(Need { field, given, needs: "at least 1".to_owned() });
            }
        }
        if let Some(needs) = row.chunks.refuses(chunks) {
            return refuse(Need { field: "chunks", given: chunks, needs });
        }
        if let Some(need) = (row.needs)(settings) {
            return refuse(need);
        }
        let stages = u64::from(ranks) * u64::from(chunks);
        if row.reads.contains(&Reads::Costs)
            && settings.cost.len() != 1
            && settings.cost.len() as u64 != stages
        {
            let given = settings.cost.len();
            return Err(ParallelError::PerStage { what: "cost", given, stages: stages as usize });
        }
        Ok(())
    }

    /// The most chunk activations that a rank of an order by this method holds at once, where the method
    /// promises one.
    #[must_use]
    pub fn peak_bound(self, settings: &Settings, rank: u32) -> Option<u64> {
        let chunks = u64::from(settings.chunks.unwrap_or(self.default_chunks()));
        let sizes =
            Sizes { p: settings.ranks.into(), m: settings.microbatches.into(), chunks, rank: rank.into() };
        Some((self.row().peak)(settings, sizes))
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
