//! The links of a chain. A link takes the update that came before it and gives its own; state is explicit and named.
//!
//! Elementwise links write instructions, so that a chain of them is one pass over memory. A link that needs a norm says
//! so, and gets it before any element is touched.

use std::fmt::Debug;

use farflung_tensor::{ProgramBuilder, Value};

use crate::{LrSchedule, OptimError};

/// What a link may use while it writes its instructions.
#[derive(Debug)]
pub struct Emit<'a> {
    /// The program under construction.
    pub program: &'a mut ProgramBuilder,
    /// The parameter, as it was before the step.
    pub param: Value,
    /// Whether weight decay applies here: a chain has one program for matrices and one for vectors.
    pub decays: bool,
    /// Index of this link's first scalar.
    pub scalars: u16,
    /// Index of this link's first state buffer among the program's rewritten buffers.
    pub states: u16,
}

/// What the scalars of a step depend on.
#[derive(Debug, Clone, Copy)]
pub struct StepInfo {
    /// The step, counted from 0.
    pub step: u64,
    /// Global l2 norm of the incoming gradient.
    pub norm: f64,
}

/// What replicas average in a step in the place of the gradient: `keep * state + take * gradient`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contribution {
    /// Which of the link's states.
    pub state: u16,
    /// The state's part.
    pub keep: f32,
    /// The gradient's part.
    pub take: f32,
}

/// One link of a chain.
pub trait Transform: Debug + Send {
    /// Its name, the prefix of its state's names.
    fn name(&self) -> &'static str;

    /// Whether its settings are in their domain.
    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }

    /// Names of its state buffers, each of the parameters' length, starting at zero.
    fn states(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether it uses the global norm of the incoming gradient: such a link stands first.
    fn needs_norm(&self) -> bool {
        false
    }

    /// Number of scalars that [`Transform::scalars`] gives.
    fn scalar_count(&self) -> u16 {
        0
    }

    /// The scalars of a step.
    fn scalars(&self, _info: StepInfo, _out: &mut Vec<f32>) {}

    /// What replicas average in a step, counted from 0, if that is not the gradient: the chain takes the mean
    /// for its gradient. For one link of a chain at most.
    fn contribution(&self, _step: u64) -> Option<Contribution> {
        None
    }

    /// Writes the instructions from the incoming update to its own.
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value;
}

pub(crate) fn require(
    ok: bool,
    transform: &'static str,
    field: &'static str,
    value: f64,
    expected: &'static str,
) -> Result<(), OptimError> {
    if ok { Ok(()) } else { Err(OptimError::Setting { transform, field, value, expected }) }
}

/// Scales the gradient down to a global l2 norm of `max`: `g * min(1, max / (norm + 1e-6))`, as PyTorch's
/// `clip_grad_norm_`. It stands first in its chain.
#[must_use]
pub fn clip_by_global_norm(max: f64) -> impl Transform {
    ClipByGlobalNorm { max }
}

#[derive(Debug)]
struct ClipByGlobalNorm {
    max: f64,
}

impl Transform for ClipByGlobalNorm {
    fn name(&self) -> &'static str {
        "clip"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require(self.max > 0.0, "clip", "max", self.max, "above 0")
    }
    fn needs_norm(&self) -> bool {
        true
    }
    fn scalar_count(&self) -> u16 {
        1
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        out.push((self.max / (info.norm + 1e-6)).min(1.0) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        let factor = e.program.scalar(e.scalars);
        e.program.mul(update, factor)
    }
}

/// Adam's direction with bias correction: `m^ / (sqrt(v^) + eps)`.
///
/// Source: Kingma and Ba 2015, Alg. 1. `eps` stands where PyTorch has it, outside the corrected root.
#[must_use]
pub fn scale_by_adam(beta1: f64, beta2: f64, eps: f64) -> impl Transform {
    ScaleByAdam { beta1, beta2, eps }
}

