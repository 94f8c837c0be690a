//! LAMB whose variance and layer coefficients are frozen after a warm-up, so that replicas can average first
//! moments through any codec.

use farflung_tensor::{
    DType, MemoryKind, Op, Param, Program, ProgramBuilder, Tensor, TensorError, Value, View,
};

use super::{Contribution, FrozenAdam, Transform, require, require_eps, require_share};
use crate::OptimError;
use crate::norm::norms;
use crate::per_tensor::{PerTensor, Tensors};

/// Settings of [`scale_by_onebit_lamb`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrozenLamb {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Number of warm-up steps. The second moment and the layers' coefficients change only in these.
    pub freeze: u64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
}

/// Bounds of a layer's coefficient in the warm-up.
const COEFFICIENT: [f64; 2] = [0.01, 10.0];
/// Decay of the running average of a layer's coefficients.
const COEFFICIENT_BETA: f64 = 0.9;
/// Bounds of the factor that multiplies the coefficient after the warm-up.
const FACTOR: [f64; 2] = [0.5, 4.0];
/// Largest relative change of that factor in one step.
const CHANGE: f64 = 0.1;

/// Rescales gradients as 1-bit LAMB does, without bias correction. In the first `freeze` steps replicas average
/// gradients, and each tensor's update `u = m / (sqrt(v) + eps) + decay p` is multiplied by `c = ||p|| /
/// ||u||`, clamped to between 0.01 and 10 (by 1 if a norm is 0).
///
/// After the warm-up, `v` and the running average of each tensor's `c` (decay 0.9) are frozen. Replicas average
/// `s (beta1 m + (1 - beta1) g)`, where `s` is a factor per tensor that brings the root mean square of its
/// momentum at step `freeze` to 1, so that all tensors can share a codec's scales. The update is multiplied by
/// `c f`. `f` is the largest `(sqrt(v) + eps) / (sqrt(w) + eps)` of the tensor, moved towards 1 by the share of
/// weight decay in the update, and clamped to between 0.5 and 4 and to within a tenth of its previous value.
/// `w` is a second moment that still changes; the gradient for it is recovered from two successive momenta.
///
/// The first three elements of a tensor's part of the state `layers` hold its `c`, `f` and `s`.
///
/// Errors when the chain is built: [`OptimError::Setting`] for a tensor of fewer than three elements.
///
/// Source: Li et al. 2021, "1-bit LAMB", Alg. 1; the constants are those of `DeepSpeed`'s `lamb.py`. Differs:
/// `s` is not multiplied by the mean of these root mean squares over all tensors, since one factor for all
/// values changes no result. Elements that get momentum from a codec alone are treated as in
/// [`scale_by_frozen_adam`](super::scale_by_frozen_adam).
#[must_use]
pub fn scale_by_onebit_lamb(settings: FrozenLamb) -> impl Transform {
    ScaleByOnebitLamb(settings)
}

/// Indices of the numbers `c`, `f` and `s` of [`scale_by_onebit_lamb`] among a tensor's elements of the state
/// `layers`.
const C: usize = 0;
const F: usize = 1;
const S: usize = 2;

#[derive(Debug)]
struct ScaleByOnebitLamb(FrozenLamb);

impl Transform for ScaleByOnebitLamb {
    fn name(&self) -> &'static str {
        "lamb"
    }
    fn validate(&self) -> Result<(), OptimError> {
        let FrozenLamb { beta1, beta2, eps, weight_decay, .. } = self.0;
        require_share("lamb", "beta1", beta1)?;
        require_share("lamb", "beta2", beta2)?;
        let decays = weight_decay >= 0.0 && weight_decay.is_finite();
        require(decays, "lamb", "weight_decay", weight_decay, "at least 0")?;
        require_eps("lamb", eps)
    }
    fn states(&self) -> &'static [&'static str] {
        &["m", "v", "w", "layers"]
    }
    fn per_tensor(&self) -> Option<&dyn PerTensor> {
        Some(self)
    }
    fn contribution(&self, step: u64) -> Option<Contribution> {
        let (keep, take) = (self.0.beta1 as f32, (1.0 - self.0.beta1) as f32);
        let scale = Some(super::TensorScale { state: 3, element: S as u16 });
        (step >= self.0.freeze).then_some(Contribution { state: 0, keep, take, scale })
    }
}

