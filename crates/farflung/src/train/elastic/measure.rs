//! Speed measurement of a newcomer before it joins. It takes two steps by itself and discards their results;
//! the first one is a warm-up. The measured time of a microbatch decides its first share.

use farflung_base::Nanos;
use farflung_comm::Communicator;
use farflung_parallel::plan::Replica;

use super::stoppable::stoppable;
use crate::events::causes;
use crate::train::job::Job;
use crate::train::links;
use crate::train::trainer::Trainer;
use crate::{Error, Result};

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
    let found = measure(job, (comm, slot), threads, simulated);
    found.inspect_err(|error| tracing::warn!("failed to measure this machine: {}", causes(error))).ok()
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
