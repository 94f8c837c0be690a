//! Delayed Nesterov: outer steps for changes that arrive one by one.

use super::{Push, RuleState, ServerRule};

/// Moves the model at once by each change's share of a mean; momentum is added at every `buffer`-th change.
///
/// A change `D` is the model that a worker received minus the parameters that it has reached. With
/// `N = buffer`:
///
/// ```text
/// buf += D;   every N-th:  m = mu m + buf / N;  x -= lr (mu m + D / N);  buf = 0      else:  x -= lr D / N
/// ```
///
/// After a full buffer the model does not depend on the order of arrival, up to rounding, and `N` changes give
/// one synchronous Nesterov step of their mean. Without momentum it is asynchronous SGD.
///
/// Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", Alg. 3 with `c = 0`.
#[derive(Debug)]
pub struct DelayedNesterov {
    lr: f64,
    momentum: f64,
    buffer: u64,
    velocity: Vec<f32>,
    sum: Vec<f32>,
    /// Number of changes in `sum`.
    gathered: u64,
}

impl DelayedNesterov {
    /// Creates the rule for a model of `len` values.
    #[must_use]
    pub fn new(len: usize, lr: f64, momentum: f64, buffer: u64) -> Self {
        let held = if momentum == 0.0 { 0 } else { len };
        let buffer = buffer.max(1);
        Self { lr, momentum, buffer, velocity: vec![0.0; held], sum: vec![0.0; held], gathered: 0 }
    }

    /// Moves a model by a change of the same length.
    pub fn step(&mut self, model: &mut [f32], change: &[f32]) {
        let (lr, part) = (self.lr as f32, (1.0 / self.buffer as f64) as f32);
        self.gathered += 1;
        let full = self.gathered == self.buffer;
        if full {
            self.gathered = 0;
        }
        if self.velocity.is_empty() {
            model.iter_mut().zip(change).for_each(|(x, d)| *x -= lr * (part * d));
            return;
        }
        let mu = self.momentum as f32;
        let held = self.velocity.iter_mut().zip(&mut self.sum);
        for ((x, d), (m, sum)) in model.iter_mut().zip(change).zip(held) {
            *sum += d;
            let mut step = part * d;
            if full {
                *m = mu * *m + part * *sum;
                *sum = 0.0;
                step += mu * *m;
            }
            *x -= lr * step;
        }
    }
}

impl ServerRule for DelayedNesterov {
    fn push(&mut self, model: &mut [f32], push: &Push) -> Vec<u32> {
        let weight = push.weight as f32;
        let weighted: Vec<f32> = push.change.iter().map(|d| weight * d).collect();
        self.step(model, &weighted);
        vec![push.from]
    }
    fn flush(&mut self, _: &mut [f32]) -> Vec<u32> {
        Vec::new()
    }
    fn states(&self) -> Vec<RuleState<'_>> {
        let held = !self.velocity.is_empty();
        let all = [("momentum", &self.velocity[..]), ("buffer", &self.sum[..])];
        all.into_iter().filter(|_| held).map(|(name, values)| RuleState { name, values }).collect()
    }
    fn state_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        match name {
            "momentum" => Some(&mut self.velocity),
            "buffer" => Some(&mut self.sum),
            _ => None,
        }
    }
    fn resume(&mut self, pushes: u64) {
        self.gathered = pushes % self.buffer;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a model of one value after each of some changes: N = 4, momentum 0.9, rate 0.7.
    fn path(changes: &[f32]) -> Vec<f32> {
        let (mut rule, mut model) = (DelayedNesterov::new(1, 0.7, 0.9, 4), [0.0]);
        let step = |&change: &f32| {
            rule.step(&mut model, &[change]);
            model[0]
        };
        changes.iter().map(step).collect()
    }

    fn near(got: &[f32], wanted: &[f32]) -> bool {
        got.len() == wanted.len() && got.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-5)
    }

    /// Values of the formula of [`DelayedNesterov`], for equal and for unequal changes.
    #[test]
    fn published_vectors() {
        assert!(near(&path(&[1.0; 8]), &[-0.175, -0.35, -0.525, -1.33, -1.505, -1.68, -1.855, -3.227]));
        let rising = path(&[1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
        assert!(near(&rising, &[-0.175, -0.525, -1.05, -3.325, -3.5, -3.85, -4.375, -8.0675]));
        // The order of arrival does not matter after a full buffer.
        assert!(near(&path(&[4.0, 3.0, 2.0, 1.0])[3..], &[-3.325]));
    }

    #[test]
    fn a_full_buffer_is_a_synchronous_step_of_the_mean() {
        let (mut x, mut v) = (0.0_f32, 0.0);
        let got = path(&[1.0; 8]);
        for end in [3, 7] {
            v = 0.9 * v + 1.0;
            x -= 0.7 * (1.0 + 0.9 * v);
            assert!((got[end] - x).abs() < 1e-5);
        }
    }

    #[test]
    fn without_momentum_each_change_counts_for_its_part() {
        let (mut rule, mut model) = (DelayedNesterov::new(2, 1.0, 0.0, 4), [1.0, 2.0]);
        for _ in 0..4 {
            rule.step(&mut model, &[1.0, -2.0]);
        }
        assert!(near(&model, &[0.0, 4.0]));
        assert!(rule.states().is_empty());
    }
}
