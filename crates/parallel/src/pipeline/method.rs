//! The schedules of the literature by name: one table for command lines, trainers and tests. Each method is a short
//! pure function from sizes to lists, in a file of its own.

mod breadth_first;
mod chimera;
mod dual_pipe;
mod gpipe;
pub(super) mod greedy;
mod hanayo;
mod inference;
mod interleaved;
mod one_f_one_b;
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
pub use tera_pipe::{Slicing, slice_tokens};

/// A way to order a pipeline's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Method {
    /// All forwards, then all backwards. Source: Huang et al. 2019.
    GPipe,
    /// One forward, one backward, with a flush. Source: Narayanan et al. 2021 (Megatron), Fan et al. 2021 (DAPPLE).
    OneFOneB,
    /// 1F1B with a steeper warm-up, so that slow links stay hidden.
    OneFOneBSlope,
    /// 1F1B without a flush, with stashed weights. Source: Narayanan et al. 2019.
    PipeDream,
    /// 1F1B without a flush, with two versions of the weights. Source: Narayanan et al. 2021.
    PipeDream2Bw,
    /// 1F1B over several chunks a rank. Source: Narayanan et al. 2021 (SC).
    Interleaved,
    /// Chunk by chunk, all microbatches. Source: Lamy-Poirier 2022.
    BreadthFirst,
    /// Split backward, the memory of 1F1B. Source: Qi et al. 2023.
    ZbH1,
    /// Split backward, twice the memory, no bubble. Source: Qi et al. 2023.
    ZbH2,
    /// Split backward, ordered by a heuristic under a memory limit. Source: Qi et al. 2023, section 3.1.
    ZbAuto,
    /// Split backward on a V of stages, the memory of 1F1B, no bubble. Source: Qi et al. 2024.
    ZbV,
    /// Split backward on a V of stages, half the memory of 1F1B. Source: Qi et al. 2024.
    VHalf,
    /// Split backward on a V of stages, a third of the memory of 1F1B. Source: Qi et al. 2024.
    VMin,
    /// Whole backward on a V of stages, two thirds of the memory of 1F1B. Source: zbpp's `v1f1b.py`.
    VOneFOneB,
    /// Two copies of the model, one each way. Source: Li and Hoefler 2021.
    Chimera,
    /// Stages in waves. Source: Liu et al. 2023.
    Hanayo,
    /// Two copies of the model, forwards and backwards in pairs. Source: DeepSeek-AI 2024.
    DualPipe,
    /// `DualPipe` on a V of stages, with one copy. Source: Sea AI Lab 2025, "cut-in-half".
    DualPipeV,
    /// Slices of each microbatch's tokens one after the other. Source: Li et al. 2021.
    TeraPipe,
    /// Backward as soon as a gradient is there, else forward. Source: Athlur et al. 2022.
    Varuna,
    /// Forwards alone.
    Inference,
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
    /// Warm-up slope of [`Method::OneFOneBSlope`]; `None`: [`slope`] of the costs, within `memory` if that is given.
    pub slope: Option<u32>,
    /// Chunk activations that a rank may hold, where `I` gives back half of one ([`Method::ZbAuto`]), or microbatches
    /// in flight ([`Method::Varuna`]); `None` is as many as ranks, what 1F1B takes.
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
    /// All of them, in the order of tables.
    pub const ALL: [Self; 21] = [
        Self::GPipe,
        Self::OneFOneB,
        Self::OneFOneBSlope,
        Self::PipeDream,
        Self::PipeDream2Bw,
        Self::Interleaved,
        Self::BreadthFirst,
        Self::ZbH1,
        Self::ZbH2,
        Self::ZbAuto,
        Self::ZbV,
        Self::VHalf,
        Self::VMin,
        Self::VOneFOneB,
        Self::Chimera,
        Self::Hanayo,
        Self::DualPipe,
        Self::DualPipeV,
        Self::TeraPipe,
        Self::Varuna,
        Self::Inference,
    ];

    /// The name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::OneFOneBSlope => "1f1b-mu",
            Self::PipeDream => "pipedream",
            Self::PipeDream2Bw => "pipedream-2bw",
            Self::Interleaved => "interleaved",
            Self::BreadthFirst => "bfs",
            Self::ZbH1 => "zb-h1",
            Self::ZbH2 => "zb-h2",
            Self::ZbAuto => "zb-auto",
            Self::ZbV => "zbv",
            Self::VHalf => "v-half",
            Self::VMin => "v-min",
            Self::VOneFOneB => "v-1f1b",
            Self::Chimera => "chimera",
            Self::Hanayo => "hanayo",
            Self::DualPipe => "dualpipe",
            Self::DualPipeV => "dualpipev",
            Self::TeraPipe => "terapipe",
            Self::Varuna => "varuna",
            Self::Inference => "inference",
        }
    }

    /// One line on what it is.
    #[must_use]
    pub const fn summary(self) -> &'static str {
        match self {
            Self::GPipe => "all forwards, then all backwards",
            Self::OneFOneB => "one forward, one backward, with a flush (Megatron, DAPPLE)",
            Self::OneFOneBSlope => "1F1B with a steeper warm-up that hides slow links",
            Self::PipeDream => "1F1B without a flush, a version of the weights per microbatch in flight",
            Self::PipeDream2Bw => "1F1B without a flush, two versions of the weights",
            Self::Interleaved => "1F1B over several chunks a rank",
            Self::BreadthFirst => "chunk by chunk, all microbatches",
            Self::ZbH1 => "split backward, the memory of 1F1B, a third of its bubble",
            Self::ZbH2 => "split backward, twice the memory, no bubble",
            Self::ZbAuto => "split backward, ordered under a memory limit",
            Self::ZbV => "split backward on a V of stages, the memory of 1F1B, no bubble",
            Self::VHalf => "split backward on a V of stages, half the memory of 1F1B",
            Self::VMin => "split backward on a V of stages, a third of the memory of 1F1B",
            Self::VOneFOneB => "whole backward on a V of stages, two thirds of the memory of 1F1B",
            Self::Chimera => "two copies of the model, one each way",
            Self::Hanayo => "stages in waves to and fro",
            Self::DualPipe => "two copies of the model, forwards and backwards in pairs",
            Self::DualPipeV => "forwards and backwards in pairs on a V of stages",
            Self::TeraPipe => "slices of each microbatch's tokens one after the other",
            Self::Varuna => "backward as soon as a gradient is there, else forward",
            Self::Inference => "forwards alone",
        }
    }

    /// How many stages of each copy of the model a rank holds when nobody says.
    #[must_use]
    pub const fn default_chunks(self) -> u32 {
        match self {
            Self::Interleaved
            | Self::BreadthFirst
            | Self::ZbV
            | Self::VHalf
            | Self::VMin
            | Self::VOneFOneB
            | Self::Hanayo
            | Self::DualPipeV => 2,
            _ => 1,
        }
    }

    /// Whether it gives the same gradients as one process: false where weights change between microbatches.
    #[must_use]
    pub const fn is_synchronous(self) -> bool {
        !matches!(self, Self::PipeDream | Self::PipeDream2Bw)
    }

    /// The rule by which ranks may follow arrivals instead of the order's lists, for a method that is one.
    #[must_use]
    pub fn arrivals(self, settings: &Settings) -> Option<Arrivals> {
        (self == Self::Varuna).then(|| varuna::arrivals(settings))
    }

    /// The order for these sizes.
    ///
    /// Errors: [`ParallelError::NotAdmitted`] with the setting that the method cannot do and what it needs instead;
    /// [`ParallelError::TooLarge`].
    pub fn order(self, settings: &Settings) -> Result<ComputeOrder, ParallelError> {
        let chunks = settings.chunks.unwrap_or(self.default_chunks());
        let (p, m) = (settings.ranks, settings.microbatches);
        self.admits(settings, chunks)?;
        let slices = if self == Self::TeraPipe { settings.slices } else { 1 };
        let cells = u128::from(p) * u128::from(chunks) * u128::from(m) * u128::from(slices);
        if cells > ComputeOrder::MAX_CELLS as u128 {
            return Err(ParallelError::TooLarge { actions: cells, limit: ComputeOrder::MAX_CELLS });
        }
        let placement = match self {
            Self::ZbV | Self::VHalf | Self::VMin | Self::VOneFOneB | Self::Hanayo | Self::DualPipeV => {
                Placement::wave(p, chunks)
            }
            Self::Chimera | Self::DualPipe => Placement::both_ways(p),
            _ => Placement::looped(p, chunks),
        };
        let lists = match self {
            Self::GPipe => gpipe::lists(p, m, settings.backward),
            Self::OneFOneB | Self::PipeDream | Self::PipeDream2Bw => one_f_one_b::lists(p, m, 1),
            Self::OneFOneBSlope => one_f_one_b::lists(p, m, one_f_one_b::slope_of(settings)),
            Self::Interleaved => interleaved::lists(p, m, chunks),
            Self::BreadthFirst => breadth_first::lists(p, m, chunks),
            Self::ZbH1 => zero_bubble::lists(p, m, 1),
            Self::ZbH2 => zero_bubble::lists(p, m, 2),
            Self::ZbAuto => zero_bubble_auto::lists(settings)?,
            Self::ZbV => zero_bubble_v::lists(p, m),
            Self::VHalf => v_half::lists(p, m, &v_half::half(p)),
            Self::VMin => v_half::lists(p, m, &v_half::min(p)),
            Self::VOneFOneB => v_one_f_one_b::lists(p, m),
            Self::Chimera => chimera::lists(p, m),
            Self::Hanayo => hanayo::lists(p, m, &placement),
            Self::DualPipe => dual_pipe::two_copies(p, m),
            Self::DualPipeV => dual_pipe::vee(p, m),
            Self::TeraPipe => tera_pipe::lists(p, m, slices),
            Self::Varuna => varuna::lists(settings),
            Self::Inference => inference::lists(p, m),
        };
        let order = ComputeOrder::new(placement, m, slices, lists)?;
        Ok(order.with_updates(match self {
            Self::PipeDream => Updates::Stashed { sync: VersionSync::Newest },
            Self::PipeDream2Bw => Updates::TwoVersions { every: p },
            _ => Updates::Flush,
        }))
    }

    /// Whether the sizes are such that the method makes sense.
    fn admits(self, settings: &Settings, chunks: u32) -> Result<(), ParallelError> {
        let (p, m) = (settings.ranks, settings.microbatches);
        let refuse = |field, given, needs: String| {
            Err(ParallelError::NotAdmitted { method: self, field, given: u64::from(given), needs })
        };
        if p == 0 {
            return refuse("stages", p, "at least 1".to_owned());
        }
        if m == 0 {
            return refuse("microbatches", m, "at least 1".to_owned());
        }
        let stages = u64::from(p) * u64::from(chunks);
        match self {
            Self::Interleaved | Self::BreadthFirst if chunks == 0 => {
                return refuse("chunks", chunks, "at least 1".to_owned());
            }
            Self::Hanayo if chunks == 0 || chunks % 2 == 1 => {
                return refuse("chunks", chunks, "an even number: two for each wave".to_owned());
            }
            Self::Interleaved | Self::BreadthFirst | Self::Hanayo => {}
            // One of each copy: whoever counts both is right too.
            Self::Chimera | Self::DualPipe if chunks == 2 => {}
            _ if chunks != self.default_chunks() => {
                return refuse("chunks", chunks, format!("{}", self.default_chunks()));
            }
            _ => {}
        }
        match self {
            Self::Interleaved if !m.is_multiple_of(p) => {
                return refuse("microbatches", m, format!("a multiple of the {p} stages"));
            }
            Self::ZbH2 if u64::from(m) < 2 * u64::from(p) - 1 => {
                return refuse(
                    "microbatches",
                    m,
                    format!("at least {} for {p} stages", 2 * u64::from(p) - 1),
                );
            }
            Self::Chimera | Self::DualPipe if !p.is_multiple_of(2) => {
                return refuse("stages", p, "an even number".to_owned());
            }
            Self::Chimera | Self::DualPipe if !m.is_multiple_of(2) => {
                return refuse("microbatches", m, "an even number: half go each way".to_owned());
            }
            Self::DualPipe | Self::DualPipeV if u64::from(m) < 2 * u64::from(p) => {
                return refuse("microbatches", m, format!("at least {} for {p} stages", 2 * u64::from(p)));
            }
            Self::TeraPipe if settings.slices == 0 => {
                return refuse("slices", 0, "at least 1".to_owned());
            }
            Self::OneFOneBSlope if settings.slope == Some(0) => {
                return refuse("mu", 0, "at least 1".to_owned());
            }
            Self::Varuna if settings.memory == Some(0) => {
                return refuse("memory", 0, "room for the activations of one microbatch".to_owned());
            }
            Self::OneFOneBSlope if settings.slope.is_none() => {
                // The first rank holds as many as there are ranks at the least slope.
                let least = p.min(m);
                if let Some(memory) = settings.memory.filter(|&memory| memory < least) {
                    return refuse(
                        "memory",
                        memory,
                        format!("room for {least} microbatches on the first stage"),
                    );
                }
            }
            _ => {}
        }
        let reads_costs = matches!(self, Self::ZbAuto | Self::Varuna | Self::OneFOneBSlope);
        if reads_costs && settings.cost.len() != 1 && settings.cost.len() as u64 != stages {
            let given = settings.cost.len();
            return Err(ParallelError::PerStage { what: "cost", given, stages: stages as usize });
        }
        Ok(())
    }

    /// The most chunk activations that a rank of an order by this method holds at once, where the method promises one.
    #[must_use]
    pub fn peak_bound(self, settings: &Settings, rank: u32) -> Option<u64> {
        let chunks = u64::from(settings.chunks.unwrap_or(self.default_chunks()));
        let (p, m, s) = (u64::from(settings.ranks), u64::from(settings.microbatches), u64::from(rank));
        Some(match self {
            Self::GPipe => m,
            Self::BreadthFirst => m * chunks,
            Self::TeraPipe => m * u64::from(settings.slices),
            Self::OneFOneB | Self::PipeDream | Self::PipeDream2Bw => m.min(p - s),
            Self::OneFOneBSlope => {
                m.min(u64::from(one_f_one_b::slope_of(settings)).saturating_mul(p - 1 - s) + 1)
            }
            Self::Interleaved => (m * chunks).min((chunks - 1) * p + 2 * (p - 1 - s) + 1),
            Self::ZbH1 => m.min(p),
            Self::ZbH2 => m.min(2 * p - 1),
            // A forward's room is there when of two others half is given back.
            Self::ZbAuto => m.min(2 * settings.memory.map_or(p, u64::from) - 1),
            Self::ZbV => 2 * p,
            Self::VHalf => 2 * (p / 2) + 2,
            Self::VMin => 2 * ((p + 1) / 3) + 2,
            Self::VOneFOneB => 2 * (2 * p + 1).div_ceil(3),
            Self::Chimera => p,
            Self::Hanayo => p * chunks,
            Self::DualPipe => p + 1,
            Self::DualPipeV => 2 * p + 1,
            Self::Varuna => m.min(settings.memory.map_or(p, u64::from)),
            Self::Inference => 1,
        })
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
