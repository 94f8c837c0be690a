//! 0/1 Adam: the variance changes more and more rarely, and is then frozen while replicas take local steps.

use farflung_tensor::{ProgramBuilder, Value};

use super::{Accumulated, Emit, StepInfo, Transform, require, require_eps, require_share};
use crate::{LrSchedule, OptimError};

/// Steps in which the variance changes, and after which replicas synchronise: a pure function of the step, the
/// same on all ranks.
///
/// Steps are counted from 0. Below `freeze`, the variance changes in the steps `k_j`, where `k_0 = 0` and
/// `k_(j+1) = k_j + 2^floor(j / variance_doubling)`. From `freeze` on, steps are local. Replicas synchronise
/// after each local step whose number, counted from 1, is a multiple of the interval. The interval is 1 at
/// first, doubles after each `local_doubling` local steps, and is at most `most`.
///
/// Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", section
/// 6 (the sets `T_v` and `T_u`). Differs: intervals double after a number of steps, as in `DeepSpeed`'s
/// `zoadam.py`, rather than with the learning rate.
///
/// ```
/// use farflung_optim::transform::SyncSchedule;
///
/// let rounds = SyncSchedule { freeze: 12, variance_doubling: 2, local_doubling: 4, most: 4 };
/// let varies: Vec<u64> = (0..20).filter(|&step| rounds.varies(step)).collect();
/// let meets: Vec<u64> = (12..30).filter(|&step| rounds.synchronises(step)).collect();
/// assert_eq!(varies, [0, 1, 2, 4, 6, 10]);
/// assert_eq!(meets, [12, 13, 14, 15, 17, 19, 23, 27]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyncSchedule {
    /// Number of steps after which the variance is frozen and steps are local.
    pub freeze: u64,
    /// Number of changes of the variance after which the number of steps between two changes doubles.
    pub variance_doubling: u64,
    /// Number of local steps after which the number of steps between two synchronisations doubles.
    pub local_doubling: u64,
    /// Largest number of steps between two synchronisations.
    pub most: u64,
}

impl SyncSchedule {
    /// Returns whether the variance changes in a step. Gradients are not compressed in such a step.
    #[must_use]
    pub fn varies(&self, step: u64) -> bool {
        let doubling = self.variance_doubling.max(1);
        // Changes come in blocks of `doubling`. In block `b` they are 2^b steps apart, and (2^b - 1) `doubling`
        // steps lie before it.
        let block = (step / doubling + 1).ilog2();
        let within = step - doubling * ((1 << block) - 1);
        step < self.freeze && within.is_multiple_of(1 << block)
    }

    /// Returns whether each step so far changed the variance, including this one. The variance is the same as
    /// Adam's then.
    #[must_use]
    pub fn is_adam(&self, step: u64) -> bool {
        step < self.freeze && step <= self.variance_doubling.max(1)
    }

    /// Returns whether a step is local.
    #[must_use]
    pub const fn is_local(&self, step: u64) -> bool {
        step >= self.freeze
    }

    /// Returns whether replicas synchronise after a step. Before the first local step this is always so, since
    /// replicas do not differ.
    #[must_use]
    pub fn synchronises(&self, step: u64) -> bool {
        let Some(local) = step.checked_sub(self.freeze) else { return true };
        let doubling = self.local_doubling.max(1);
        let interval = (1_u64 << (local / doubling).min(63)).min(self.most.max(1));
        local.saturating_add(1).is_multiple_of(interval)
    }
}

/// Settings of [`scale_by_zero_one_adam`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ZeroOneAdam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Steps in which the variance changes, and after which replicas synchronise.
    pub rounds: SyncSchedule,
    /// Learning rate, which is part of what replicas average.
    pub schedule: LrSchedule,
    /// Decoupled weight decay of matrices. This link applies it when replicas average what their local steps
    /// accumulated; in each step [`add_decayed_weights`](super::add_decayed_weights) applies it.
    pub weight_decay: f64,
}

/// Rescales gradients as 0/1 Adam does: `m / (sqrt(v) + eps)`, without bias correction. `v` changes only in the
/// steps of [`SyncSchedule::varies`]. From `freeze` on, each replica accumulates `u = sum of lr m` over its
/// local steps. When replicas synchronise, they average `u` and set `m = u / sum of lr` and `p = a - u /
/// (sqrt(v) + eps)`, where `a` is `p` at the previous synchronisation.
///
/// Source: Lu et al. 2022, "0/1 Adam", Alg. 1, in the order of `DeepSpeed`'s `zoadam.py`: before `freeze`,
/// gradients are averaged before the step. Differs:
///
/// - Weight decay for all local steps is computed from `a`. It is not part of `u`, because it would accumulate
///   in `m`.
/// - As in [`scale_by_frozen_adam`](super::scale_by_frozen_adam), because codecs can give momentum to elements
///   that never had a gradient: an element without any gradient before `freeze` does not move, and none moves
///   farther than Adam can move it.
#[must_use]
pub fn scale_by_zero_one_adam(settings: ZeroOneAdam) -> impl Transform {
    ScaleByZeroOneAdam(settings)
}

#[derive(Debug)]
struct ScaleByZeroOneAdam(ZeroOneAdam);

impl ScaleByZeroOneAdam {
    fn longest(&self) -> f64 {
        let ZeroOneAdam { beta1, beta2, eps, rounds, .. } = self.0;
        super::FrozenAdam { beta1, beta2, eps, freeze: rounds.freeze, corrects: false }.longest()
    }

