//! Replays a trace of losses against a recovery policy: steps, checkpoints and pauses, one after the other.

use farflung_base::Nanos;

use super::best_shape::best_shape;
use super::policy::{ChangeContext, CheckpointInterval, LostWork, Policy, PolicyRow, Reaction};
use super::{Recovery, StepTimes, Trace, daly};
use crate::ParallelError;

/// Result of a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// Number of completed steps that were not lost later.
    pub steps: u64,
    /// `steps` divided by those of an ideal job, which always has the best shape for the machines present and
    /// changes shape in no time.
    pub share: f64,
    /// Number of completed steps that were lost because the job went back to a checkpoint.
    pub lost: u64,
    /// Number of restarts from a checkpoint.
    pub restarts: u32,
    /// Number of changes of the machines that cost only the step in flight, so that no restart was needed.
    pub regroups: u32,
    /// Time spent saving checkpoints.
    pub saving: Nanos,
    /// Total time from changes of the machines to the next step.
    pub paused: Nanos,
    /// Total time in which no plan fits the machines that are present.
    pub idle: Nanos,
}

const HOUR: Nanos = Nanos(3_600_000_000_000);

/// Replays `trace` with the policy `row`.
///
/// Each step has the same microbatches, whatever the shape. The job saves a checkpoint after each interval of
/// working time, as the policy's row says, and does not work meanwhile. A loss during a restart begins the
/// restart again.
///
/// Errors: [`ParallelError::Zero`] if `recovery.lifetime` is zero; [`ParallelError::TooSmall`] if all machines
/// together cannot hold the model.
pub fn replay(
    row: &PolicyRow,
    trace: &Trace,
    recovery: &Recovery,
    prices: &mut StepTimes<'_>,
) -> Result<Replay, ParallelError> {
    if recovery.lifetime == Nanos::ZERO {
        return Err(ParallelError::Zero { of: "the recovery".to_owned(), field: "lifetime" });
    }
    if best_shape(prices, trace.machines, 1).is_none() {
        return Err(prices.too_small(trace.machines));
    }
    let between = recovery.lifetime.as_secs_f64() / f64::from(trace.machines);
    let every = match row.saves {
        CheckpointInterval::Daly => Nanos::from_secs_f64(daly(recovery.save.as_secs_f64(), between)),
        CheckpointInterval::Hourly => HOUR,
    };
    let mut job = Job::new((row.begin)(), every, recovery.save);
    let mut there = vec![true; trace.machines as usize];
    let first = ChangeContext { there: &there, lost: &[], at: Nanos::ZERO, recovery };
    job.react(first, prices);
    // At the start, all machines are present and the program already runs: no pause, no restart.
    (job.pause, job.done) = (Nanos::ZERO, Replay { restarts: 0, regroups: 0, ..job.done });
    let mut possible = Possible::default();
    for change in &trace.changes {
        job.until(change.at, &there, recovery, prices);
        possible.until(change.at, &there, prices);
        for &machine in &change.lost {
            there[machine as usize] = false;
        }
        for &machine in &change.back {
            there[machine as usize] = true;
        }
        let now = ChangeContext { there: &there, lost: &change.lost, at: change.at, recovery };
        job.react(now, prices);
    }
    job.until(trace.time, &there, recovery, prices);
    possible.until(trace.time, &there, prices);
    let mut done = job.done;
    done.share = done.steps as f64 / possible.steps.max(1e-9);
    Ok(done)
}

/// Steps of the ideal job, which always has the best shape and changes its shape in no time.
#[derive(Default)]
struct Possible {
    at: Nanos,
    steps: f64,
}

impl Possible {
    fn until(&mut self, at: Nanos, there: &[bool], prices: &mut StepTimes<'_>) {
        let machines = there.iter().filter(|there| **there).count() as u32;
        if let Some(step) = best_shape(prices, machines, 1).and_then(|shape| prices.step(shape)) {
            self.steps += (at - self.at).as_secs_f64() / step.as_secs_f64().max(1e-12);
        }
        self.at = at;
    }
}

/// Kind of the job's current work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Step,
    Save,
}

struct Job {
    policy: Box<dyn Policy>,
    every: Nanos,
    save: Nanos,
    at: Nanos,
    step: Option<Nanos>,
    pause: Nanos,
    work: Work,
    /// Remaining time of the current work.
    left: Nanos,
    /// Working time since the newest checkpoint.
    since: Nanos,
    saved: u64,
    wake: Option<Nanos>,
    done: Replay,
}

impl Job {
    fn new(policy: Box<dyn Policy>, every: Nanos, save: Nanos) -> Self {
        let done = Replay {
            steps: 0,
            share: 0.0,
            lost: 0,
            restarts: 0,
            regroups: 0,
            saving: Nanos::ZERO,
            paused: Nanos::ZERO,
            idle: Nanos::ZERO,
        };
        let (at, pause, left, since) = (Nanos::ZERO, Nanos::ZERO, Nanos::ZERO, Nanos::ZERO);
        Self {
            policy,
            every,
            save,
            at,
            step: None,
            pause,
            work: Work::Step,
            left,
            since,
            saved: 0,
            wake: None,
            done,
        }
    }

