//! How the time of the newest steps was spent, for all ranks that report it.

use std::collections::BTreeMap;

use super::snapshot::{RankTime, StepFacts};
use crate::StepTimes;

/// Number of newest steps that are kept.
pub const MOST_STEPS: usize = 12;

/// Times by step and rank, and the last times of each rank.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    steps: BTreeMap<u64, BTreeMap<u32, StepTimes>>,
    last: BTreeMap<u32, StepTimes>,
}

impl Timeline {
    /// Takes a line of the file of `rank`.
    ///
    /// Errors: values that are not valid times.
    pub(super) fn line(&mut self, rank: u32, line: &[u8]) -> Result<(), String> {
        let times: StepTimes = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let StepTimes { took_s, wait_s, communicate_s, step, .. } = times;
        if [took_s, wait_s, communicate_s].iter().any(|time| !(0.0..1e12).contains(time)) {
            return Err("its times are negative or too large".to_owned());
        }
        // A run that continues from a checkpoint repeats steps.
        if self.last.get(&rank).is_some_and(|last| last.step >= step) {
            self.forget(rank, step);
        }
        self.last.insert(rank, times);
        self.steps.entry(step).or_default().insert(rank, times);
        while self.steps.len() > MOST_STEPS {
            self.steps.pop_first();
        }
        Ok(())
    }

    /// Removes a rank's times of all steps from `from` on.
    fn forget(&mut self, rank: u32, from: u64) {
        for (_, ranks) in self.steps.range_mut(from..) {
            ranks.remove(&rank);
        }
        self.steps.retain(|_, ranks| !ranks.is_empty());
    }

    /// Removes all times of a rank.
    pub(super) fn clear(&mut self, rank: u32) {
        self.forget(rank, 0);
        self.last.remove(&rank);
    }

    /// Returns the last times of a rank.
    pub(super) fn last(&self, rank: u32) -> Option<&StepTimes> {
        self.last.get(&rank)
    }

    /// Returns the newest steps. `ranks` is the number of ranks of the job, if known. The last step is left out
    /// while fewer ranks have reported it than the step before.
    ///
    /// An average ends for all ranks at about the same time. If a rank waits longer for an average than the
    /// rank that reached it last, the difference is a wait for that last rank. So if all ranks have reported a
    /// step, and replicas had equal parameters at its end, the difference counts as waiting, not as
    /// communication.
    pub(super) fn facts(&self, ranks: Option<usize>) -> Vec<StepFacts> {
        let facts = |(&step, told): (&u64, &BTreeMap<u32, StepTimes>)| {
            let all = ranks.is_some_and(|ranks| ranks > 1 && told.len() == ranks);
            let together = all && told.values().all(|times| times.met);
            let least = told.values().map(|times| times.communicate_s).fold(f64::INFINITY, f64::min);
            let time = |times: &StepTimes| {
                let late = if together { times.communicate_s - least } else { 0.0 };
                RankTime {
                    rank: times.rank,
                    compute_s: times.compute_s(),
                    wait_s: times.wait_s + late,
                    communicate_s: times.communicate_s - late,
                }
            };
            StepFacts { step, ranks: told.values().map(time).collect() }
        };
        // If fewer ranks have reported the newest step than the step before, the newest one is left out.
        let counts = self.steps.values().rev().map(BTreeMap::len).take(2).collect::<Vec<_>>();
        let half_told = matches!(counts[..], [newest, before] if newest < before);
        self.steps.iter().take(self.steps.len() - usize::from(half_told)).map(facts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(timeline: &mut Timeline, rank: u32, step: u64, times: [f64; 3]) {
        let [took_s, wait_s, communicate_s] = times;
        let times = StepTimes {
            step,
            rank,
            took_s,
            wait_s,
            communicate_s,
            bytes_sent: 5,
            met: true,
            ..StepTimes::default()
        };
        timeline.line(rank, &serde_json::to_vec(&times).unwrap()).unwrap();
    }

    #[test]
    fn who_waits_longer_than_the_last_to_come_has_waited_for_it() {
        let mut timeline = Timeline::default();
        told(&mut timeline, 0, 1, [10.0, 1.0, 5.0]);
        told(&mut timeline, 1, 1, [10.0, 0.0, 2.0]);
        let split = |ranks| {
            let [step] = &timeline.facts(ranks)[..] else { unreachable!() };
            step.ranks.iter().map(|r| [r.compute_s, r.wait_s, r.communicate_s]).collect::<Vec<_>>()
        };
        assert_eq!(split(Some(2)), [[4.0, 4.0, 2.0], [8.0, 0.0, 2.0]]);
        // Without the times of all ranks, the reported split is kept.
        let as_told = [[4.0, 1.0, 5.0], [8.0, 0.0, 2.0]];
        assert_eq!([split(Some(3)), split(None)], [as_told, as_told]);
    }

    #[test]
    fn the_newest_steps_are_kept_and_a_rank_that_goes_back_replaces_its_own() {
        let mut timeline = Timeline::default();
        (1..=100).for_each(|step| told(&mut timeline, 0, step, [1.0, 0.0, 0.0]));
        (1..=100).for_each(|step| told(&mut timeline, 1, step, [1.0, 0.0, 0.0]));
        let steps = |timeline: &Timeline| timeline.facts(None).iter().map(|s| s.step).collect::<Vec<_>>();
        assert_eq!(steps(&timeline), (89..=100).collect::<Vec<_>>());
        told(&mut timeline, 1, 95, [2.0, 0.0, 0.0]);
        assert_eq!(timeline.facts(None).last().unwrap().ranks.len(), 1);
        assert_eq!(timeline.last(1).unwrap().step, 95);
        timeline.clear(0);
        assert_eq!(steps(&timeline), (89..=95).collect::<Vec<_>>());
        // A step that some ranks have not reported yet is left out.
        told(&mut timeline, 0, 95, [2.0, 0.0, 0.0]);
        told(&mut timeline, 1, 96, [2.0, 0.0, 0.0]);
        assert_eq!(steps(&timeline).last(), Some(&95));
        told(&mut timeline, 0, 96, [2.0, 0.0, 0.0]);
        // An absurd step number is removed when the rank reports a smaller one.
        told(&mut timeline, 1, u64::MAX, [2.0, 0.0, 0.0]);
        told(&mut timeline, 1, 97, [2.0, 0.0, 0.0]);
        told(&mut timeline, 0, 97, [2.0, 0.0, 0.0]);
        assert_eq!(steps(&timeline).last(), Some(&97));
    }

    #[test]
    fn times_that_are_none_are_refused() {
        let mut timeline = Timeline::default();
        for bad in [
            "{}",
            "7",
            r#"{"step":1,"rank":0,"took_s":-1,"wait_s":0,"communicate_s":0,"bytes_sent":0,"met":true}"#,
            r#"{"step":1,"rank":0,"took_s":1e300,"wait_s":0,"communicate_s":0,"bytes_sent":0,"met":true}"#,
        ] {
            assert!(timeline.line(0, bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(timeline.facts(None).is_empty() && timeline.last(0).is_none());
    }
}
