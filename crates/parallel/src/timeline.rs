//! What a simulation found: who did what from when to when, and figures drawn from it.

use std::fmt;

use farflung_base::{Bytes, Nanos, Rank};

use crate::pipeline::{ComputeKind, Op};

/// What a span of time was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Forward of a microbatch.
    Forward,
    /// Backward of a microbatch, or of one bucket's part of it.
    Backward,
    /// Gradient of a stage's input.
    BackwardInput,
    /// Gradients of a stage's weights.
    BackwardWeight,
    /// Forward and backward of two microbatches at once.
    Overlapped,
    /// Forward again, for the backward.
    Recompute,
    /// Average of a bucket of gradients.
    AllReduce,
    /// Step of the (inner) optimizer.
    Optimizer,
    /// Average of the distances that replicas went since they last met.
    OuterSync,
    /// Step of the outer optimizer.
    OuterStep,
    /// A stage's output on its way to the next stage.
    SendActivation,
    /// A gradient on its way to the stage before.
    SendGradient,
}

impl Kind {
    /// All kinds, in the order of legends.
    pub const ALL: [Self; 12] = [
        Self::Forward,
        Self::Backward,
        Self::BackwardInput,
        Self::BackwardWeight,
        Self::Overlapped,
        Self::Recompute,
        Self::Optimizer,
        Self::AllReduce,
        Self::OuterSync,
        Self::OuterStep,
        Self::SendActivation,
        Self::SendGradient,
    ];

    /// The letter of the kind in a text grid.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
            Self::Overlapped => 'X',
            Self::Recompute => 'R',
            Self::AllReduce => '=',
            Self::Optimizer => 'O',
            Self::OuterSync => '#',
            Self::OuterStep => 'U',
            Self::SendActivation => '>',
            Self::SendGradient => '<',
        }
    }
}

impl From<ComputeKind> for Kind {
    fn from(kind: ComputeKind) -> Self {
        match kind {
            ComputeKind::Forward => Self::Forward,
            ComputeKind::BackwardInput => Self::BackwardInput,
            ComputeKind::BackwardWeight => Self::BackwardWeight,
            ComputeKind::Backward => Self::Backward,
            ComputeKind::Recompute => Self::Recompute,
            ComputeKind::Step => Self::Optimizer,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::BackwardInput => "input gradient",
            Self::BackwardWeight => "weight gradient",
            Self::Overlapped => "overlapped pair",
            Self::Recompute => "recompute",
            Self::AllReduce => "all-reduce",
            Self::Optimizer => "optimizer",
            Self::OuterSync => "outer sync",
            Self::OuterStep => "outer step",
            Self::SendActivation => "activation sent",
            Self::SendGradient => "gradient sent",
        })
    }
}

/// The things of a rank that are busy one span at a time, and independently of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Its processor.
    Compute,
    /// Its access link, which all its collectives share.
    Link,
    /// Its wire to the rank behind it.
    Next,
    /// Its wire to the rank before it.
    Previous,
}

impl Lane {
    /// All lanes, in the order in which they are drawn.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Link, Self::Next, Self::Previous];
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Compute => "compute",
            Self::Link => "link",
            Self::Next => "to next",
            Self::Previous => "to previous",
        })
    }
}

/// One rank busy with one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Who.
    pub rank: Rank,
    /// Which part of it.
    pub lane: Lane,
    /// With what.
    pub kind: Kind,
    /// In which step, from 0.
    pub step: u32,
    /// Which microbatch (forward, backward), or which bucket, or stage of a pipeline (all-reduce), from 0.
    pub part: u32,
    /// Which op of a pipeline's schedule, or whose output; `None` outside of pipelines.
    pub op: Option<Op>,
    /// From when.
    pub start: Nanos,
    /// Until when.
    pub end: Nanos,
    /// What the rank sends meanwhile.
    pub sent: Bytes,
}

