//! Communicators of members that a stop cancels.

use farflung_comm::Communicator;

use crate::train::job::Job;

/// Returns the communicator with the job's deadline, cancelled by a stop.
pub(super) fn stoppable(job: &Job, comm: Communicator) -> Communicator {
    job.stop.with_stop(comm.with_deadline(job.deadline()))
}
