//! Speed measurement of a newcomer before it joins. It takes two steps by itself and discards their results;
//! the first one is a warm-up. Where each member has the whole model, the measured time of a microbatch decides
//! its first share. A newcomer to pipelines may not have the memory for the whole model: it measures a model of
//! one layer, and its operations a second decide its first share.

use std::sync::Arc;

use farflung_base::Nanos;
use farflung_comm::Communicator;
use farflung_parallel::Plan;
use farflung_parallel::plan::Replica;
use farflung_zoo::Resize;

use super::rank_speeds;
use super::stoppable::stoppable;
use crate::events::causes;
use crate::train::job::Job;
use crate::train::trainer::Trainer;
use crate::train::{links, planned};
use crate::{Error, Result, TrainConfig};

/// Measures the time of one microbatch on this rank; `None` if shares do not follow speed, or if the
/// measurement fails. `comm` must contain this rank only.
pub(super) fn measured(
    job: &Job,
    (comm, slot): (&Communicator, u32),
    threads: usize,
    simulated: bool,
) -> Option<Nanos> {
    if !job.follows_speed() {
        return None;
    }
    known(measure(job, (comm, slot), threads, simulated))
}

/// Measures the speed of this rank in operations a second, for members in pipelines; `None` if neither shares
/// nor pools depend on speeds, or if the measurement fails. `comm` must contain this rank only.
pub(super) fn measured_speed(
    job: &Job,
    (comm, slot): (&Communicator, u32),
    threads: usize,
    simulated: bool,
) -> Option<f64> {
    if !job.follows_speed() && !job.is_pooled() {
        return None;
    }
    known(of_one_layer(job).and_then(|small| {
        let time = measure(&small, (comm, slot), threads, simulated)?;
        let operations: f64 = rank_speeds::work(&small.plan, &small.model).iter().sum();
        Ok(operations / time.as_secs_f64())
    }))
}

fn known<T>(found: Result<T>) -> Option<T> {
    found.inspect_err(|error| tracing::warn!("failed to measure this machine: {}", causes(error))).ok()
}

/// Returns the job of a newcomer to pipelines with one layer of its model, and one microbatch a step.
fn of_one_layer(job: &Job) -> Result<Job> {
    let model = job.model.resized(Resize { layers: Some(1), ..Resize::default() })?;
    let wished = job.pipelines.as_deref().unwrap_or(&job.given).clone();
    let one = TrainConfig {
        layers: Some(1),
        microbatches: Some(1),
        accumulate: 1,
        stages: 1,
        workers: 1,
        pools: None,
        pool_rates: None,
        ..wished
    };
    let plan = planned::divided(&one, &model, (1, None), None)?;
    let plan = Plan { levels: job.plan.levels.clone(), ..plan.into_plan() };
    let (config, given) = (one.run_settings(), Arc::new(one));
    Job { config, given, model, pipelines: None, initial: None, ..job.clone() }.with_plan(plan)
}

fn measure(job: &Job, (comm, slot): (&Communicator, u32), threads: usize, simulated: bool) -> Result<Nanos> {
    let each = job.plan.microbatches.first().copied().unwrap_or(1);
    let machines = vec![format!("member.{}", slot)];
    let plan = job.plan.with_replicas(&[Replica::New { machines, microbatches: each }])?;
    let job = Job { failure: None, departure: None, fault: None, ..job.with_plan(plan)? };
    let comm = links::view_communicator(&job, stoppable(&job, comm.clone()), simulated)?;
    let mut trainer = Trainer::new(&job, comm, threads)?;
    for _ in 0..2 {
        trainer.step(false)?;
    }
    let (begun, ended) = trainer.last_pass();
    let time = Nanos(ended.saturating_sub(begun).0 / u64::from(each));
    let wrong =
        Error::Message { message: "the measured time of a microbatch".to_owned(), problem: "is not above 0" };
    if time > Nanos::ZERO { Ok(time) } else { Err(wrong) }
}

#[cfg(test)]
mod tests {
    use farflung_base::Topology;
    use farflung_comm::simulated;

    use super::*;
    use crate::Stop;
    use crate::config::choice::BalanceKind;
    use crate::train::elastic::founder;

    #[test]
    fn a_newcomer_to_pipelines_finds_the_speed_of_its_machine() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text.txt");
        std::fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(99)).unwrap();
        for (pooled, balance) in [(false, BalanceKind::BySpeed), (true, BalanceKind::Equal)] {
            let config = TrainConfig {
                data: Some(text.clone()),
                layers: Some(4),
                dim: Some(32),
                heads: Some(2),
                context: Some(16),
                batch: 2,
                steps: 9,
                workers: 1,
                stages: 2,
                pooled,
                balance,
                compute_rate: 3e6,
                ..TrainConfig::default()
            };
            let job = founder(config.clone(), &Stop::manual()).unwrap();
            let ends = simulated::cluster(&Topology::uniform(1, job.config.link));
            let alone = Communicator::new(ends[0].clone());
            let speed = measured_speed(&job, (&alone, 0), 1, true).unwrap();
            assert!((speed / 3e6 - 1.0).abs() < 0.01, "{speed}");
            let told = TrainConfig { balance: BalanceKind::Equal, pooled: false, ..config };
            let equal = founder(told, &Stop::manual()).unwrap();
            assert_eq!(measured_speed(&equal, (&alone, 0), 1, true), None);
        }
    }
}
