//! The links of a chain: one file each. A link takes the update that came before it and gives its own; state is
//! explicit and named.
//!
//! Elementwise links write instructions, so that a chain of them is one pass over memory. A link that needs the
//! global norm says so, and gets it before any element is touched. A link that needs whole tensors
//! ([`PerTensor`]) ends the pass before it.

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
pub use zero_one_adam::{Rounds, ZeroOneAdam, scale_by_zero_one_adam};

/// What a link may use while it writes its instructions.
#[derive(Debug)]
pub struct Emit<'a> {
    /// The program under construction.
    pub program: &'a mut ProgramBuilder,
    /// The parameter, as it was before the step.
    pub param: Value,
    /// Settings of these parameters: a chain has a program for each group.
    pub group: ParamGroup,
    /// Index of this link's first scalar.
    pub scalars: u16,
    /// Index of this link's first state buffer among the program's rewritten buffers.
    pub states: u16,
}

impl Emit<'_> {
    /// `beta old + (1 - beta) new`, in two products and a sum.
    pub fn average(&mut self, beta: f64, old: Value, new: Value) -> Value {
        let p = &mut *self.program;
        let (keep, take) = (p.constant(beta as f32), p.constant((1.0 - beta) as f32));
        let (old, new) = (p.mul(keep, old), p.mul(take, new));
        p.add(old, new)
    }

    /// Adam's two moments of the gradient after this step, which are the link's first two states.
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

/// What the scalars of a step depend on.
#[derive(Debug, Clone, Copy)]
pub struct StepInfo {
    /// The step, counted from 0.
    pub step: u64,
    /// Global l2 norm of the incoming gradient.
    pub norm: f64,
    /// Factor of the learning rate of the parameters that the scalars are for.
    pub lr: f64,
}

/// What replicas average in a step in the place of the gradient: `keep * state + take * gradient`, times a
/// number of each tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contribution {
    /// Which of the link's states.
    pub state: u16,
    /// The state's part.
    pub keep: f32,
    /// The gradient's part.
    pub take: f32,
    /// Where each tensor's number is; `None` is 1.
    pub scale: Option<TensorScale>,
}

/// Where a link has a number for each tensor; 0 stands for 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorScale {
    /// In which of the link's states.
    pub state: u16,
    /// Which element of the tensor's part of that; no tensor is shorter.
    pub element: u16,
}

/// What a link gathers over local steps, for replicas to average where they meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gathered {
    /// Which of the link's states.
    pub state: u16,
    /// Number of scalars that [`Transform::gathered_scalars`] gives.
    pub scalars: u16,
}

/// What a link remembers in a buffer, for methods that average it over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// Slow weights.
    Weights,
    /// A running mean of gradients.
    FirstMoment,
    /// A running mean of their squares, or a sum of them.
    SecondMoment,
}

/// One link of a chain.
pub trait Transform: Debug + Send {
    /// Its name, the prefix of its state's names.
    fn name(&self) -> &'static str;

    /// Whether its settings are in their domain.
    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }

    /// Names of its state buffers, each of the parameters' length, starting at zero; three at most, unless it
    /// sees whole tensors: its instructions then do without its states.
    fn states(&self) -> &'static [&'static str] {
        &[]
    }

    /// What is in the state buffer of this number. Not asked of a link that decides itself what replicas
    /// average.
    fn state_kind(&self, _state: usize) -> StateKind {
        StateKind::FirstMoment
    }

    /// Whether it uses the global norm of the incoming gradient: such a link stands first.
    fn needs_norm(&self) -> bool {
        false
    }

    /// Number of scalars that [`Transform::scalars`] gives.
    fn scalar_count(&self) -> u16 {
        0
    }

    /// The scalars of a step, for parameters of one group.
    fn scalars(&self, _info: StepInfo, _out: &mut Vec<f32>) {}

    /// What replicas average in a step, counted from 0, if that is not the gradient: the chain takes the mean
    /// for its gradient. For one link of a chain at most.
    fn contribution(&self, _step: u64) -> Option<Contribution> {
        None
    }

    /// In which steps replicas average gradients, and which are local, if the link decides that.
    fn rounds(&self) -> Option<Rounds> {
        None
    }

    /// What it gathers over local steps, if anything. For one link of a chain at most, which has three states:
    /// all of them are rewritten where replicas meet.
    fn gathers(&self) -> Option<Gathered> {
        None
    }

    /// The scalars of a meeting after these steps, for parameters with a factor of the learning rate.
    fn gathered_scalars(&self, _lr: f64, _steps: std::ops::Range<u64>, _out: &mut Vec<f32>) {}

    /// Writes the instructions from the mean of what replicas gathered to the parameters' next values. The
    /// parameter of `e` is what it was when replicas last met; scalars begin with 0.
    fn emit_gathered(&self, e: &mut Emit<'_>, _mean: Value) -> Value {
        e.param
    }

    /// What it does with whole tensors before its instructions, if anything. The links before it run as a pass
    /// of their own, so that their update lies in memory.
    fn per_tensor(&self) -> Option<&dyn PerTensor> {
        None
    }

    /// Writes the instructions from the incoming update to its own.
    fn emit(&self, _e: &mut Emit<'_>, update: Value) -> Value {
        update
    }

    /// Whether it rewrites the parameter after the update is subtracted ([`Transform::finish`]): such links
    /// stand last.
    fn finishes(&self) -> bool {
        false
    }

    /// Writes the instructions from the moved parameter to what is stored.
    fn finish(&self, _e: &mut Emit<'_>, moved: Value) -> Value {
        moved
    }
}

/// [`OptimError::Setting`] unless `ok`.
fn require(
    ok: bool,
    transform: &'static str,
    field: &'static str,
    value: f64,
    expected: &'static str,
) -> Result<(), OptimError> {
    if ok { Ok(()) } else { Err(OptimError::Setting { transform, field, value, expected }) }
}

/// A share such as a momentum: at least 0 and below 1.
fn require_share(transform: &'static str, field: &'static str, value: f64) -> Result<(), OptimError> {
    require((0.0..1.0).contains(&value), transform, field, value, "at least 0 and below 1")
}

/// What keeps a zero gradient, and all padding, from becoming 0 / 0.
fn require_eps(transform: &'static str, eps: f64) -> Result<(), OptimError> {
    require(eps as f32 > 0.0, transform, "eps", eps, "above 0 in f32")
}
