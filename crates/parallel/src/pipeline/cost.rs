//! What a pipeline's parts take: stages in time and memory, the boundaries between them in bytes and links.

use farflung_base::{Bytes, Link, Nanos, StageId};

use super::{Action, ComputeKind, ComputeOrder, Op};
use crate::ParallelError;
use crate::share::largest_remainder;

/// What one stage takes for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageCost {
    /// `F`.
    pub forward: Nanos,
    /// `I`.
    pub input: Nanos,
    /// `W`; a whole backward `B` is `I` and `W`.
    pub weight: Nanos,
    /// `R`.
    pub recompute: Nanos,
    /// `STEP`.
    pub step: Nanos,
    /// What it holds.
    pub memory: StageMemory,
}

/// What one stage holds of one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageMemory {
    /// All that a backward needs, from `F` (or `R`) on.
    pub activations: Bytes,
    /// The part of it that `W` still needs when `I` is done.
    pub for_weight: Bytes,
    /// What is held from `F` to `R` where the stage recomputes: its input alone, or with selective
    /// recomputation also what it keeps of the layers that do not run again.
    pub input: Bytes,
}

impl StageCost {
    /// A millisecond for each of `F`, `I` and `W`, one byte of activations.
    pub const UNIT: Self = Self {
        forward: Nanos(1_000_000),
        input: Nanos(1_000_000),
        weight: Nanos(1_000_000),
        recompute: Nanos(1_000_000),
        step: Nanos::ZERO,
        memory: StageMemory { activations: Bytes(1), for_weight: Bytes(1), input: Bytes(0) },
    };

    /// `B`.
    #[must_use]
    pub fn backward(&self) -> Nanos {
        self.input.saturating_add(self.weight)
    }

    /// The time of a kind.
    #[must_use]
    pub fn time(&self, kind: ComputeKind) -> Nanos {
        match kind {
            ComputeKind::Forward => self.forward,
            ComputeKind::BackwardInput => self.input,
            ComputeKind::BackwardWeight => self.weight,
            ComputeKind::Backward => self.backward(),
            ComputeKind::Recompute => self.recompute,
            ComputeKind::Step => self.step,
        }
    }
}

/// What joins a stage and the next, and what travels there for one microbatch.
///
/// Messages from one rank to another take their turns on the wire, whichever boundary they cross; the two
/// directions do not disturb each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// The link, each way.
    pub link: Link,
    /// Activations, to the next stage.
    pub forward: Bytes,
    /// Their gradients, back.
    pub backward: Bytes,
}

impl Boundary {
    /// Nothing is sent, and it arrives `hop` later.
    #[must_use]
    pub const fn latency(hop: Nanos) -> Self {
        Self { link: Link { latency: hop, ..Link::FREE }, forward: Bytes(0), backward: Bytes(0) }
    }

    /// What an action sends over it.
    #[must_use]
    pub const fn bytes(&self, kind: ComputeKind) -> Bytes {
        if matches!(kind, ComputeKind::Forward) { self.forward } else { self.backward }
    }
}

/// What a slice of a microbatch's tokens is, beside the other slices: its attention looks at those before it,
/// so the last of equally long slices takes longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceShare {
    /// Of the tokens: what stages hold and boundaries carry is cut so.
    pub tokens: u64,
    /// Of the stages' times.
    pub time: u64,
}

impl SliceShare {
    const EQUAL: Self = Self { tokens: 1, time: 1 };
}

/// What a pipeline takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineCost {
    /// By stage of one copy of the model; or of all copies, where ranks that hold the same part are unequally
    /// fast.
    pub stages: Vec<StageCost>,
    /// By the stage before the boundary: one fewer than stages.
    pub boundaries: Vec<Boundary>,
    /// By slice of a microbatch's tokens; empty: all equal.
    pub slices: Vec<SliceShare>,
    /// How much of the shorter half of an overlapped pair is free, in percent.
    pub overlap_percent: u8,
}

impl PipelineCost {
    /// Equal stages and boundaries for `order`.
    #[must_use]
    pub fn uniform(order: &ComputeOrder, stage: StageCost, boundary: Boundary) -> Self {
        let depth = order.placement().depth() as usize;
        Self {
            stages: vec![stage; depth],
            boundaries: vec![boundary; depth.saturating_sub(1)],
            slices: Vec::new(),
            overlap_percent: 0,
        }
    }

