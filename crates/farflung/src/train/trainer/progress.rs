//! How far a rank is: its steps, its averages, and the last step after which all replicas were equal.

use serde::{Deserialize, Serialize};

use super::Trainer;

/// Progress of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::train) struct Progress {
    /// Number of steps done.
    pub(in crate::train) step: u64,
    /// Number of averages that the method of synchronisation has committed.
    pub(in crate::train) outer_step: u64,
}

impl Trainer {
    /// Returns the numbers of steps and averages done.
    pub(in crate::train) fn progress(&self) -> Progress {
        let counters = self.counters();
        Progress { step: counters.step, outer_step: counters.outer_step }
    }

    /// Returns whether the average after the last step failed. The next call of [`Trainer::step`] then repeats
    /// only that average.
    pub(in crate::train) const fn lacks_average(&self) -> bool {
        self.unmet
    }

    /// Returns the last step after which all replicas had the same parameters.
    pub(in crate::train) fn agreed_step(&self) -> u64 {
        if self.each_step {
            return self.step;
        }
        // The last step of a run ends its period, whatever its length.
        let ends = self.step.is_multiple_of(self.every) || self.step == self.steps;
        if ends && !self.unmet { self.step } else { self.step.saturating_sub(1) / self.every * self.every }
    }

    /// Returns how often all replicas have had the same parameters: after each step, or after each
    /// synchronisation.
    pub(in crate::train) fn agreements(&self) -> u64 {
        let progress = self.progress();
        // The method has already counted an average that is not applied yet.
        let open = u64::from(self.undecided.is_average_open());
        if self.each_step { progress.step } else { progress.outer_step.saturating_sub(open) }
    }

    /// Returns whether a step or a synchronisation can be replayed from its record.
    pub(in crate::train) fn keeps_averages(&self) -> bool {
        let mut syncs = self.executor.parts.values().map(|part| part.sync.as_ref());
        self.each_step || syncs.all(|sync| sync.is_some_and(|sync| !sync.averaged().is_empty()))
    }
}
