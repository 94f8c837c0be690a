//! Communicators of members whose operations a second stop signal cancels.

use farflung_comm::Communicator;

use crate::train::job::Job;

/// Returns the communicator with the job's deadline; a second stop signal cancels its operations.
pub(super) fn stoppable(job: &Job, comm: Communicator) -> Communicator {
    job.stop.with_stop(comm.with_deadline(job.deadline()))
}