impl PerTensor for ScaleByOnebitLamb {
    fn check(&self, tensor: &Param) -> Result<(), OptimError> {
        let count = tensor.shape.len();
        require(count > S, "lamb", "elements", count as f64, "at least 3 in each tensor")
    }
    fn rewrite(&self, tensors: &mut Tensors<'_>) -> Result<(), OptimError> {
        let decay = tensors.decay.unwrap_or(self.0.weight_decay) as f32;
        let step = tensors.step;
        let warm = step < self.0.freeze;
        let programs = [self.warm()?, self.frozen()?, decayed()?];
        let mut factors = Vec::with_capacity(tensors.list.len());
        for i in 0..tensors.list.len() {
            let mut it = Layer::of(tensors, i)?;
            let factor = if warm {
                it.warm(&programs, decay, step + 1 == self.0.freeze)?
            } else {
                it.frozen(&programs, decay)?
            };
            it.write()?;
            factors.push(factor);
        }
        factors.into_iter().enumerate().try_for_each(|(i, factor)| tensors.scale(i, factor as f32))
    }
}

impl ScaleByOnebitLamb {
    /// Builds the program of the warm-up: computes `m / (sqrt(v) + eps)` from the gradient. It rewrites the
    /// update, `m`, `v` and `w`.
    fn warm(&self) -> Result<Program, TensorError> {
        let FrozenLamb { beta1, beta2, eps, .. } = self.0;
        let mut p = ProgramBuilder::new();
        let (x, m, v) = (p.load(0), p.load(1), p.load(2));
        let m = average(&mut p, beta1, m, x);
        let xx = p.mul(x, x);
        let v = average(&mut p, beta2, v, xx);
        let under = root(&mut p, v, eps);
        let direction = p.div(m, under);
        for (i, value) in (0..).zip([direction, m, v, v]) {
            p.store(i, value);
        }
        p.build()
    }

    /// Builds the program after the warm-up: computes `m / (sqrt(v) + eps)` from the mean of what replicas
    /// sent. It reads `v` and rewrites the update, `m`, `w`, and a buffer with the ratio of both roots. Its
    /// scalar is `1 / s`.
    fn frozen(&self) -> Result<Program, TensorError> {
        let FrozenLamb { beta1, beta2, eps, freeze, .. } = self.0;
        let longest = FrozenAdam { beta1, beta2, eps, freeze, corrects: false }.longest() as f32;
        let mut p = ProgramBuilder::new();
        let (v, x, before, w) = (p.read(0), p.load(0), p.load(1), p.load(2));
        let unscale = p.scalar(0);
        let m = p.mul(unscale, x);
        let (keep, inverse) = (p.constant(beta1 as f32), p.constant((1.0 / (1.0 - beta1)) as f32));
        let kept = p.mul(keep, before);
        let added = p.sub(m, kept);
        let g = p.mul(inverse, added);
        let gg = p.mul(g, g);
        let w = average(&mut p, beta2, w, gg);
        let (under, fresh) = (root(&mut p, v, eps), root(&mut p, w, eps));
        let direction = p.div(m, under);
        let (most, least) = (p.constant(longest), p.constant(-longest));
        let direction = p.min(direction, most);
        let direction = p.max(direction, least);
        let seen = p.sign(v);
        let direction = p.mul(direction, seen);
        let ratio = p.div(under, fresh);
        for (i, value) in (0..).zip([direction, m, w, ratio]) {
            p.store(i, value);
        }
        p.build()
    }
}

/// Emits `beta old + (1 - beta) new`.
fn average(p: &mut ProgramBuilder, beta: f64, old: Value, new: Value) -> Value {
    let (keep, take) = (p.constant(beta as f32), p.constant((1.0 - beta) as f32));
    let (old, new) = (p.mul(keep, old), p.mul(take, new));
    p.add(old, new)
}

/// Emits `sqrt(v) + eps`.
fn root(p: &mut ProgramBuilder, v: Value, eps: f64) -> Value {
    let eps = p.constant(eps as f32);
    let root = p.sqrt(v);
    p.add(root, eps)
}

/// Builds the program that adds the scalar times the parameter to the update.
fn decayed() -> Result<Program, TensorError> {
    let mut p = ProgramBuilder::new();
    let (param, x, decay) = (p.read(0), p.load(0), p.scalar(0));
    let decayed = p.mul(decay, param);
    let sum = p.add(x, decayed);
    p.store(0, sum);
    p.build()
}

/// One tensor during a step.
struct Layer<'a, 't> {
    tensors: &'a mut Tensors<'t>,
    param: Param,
    /// Coefficient `c`, its factor `f`, and the factor `s` of the momentum that replicas average.
    numbers: [f64; 3],
}

