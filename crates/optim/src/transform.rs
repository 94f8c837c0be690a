//! Links of a chain; a file contains one link, or variants of one. A link takes the update of the link before
//! it and returns its own. Its state is explicit and named.
//!
//! Elementwise links emit instructions, so that several of them run as one pass over memory. A link that needs
//! the global norm declares it ([`Transform::needs_norm`]) and gets it before any element changes. A link that
//! needs whole tensors ([`PerTensor`]) ends the pass before it.

mod adabelief;
mod adabound;
mod adagrad;
mod adam;
mod clip;
mod decay;
mod frozen_adam;
mod lion;
mod lookahead;
mod onebit_lamb;
mod orthogonalize;
mod radam;
mod rms;
mod schedule;
mod sign;
mod trace;
mod trust_ratio;
mod zero_one_adam;

use std::fmt::Debug;

use farflung_tensor::{ProgramBuilder, Value};

use crate::OptimError;
use crate::group::ParamGroup;
use crate::per_tensor::PerTensor;

pub use adabelief::scale_by_adabelief;
pub use adabound::{Bound, scale_by_adabound};
pub use adagrad::scale_by_adagrad;
pub use adam::{scale_by_adam, scale_by_amsgrad};
pub use clip::{clip_by_global_norm, clip_by_global_norm_until};
pub use decay::add_decayed_weights;
pub use frozen_adam::{FrozenAdam, scale_by_frozen_adam};
pub use lion::scale_by_lion;
pub use lookahead::lookahead;
pub use onebit_lamb::{FrozenLamb, scale_by_onebit_lamb};
pub use orthogonalize::{MuonScale, Outputs, orthogonalize};
pub use radam::scale_by_radam;
pub use rms::{scale_by_centered_rms, scale_by_rms};
pub use schedule::scale_by_schedule;
pub use sign::sign;
pub use trace::{trace, trace_with};
pub use trust_ratio::scale_by_trust_ratio;
pub use zero_one_adam::{SyncSchedule, ZeroOneAdam, scale_by_zero_one_adam};

/// Context in which a link emits its instructions.
#[derive(Debug)]
pub struct Emit<'a> {
    /// The program under construction.
    pub program: &'a mut ProgramBuilder,
    /// The parameter, as it was before the step.
    pub param: Value,
    /// Settings of the parameters' group; a chain has a program for each group.
    pub group: ParamGroup,
    /// Index of this link's first scalar.
    pub scalars: u16,
    /// Index of this link's first state buffer among the program's rewritten buffers.
    pub states: u16,
}

impl Emit<'_> {
    /// Emits `beta old + (1 - beta) new`, as two products and a sum.
    pub fn average(&mut self, beta: f64, old: Value, new: Value) -> Value {
        let p = &mut *self.program;
        let (keep, take) = (p.constant(beta as f32), p.constant((1.0 - beta) as f32));
        let (old, new) = (p.mul(keep, old), p.mul(take, new));
        p.add(old, new)
    }

    /// Emits the update of Adam's two moments by the gradient `g` and returns them. They are the link's first
    /// two states.
    fn moments(&mut self, beta1: f64, beta2: f64, g: Value) -> (Value, Value) {
        let (m, v) = (self.program.load(self.states), self.program.load(self.states + 1));
        let m = self.average(beta1, m, g);
        let gg = self.program.mul(g, g);
        let v = self.average(beta2, v, gg);
        self.program.store(self.states, m);
        self.program.store(self.states + 1, v);
        (m, v)
    }
}

/// Values that the scalars of a step depend on.
#[derive(Debug, Clone, Copy)]
pub struct StepInfo {
    /// The step, counted from 0.
    pub step: u64,
    /// Global l2 norm of the incoming gradient.
    pub norm: f64,
    /// Learning-rate factor of the parameters that the scalars are for.
    pub lr: f64,
}

/// Value that replicas average in a step instead of the gradient: `keep * state + take * gradient`, times a
/// factor per tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contribution {
    /// Index among the link's states.
    pub state: u16,
    /// Factor of the state.
    pub keep: f32,
    /// Factor of the gradient.
    pub take: f32,
    /// Place of each tensor's factor; `None` means 1 for all tensors.
    pub scale: Option<TensorScale>,
}

/// Place where a link stores a factor for each tensor. A stored 0 means 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorScale {
    /// Index among the link's states.
    pub state: u16,
    /// Index of the factor within the tensor's part of that state. Every tensor has more elements than this
    /// index.
    pub element: u16,
}

/// Value that a link accumulates over local steps, for replicas to average when they synchronise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accumulated {
    /// Index among the link's states.
    pub state: u16,
}