#[derive(Debug)]
struct ScaleByAdam {
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl Transform for ScaleByAdam {
    fn name(&self) -> &'static str {
        "adam"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require((0.0..1.0).contains(&self.beta1), "adam", "beta1", self.beta1, "at least 0 and below 1")?;
        require((0.0..1.0).contains(&self.beta2), "adam", "beta2", self.beta2, "at least 0 and below 1")?;
        // Without it a zero gradient, and all padding, would become 0 / 0.
        require(self.eps as f32 > 0.0, "adam", "eps", self.eps, "above 0 in f32")
    }
    fn states(&self) -> &'static [&'static str] {
        &["m", "v"]
    }
    fn scalar_count(&self) -> u16 {
        2
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let t = (info.step + 1) as f64;
        out.push((1.0 / (1.0 - self.beta1.powf(t))) as f32);
        out.push((1.0 / (1.0 - self.beta2.powf(t)).sqrt()) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let p = &mut *e.program;
        let (m, v) = (p.load(e.states), p.load(e.states + 1));
        let blend = |p: &mut ProgramBuilder, old: Value, new: Value, beta: f64| {
            let (keep, take) = (p.constant(beta as f32), p.constant((1.0 - beta) as f32));
            let (old, new) = (p.mul(keep, old), p.mul(take, new));
            p.add(old, new)
        };
        let m = blend(p, m, g, self.beta1);
        let gg = p.mul(g, g);
        let v = blend(p, v, gg, self.beta2);
        p.store(e.states, m);
        p.store(e.states + 1, v);
        let (fix_m, fix_v, eps) = (p.scalar(e.scalars), p.scalar(e.scalars + 1), p.constant(self.eps as f32));
        let root = p.sqrt(v);
        let root = p.mul(root, fix_v);
        let under = p.add(root, eps);
        let m = p.mul(m, fix_m);
        p.div(m, under)
    }
}

/// Momentum: `b = mu b + g`, and `b`, or `g + mu b` with Nesterov's look-ahead: PyTorch's SGD without dampening.
#[must_use]
pub fn trace(momentum: f64, nesterov: bool) -> impl Transform {
    Trace { momentum, nesterov }
}

#[derive(Debug)]
struct Trace {
    momentum: f64,
    nesterov: bool,
}

impl Transform for Trace {
    fn name(&self) -> &'static str {
        "trace"
    }
    fn validate(&self) -> Result<(), OptimError> {
        let ok = (0.0..1.0).contains(&self.momentum);
        require(ok, "trace", "momentum", self.momentum, "at least 0 and below 1")
    }
    fn states(&self) -> &'static [&'static str] {
        &["momentum"]
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let p = &mut *e.program;
        let (b, mu) = (p.load(e.states), p.constant(self.momentum as f32));
        let kept = p.mul(mu, b);
        let b = p.add(kept, g);
        p.store(e.states, b);
        if !self.nesterov {
            return b;
        }
        let ahead = p.mul(mu, b);
        p.add(g, ahead)
    }
}

/// Adds `decay * parameter` to matrices, not to vectors: decoupled weight decay when it stands after
/// [`scale_by_adam`] (Loshchilov and Hutter 2019), l2 regularisation when it stands before.
#[must_use]
pub fn add_decayed_weights(decay: f64) -> impl Transform {
    AddDecayedWeights { decay }
}

#[derive(Debug)]
struct AddDecayedWeights {
    decay: f64,
}

impl Transform for AddDecayedWeights {
    fn name(&self) -> &'static str {
        "decay"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require(self.decay >= 0.0 && self.decay.is_finite(), "decay", "decay", self.decay, "at least 0")
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        if !e.decays {
            return update;
        }
        let p = &mut *e.program;
        let decay = p.constant(self.decay as f32);
        let decayed = p.mul(decay, e.param);
        p.add(update, decayed)
    }
}

/// Multiplies by the learning rate. The chain subtracts what its last link gives.
#[must_use]
pub fn scale_by_schedule(schedule: LrSchedule) -> impl Transform {
    ScaleBySchedule { schedule }
}

#[derive(Debug)]
struct ScaleBySchedule {
    schedule: LrSchedule,
}

impl Transform for ScaleBySchedule {
    fn name(&self) -> &'static str {
        "schedule"
    }
    fn scalar_count(&self) -> u16 {
        1
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        out.push(self.schedule.rate(info.step) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        let rate = e.program.scalar(e.scalars);
        e.program.mul(rate, update)
    }
}
