//! A newcomer measures itself before it comes in: two steps of its own, of which the first warms up, and which
//! count for nothing. What a microbatch took decides its first share.

use farflung_base::Nanos;
use farflung_comm::Communicator;
use farflung_parallel::plan::Replica;

use super::change::tied;
use crate::events::causes;
use crate::train::job::Job;
use crate::train::links;
use crate::train::trainer::Trainer;
use crate::{Error, Result};

/// What a microbatch takes this rank, where shares follow that; `comm` is of this rank alone.
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
    found.inspect_err(|error| tracing::warn!("this machine is not measured: {}", causes(error))).ok()
}

fn measure(job: &Job, (comm, slot): (&Communicator, u32), threads: usize, simulated: bool) -> Result<Nanos> {
    let each = job.plan.microbatches.first().copied().unwrap_or(1);
    let machines = vec![format!("member.{}", slot)];
    let plan = job.plan.with_replicas(&[Replica::New { machines, microbatches: each }])?;
    let job = Job { failure: None, departure: None, fault: None, ..job.with_plan(plan)? };
    let comm = links::seat(&job, tied(&job, comm.clone()), simulated)?;
    let mut trainer = Trainer::new(&job, comm, threads)?;
    for _ in 0..2 {
        trainer.step(false)?;
    }
    let (begun, ended) = trainer.last_pass();
    let time = Nanos(ended.saturating_sub(begun).0 / u64::from(each));
    let wrong = Error::Message { message: "what a microbatch takes".to_owned(), problem: "is no time" };
    if time > Nanos::ZERO { Ok(time) } else { Err(wrong) }
}
