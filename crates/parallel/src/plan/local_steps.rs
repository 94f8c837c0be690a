//! Which replicas take a local step in which step of the run: slower ones may take fewer.

use std::ops::Range;

use super::Plan;

/// Local steps by speed: of every `period` steps of the run, a replica takes so many, spread evenly. In the
/// others it does nothing, so that machines of unequal speed reach the end of a period together.
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
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct LocalSteps {
    period: u32,
    /// Of each replica in a period.
    steps: Vec<u32>,
    /// Of each replica in a local step.
    microbatches: Vec<u32>,
}

impl LocalSteps {
    /// So many `steps` of each replica in a `period`, and so many `microbatches` of each in a step.
    ///
    /// # Panics
    /// For a period of 0 and for lists of different lengths.
    pub fn new(period: u32, steps: Vec<u32>, microbatches: Vec<u32>) -> Self {
        assert!(
            period > 0 && steps.len() == microbatches.len(),
            "a period, and two numbers for each replica"
        );
        Self { period, steps, microbatches }
    }

    /// Steps of the run in a period.
    #[must_use]
    pub const fn period(&self) -> u32 {
        self.period
    }

    /// Whether all replicas take all steps.
    #[must_use]
    pub fn are_equal(&self) -> bool {
        self.steps.iter().all(|&steps| steps == self.period)
    }

    /// Local steps that a replica has taken after so many steps of the run.
    #[must_use]
    pub fn taken(&self, replica: u32, steps: u64) -> u64 {
        let (period, own) = (u64::from(self.period), u64::from(self.steps[replica as usize]));
        steps / period * own + steps % period * own / period
    }

    /// Whether a replica takes a local step in a step of the run, counted from 1.
    #[must_use]
    pub fn takes(&self, replica: u32, step: u64) -> bool {
        self.taken(replica, step) > self.taken(replica, step.saturating_sub(1))
    }

    /// Microbatches that a replica trains on between two numbers of steps.
    fn microbatches(&self, replica: u32, steps: &Range<u64>) -> u64 {
        let taken = self.taken(replica, steps.end) - self.taken(replica, steps.start);
        taken * u64::from(self.microbatches[replica as usize])
    }

    /// A replica's part of a mean over all tokens that are trained on between two numbers of steps, where an
    /// equal part is 1; 0 where nobody trains.
    #[must_use]
    pub fn weight(&self, replica: u32, steps: Range<u64>) -> f64 {
        let replicas = self.steps.len() as u32;
        let all: u64 = (0..replicas).map(|other| self.microbatches(other, &steps)).sum();
        let mine = self.microbatches(replica, &steps) * u64::from(replicas);
        if all == 0 { 0.0 } else { mine as f64 / all as f64 }
    }

    /// Microbatches of all replicas in the first so many steps.
    #[must_use]
    pub fn all_microbatches(&self, steps: u64) -> u64 {
        (0..self.steps.len() as u32).map(|replica| self.microbatches(replica, &(0..steps))).sum()
    }
}

impl Plan {
    /// Who takes a local step when.
    pub fn local_steps(&self) -> LocalSteps {
        let level = self.outermost();
        let fastest = level.steps.iter().max().copied();
        let steps = match fastest {
            None => vec![level.every; self.replicas() as usize],
            Some(_) => level.steps.clone(),
        };
        LocalSteps::new(fastest.unwrap_or(level.every), steps, self.microbatches.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_spread_evenly_and_weights_are_by_tokens() {
        for period in 1..12_u32 {
            for own in 1..=period {
                let steps = LocalSteps::new(period, vec![period, own], vec![2, 3]);
                for step in 1..=3 * u64::from(period) {
                    assert!(steps.takes(0, step));
                    let taken = (1..=step).filter(|&step| steps.takes(1, step)).count() as u64;
                    assert_eq!(steps.taken(1, step), taken);
                    // Never a whole step ahead of an even pace, nor behind it.
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
