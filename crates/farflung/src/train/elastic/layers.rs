//! Division of the model's layers among the stages by measured speed: a slow rank of a pipeline gets fewer
//! layers, and so does a stage that has fewer members than the others after a loss. All ranks compute it from
//! the same measured times.

use std::ops::Range;

use farflung_base::Nanos;
use farflung_parallel::plan::{Measured, is_worth_it, layers_by_speed, shares_by_speed, step_time};
use farflung_parallel::{Plan, ScheduleSource};
use farflung_zoo::ModelSpec;

use super::rank_speeds::work_of_ranks;
use super::shares::is_possible;
use crate::train::costs::Work;
use crate::train::job::Job;

/// Number of measurements in a row in which another division must be worthwhile: a change moves state.
const TIMES: u32 = 20;

/// A division of the layers that makes steps shorter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Division {
    /// Number of layers of each stage.
    pub(super) layers: Vec<u32>,
    /// Expected time of a step with the present division (`before`) and with this one (`now`).
    pub(super) before: Nanos,
    pub(super) now: Nanos,
}

/// Decides when the layers are divided anew.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LayerBalance {
    /// Number of measurements in a row in which another division would have been worthwhile.
    uneven: u32,
}

impl LayerBalance {
    /// Returns the division of the layers that is worthwhile by the times of all ranks, if one has been for
    /// long enough.
    pub(super) fn observe(&mut self, job: &Job, ranks: &[Measured]) -> Option<Division> {
        let stages = if job.is_pooled() { None } else { Stages::new(&job.plan, &job.model, ranks) };
        let best = stages.and_then(|stages| stages.best());
        let Some(best) = best.filter(|best| is_worth_it(best.before, best.now)) else {
            self.uneven = 0;
            return None;
        };
        self.uneven += 1;
        (self.uneven >= TIMES).then_some(best)
    }
}

/// The measured speeds of a plan's ranks, where each has one part of the model.
struct Stages<'a> {
    plan: &'a Plan,
    work: Work,
    /// Speeds in operations a second, by stage: those of the replicas in their order, or of the members of a
    /// pool.
    speeds: Vec<Vec<f64>>,
    /// Time of a step besides computing.
    rest: Nanos,
}

/// Returns the layers of stages with these numbers of layers.
pub(super) fn ranges(layers: &[u32]) -> Vec<Range<u32>> {
    let mut begin = 0;
    let mut next = |count: &u32| {
        let range = begin..begin + count;
        begin = range.end;
        range
    };
    layers.iter().map(&mut next).collect()
}

impl<'a> Stages<'a> {
    /// Returns `None` if ranks have several parts or slices of sequences, or if the time of one is not known.
    fn new(plan: &'a Plan, model: &'a ModelSpec, ranks: &[Measured]) -> Option<Self> {
        let has_one_part = match &plan.pipeline.schedule {
            ScheduleSource::Named(method) => {
                method.copies() == 1 && plan.parts.len() == plan.stages() as usize
            }
            ScheduleSource::Pools(_) => true,
            ScheduleSource::Text(_) => false,
        };
        if !has_one_part || plan.stages() < 2 || !plan.pipeline.slices.is_empty() {
            return None;
        }
        let work = Work::new(model, plan.batch as usize);
        let mut speeds = vec![Vec::new(); plan.parts.len()];
        for (work, told) in work_of_ranks(plan, model).iter().zip(ranks) {
            speeds.get_mut(work.stage as usize)?.push(work.speed(told)?);
        }
        let rest = ranks.iter().map(|rank| rank.rest).min()?;
        Some(Self { plan, work, speeds, rest })
    }

    fn work_of(&self, layers: &Range<u32>) -> f64 {
        self.work.slice_flops(layers, &self.work.positions())
    }

    /// Returns the best division, with the times of a step with it and with the present one.
    fn best(&self) -> Option<Division> {
        let layers = self.plan.model.layers;
        let present: Vec<Range<u32>> = self.plan.parts.iter().map(|part| part.layers.clone()).collect();
        let speed = |speeds: &Vec<f64>| match self.plan.pools() {
            // Members of a pool get equal numbers of microbatches if a loss has made it one.
            Some(_) => speeds.len() as f64 * slowest(speeds),
            None => speeds.iter().sum(),
        };
        let speeds: Vec<f64> = self.speeds.iter().map(speed).collect();
        // A part that is much larger may not fit into a rank's memory.
        let held = present.iter().map(|layers| layers.end - layers.start).max()?;
        let most = held.max((3 * layers).div_ceil(2 * self.plan.parts.len() as u32));
        let best = layers_by_speed(layers, &speeds, most, |layers| self.work_of(layers))?;
        let (before, now) = (self.step_time(&present)?, self.step_time(&best)?);
        let layers = best.iter().map(|layers| layers.end - layers.start).collect();
        Some(Division { layers, before, now })
    }