    fn react(&mut self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>) {
        let Reaction { step, pause, gone, has_saved, wake } = self.policy.change(now, prices);
        if has_saved {
            (self.saved, self.since) = (self.done.steps, Nanos::ZERO);
        }
        match gone {
            LostWork::Nothing => {
                if step != self.step {
                    self.begin(step);
                }
            }
            LostWork::Step => {
                self.begin(step);
                self.done.regroups += 1;
            }
            LostWork::SinceSaved => {
                self.done.lost += self.done.steps - self.saved;
                self.done.steps = self.saved;
                self.since = Nanos::ZERO;
                self.begin(step);
                self.done.restarts += 1;
            }
        }
        self.step = step;
        self.pause = self.pause.max(pause);
        self.wake = wake;
    }

    fn begin(&mut self, step: Option<Nanos>) {
        (self.work, self.left) = (Work::Step, step.unwrap_or_default());
    }

    /// Advances to `end` and calls the policy at each wake-up that it requested.
    fn until(&mut self, end: Nanos, there: &[bool], recovery: &Recovery, prices: &mut StepTimes<'_>) {
        while let Some(wake) = self.wake.filter(|&wake| wake < end) {
            self.go(wake.max(self.at));
            let now = ChangeContext { there, lost: &[], at: self.at, recovery };
            self.wake = None;
            self.react(now, prices);
        }
        self.go(end);
    }

    fn go(&mut self, end: Nanos) {
        let mut left = end.saturating_sub(self.at);
        self.at = end;
        let paused = self.pause.min(left);
        (self.pause, left) = (self.pause - paused, left - paused);
        self.done.paused += paused;
        let Some(step) = self.step else {
            self.done.idle += left;
            return;
        };
        while left > Nanos::ZERO {
            let now = self.left.min(left);
            (self.left, left) = (self.left - now, left - now);
            match self.work {
                Work::Step => self.since += now,
                Work::Save => self.done.saving += now,
            }
            if self.left > Nanos::ZERO {
                break;
            }
            match self.work {
                Work::Step => self.done.steps += 1,
                Work::Save => (self.saved, self.since) = (self.done.steps, Nanos::ZERO),
            }
            let is_due = self.work == Work::Step && self.since >= self.every;
            (self.work, self.left) = if is_due { (Work::Save, self.save) } else { (Work::Step, step) };
            // A step of zero time would make this loop endless.
            self.left = self.left.max(Nanos(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::Bytes;

    use super::super::POLICIES;
    use super::super::fleet::tests::fleet;
    use super::super::{Change, CheckpointedJob, Fleet};
    use super::*;
    use crate::planner::uneven::ChainMachine;

    const RECOVERY: Recovery = Recovery {
        save: Nanos(2_000_000_000),
        restart: Nanos(60_000_000_000),
        regroup: Nanos(5_000_000_000),
        lifetime: Nanos(7_200_000_000_000),
    };

    #[test]
    fn without_losses_only_checkpoints_cost() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        let calm = Trace { machines: 12, time: HOUR * 5, changes: Vec::new() };
        for row in &POLICIES {
            let seen = replay(row, &calm, &RECOVERY, &mut prices).unwrap();
            assert!(seen.share > 0.85 && seen.lost == 0 && seen.restarts == 0, "{}: {seen:?}", row.name);
        }
    }

    #[test]
    fn restarting_is_what_the_closed_form_says() {
        // A single pipeline uses all machines and each lost machine is replaced at once, so any loss is a
        // failure of the job.
        let fleet =
            Fleet { machine: ChainMachine { memory: Some(Bytes(60_000_000)), ..fleet().machine }, ..fleet() };
        let mut prices = StepTimes::new(&fleet).unwrap();
        let recovery = Recovery { lifetime: HOUR * 4, ..RECOVERY };
        let trace = Trace::drawn(8, 4.0 * 3600.0, 1e-3, HOUR * 2000, 9);
        let seen = replay(&POLICIES[0], &trace, &recovery, &mut prices).unwrap();
        let between = 4.0 * 3600.0 / 8.0;
        let job = CheckpointedJob { every: daly(2.0, between), save: 2.0, restart: 60.0, mtbf: between };
        let expected = job.expected().work;
        assert!((seen.share / expected - 1.0).abs() < 0.02, "{} {expected}", seen.share);
    }

    #[test]
    fn going_on_is_better_than_beginning_again() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        for seed in 0..3 {
            let trace = Trace::drawn(16, 7200.0, 1800.0, HOUR * 24, seed);
            let seen: Vec<Replay> =
                POLICIES.iter().map(|row| replay(row, &trace, &RECOVERY, &mut prices).unwrap()).collect();
            for (row, other) in POLICIES.iter().zip(&seen).skip(1) {
                assert!(other.steps > seen[0].steps, "{seed} {}: {other:?} {:?}", row.name, seen[0]);
            }
            assert!(seen.iter().all(|seen| seen.share < 1.0), "{seen:?}");
        }
    }

    #[test]
    fn a_model_that_does_not_fit_is_refused_and_machines_that_are_all_gone_stand_still() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        let trace = Trace { machines: 2, time: HOUR, changes: Vec::new() };
        let refused = replay(&POLICIES[0], &trace, &RECOVERY, &mut prices).unwrap_err();
        assert!(matches!(refused, ParallelError::TooSmall { machines: 2, .. }), "{refused}");
        let gone = Change { at: Nanos(HOUR.0 / 2), lost: (0..6).collect(), back: Vec::new() };
        let trace = Trace { machines: 6, time: HOUR, changes: vec![gone] };
        for row in &POLICIES {
            let seen = replay(row, &trace, &RECOVERY, &mut prices).unwrap();
            assert!(seen.idle > Nanos(HOUR.0 / 3), "{}: {seen:?}", row.name);
        }
    }
}
