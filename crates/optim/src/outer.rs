//! DiLoCo's outer optimizer, which can be any chain. Its gradient is the change of the parameters, as old minus
//! new, since the workers last agreed on them.

use farflung_tensor::{MemoryKind, Op, Program, ProgramBuilder, Tensor};

use crate::finite::is_finite;
use crate::local::with_momentum;
use crate::transform::scale_by_schedule;
use crate::{Chain, ChainBuilder, LrSchedule, OptimError, Prepared};

/// Builds the chain of a DiLoCo [`OuterOptimizer`](crate::OuterOptimizer): Nesterov momentum without weight
/// decay and clipping. The paper uses a rate of 0.7 and a momentum of 0.9.
///
/// Source: Douillard et al. 2023, "DiLoCo", section 3.1.
#[must_use]
pub fn diloco_outer(lr: f64, momentum: f64) -> ChainBuilder {
    with_momentum(Chain::new(), momentum, true).then(scale_by_schedule(LrSchedule::constant(lr)))
}

/// Outer optimizer of DiLoCo. The anchor holds the parameters that all workers last agreed on. Every H steps,
/// `delta = mean over workers of (anchor - params)` is computed; the chain takes `delta` as its gradient and
/// moves the anchor; then the parameters are set to the anchor.
///
/// Source: Douillard et al. 2023, "DiLoCo", Alg. 1. Nesterov momentum is that of PyTorch's SGD, so the first
/// step moves by `lr (1 + mu) delta`.
#[derive(Debug)]
pub struct OuterOptimizer {
    chain: Chain,
    anchor: Tensor,
    delta: Tensor,
    difference: Program,
    /// Anchor and chain states from before a step that was tried but not yet committed.
    before: Option<(Tensor, Vec<Tensor>)>,
}

/// Copies a tensor to a new buffer on the same device.
fn copy(x: &Tensor) -> Result<Tensor, OptimError> {
    let mut y = x.device().empty(x.dtype(), x.shape())?;
    x.device().run(Op::Cast { x: x.view(), y: y.view_mut() })?;
    Ok(y)
}

impl OuterOptimizer {
    /// Creates an outer optimizer whose anchor is a copy of the parameters.
    pub fn new(chain: Chain, params: &Tensor) -> Result<Self, OptimError> {
        let device = params.device().counting_for(MemoryKind::Optimizer);
        let len = params.shape().len();
        let mut anchor = device.zeros(len)?;
        device.run(Op::Cast { x: params.view(), y: anchor.view_mut() })?;
        let mut p = ProgramBuilder::new();
        let (anchor_value, param_value) = (p.read(0), p.read(1));
        let difference = p.sub(anchor_value, param_value);
        p.store(0, difference);
        Ok(Self { chain, anchor, delta: device.zeros(len)?, difference: p.build()?, before: None })
    }

    /// Computes `anchor - params` of this worker and returns the buffer. The caller averages it in place over
    /// all workers.
    pub fn delta(&mut self, params: &Tensor) -> Result<&mut Tensor, OptimError> {
        params.device().run(Op::Map {
            program: &self.difference,
            scalars: &[],
            reads: &[self.anchor.view(), params.view()],
            writes: &mut [self.delta.view_mut()],
        })?;
        Ok(&mut self.delta)
    }

    /// Returns the buffer of [`OuterOptimizer::delta`], which the caller has averaged.
    pub const fn averaged_mut(&mut self) -> &mut Tensor {
        &mut self.delta
    }

    /// Returns the buffer of [`OuterOptimizer::delta`]. It keeps the average of the last step until the next
    /// call of [`OuterOptimizer::delta`].
    #[must_use]
    pub const fn averaged(&self) -> &Tensor {
        &self.delta
    }

    /// Prepares a step with the averaged delta; changes nothing. See [`Chain::prepare`].
    pub fn prepare(&self) -> Result<Prepared, OptimError> {
        self.chain.prepare(&self.delta)
    }

    /// Moves the anchor by the averaged delta. Must be followed by [`commit`](OuterOptimizer::commit) or
    /// [`undo`](OuterOptimizer::undo).
    ///
    /// Errors: [`OptimError::StepNotFinite`] if the anchor or a state of the chain would not be finite; nothing
    /// has changed then.
    pub fn try_step(&mut self, prepared: Prepared) -> Result<(), OptimError> {
        let states = self.chain.states().map(|(_, state)| copy(state)).collect::<Result<_, _>>()?;
        self.before = Some((copy(&self.anchor)?, states));
        self.chain.commit(&mut self.anchor, &self.delta, prepared)?;
        let mut broken = None;
        for (name, tensor) in [("parameters", &self.anchor)].into_iter().chain(self.chain.states()) {
            if broken.is_none() && !is_finite(tensor.view())? {
                broken = Some(name.to_owned());
            }
        }
        match broken {
            None => Ok(()),
            Some(name) => {
                self.undo();
                Err(OptimError::StepNotFinite { name })
            }
        }
    }

    /// Undoes a step that was tried but not committed. Does nothing if there is none.
    pub fn undo(&mut self) {
        if let Some((anchor, states)) = self.before.take() {
            self.anchor = anchor;
            self.chain.take_back(states);
        }
    }

    /// Sets the parameters to the anchor. If the step was not [tried](OuterOptimizer::try_step) before, takes
    /// it first.
    ///
    /// Errors: those of [`OuterOptimizer::try_step`].
    pub fn commit(&mut self, params: &mut Tensor, prepared: Prepared) -> Result<(), OptimError> {
        if self.before.is_none() {
            self.try_step(prepared)?;
        }
        params.device().clone().run(Op::Cast { x: self.anchor.view(), y: params.view_mut() })?;
        self.before = None;
        Ok(())
    }

    /// Returns the number of outer steps committed so far.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.chain.step()
    }

    /// Returns the anchor: the parameters that all workers last agreed on.
    #[must_use]
    pub const fn anchor(&self) -> &Tensor {
        &self.anchor
    }

    /// Sets the anchor to the given parameters.
    pub fn anchor_at(&mut self, params: &Tensor) -> Result<(), OptimError> {
        Ok(params.device().run(Op::Cast { x: params.view(), y: self.anchor.view_mut() })?)
    }

    /// Returns the named state buffers: those of the chain, and `anchor`.
    pub fn states(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.chain.states().chain([("anchor", &self.anchor)])
    }

    /// Restores the step counter and the buffers of [`OuterOptimizer::states`]; `get` returns each buffer by
    /// its name.
    ///
    /// Errors: [`OptimError::State`] if a buffer is missing or has another length; nothing has changed then.
    pub fn restore<'a>(
        &mut self,
        step: u64,
        get: impl Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        let expected = self.anchor.shape().len();
        let anchor = get("anchor").unwrap_or_default();
        if anchor.len() != expected {
            return Err(OptimError::State { name: "anchor".to_owned(), found: anchor.len(), expected });
        }
        self.chain.restore(step, &get)?;
        Ok(self.anchor.write(anchor)?)
    }
}
