//! Costs of a pipeline: time and memory of stages, bytes and links of the boundaries between them.

use farflung_base::{Bytes, Link, Nanos, StageId};

use super::{Action, ComputeKind, ComputeOrder, Op};
use crate::ParallelError;
use crate::share::largest_remainder;

/// Time and memory of one stage for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageCost {
    /// Time of `F`.
    pub forward: Nanos,
    /// Time of `I`.
    pub input: Nanos,
    /// Time of `W`. A whole backward `B` takes the time of `I` and `W`.
    pub weight: Nanos,
    /// Time of `R`.
    pub recompute: Nanos,
    /// Time of `STEP`.
    pub step: Nanos,
    /// Memory that the stage holds.
    pub memory: StageMemory,
}

/// Memory that one stage holds for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageMemory {
    /// Everything that a backward needs, held from `F` (or `R`) on.
    pub activations: Bytes,
    /// The part of `activations` that `W` still needs after `I`.
    pub for_weight: Bytes,
    /// Memory held from `F` to `R` if the stage recomputes: its input, and with selective recomputation also
    /// the kept activations of layers that are not recomputed.
    pub input: Bytes,
}

impl StageCost {
    /// A millisecond for each of `F`, `I`, `W` and `R`, and one byte of activations.
    pub const UNIT: Self = Self {
        forward: Nanos(1_000_000),
        input: Nanos(1_000_000),
        weight: Nanos(1_000_000),
        recompute: Nanos(1_000_000),
        step: Nanos::ZERO,
        memory: StageMemory { activations: Bytes(1), for_weight: Bytes(1), input: Bytes(0) },
    };

    /// Returns the time of `B`.
    #[must_use]
    pub fn backward(&self) -> Nanos {
        self.input.saturating_add(self.weight)
    }

    /// Returns the time of a kind.
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

/// Link between a stage and the next, and the bytes that cross it for one microbatch.
///
/// Messages from one rank to another are sent one at a time, whichever boundary they cross. The two directions
/// are independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// The link between the two stages; the same in each direction.
    pub link: Link,
    /// Bytes of the activations sent to the next stage.
    pub forward: Bytes,
    /// Bytes of the gradients sent back.
    pub backward: Bytes,
}

impl Boundary {
    /// Creates a boundary where messages have no size and arrive `hop` later.
    #[must_use]
    pub const fn latency(hop: Nanos) -> Self {
        Self { link: Link { latency: hop, ..Link::FREE }, forward: Bytes(0), backward: Bytes(0) }
    }

    /// Returns the bytes that an action of this kind sends over the boundary.
    #[must_use]
    pub const fn bytes(&self, kind: ComputeKind) -> Bytes {
        if matches!(kind, ComputeKind::Forward) { self.forward } else { self.backward }
    }
}

/// Relative size of one slice of a microbatch's tokens. A token's attention covers all earlier slices, so the
/// last of equally long slices takes the most time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceShare {
    /// Share of the tokens. Divides the memory of stages and the bytes on boundaries.
    pub tokens: u64,
    /// Share of the stages' times.
    pub time: u64,
}

impl SliceShare {
    const EQUAL: Self = Self { tokens: 1, time: 1 };
}

/// Costs of a whole pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineCost {
    /// Cost of each stage of one copy of the model; or of all copies, if ranks with the same part differ in
    /// speed.
    pub stages: Vec<StageCost>,
    /// Boundary after each stage of one copy but the last.
    pub boundaries: Vec<Boundary>,
    /// Share of each slice of a microbatch's tokens. Empty: all equal.
    pub slices: Vec<SliceShare>,
    /// Percentage of the shorter half of an overlapped pair that takes no time.
    pub overlap_percent: u8,
}

impl PipelineCost {
    /// Creates the cost of equal stages and boundaries for `order`.
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

    /// Checks that the lists have the lengths that `order` needs.
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

    /// Returns the costs of each stage for each slice of `order`, as a table.
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

    /// Returns the cost of each stage for each slice of `order`: stage by stage, slice by slice.
    ///
    /// Errors: as [`PipelineCost::check`].
    pub fn by_slice(&self, order: &ComputeOrder) -> Result<Vec<StageCost>, ParallelError> {
        self.check(order)?;
        Ok(self.table(order).stages)
    }

    /// Returns the cost of a stage, of any copy of the model, for a whole microbatch.
    pub(super) fn stage(&self, stage: StageId) -> &StageCost {
        &self.stages[stage.index() % self.stages.len()]
    }

    /// Returns the cost of a part in the copy of the model with the fastest forward. Used for lower bounds.
    pub(super) fn least(&self, part: u32) -> StageCost {
        let depth = self.boundaries.len() + 1;
        let copies = self.stages.iter().skip(part as usize).step_by(depth);
        copies.copied().reduce(|a, b| if b.forward < a.forward { b } else { a }).unwrap_or_default()
    }

    /// Returns the boundary over which an action of `stage` sends: to the next stage for a forward, to the
    /// previous one for a backward.
    pub(super) fn boundary(&self, stage: StageId, kind: ComputeKind) -> &Boundary {
        let part = stage.index() % (self.boundaries.len() + 1);
        &self.boundaries[if kind == ComputeKind::Forward { part } else { part - 1 }]
    }
}

/// Costs by stage and slice, for fast lookup.
#[derive(Debug)]
pub(super) struct CostTable {
    stages: Vec<StageCost>,
    slices: usize,
    /// Relative lengths of the slices.
    tokens: Vec<u64>,
    overlap_percent: u8,
}

impl CostTable {
    /// Returns the bytes of one slice of a microbatch's message, rounded up.
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

    /// Returns the duration of an op.
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