    /// Whether the lists are as long as `order` needs.
    ///
    /// Errors: [`ParallelError::PerStage`].
    pub fn check(&self, order: &ComputeOrder) -> Result<(), ParallelError> {
        let depth = order.placement().depth() as usize;
        let slices = usize::from(order.slices());
        let all = order.placement().stages() as usize;
        let stages = if self.stages.len() == all { all } else { depth };
        let lists = [
            ("cost.stages", self.stages.len(), stages),
            ("cost.boundaries", self.boundaries.len(), depth - 1),
            ("cost.slices", if self.slices.is_empty() { slices } else { self.slices.len() }, slices),
        ];
        match lists.into_iter().find(|&(_, given, needed)| given != needed) {
            Some((what, given, stages)) => Err(ParallelError::PerStage { what, given, stages }),
            None => Ok(()),
        }
    }

    /// The costs with each stage's time cut into the slices of `order`.
    pub(super) fn table(&self, order: &ComputeOrder) -> CostTable {
        let slices = usize::from(order.slices());
        let shares =
            if self.slices.is_empty() { vec![SliceShare::EQUAL; slices] } else { self.slices.clone() };
        let tokens: Vec<u64> = shares.iter().map(|share| share.tokens).collect();
        let times: Vec<u64> = shares.iter().map(|share| share.time).collect();
        let mut stages = vec![StageCost::default(); order.placement().stages() as usize * slices];
        for (i, parts) in stages.chunks_mut(slices).enumerate() {
            let whole = self.stages[i % self.stages.len()];
            if let [only] = parts {
                *only = whole;
                continue;
            }
            let mut cut = |weights: &[u64], part: fn(&mut StageCost) -> &mut u64| {
                let mut whole = whole;
                let cut = largest_remainder(*part(&mut whole), weights);
                parts.iter_mut().zip(cut).for_each(|(to, value)| *part(to) = value);
            };
            cut(&times, |c| &mut c.forward.0);
            cut(&times, |c| &mut c.input.0);
            cut(&times, |c| &mut c.weight.0);
            cut(&times, |c| &mut c.recompute.0);
            cut(&tokens, |c| &mut c.memory.activations.0);
            cut(&tokens, |c| &mut c.memory.for_weight.0);
            cut(&tokens, |c| &mut c.memory.input.0);
            parts[slices - 1].step = whole.step;
        }
        CostTable { stages, slices, tokens, overlap_percent: self.overlap_percent }
    }

    /// What each stage takes for each slice of `order`: stage by stage, slice by slice.
    ///
    /// Errors: as [`PipelineCost::check`].
    pub fn by_slice(&self, order: &ComputeOrder) -> Result<Vec<StageCost>, ParallelError> {
        self.check(order)?;
        Ok(self.table(order).stages)
    }

    /// What a stage of any copy of the model takes for a whole microbatch.
    pub(super) fn stage(&self, stage: StageId) -> &StageCost {
        &self.stages[stage.index() % self.stages.len()]
    }

    /// The least that a part takes in any copy of the model, for times that no order can do without.
    pub(super) fn least(&self, part: u32) -> StageCost {
        let depth = self.boundaries.len() + 1;
        let copies = self.stages.iter().skip(part as usize).step_by(depth);
        copies.copied().reduce(|a, b| if b.forward < a.forward { b } else { a }).unwrap_or_default()
    }

    /// The boundary that `action` of `stage` sends over: ahead for a forward, back for a backward.
    pub(super) fn boundary(&self, stage: StageId, kind: ComputeKind) -> &Boundary {
        let part = stage.index() % (self.boundaries.len() + 1);
        &self.boundaries[if kind == ComputeKind::Forward { part } else { part - 1 }]
    }
}

/// Costs by stage and slice, ready to be looked up.
#[derive(Debug)]
pub(super) struct CostTable {
    stages: Vec<StageCost>,
    slices: usize,
    /// Relative lengths of the slices.
    tokens: Vec<u64>,
    overlap_percent: u8,
}

impl CostTable {
    /// What the slice of `action` is of a microbatch's message, rounded up.
    pub(super) fn message(&self, action: Action, whole: Bytes) -> Bytes {
        if self.slices == 1 {
            return whole;
        }
        let all: u128 = self.tokens.iter().copied().map(u128::from).sum();
        let part = u128::from(whole.0) * u128::from(self.tokens[usize::from(action.slice)]);
        Bytes(part.div_ceil(all.max(1)) as u64)
    }

    pub(super) fn of(&self, action: Action) -> &StageCost {
        &self.stages[action.stage.index() * self.slices + usize::from(action.slice)]
    }

    /// How long an op takes.
    pub(super) fn time(&self, op: Op) -> Nanos {
        match op {
            Op::Run(action) => self.of(action).time(action.kind),
            Op::Overlap { forward, backward } => {
                let f = self.of(forward).time(forward.kind);
                let b = self.of(backward).time(backward.kind);
                let free = u128::from(f.min(b).0) * u128::from(self.overlap_percent.min(100)) / 100;
                f.saturating_add(b).saturating_sub(Nanos(free as u64))
            }
        }
    }
}
