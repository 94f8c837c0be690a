//! Distribution of a step's microbatches over replicas by measured speed. All ranks compute it from the same
//! measured times, so they reach the same result without further messages.

use farflung_base::{Axis, Nanos, Rank};
use farflung_parallel::Plan;
use farflung_parallel::plan::{Advice, Measured, Rebalance, step_time};

use super::layers::{Division, LayerBalance};
use super::shares::is_possible;
use crate::Result;
use crate::train::job::Job;
use crate::train::trainer::Trainer;

/// Speed measurements that a rank keeps about all replicas.
#[derive(Debug, Clone, Default)]
pub(super) struct Balance {
    rebalance: Rebalance,
    /// The newest measurement of each replica. A pipeline has that of its slowest rank.
    measured: Vec<Measured>,
    /// The slowest rank of each replica.
    slowest: Vec<u32>,
    layers: LayerBalance,
    /// The division of the layers that the last measurement has advised.
    division: Option<Division>,
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
    /// Returns how the shares should change after the step just done, from the newest times of all ranks. The
    /// result is the same on all ranks.
    pub(super) fn advice(&mut self, job: &Job, ranks: &[Measured]) -> Advice {
        self.division = self.layers.observe(job, ranks);
        if job.plan.pools().is_some() {
            return Advice::Stay;
        }
        (self.slowest, self.measured) = slowest(ranks, &job.plan.mesh.groups(Axis::Pipeline));
        match self.rebalance.observe(&job.plan.microbatches, &self.measured) {
            Advice::Shares(shares) if !is_possible(&job.plan, &shares) => Advice::Stay,
            advice => advice,
        }
    }

    /// Returns and clears the division of the layers that the last measurement has advised.
    pub(super) const fn division(&mut self) -> Option<Division> {
        self.division.take()
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
        let plan = Plan { microbatches: microbatches.clone(), ..Plan::from(&job.plan) };
        let next = job.with_plan_after(trainer.steps_done(), plan)?;
        let comm = trainer.comm().clone();
        trainer.carry_over(&next, comm)?;
        *job = next;
        Ok(Reshared { microbatches, before, now })
    }
}

/// Returns the slowest rank of each pipeline, and its times. If those of any of its ranks are not known, the
/// pipeline's are not. `measured` has the times of all ranks.
fn slowest(measured: &[Measured], pipelines: &[Vec<Rank>]) -> (Vec<u32>, Vec<Measured>) {
    let slowest = |ranks: &Vec<Rank>| {
        let times = || ranks.iter().filter_map(|&rank| Some((rank, measured.get(rank.index())?)));
        let is_known = times().all(|(_, times)| times.microbatch > Nanos::ZERO);
        let (rank, &times) = times().max_by_key(|(_, times)| times.microbatch)?;
        let unknown = Measured { microbatch: Nanos::ZERO, ..times };
        Some((rank.0, if is_known { times } else { unknown }))
    };
    pipelines.iter().filter_map(slowest).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_is_as_slow_as_its_slowest_rank() {
        let of = |ms| Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::from_millis(ms + 1) };
        let pipelines = |replicas, stages| Plan::mesh_of(replicas, stages).unwrap().groups(Axis::Pipeline);
        let (ranks, times) = slowest(&[of(3), of(8), of(9), of(2), of(0), of(4)], &pipelines(3, 2));
        assert_eq!((ranks, &times[..2]), (vec![1, 2, 5], &[of(8), of(9)][..]));
        // One of its ranks has not said how long it takes.
        assert_eq!(times[2].microbatch, Nanos::ZERO);
        assert_eq!(slowest(&[of(3), of(8)], &pipelines(2, 1)), (vec![0, 1], vec![of(3), of(8)]));
    }
}