    /// Emits `x / (sqrt(v) + eps)`, at most `bounds[0]` and at least `bounds[1]`, and 0 where `v` is 0.
    fn direction(&self, p: &mut ProgramBuilder, x: Value, v: Value, bounds: [Value; 2]) -> Value {
        let eps = p.constant(self.0.eps as f32);
        let root = p.sqrt(v);
        let under = p.add(root, eps);
        let direction = p.div(x, under);
        let direction = p.min(direction, bounds[0]);
        let direction = p.max(direction, bounds[1]);
        let seen = p.sign(v);
        p.mul(direction, seen)
    }
}

impl Transform for ScaleByZeroOneAdam {
    fn name(&self) -> &'static str {
        "adam"
    }
    fn validate(&self) -> Result<(), OptimError> {
        let ZeroOneAdam { beta1, beta2, eps, weight_decay, .. } = self.0;
        require_share("adam", "beta1", beta1)?;
        require_share("adam", "beta2", beta2)?;
        let decays = weight_decay >= 0.0 && weight_decay.is_finite();
        require(decays, "adam", "weight_decay", weight_decay, "at least 0")?;
        require_eps("adam", eps)
    }
    fn states(&self) -> &'static [&'static str] {
        &["m", "v", "u"]
    }
    fn scalar_count(&self) -> u16 {
        5
    }
    fn rate(&self, step: u64) -> Option<f64> {
        Some(self.0.schedule.rate(step))
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let ZeroOneAdam { beta2, rounds, schedule, .. } = self.0;
        let keep = if rounds.varies(info.step) { beta2 } else { 1.0 };
        let rate = if rounds.is_local(info.step) { info.lr * schedule.rate(info.step) } else { 0.0 };
        let longest = if rounds.is_adam(info.step) { f64::INFINITY } else { self.longest() };
        out.extend([keep, 1.0 - keep, rate, longest, -longest].map(|x| x as f32));
    }
    fn emit(&self, e: &mut Emit<'_>, x: Value) -> Value {
        let (m, v, u) =
            (e.program.load(e.states), e.program.load(e.states + 1), e.program.load(e.states + 2));
        let m = e.average(self.0.beta1, m, x);
        let p = &mut *e.program;
        let [keep, take, rate, most, least] = [0, 1, 2, 3, 4].map(|i| p.scalar(e.scalars + i));
        let xx = p.mul(x, x);
        let (old, new) = (p.mul(keep, v), p.mul(take, xx));
        let v = p.add(old, new);
        let gathered = p.mul(rate, m);
        let u = p.add(u, gathered);
        p.store(e.states, m);
        p.store(e.states + 1, v);
        p.store(e.states + 2, u);
        self.direction(p, m, v, [most, least])
    }
    fn rounds(&self) -> Option<SyncSchedule> {
        Some(self.0.rounds)
    }
    fn accumulates(&self) -> Option<Accumulated> {
        Some(Accumulated { state: 2 })
    }
    fn accumulated_scalars(&self, lr: f64, steps: std::ops::Range<u64>, out: &mut Vec<f32>) {
        let rates: f64 = steps.map(|step| lr * self.0.schedule.rate(step)).sum();
        let longest = rates * self.longest();
        // If all rates are 0, the momentum cannot be computed from what was accumulated; it becomes 0.
        let inverse = if rates > 0.0 { 1.0 / rates } else { 0.0 };
        out.extend([inverse, rates, longest, -longest].map(|x| x as f32));
    }
    fn emit_accumulated(&self, e: &mut Emit<'_>, mean: Value) -> Value {
        let decay = e.group.decay.unwrap_or(self.0.weight_decay);
        let anchor = e.param;
        let p = &mut *e.program;
        let v = p.load(e.states + 1);
        let [inverse, rates, most, least] = [0, 1, 2, 3].map(|i| p.scalar(i));
        let m = p.mul(inverse, mean);
        let none = p.constant(0.0);
        p.store(e.states, m);
        p.store(e.states + 1, v);
        p.store(e.states + 2, none);
        let step = self.direction(p, mean, v, [most, least]);
        let moved = p.sub(anchor, step);
        if decay == 0.0 {
            return moved;
        }
        let decay = p.constant(decay as f32);
        let decayed = p.mul(decay, anchor);
        let decayed = p.mul(rates, decayed);
        p.sub(moved, decayed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_the_papers() {
        for doubling in [1, 2, 3, 16] {
            let rounds =
                SyncSchedule { freeze: 500, variance_doubling: doubling, local_doubling: 10, most: 6 };
            let (mut next, mut changes) = (0, 0);
            for step in 0..500 {
                let varies = step == next;
                assert_eq!(rounds.varies(step), varies, "{doubling} {step}");
                if varies {
                    next += 1 << (changes / doubling);
                    changes += 1;
                }
                assert_eq!(rounds.is_adam(step), (0..=step).all(|s| rounds.varies(s)), "{doubling} {step}");
                assert!(rounds.synchronises(step) && !rounds.is_local(step));
            }
            let meets: Vec<u64> =
                (500..540).filter(|&step| rounds.synchronises(step)).map(|s| s - 499).collect();
            let wanted: Vec<u64> = (1..=10).chain([12, 14, 16, 18, 20, 24, 28, 36]).collect();
            assert_eq!(meets, wanted);
            assert!(!rounds.varies(500) && rounds.is_local(500));
        }
        // Extreme settings must not overflow.
        let rounds = SyncSchedule { freeze: u64::MAX, variance_doubling: 0, local_doubling: 0, most: 0 };
        assert!(rounds.varies(0) && rounds.synchronises(u64::MAX - 1));
        let never = SyncSchedule { variance_doubling: u64::MAX, ..rounds };
        assert!(never.varies(u64::MAX - 1) && never.is_adam(1 << 40));
        assert!(SyncSchedule { freeze: 0, ..rounds }.synchronises(u64::MAX));
    }
}
