//! Assignment of local steps to replicas: slower replicas may take fewer local steps.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Plan;

/// Numbers of local steps by speed. In every `period` steps of the run, a replica takes its own number of local
/// steps, spread evenly. In the other steps it does nothing, so that machines of unequal speed reach the end of
/// a period at the same time.
///
/// Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", dynamic local updates
/// (`H_w = H v_w / v_max`). Differs: the numbers are part of the plan.
///
/// ```
/// # use farflung_parallel::LocalSteps;
/// let steps = LocalSteps::new(4, vec![4, 2], vec![1, 1]);
/// let slow: Vec<bool> = (1..=4).map(|step| steps.takes(1, step)).collect();
/// assert_eq!(slow, [false, true, false, true]);
/// assert!((steps.weight(1, 0..4) - 2.0 / 3.0).abs() < 1e-12);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[must_use]
pub struct LocalSteps {
    period: u32,
    /// Number of local steps of each replica in a period.
    steps: Vec<u32>,
    /// Number of microbatches of each replica in a local step.
    microbatches: Vec<u32>,
    /// Number of neighbouring replicas that run each microbatch together.
    #[serde(default = "alone")]
    together: u32,
    /// Local steps of these replicas under earlier plans, oldest first.
    earlier: Vec<Earlier>,
}

const fn alone() -> u32 {
    1
}

/// Local steps of the replicas under one earlier plan, which ended after step `until`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Earlier {
    until: u64,
    period: u32,
    steps: Vec<u32>,
    microbatches: Vec<u32>,
}

impl Earlier {
    /// Returns the number of local steps that a replica takes in the first `steps` steps of the run, if it
    /// takes `own` in every `period`.
    fn taken(period: u32, own: u32, steps: u64) -> u64 {
        let (period, own) = (u64::from(period), u64::from(own));
        steps / period * own + steps % period * own / period
    }

    /// Returns the number of microbatches on which a replica trained in these steps.
    fn microbatches(&self, replica: u32, steps: &Range<u64>) -> u64 {
        let own = self.steps[replica as usize];
        let taken = Self::taken(self.period, own, steps.end) - Self::taken(self.period, own, steps.start);
        taken * u64::from(self.microbatches[replica as usize])
    }
}

impl LocalSteps {
    /// Creates the numbers from each replica's local `steps` in a `period` and its `microbatches` in a local
    /// step.
    ///
    /// # Panics
    /// If the period is 0 or the lists have different lengths.
    pub fn new(period: u32, steps: Vec<u32>, microbatches: Vec<u32>) -> Self {
        assert!(
            period > 0 && steps.len() == microbatches.len(),
            "the period must be above 0, and each replica needs a number of steps and of microbatches"
        );
        Self { period, steps, microbatches, together: 1, earlier: Vec::new() }
    }

    /// Returns the numbers for replicas of which so many neighbours run each microbatch together.
    fn of_readers(self, together: u32) -> Self {
        Self { together: together.max(1), ..self }
    }

    /// Adds the history: up to `step`, the replicas followed `before`, under plans with other members. Earlier
    /// plans that ended at step `since` or before are dropped.
    ///
    /// `replicas` has the number of each current replica in `before`; `None` for a new replica, which did no
    /// local steps then.
    ///
    /// ```
    /// # use farflung_parallel::LocalSteps;
    /// let before = LocalSteps::new(4, vec![4, 4, 4], vec![1, 3, 2]);
    /// let now = LocalSteps::new(4, vec![4, 4], vec![2, 2]).after(4, &before, &[Some(0), Some(2)], 0);
    /// assert!((now.weight(0, 0..4) - 2.0 / 3.0).abs() < 1e-12);
    /// assert!((now.weight(0, 4..8) - 1.0).abs() < 1e-12);
    /// ```
    pub fn after(mut self, step: u64, before: &Self, replicas: &[Option<u32>], since: u64) -> Self {
        let of = |counts: &[u32]| -> Vec<u32> {
            let count =
                |old: &Option<u32>| old.and_then(|old| counts.get(old as usize)).copied().unwrap_or(0);
            replicas.iter().map(count).collect()
        };
        let last = Earlier {
            until: step,
            period: before.period,
            steps: before.steps.clone(),
            microbatches: before.microbatches.clone(),
        };
        let all = before.earlier.iter().chain([&last]).filter(|earlier| earlier.until > since);
        let all = all.map(|earlier| Earlier {
            until: earlier.until.min(step),
            period: earlier.period,
            steps: of(&earlier.steps),
            microbatches: of(&earlier.microbatches),
        });
        self.earlier = all.collect();
        self
    }