impl<'a, 't> Layer<'a, 't> {
    fn of(tensors: &'a mut Tensors<'t>, i: usize) -> Result<Self, OptimError> {
        let param = tensors.list[i].clone();
        let read = tensors.states[3].view().part(param.start, 3)?.to_vec::<f32>()?;
        let mut numbers = [f64::from(read[C]), f64::from(read[F]), f64::from(read[S])];
        for number in [F, S] {
            // A number that was never written is 0 and means 1.
            if numbers[number] <= 0.0 {
                numbers[number] = 1.0;
            }
        }
        Ok(Self { tensors, param, numbers })
    }

    fn write(self) -> Result<(), OptimError> {
        let numbers = self.numbers.map(|number| number as f32);
        Ok(self.tensors.states[3].view_mut().part(self.param.start, 3)?.write(&numbers)?)
    }

    fn norm(&self, flat: &Tensor) -> Result<f64, OptimError> {
        Ok(norms(flat, std::slice::from_ref(&self.param), 0)?[0])
    }

    /// Adds weight decay to the update.
    fn decay(&mut self, program: &Program, decay: f32) -> Result<(), OptimError> {
        let (start, len) = (self.param.start, self.param.shape.len());
        let reads = &[self.tensors.params.view().part(start, len)?];
        let writes = &mut [self.tensors.update.view_mut().part(start, len)?];
        Ok(self.tensors.params.device().run(Op::Map { program, scalars: &[decay], reads, writes })?)
    }

    /// Takes a warm-up step for the tensor and returns the factor of its update.
    fn warm(&mut self, [warm, _, decayed]: &[Program; 3], decay: f32, last: bool) -> Result<f64, OptimError> {
        let (start, len) = (self.param.start, self.param.shape.len());
        let [m, v, w, _] = &mut *self.tensors.states else { unreachable!("it has four states") };
        let writes = &mut [
            self.tensors.update.view_mut().part(start, len)?,
            m.view_mut().part(start, len)?,
            v.view_mut().part(start, len)?,
            w.view_mut().part(start, len)?,
        ];
        self.tensors.params.device().run(Op::Map { program: warm, scalars: &[], reads: &[], writes })?;
        self.decay(decayed, decay)?;
        let (weights, update) = (self.norm(self.tensors.params)?, self.norm(self.tensors.update)?);
        let mut c = 1.0;
        if weights > 0.0 && update > 0.0 {
            c = (weights / update).clamp(COEFFICIENT[0], COEFFICIENT[1]);
            self.numbers[C] = COEFFICIENT_BETA * self.numbers[C] + (1.0 - COEFFICIENT_BETA) * c;
        }
        let momentum = if last { self.norm(&self.tensors.states[0])? } else { 0.0 };
        if momentum > 0.0 {
            self.numbers[S] = (len as f64).sqrt() / momentum;
        }
        Ok(c)
    }

    /// Takes a step after the warm-up for the tensor and returns the factor of its update.
    fn frozen(&mut self, [_, frozen, decayed]: &[Program; 3], decay: f32) -> Result<f64, OptimError> {
        let (start, len) = (self.param.start, self.param.shape.len());
        let device = self.tensors.params.device().counting_for(MemoryKind::Optimizer);
        let mut ratio = device.empty(DType::F32, len)?;
        let [m, v, w, _] = &mut *self.tensors.states else { unreachable!("it has four states") };
        let writes = &mut [
            self.tensors.update.view_mut().part(start, len)?,
            m.view_mut().part(start, len)?,
            w.view_mut().part(start, len)?,
            ratio.view_mut(),
        ];
        let (reads, scalars) = (&[v.view().part(start, len)?], &[(1.0 / self.numbers[S]) as f32]);
        self.tensors.params.device().run(Op::Map { program: frozen, scalars, reads, writes })?;
        let mut factor = largest(ratio.view())?;
        if decay > 0.0 {
            let alone = self.norm(self.tensors.update)?;
            self.decay(decayed, decay)?;
            let whole = self.norm(self.tensors.update)?;
            let share = if whole > 0.0 { (alone / whole).min(1.0) } else { 1.0 };
            factor = factor * share + (1.0 - share);
        }
        let last = self.numbers[F];
        factor = factor.clamp(FACTOR[0], FACTOR[1]).clamp(last * (1.0 - CHANGE), last * (1.0 + CHANGE));
        self.numbers[F] = factor;
        Ok(self.numbers[C] * factor)
    }
}

/// Returns the largest element.
fn largest(x: View<'_>) -> Result<f64, OptimError> {
    let of = |values: &[f32]| values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    Ok(f64::from(match x.host::<f32>() {
        Some(values) => of(values),
        None => of(&x.to_vec::<f32>()?),
    }))
}
