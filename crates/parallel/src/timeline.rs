//! Timeline: the spans of a simulated run, and figures computed from them.

use std::collections::BTreeSet;
use std::fmt;

use farflung_base::{Bytes, Nanos, Rank};

use crate::pipeline::{ComputeKind, Op};

/// What a span of time was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Forward of a microbatch.
    Forward,
    /// Backward of a microbatch, or one bucket's part of it.
    Backward,
    /// Gradient of a stage's input.
    BackwardInput,
    /// Gradients of a stage's weights.
    BackwardWeight,
    /// Forward and backward of two microbatches at the same time.
    Overlapped,
    /// Recomputed forward, for the backward.
    Recompute,
    /// Average of a bucket of gradients, or of the gradients of a pipeline's stage.
    AllReduce,
    /// Step of the (inner) optimizer.
    Optimizer,
    /// Average of the changes of parameters since the replicas last synchronised.
    OuterSync,
    /// Step of the outer optimizer.
    OuterStep,
    /// Transfer of a stage's output to the next stage.
    SendActivation,
    /// Transfer of a gradient to the previous stage.
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

    /// Returns the letter of the kind in a text grid.
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

/// A resource of a rank. It works independently of the rank's other resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The processor.
    Compute,
    /// The access link, shared by all collectives of the rank.
    Link,
    /// The wire to the next rank.
    Next,
    /// The wire to the previous rank.
    Previous,
    /// The wire to another rank, as between stages that are pools.
    To(Rank),
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compute => f.pad("compute"),
            Self::Link => f.pad("link"),
            Self::Next => f.pad("to next"),
            Self::Previous => f.pad("to previous"),
            Self::To(rank) => f.pad(&format!("to {rank}")),
        }
    }
}

/// A span of time in which a resource of a rank is busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The rank.
    pub rank: Rank,
    /// The resource of the rank.
    pub lane: Lane,
    /// What the span is spent on.
    pub kind: Kind,
    /// Index of the step, from 0.
    pub step: u32,
    /// Index, from 0, of the microbatch (forward, backward), of the bucket, or of the pipeline's stage
    /// (all-reduce).
    pub part: u32,
    /// Op of the pipeline's schedule that runs, or whose output is sent. `None` outside of pipelines.
    pub op: Option<Op>,
    /// Start.
    pub start: Nanos,
    /// End.
    pub end: Nanos,
    /// Bytes that the rank sends during the span.
    pub sent: Bytes,
}

impl Span {
    /// Returns the duration.
    #[must_use]
    pub const fn time(&self) -> Nanos {
        self.end.saturating_sub(self.start)
    }
}

/// The spans of a simulated run. Spans of the same rank and lane are in the order of time and do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// Number of ranks, including idle ones.
    pub ranks: u32,
    /// Number of steps simulated.
    pub steps: u32,
    /// All spans with a positive duration or with bytes.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// Returns the time at which the last rank is done.
    #[must_use]
    pub fn makespan(&self) -> Nanos {
        self.spans.iter().map(|s| s.end).max().unwrap_or_default()
    }

    /// Returns the lanes of each rank in the order in which they are drawn. All ranks have the processor and
    /// the lanes that any of them uses, but [`Lane::To`] only if they use it themselves.
    #[must_use]
    pub fn lanes(&self) -> Vec<Vec<Lane>> {
        let (mut common, mut own) =
            (BTreeSet::from([Lane::Compute]), vec![BTreeSet::new(); self.ranks as usize]);
        for span in &self.spans {
            let lanes =
                if matches!(span.lane, Lane::To(_)) { &mut own[span.rank.index()] } else { &mut common };
            lanes.insert(span.lane);
        }
        own.into_iter().map(|own| common.iter().copied().chain(own).collect()).collect()
    }

    /// Returns the kinds that occur, in the order of legends.
    pub fn kinds(&self) -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(|&kind| self.spans.iter().any(|s| s.kind == kind))
    }

    /// Returns the spans of one rank and lane.
    pub fn lane(&self, rank: Rank, lane: Lane) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(move |s| s.rank == rank && s.lane == lane)
    }

    /// Returns the time for which a rank's lane was busy.
    #[must_use]
    pub fn busy(&self, rank: Rank, lane: Lane) -> Nanos {
        self.lane(rank, lane).map(Span::time).sum()
    }

    /// Returns the time for which a rank computed while its access link ([`Lane::Link`]) was busy.
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

    /// Returns the time for which a rank's link was busy while its processor was idle: the communication that
    /// costs time.
    #[must_use]
    pub fn exposed(&self, rank: Rank) -> Nanos {
        self.busy(rank, Lane::Link).saturating_sub(self.overlapped(rank))
    }

    /// Returns the time for which a rank neither computed nor used its access link ([`Lane::Link`]), because it
    /// waited for other ranks.
    #[must_use]
    pub fn waited(&self, rank: Rank) -> Nanos {
        self.makespan().saturating_sub(self.busy(rank, Lane::Compute)).saturating_sub(self.exposed(rank))
    }

    /// Returns the bytes that a rank sent.
    #[must_use]
    pub fn sent(&self, rank: Rank) -> Bytes {
        self.spans.iter().filter(|s| s.rank == rank).map(|s| s.sent).sum()
    }

    /// Returns the fraction of the makespan in which a rank's link was busy, from 0 to 1.
    #[must_use]
    pub fn link_use(&self, rank: Rank) -> f64 {
        self.busy(rank, Lane::Link).0 as f64 / self.makespan().0.max(1) as f64
    }
}

impl fmt::Display for Timeline {
    /// Prints a table with one line per rank.
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
