//! Distribution of a step's microbatches over replicas by measured speed. All ranks compute it from the same
//! measured times, so they reach the same result without further messages.

use farflung_base::Nanos;
use farflung_parallel::Plan;
use farflung_parallel::plan::{Advice, Measured, Rebalance, shares_by_speed, step_time};

use crate::Result;
use crate::train::job::Job;
use crate::train::trainer::Trainer;

/// A member that reports to be this many times faster than the middle one is not believed.
const MAX_RATIO: u64 = 4096;

/// Speed measurements that a rank keeps about all replicas.
#[derive(Debug, Clone, Default)]
pub(super) struct Balance {
    rebalance: Rebalance,
    /// The newest measurement of each replica.
    measured: Vec<Measured>,
}

/// A change of the replicas' shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reshared {
    /// Number of microbatches of each replica in a step.
    pub(super) microbatches: Vec<u32>,
    /// Expected time of a step with the old shares (`before`) and the new ones (`now`).
    pub(super) before: Nanos,
    pub(super) now: Nanos,
}

impl Balance {
    /// Returns how the shares should change after the step just done. The result is the same on all ranks.
    pub(super) fn advice(&mut self, job: &Job, trainer: &mut Trainer) -> Advice {
        let Some(measured) = trainer.measured() else { return Advice::Stay };
        let advice = self.rebalance.observe(&job.plan.microbatches, &measured);
        self.measured = measured;
        advice
    }

    /// Returns the newest measurement of each replica, for the next plan.
    pub(super) fn measured(&self) -> &[Measured] {
        &self.measured
    }

    /// Drops all measurements, since the members have changed.
    pub(super) fn begin_anew(&mut self) {
        *self = Self::default();
    }

    /// Returns the reason, as text for the user, why a replica is too slow to stay.
    pub(super) fn too_slow(&self, replica: u32) -> String {
        let time = |replica: usize| self.measured.get(replica).map_or(Nanos::ZERO, |m| m.microbatch);
        let others = (0..self.measured.len()).filter(|&other| other != replica as usize);
        let slowest = others.map(time).max().unwrap_or_default();
        format!(
            "a microbatch takes {} on it and at most {slowest} on the others, which are faster without it",
            time(replica as usize)
        )
    }

    /// Changes to other shares of microbatches. All ranks call it after the same step.
    ///
    /// Errors: a rank that is lost meanwhile.
    pub(super) fn reshare(
        &mut self,
        job: &mut Job,
        trainer: &mut Trainer,
        microbatches: Vec<u32>,
    ) -> Result<Reshared> {
        // A rank must not start a step with the new shares before all ranks have finished the step before.
        trainer.comm().barrier()?;
        let (before, now) = (&job.plan.microbatches, &microbatches);
        let [before, now] = [before, now].map(|shares| step_time(shares, &self.measured));
        let plan = Plan { microbatches: microbatches.clone(), ..job.plan.clone() };
        let next = job.with_plan_after(trainer.steps_done(), plan)?;
        let comm = trainer.comm().clone();
        trainer.carry_over(&next, comm)?;
        *job = next;
        Ok(Reshared { microbatches, before, now })
    }
}

/// Returns the number of microbatches for each replica of a view, by speed; in total `each` times the number of
/// replicas. A replica without a known time, or with one that cannot be true ([`MAX_RATIO`]), counts as having
/// the median of the known ones. `None` if no time is known.
pub(super) fn shares(each: u32, measured: &[Option<Measured>]) -> Option<Vec<u32>> {
    let mut known: Vec<Nanos> = measured.iter().flatten().map(|measured| measured.microbatch).collect();
    known.retain(|&time| time > Nanos::ZERO);
    known.sort_unstable();
    let middle = *known.get(known.len() / 2)?;
    let time = |measured: &Option<Measured>| {
        let least = middle.0 / MAX_RATIO;
        let told = measured.map(|measured| measured.microbatch).filter(|time| time.0 > least);
        Measured { microbatch: told.unwrap_or(middle), rest: Nanos::ZERO }
    };
    let all: Vec<Measured> = measured.iter().map(time).collect();
    shares_by_speed(each.checked_mul(u32::try_from(all.len()).ok()?)?, &all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_counts_as_the_middle_one() {
        let of = |ms| Some(Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::ZERO });
        assert_eq!(shares(4, &[of(10), of(40), of(10), None]), Some(vec![5, 1, 5, 5]));
        assert_eq!(shares(4, &[None, None]), None);
        // One that reports a time that no machine needs does not get all microbatches.
        assert_eq!(
            shares(4, &[of(10), of(10), of(10), Some(Measured { microbatch: Nanos(1), rest: Nanos::ZERO })]),
            Some(vec![4; 4])
        );
        assert_eq!(shares(4, &[of(1000), of(1000), of(2)]).map(|shares| shares[2]), Some(10));
    }
}