    /// Returns whether the lists have consistent lengths and all periods are above 0. Check this for a value
    /// received from another rank: the other functions may panic if it is false.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let replicas = self.microbatches.len();
        let sound = |period: u32, steps: &[u32], microbatches: &[u32]| {
            period > 0 && steps.len() == replicas && microbatches.len() == replicas
        };
        let earlier = |earlier: &Earlier| sound(earlier.period, &earlier.steps, &earlier.microbatches);
        sound(self.period, &self.steps, &self.microbatches) && self.earlier.iter().all(earlier)
    }

    /// Returns the number of steps of the run in a period.
    #[must_use]
    pub const fn period(&self) -> u32 {
        self.period
    }

    /// Returns whether all replicas take all steps.
    #[must_use]
    pub fn are_equal(&self) -> bool {
        self.steps.iter().all(|&steps| steps == self.period)
    }

    /// Returns the number of local steps that a replica takes in the first `steps` steps of the run.
    #[must_use]
    pub fn taken(&self, replica: u32, steps: u64) -> u64 {
        Earlier::taken(self.period, self.steps[replica as usize], steps)
    }

    /// Returns whether a replica takes a local step in this step of the run. Steps are counted from 1.
    #[must_use]
    pub fn takes(&self, replica: u32, step: u64) -> bool {
        self.taken(replica, step) > self.taken(replica, step.saturating_sub(1))
    }

    /// Returns the number of microbatches on which a replica trains in these steps, earlier plans included.
    fn microbatches(&self, replica: u32, steps: &Range<u64>) -> u64 {
        let (mut all, mut start) = (0, steps.start);
        for earlier in &self.earlier {
            let end = earlier.until.clamp(start, steps.end);
            all += earlier.microbatches(replica, &(start..end));
            start = end;
        }
        let taken = self.taken(replica, steps.end) - self.taken(replica, start);
        all + taken * u64::from(self.microbatches[replica as usize])
    }

    /// Returns a replica's weight in a mean over all tokens of these steps. A replica with an average number of
    /// tokens has weight 1. Returns 0 if no replica trains in these steps.
    #[must_use]
    pub fn weight(&self, replica: u32, steps: Range<u64>) -> f64 {
        let replicas = self.steps.len() as u32;
        let all: u64 = (0..replicas).map(|other| self.microbatches(other, &steps)).sum();
        let mine = self.microbatches(replica, &steps) * u64::from(replicas);
        if all == 0 { 0.0 } else { mine as f64 / all as f64 }
    }

    /// Like [`LocalSteps::weight`], where a local step of a replica has `tokens` that count, one number for
    /// each replica. Steps under earlier plans must have had the same.
    #[must_use]
    pub fn weight_of(&self, replica: u32, steps: Range<u64>, tokens: &[u64]) -> f64 {
        let of = |(other, tokens): (usize, &u64)| {
            (self.taken(other as u32, steps.end) - self.taken(other as u32, steps.start)) * tokens
        };
        let all: u64 = tokens.iter().enumerate().map(of).sum();
        let mine = tokens.get(replica as usize).map_or(0, |tokens| of((replica as usize, tokens)));
        if all == 0 { 0.0 } else { (mine * tokens.len() as u64) as f64 / all as f64 }
    }

    /// Returns the number of microbatches of all replicas in the first `steps` steps.
    #[must_use]
    pub fn all_microbatches(&self, steps: u64) -> u64 {
        let replicas = (0..self.steps.len() as u32).step_by(self.together.max(1) as usize);
        replicas.map(|replica| self.microbatches(replica, &(0..steps))).sum()
    }
}

impl Plan {
    /// Returns the numbers of local steps of the replicas.
    pub fn local_steps(&self) -> LocalSteps {
        let level = self.outermost();
        let fastest = level.steps.iter().max().copied();
        let steps = match fastest {
            None => vec![level.every; self.replicas() as usize],
            Some(_) => level.steps.clone(),
        };
        LocalSteps::new(fastest.unwrap_or(level.every), steps, self.microbatches.clone())
            .of_readers(self.context.readers())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_before_members_changed_counts_as_it_was_done() {
        // Three replicas. The second is lost after step 3, then the first after step 5.
        let first = LocalSteps::new(4, vec![4, 4, 2], vec![1, 3, 2]);
        let second = LocalSteps::new(4, vec![4, 4], vec![5, 7]).after(3, &first, &[Some(0), Some(2)], 0);
        assert!(second.is_sound());
        let counts = |local: &LocalSteps, replica| {
            let count = |end: u64| local.microbatches(replica, &(0..end));
            (1..=6).map(count).collect::<Vec<_>>()
        };
        assert_eq!(counts(&second, 0), [1, 2, 3, 8, 13, 18]);
        assert_eq!(counts(&second, 1), [0, 2, 2, 9, 16, 23]);
        assert_eq!(second.microbatches(1, &(2..4)), 7);
        let third = LocalSteps::new(4, vec![4, 4], vec![1, 1]).after(5, &second, &[Some(1), None], 0);
        assert_eq!(counts(&third, 0), [0, 2, 2, 9, 16, 17]);
        // A new replica did no steps before it joined.
        assert_eq!(counts(&third, 1), [0, 0, 0, 0, 0, 1]);
        assert!((third.weight(0, 4..6) - 2.0 * 8.0 / 9.0).abs() < 1e-12);
        // The first plan ended after step 3, before `since`, so it is dropped.
        let later = LocalSteps::new(4, vec![4, 4], vec![1, 1]).after(5, &second, &[Some(1), None], 4);
        assert_eq!(later.earlier.len(), 1);
        assert_eq!(later.microbatches(0, &(4..6)), 8);
        let mut broken = third;
        broken.earlier[0].steps.pop();
        assert!(!broken.is_sound());
    }

    #[test]
    fn steps_are_spread_evenly_and_weights_are_by_tokens() {
        for period in 1..12_u32 {
            for own in 1..=period {
                let steps = LocalSteps::new(period, vec![period, own], vec![2, 3]);
                for step in 1..=3 * u64::from(period) {
                    assert!(steps.takes(0, step));
                    let taken = (1..=step).filter(|&step| steps.takes(1, step)).count() as u64;
                    assert_eq!(steps.taken(1, step), taken);
                    // The count is never ahead of an even pace, and less than one step behind it.
                    let even = step as f64 * f64::from(own) / f64::from(period);
                    assert!((even - taken as f64) < 1.0 && taken as f64 <= even + 1e-9);
                    assert_eq!(steps.all_microbatches(step), 2 * step + 3 * taken);
                    let weights = [0, 1].map(|replica| steps.weight(replica, 0..step));
                    assert!((weights[0] + weights[1] - 2.0).abs() < 1e-12);
                    assert!((weights[1] * (2 * step) as f64 - weights[0] * (3 * taken) as f64).abs() < 1e-9);
                }
            }
        }
    }
}
