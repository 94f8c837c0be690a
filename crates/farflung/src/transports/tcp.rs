//! Sockets between processes.

use std::time::Duration;

use farflung_comm::{Communicator, tcp};

use super::{Ends, Meeting, TransportMethod};
use crate::Result;

/// [`farflung_comm::tcp`].
pub const TCP: TransportMethod = TransportMethod {
    name: "tcp",
    summary: "sockets between processes, as `farflung launch` starts them; encrypted with a ticket or secret",
    simulated: false,
    fixed: None,
    ends: Ends::Processes(meet),
};

/// Meets the others; with whom memory is shared is said by the meeting.
pub(super) fn meet(meeting: &Meeting) -> Result<Communicator> {
    let Meeting { rank, world_size, master, security, job, deadline, pace, shared_memory } = meeting;
    let mut join = tcp::Config::new(*rank, *world_size, master.clone());
    join.deadline = Duration::from(*deadline);
    join.pace = *pace;
    join.shared_memory = *shared_memory;
    join.job.clone_from(job);
    join.security.clone_from(security);
    Ok(Communicator::new(tcp::join(&join)?).with_deadline(*deadline))
}