/// Kind of value in a state buffer, for methods that average state over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// Slow weights of Lookahead.
    Weights,
    /// Running mean of gradients, or their decaying sum (momentum).
    FirstMoment,
    /// Running mean or sum of squared gradients, the largest such mean so far, or the gradients' variance.
    SecondMoment,
}

/// One link of a chain: computes an update from the update of the link before it.
pub trait Transform: Debug + Send {
    /// Returns the link's name, which is also the prefix of its states' names.
    fn name(&self) -> &'static str;

    /// Checks that the settings are in their domain.
    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }

    /// Returns the names of the state buffers. Each buffer has the parameters' length and starts at zero. A
    /// link has at most three, unless it works on whole tensors. The instructions of a link on whole tensors
    /// cannot use its states.
    fn states(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the kind of a state buffer. Not used for a link that itself decides what replicas average.
    fn state_kind(&self, _state: usize) -> StateKind {
        StateKind::FirstMoment
    }

    /// Returns whether the link uses the global norm of the incoming gradient. Such a link must be first in the
    /// chain.
    fn needs_norm(&self) -> bool {
        false
    }

    /// Returns the number of scalars that [`Transform::scalars`] appends.
    fn scalar_count(&self) -> u16 {
        0
    }

    /// Appends the scalars of a step for the parameters of one group.
    fn scalars(&self, _info: StepInfo, _out: &mut Vec<f32>) {}

    /// Returns the learning rate of a step, counted from 0, if the link has a schedule of it.
    fn rate(&self, _step: u64) -> Option<f64> {
        None
    }

    /// Returns what replicas average in a step, counted from 0, if that is not the gradient. The chain then
    /// takes the mean as its gradient. At most one link of a chain may return `Some`.
    fn contribution(&self, _step: u64) -> Option<Contribution> {
        None
    }

    /// Returns in which steps replicas average gradients and which steps are local, if the link decides this.
    fn rounds(&self) -> Option<SyncSchedule> {
        None
    }

    /// Returns what the link accumulates over local steps, if anything. At most one link of a chain may return
    /// `Some`. It has at most three states, and [`Transform::emit_accumulated`] must store all of them.
    fn accumulates(&self) -> Option<Accumulated> {
        None
    }

    /// Appends the scalars of a synchronisation after these local steps, for parameters with the given
    /// learning-rate factor.
    fn accumulated_scalars(&self, _lr: f64, _steps: std::ops::Range<u64>, _out: &mut Vec<f32>) {}

    /// Emits the instructions that compute the parameters' next values from the mean of what replicas
    /// accumulated. `e.param` holds the parameters at the previous synchronisation, and the scalars of
    /// [`Transform::accumulated_scalars`] begin at index 0 (`e.scalars`).
    fn emit_accumulated(&self, e: &mut Emit<'_>, _mean: Value) -> Value {
        e.param
    }

    /// Returns the part of the link that works on whole tensors, if it has one. It runs before the link's
    /// instructions. The links before it run as a pass of their own, so that their update is in memory.
    fn per_tensor(&self) -> Option<&dyn PerTensor> {
        None
    }

    /// Emits the instructions that compute the link's update from the incoming one.
    fn emit(&self, _e: &mut Emit<'_>, update: Value) -> Value {
        update
    }

    /// Returns whether the link rewrites the parameter after the update is subtracted ([`Transform::finish`]).
    /// Such links must be last in the chain.
    fn finishes(&self) -> bool {
        false
    }

    /// Emits the instructions that compute the stored parameter from the moved one.
    fn finish(&self, _e: &mut Emit<'_>, moved: Value) -> Value {
        moved
    }
}

/// Returns [`OptimError::Setting`] unless `ok`.
fn require(
    ok: bool,
    transform: &'static str,
    field: &'static str,
    value: f64,
    expected: &'static str,
) -> Result<(), OptimError> {
    if ok { Ok(()) } else { Err(OptimError::Setting { transform, field, value, expected }) }
}

/// Checks that a fraction, such as a momentum, is at least 0 and below 1.
fn require_share(transform: &'static str, field: &'static str, value: f64) -> Result<(), OptimError> {
    require((0.0..1.0).contains(&value), transform, field, value, "at least 0 and below 1")
}

/// Checks that `eps` is above 0 in f32. Without it, a zero gradient, and all padding, would become 0 / 0.
fn require_eps(transform: &'static str, eps: f64) -> Result<(), OptimError> {
    require(eps as f32 > 0.0, transform, "eps", eps, "above 0 in f32")
}
