//! Speeds of the members of pools, and the pools and rates that follow from them.

use std::collections::BTreeMap;

use farflung_base::Nanos;
use farflung_parallel::pipeline::Pools;
use farflung_parallel::plan::{Assignment, Measured, PoolAdvice, PoolBalance, Pooling, rates_of};

use super::nonsense::{MOST_TIMES_THE_MIDDLE, is_possible_speed};
use super::rank_speeds::{RankWork, work};
use crate::train::job::Job;

/// A member that moves to another stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Moving {
    /// Its endpoint.
    pub(super) slot: u32,
    /// Index of the stage to which it moves.
    pub(super) to: u32,
}

/// The speeds of all members that a member has received, and the change that they have decided on.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolSpeeds {
    balance: PoolBalance,
    /// Speed of each member that has sent the time of a microbatch, by its endpoint, in operations a second.
    pub(super) known: BTreeMap<u32, f64>,
    pub(super) moving: Option<Moving>,
}

impl PoolSpeeds {
    /// Starts anew with the speeds that a member has sent in a new view. Those that no member can have are
    /// ignored.
    pub(super) fn begin_anew(&mut self, known: &BTreeMap<u32, f64>) {
        let known = known.iter().filter(|(_, speed)| is_possible_speed(**speed));
        let known = known.map(|(&slot, &speed)| (slot, speed)).collect();
        *self = Self { known, ..Self::default() };
    }

    /// Returns how the pools should change after the step just done. The result is the same on all members that
    /// take steps.
    pub(super) fn advice(&mut self, job: &Job, measured: &[Measured]) -> PoolAdvice {
        let Some(pools) = job.plan.pools() else { return PoolAdvice::Stay };
        let work = work(&job.plan, &job.model);
        self.balance.observe(pools, job.plan.microbatches[0], measured, &work)
    }

    /// Notes the measured speeds of the ranks with these endpoints, each of which has one part.
    pub(super) fn note(&mut self, slots: &[u32], work: &[RankWork], measured: &[Measured]) {
        let speeds = work.iter().zip(measured).map(|(work, told)| work.speed(told));
        self.known.extend(slots.iter().zip(speeds).filter_map(|(&slot, speed)| Some((slot, speed?))));
    }

    /// Returns the input from which the pools of some members are formed. `slots` are the members' endpoints,
    /// `None` for a newcomer that has none yet. `work` is the operations of a microbatch in each stage, `most`
    /// the maximum members of a pool. A member without a known speed, or with one that is not believed
    /// ([`MOST_TIMES_THE_MIDDLE`]), counts as having the median of the known ones, the lower of two.
    pub(super) fn pooling(&self, slots: &[Option<u32>], most: u32, work: Vec<f64>) -> Pooling {
        let speeds: Vec<Option<f64>> =
            slots.iter().map(|slot| self.known.get(slot.as_ref()?).copied()).collect();
        let mut told: Vec<f64> = speeds.iter().flatten().copied().collect();
        told.sort_by(f64::total_cmp);
        let middle = told.get(told.len().saturating_sub(1) / 2).copied().unwrap_or(1.0);
        let fastest = middle * MOST_TIMES_THE_MIDDLE as f64;
        let believed = |speed: Option<f64>| speed.filter(|&speed| speed <= fastest).unwrap_or(middle);
        let speeds = speeds.into_iter().map(believed).collect();
        let member = |slot| slots.iter().position(|of| *of == Some(slot));
        let moving = self.moving.and_then(|Moving { slot, to }| Some((member(slot)?, to)));
        Pooling { stages: work.len() as u32, most, work, speeds, moving }
    }
}

/// Returns the rate of each rank of some pools, relative to the others of its pool.
pub(super) fn rates(assignment: &Assignment, pooling: &Pooling) -> Vec<u32> {
    let pools = Pools::equal(assignment.pools.clone());
    let time = |(rank, &member): (u32, &usize)| {
        let stage = pools.stage_of(rank).unwrap_or(0) as usize;
        Nanos::from_secs_f64(pooling.work[stage] / pooling.speeds[member])
    };
    let times: Vec<Nanos> = (0..).zip(&assignment.ranks).map(time).collect();
    rates_of(&pools, &times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_far_above_the_others_is_not_believed() {
        let pooling = |known: &[(u32, f64)]| {
            let speeds = PoolSpeeds { known: known.iter().copied().collect(), ..PoolSpeeds::default() };
            speeds.pooling(&[Some(0), Some(1), Some(2)], 2, vec![1.0, 1.0]).speeds
        };
        assert_eq!(pooling(&[(0, 2e9), (1, 1e9)]), [2e9, 1e9, 1e9]);
        assert_eq!(pooling(&[(0, 1e9), (1, 4e12)]), [1e9, 4e12, 1e9]);
        assert_eq!(pooling(&[(0, 1e9), (1, 1e18)]), [1e9, 1e9, 1e9]);
        assert_eq!(pooling(&[]), [1.0; 3]);
    }
}