impl Span {
    /// How long it lasts.
    #[must_use]
    pub const fn time(&self) -> Nanos {
        self.end.saturating_sub(self.start)
    }
}

/// The spans of a simulated run. Spans of one rank and lane do not overlap and stand in the order of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// Number of ranks, also of those that did nothing.
    pub ranks: u32,
    /// Steps that were simulated.
    pub steps: u32,
    /// All spans that last longer than nothing.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// When the last rank is done.
    #[must_use]
    pub fn makespan(&self) -> Nanos {
        self.spans.iter().map(|s| s.end).max().unwrap_or_default()
    }

    /// The lanes that anything happened on, the processors always among them.
    pub fn lanes(&self) -> impl Iterator<Item = Lane> {
        Lane::ALL
            .into_iter()
            .filter(|&lane| lane == Lane::Compute || self.spans.iter().any(|s| s.lane == lane))
    }

    /// The kinds that anything was spent on, in the order of legends.
    pub fn kinds(&self) -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(|&kind| self.spans.iter().any(|s| s.kind == kind))
    }

    /// The spans of one rank and lane.
    pub fn lane(&self, rank: Rank, lane: Lane) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(move |s| s.rank == rank && s.lane == lane)
    }

    /// How long a rank's lane was busy.
    #[must_use]
    pub fn busy(&self, rank: Rank, lane: Lane) -> Nanos {
        self.lane(rank, lane).map(Span::time).sum()
    }

    /// How long a rank computed and communicated at once.
    #[must_use]
    pub fn overlapped(&self, rank: Rank) -> Nanos {
        let compute: Vec<&Span> = self.lane(rank, Lane::Compute).collect();
        let mut total = Nanos::ZERO;
        let mut first = 0;
        for link in self.lane(rank, Lane::Link) {
            while compute.get(first).is_some_and(|c| c.end <= link.start) {
                first += 1;
            }
            for c in compute[first..].iter().take_while(|c| c.start < link.end) {
                total += c.end.min(link.end).saturating_sub(c.start.max(link.start));
            }
        }
        total
    }

    /// How long a rank's processor stood still while its link was busy: the communication that costs time.
    #[must_use]
    pub fn exposed(&self, rank: Rank) -> Nanos {
        self.busy(rank, Lane::Link).saturating_sub(self.overlapped(rank))
    }

    /// How long a rank neither computed nor communicated: it waited for slower ones.
    #[must_use]
    pub fn waited(&self, rank: Rank) -> Nanos {
        self.makespan().saturating_sub(self.busy(rank, Lane::Compute)).saturating_sub(self.exposed(rank))
    }

    /// What a rank sent.
    #[must_use]
    pub fn sent(&self, rank: Rank) -> Bytes {
        self.spans.iter().filter(|s| s.rank == rank).map(|s| s.sent).sum()
    }

    /// Part of the makespan in which a rank's link was busy, from 0 to 1.
    #[must_use]
    pub fn link_use(&self, rank: Rank) -> f64 {
        self.busy(rank, Lane::Link).0 as f64 / self.makespan().0.max(1) as f64
    }
}

impl fmt::Display for Timeline {
    /// A table: a line per rank.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.steps == 1 { "" } else { "s" };
        writeln!(f, "{} step{s}, {} ranks, makespan {}", self.steps, self.ranks, self.makespan())?;
        writeln!(
            f,
            "{:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>5}",
            "rank", "compute", "link", "overlap", "exposed", "waited", "sent", "use"
        )?;
        for rank in (0..self.ranks).map(Rank) {
            writeln!(
                f,
                "{:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>4.0}%",
                rank.0,
                self.busy(rank, Lane::Compute),
                self.busy(rank, Lane::Link),
                self.overlapped(rank),
                self.exposed(rank),
                self.waited(rank),
                self.sent(rank).to_string(),
                self.link_use(rank) * 100.0
            )?;
        }
        Ok(())
    }
}
