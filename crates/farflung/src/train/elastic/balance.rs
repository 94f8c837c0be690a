//! Distribution of a step's microbatches over replicas by measured speed. All ranks compute it from the same
//! measured times, so they reach the same result without further messages.

use farflung_base::Nanos;
use farflung_parallel::Plan;
use farflung_parallel::pipeline::{StageCost, peaks};
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
    /// The newest measurement of each replica. A pipeline has that of its slowest rank.
    measured: Vec<Measured>,
    /// The slowest rank of each replica.
    slowest: Vec<u32>,
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
        let Some(ranks) = trainer.measured() else { return Advice::Stay };
        (self.slowest, self.measured) = slowest(&ranks, job.plan.stages());
        match self.rebalance.observe(&job.plan.microbatches, &self.measured) {
            Advice::Shares(shares) if !is_possible(&job.plan, &shares) => Advice::Stay,
            advice => advice,
        }
    }

    /// Returns whether `rank` is the one that makes a replica too slow to stay.
    pub(super) fn is_slowest(&self, replica: u32, rank: u32) -> bool {
        self.slowest.get(replica as usize) == Some(&rank)
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

/// Returns the slowest rank of each replica of `stages` ranks, and its times. If those of any of its ranks are
/// not known, the replica's are not.
fn slowest(ranks: &[Measured], stages: u32) -> (Vec<u32>, Vec<Measured>) {
    let slowest = |(first, ranks): (u32, &[Measured])| {
        let is_known = ranks.iter().all(|rank| rank.microbatch > Nanos::ZERO);
        let key = |(_, rank): &(u32, &Measured)| rank.microbatch;
        let (rank, &times) = (first..).zip(ranks).max_by_key(key)?;
        let unknown = Measured { microbatch: Nanos::ZERO, ..times };
        Some((rank, if is_known { times } else { unknown }))
    };
    (0..).step_by(stages as usize).zip(ranks.chunks(stages as usize)).filter_map(slowest).unzip()
}

/// Returns whether pipelines can have these shares, and hold as many activations as now. With a schedule that
/// holds those of all microbatches, a larger share could take more memory than a rank has; others require
/// certain numbers of microbatches.
fn is_possible(plan: &Plan, shares: &[u32]) -> bool {
    let moment = Nanos(1);
    let cost = StageCost { forward: moment, input: moment, weight: moment, ..StageCost::default() };
    let cost = vec![cost; plan.parts.len()];
    let most = |&count: &u32| peaks(&plan.order_with(count, &cost, Nanos::ZERO).ok()?).into_iter().max();
    let most = |shares: &[u32]| shares.iter().map(most).collect::<Option<Vec<u32>>>()?.into_iter().max();
    plan.stages() == 1 || most(shares).zip(most(&plan.microbatches)).is_some_and(|(then, now)| then <= now)
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
    fn a_pipeline_is_as_slow_as_its_slowest_rank() {
        let of = |ms| Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::from_millis(ms + 1) };
        let (ranks, times) = slowest(&[of(3), of(8), of(9), of(2), of(0), of(4)], 2);
        assert_eq!((ranks, &times[..2]), (vec![1, 2, 5], &[of(8), of(9)][..]));
        // One of its ranks has not said how long it takes.
        assert_eq!(times[2].microbatch, Nanos::ZERO);
        assert_eq!(slowest(&[of(3), of(8)], 1), (vec![0, 1], vec![of(3), of(8)]));
    }

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
