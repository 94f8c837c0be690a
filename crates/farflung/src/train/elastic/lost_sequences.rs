//! Sequences of lost replicas that are in no average.

use crate::events::LostSequences;
use crate::train::job::Job;
use crate::train::trainer::ReplicaSamples;

/// The plan with which members that hold the whole model have taken the local steps of a round.
#[derive(Debug, Clone)]
pub(super) struct RoundTaken {
    job: Job,
    /// Endpoints of the plan's replicas.
    slots: Vec<u32>,
    /// Number of steps done.
    step: u64,
}

impl RoundTaken {
    /// Returns the plan of the round of which `step` is the last step done. If members are lost one after
    /// another at the average after a round, that is the plan `before` the first loss, not the one of `job`.
    pub(super) fn of(before: Option<Self>, job: &Job, slots: &[u32], step: u64) -> Self {
        let same = before.filter(|before| before.step == step);
        same.unwrap_or_else(|| Self { job: job.clone(), slots: slots.to_vec(), step })
    }

    /// Returns it after the local steps up to `step`, which a member may have caught up on.
    pub(super) fn up_to(self, step: u64) -> Self {
        Self { step, ..self }
    }

    /// Returns the sequences since the last average of the members with these endpoints.
    pub(super) fn lost(&self, slots: &[u32]) -> Vec<LostSequences> {
        let replica =
            |slot| self.slots.iter().position(|of| of == slot).map(|replica| (replica as u32, slot));
        let one = |(replica, &slot)| unaveraged(&self.job, (replica, vec![slot]), self.step);
        slots.iter().filter_map(replica).filter_map(one).collect()
    }
}

/// Returns the sequences of a replica, of the members with these endpoints, since the last average before step
/// `until`. `None` if there are none, because every step is averaged.
pub(super) fn unaveraged(
    job: &Job,
    (replica, members): (u32, Vec<u32>),
    until: u64,
) -> Option<LostSequences> {
    let level = job.plan.outermost();
    let since = level.round_of(until).start;
    // Only the job of a member that has taken these steps knows their sequences.
    let knows = job.plan_start.step <= since || job.round_plan.is_some();
    if level.every <= 1 || !knows {
        return None;
    }
    let samples = ReplicaSamples::new(job, replica).ok()?;
    let batch = u64::from(job.plan.batch);
    let each = u64::from(job.plan.microbatches[replica as usize]) * batch;
    let mut taken = (since..until).filter(|&step| samples.takes(step + 1));
    let first = samples.first(taken.next()?) * batch;
    // It takes as many sequences in each of its steps, after those of all others.
    let stride = samples.all_microbatches(until) * batch;
    Some(LostSequences { members, first, each, steps: 1 + taken.count() as u64, stride })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::choice::SyncKind;
    use crate::{Stop, TrainConfig};

    /// Returns a job of three workers with rounds of four steps.
    fn job(sync: &'static farflung_optim::sync::SyncMethod) -> Job {
        let config = TrainConfig {
            sync: SyncKind::of(sync),
            sync_every: 4,
            workers: 3,
            layers: Some(1),
            microbatches: Some(2),
            steps: 10,
            data: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into()),
            context: Some(8),
            batch: 3,
            ..TrainConfig::default()
        };
        Job { elastic: true, ..Job::new(config, 3, Stop::manual()).unwrap() }
    }

    #[test]
    fn replicas_have_all_sequences_of_a_round_once() {
        let job = job(&farflung_optim::sync::DILOCO);
        let of = |replica| unaveraged(&job, (replica, vec![replica]), 8).unwrap();
        assert_eq!(of(1).ranges().collect::<Vec<_>>(), [78..84, 96..102, 114..120, 132..138]);
        let mut all: Vec<u64> = (0..3).flat_map(|n| of(n).ranges().flatten().collect::<Vec<_>>()).collect();
        all.sort_unstable();
        assert_eq!(all, (4 * 18..8 * 18).collect::<Vec<_>>());
        assert_eq!(of(2).count(), 4 * 2 * 3);
    }

    #[test]
    fn members_lost_one_after_another_lose_what_the_first_plan_gave_them() {
        let job = job(&farflung_optim::sync::DILOCO);
        let taken = RoundTaken::of(None, &job, &[5, 6, 7], 8);
        let [first] = &taken.lost(&[6])[..] else { unreachable!() };
        assert_eq!((&first.members[..], first.ranges().next()), (&[6][..], Some(78..84)));
        // The next plan begins after the round: it does not say who has had which of its sequences.
        let plan = job.plan.with_replicas(&[0, 2].map(farflung_parallel::plan::Replica::Stays)).unwrap();
        let next = job.with_plan_after(8, plan).unwrap();
        assert_eq!(unaveraged(&next, (1, vec![7]), 8), None);
        let [second] = &RoundTaken::of(Some(taken.clone()), &next, &[5, 7], 8).lost(&[7])[..] else {
            unreachable!()
        };
        assert_eq!((&second.members[..], second.ranges().next()), (&[7][..], Some(84..90)));
        // In the next round, there are two of them.
        let [later] = &RoundTaken::of(Some(taken), &next, &[5, 7], 10).lost(&[7])[..] else { unreachable!() };
        assert_eq!(later.ranges().collect::<Vec<_>>(), [150..156, 162..168]);
    }

    #[test]
    fn averages_of_each_step_lose_nothing() {
        assert_eq!(unaveraged(&job(&farflung_optim::sync::DDP), (1, vec![1]), 8), None);
    }
}
