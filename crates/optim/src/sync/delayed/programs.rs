//! Programs of [`Delayed`](super::Delayed), each one pass over memory.

use farflung_tensor::{Program, ProgramBuilder};

use crate::OptimError;

/// Programs, each one pass over memory.
#[derive(Debug)]
pub(super) struct Programs {
    /// `anchor - params`.
    pub(super) delta: Program,
    /// Multiplies by a factor.
    pub(super) scaled: Program,
    /// Outer step, with momentum if there is any.
    pub(super) step: Program,
    /// Weighted sum of the replica's own parameters and the anchor.
    pub(super) mix: Program,
    /// Adds to the replica's own parameters the delta that was sent and the move of the anchor.
    pub(super) rebase: Program,
}

impl Programs {
    /// Builds the programs, with or without momentum in the outer step.
    pub(super) fn new(momentum: bool) -> Result<Self, OptimError> {
        let mut p = ProgramBuilder::new();
        let (anchor, params) = (p.read(0), p.read(1));
        let distance = p.sub(anchor, params);
        p.store(0, distance);
        let delta = p.build()?;

        let mut p = ProgramBuilder::new();
        let (x, by) = (p.read(0), p.scalar(0));
        let scaled = p.mul(x, by);
        p.store(0, scaled);
        let scaled = p.build()?;

        // The same arithmetic as the chain of `diloco_outer`, to the bit.
        let mut p = ProgramBuilder::new();
        let (mean, anchor, rate) = (p.read(0), p.load(0), p.scalar(0));
        let mut update = mean;
        if momentum {
            let (v, mu) = (p.load(1), p.scalar(1));
            let kept = p.mul(mu, v);
            let v = p.add(kept, mean);
            p.store(1, v);
            let ahead = p.mul(mu, v);
            update = p.add(mean, ahead);
        }
        let update = p.mul(rate, update);
        let moved = p.sub(anchor, update);
        p.store(0, moved);
        let step = p.build()?;

        let mut p = ProgramBuilder::new();
        let (params, anchor) = (p.load(0), p.read(0));
        let (own, common) = (p.scalar(0), p.scalar(1));
        let (own, common) = (p.mul(own, params), p.mul(common, anchor));
        let mixed = p.add(own, common);
        p.store(0, mixed);
        let mix = p.build()?;

        let mut p = ProgramBuilder::new();
        let (params, before, after, distance) = (p.load(0), p.read(0), p.read(1), p.read(2));
        let (moved, learned) = (p.sub(after, before), p.add(params, distance));
        let rebased = p.add(learned, moved);
        p.store(0, rebased);
        Ok(Self { delta, scaled, step, mix, rebase: p.build()? })
    }
}
