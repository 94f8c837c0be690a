//! Mean of the changes that arrived in time: the syncer of Decoupled `DiLoCo`.

use farflung_base::Nanos;

use super::{Push, RuleState, ServerRule};

/// Rule for when a mean is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quorum {
    /// Number of workers whose changes are enough for a mean.
    pub least: usize,
    /// Time in which later changes may still join it.
    pub grace: Nanos,
}

/// Collects changes until a quorum has arrived, and then until the grace time ends or all workers have sent a
/// change. The model then takes an outer Nesterov step of their weighted mean, and their senders are answered.
/// A late worker delays no other: its change joins the next mean.
///
/// Source: Douillard et al. 2026, "Decoupled `DiLoCo`". Its text gives no formula for the grace window. Here it
/// is a constant, and its end takes effect at the first message after it.
#[derive(Debug)]
pub struct QuorumMean {
    lr: f64,
    momentum: f64,
    quorum: Quorum,
    workers: usize,
    velocity: Vec<f32>,
    waiting: Vec<Push>,
    /// End of the grace time of the changes that wait.
    due: Option<Nanos>,
}

impl QuorumMean {
    /// Creates the rule for a model of `len` values and this number of workers.
    #[must_use]
    pub fn new(len: usize, (lr, momentum): (f64, f64), quorum: Quorum, workers: usize) -> Self {
        let quorum = Quorum { least: quorum.least.clamp(1, workers.max(1)), ..quorum };
        let velocity = vec![0.0; len];
        Self { lr, momentum, quorum, workers, velocity, waiting: Vec::new(), due: None }
    }

    /// Takes the step of the changes that wait, in the order of their ranks. Returns the workers to answer.
    fn merge(&mut self, model: &mut [f32]) -> Vec<u32> {
        let mut changes = std::mem::take(&mut self.waiting);
        self.due = None;
        changes.sort_by_key(|push| push.from);
        let all: f64 = changes.iter().map(|push| push.weight).sum();
        let parts: Vec<f32> = changes.iter().map(|push| (push.weight / all) as f32).collect();
        let (lr, mu) = (self.lr as f32, self.momentum as f32);
        for (i, (x, v)) in model.iter_mut().zip(&mut self.velocity).enumerate().filter(|_| all > 0.0) {
            let mean: f32 = changes.iter().zip(&parts).map(|(push, part)| part * push.change[i]).sum();
            *v = mu * *v + mean;
            *x -= lr * (mean + mu * *v);
        }
        changes.iter().map(|push| push.from).collect()
    }
}

impl ServerRule for QuorumMean {
    fn advance_to(&mut self, model: &mut [f32], at: Nanos) -> Vec<u32> {
        if self.due.is_some_and(|due| at > due) { self.merge(model) } else { Vec::new() }
    }
    fn push(&mut self, model: &mut [f32], push: &Push) -> Vec<u32> {
        let (from, at) = (push.from, push.at);
        match self.waiting.iter_mut().find(|waiting| waiting.from == from) {
            // A worker that was not answered yet has trained on; its two changes are added up.
            Some(waiting) => {
                waiting.change.iter_mut().zip(&push.change).for_each(|(a, b)| *a += b);
                waiting.weight += push.weight;
            }
            None => self.waiting.push(push.clone()),
        }
        if self.waiting.len() >= self.quorum.least && self.due.is_none() {
            self.due = Some(at.saturating_add(self.quorum.grace));
        }
        let over = self.due.is_some() && self.quorum.grace == Nanos::ZERO;
        if over || self.waiting.len() == self.workers { self.merge(model) } else { Vec::new() }
    }
    fn flush(&mut self, model: &mut [f32]) -> Vec<u32> {
        if self.waiting.is_empty() { Vec::new() } else { self.merge(model) }
    }
    fn states(&self) -> Vec<RuleState<'_>> {
        vec![RuleState { name: "momentum", values: &self.velocity }]
    }
    fn state_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        (name == "momentum").then_some(&mut self.velocity[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(from: u32, at: u64, weight: f64, change: f32) -> Push {
        Push { from, at: Nanos(at), step: 1, weight, change: vec![change] }
    }

    #[test]
    fn weights_are_tokens_times_tokens_a_step() {
        // (tokens, steps) of three workers: (1000, 10), (500, 10), (1000, 20).
        let weights = [(1000.0, 10.0), (500.0, 10.0), (1000.0, 20.0)].map(|(t, s): (f64, f64)| t * (t / s));
        let all: f64 = weights.iter().sum();
        for (weight, wanted) in weights.iter().zip([0.5714, 0.1429, 0.2857]) {
            assert!((weight / all - wanted).abs() < 1e-4);
        }
        let quorum = Quorum { least: 3, grace: Nanos(100) };
        let (mut rule, mut model) = (QuorumMean::new(1, (1.0, 0.0), quorum, 3), [0.0]);
        for (from, weight) in (0..).zip(weights) {
            let answered = rule.push(&mut model, &push(from, 5, weight, 1.0 + from as f32));
            assert_eq!(answered, if from == 2 { vec![0, 1, 2] } else { vec![] });
        }
        assert!((model[0] + (0.5714 + 2.0 * 0.1429 + 3.0 * 0.2857)).abs() < 1e-3, "{model:?}");
    }

    #[test]
    fn a_quorum_waits_for_its_grace_and_no_longer() {
        let quorum = Quorum { least: 2, grace: Nanos(100) };
        let (mut rule, mut model) = (QuorumMean::new(1, (1.0, 0.0), quorum, 4), [0.0]);
        assert!(rule.push(&mut model, &push(0, 10, 1.0, 1.0)).is_empty());
        assert!(rule.push(&mut model, &push(1, 20, 1.0, 3.0)).is_empty());
        // This change arrives within the grace time.
        assert!(rule.push(&mut model, &push(2, 110, 1.0, 5.0)).is_empty());
        assert!(model[0].abs() < 1e-6);
        assert!(rule.advance_to(&mut model, Nanos(120)).is_empty());
        // The grace time has ended: a change that arrives now joins the next mean.
        assert_eq!(rule.advance_to(&mut model, Nanos(121)), [0, 1, 2]);
        assert!(rule.push(&mut model, &push(3, 121, 1.0, 7.0)).is_empty());
        assert!((model[0] + 3.0).abs() < 1e-6, "{model:?}");
        // A worker that pushes twice before it is answered counts once for the quorum.
        assert!(rule.push(&mut model, &push(3, 130, 1.0, 1.0)).is_empty());
        assert_eq!(rule.flush(&mut model), [3]);
        assert!((model[0] + 3.0 + 8.0).abs() < 1e-6, "{model:?}");
        assert!(rule.flush(&mut model).is_empty());
    }

    #[test]
    fn a_full_quorum_is_a_synchronous_step() {
        let quorum = Quorum { least: 2, grace: Nanos::ZERO };
        let (mut rule, mut model) = (QuorumMean::new(1, (0.7, 0.9), quorum, 2), [0.0]);
        let (mut x, mut v) = (0.0_f32, 0.0_f32);
        for at in 0..3 {
            assert!(rule.push(&mut model, &push(1, at, 1.0, 1.0)).is_empty());
            assert_eq!(rule.push(&mut model, &push(0, at, 1.0, 2.0)), [0, 1]);
            v = 0.9 * v + 1.5;
            x -= 0.7 * (1.5 + 0.9 * v);
            assert!((model[0] - x).abs() < 1e-5);
        }
    }
}