    /// Returns the time of a step with this division of the layers and the best shares.
    fn step_time(&self, cut: &[Range<u32>]) -> Option<Nanos> {
        let all = self.plan.all_microbatches();
        if self.plan.pools().is_some() {
            let stage = |(layers, speeds): (&Range<u32>, &Vec<f64>)| {
                all as f64 / speeds.len() as f64 * self.work_of(layers) / slowest(speeds)
            };
            let longest = cut.iter().zip(&self.speeds).map(stage).fold(0.0, f64::max);
            return Some(Nanos::from_secs_f64(longest).saturating_add(self.rest));
        }
        let replica = |replica: usize| {
            let stage = |(layers, speeds): (&Range<u32>, &Vec<f64>)| self.work_of(layers) / speeds[replica];
            let longest = cut.iter().zip(&self.speeds).map(stage).fold(0.0, f64::max);
            Measured { microbatch: Nanos::from_secs_f64(longest), rest: self.rest }
        };
        let replicas: Vec<Measured> = (0..self.plan.replicas() as usize).map(replica).collect();
        let best = shares_by_speed(u32::try_from(all).ok()?, &replicas)?;
        let shares = if is_possible(self.plan, &best) { &best } else { &self.plan.microbatches };
        Some(step_time(shares, &replicas))
    }
}

fn slowest(speeds: &[f64]) -> f64 {
    speeds.iter().copied().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use farflung_zoo::Resize;

    use super::*;

    const PLAN: &str = "version = 1\nmesh = \"data=REPLICAS,pipeline=2\"\nmachines = [MACHINES]\n\
                        precision = \"f32\"\nbatch = 1\nmicrobatches = [SHARES]\n[model]\nname = \"nano\"\n\
                        layers = 6\nparameters = 834304\n[[part]]\nlayers = \"0..3\"\n[[part]]\n\
                        layers = \"3..6\"\n[[boundary]]\n[pipeline]\nschedule = \"1f1b\"\n[[level]]\n\
                        method = \"ddp\"\n";

    /// Returns the plan of some pipelines of two stages of three layers, and a model with hardly any head.
    fn planned(replicas: usize) -> (Plan, ModelSpec) {
        let machines: Vec<String> = (0..2 * replicas).map(|n| format!("\"m{n}\"")).collect();
        let text = PLAN
            .replace("REPLICAS", &replicas.to_string())
            .replace("MACHINES", &machines.join(", "))
            .replace("SHARES", &vec!["4"; replicas].join(", "));
        let sizes = Resize { layers: Some(6), vocab: Some(1), ..Resize::default() };
        (text.parse().unwrap(), ModelSpec::preset("nano").unwrap().resized(sizes).unwrap())
    }

    fn best(millis: &[u64]) -> Division {
        let (plan, model) = planned(millis.len() / 2);
        let of = |&ms| Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::from_millis(10) };
        let ranks: Vec<Measured> = millis.iter().map(of).collect();
        Stages::new(&plan, &model, &ranks).unwrap().best().unwrap()
    }

    #[test]
    fn a_slow_stage_gets_fewer_layers() {
        let even = best(&[30, 30]);
        assert_eq!((&even.layers[..], even.before), (&[3, 3][..], even.now));
        // The second rank takes 60 ms for three layers, and 40 ms for two.
        let slow = best(&[30, 60]);
        assert_eq!(slow.layers, [4, 2]);
        let millis = |time: Nanos| (time.0 + 500_000) / 1_000_000;
        assert_eq!((millis(slow.before), millis(slow.now)), (4 * 60 + 10, 4 * 40 + 10));
        assert_eq!(best(&[30, 60, 30, 60]).layers, [4, 2]);
        assert_eq!(ranges(&[4, 2]), [0..4, 4..6]);
    }

    #[test]
    fn a_time_that_is_not_known_divides_nothing() {
        let (plan, model) = planned(1);
        let ranks = [Measured { microbatch: Nanos::ZERO, rest: Nanos::ZERO }; 2];
        assert!(Stages::new(&plan, &model, &ranks).is_none());
    }
}
