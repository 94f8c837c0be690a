//! Transport over sockets between processes.

use std::time::Duration;

use farflung_comm::{Communicator, tcp};

use super::{Connects, JoinSettings, TransportMethod};
use crate::{Error, Result};

/// [`farflung_comm::tcp`].
pub const TCP: TransportMethod = TransportMethod {
    name: "tcp",
    summary: "sockets between processes, as `farflung launch` starts them; encrypted with a ticket or secret",
    simulated: false,
    fixed: None,
    ends: Connects::Processes(meet),
};

/// Meets the other processes; `meeting.shared_memory` says whether processes of one machine share memory.
pub(super) fn meet(meeting: &JoinSettings) -> Result<Communicator> {
    let JoinSettings { rank, world_size, master, security, job, deadline, pace, shared_memory, .. } = meeting;
    // A ticket may also contain relays, which are only used by QUIC.
    let addresses: Vec<&str> = master.split(',').filter(|address| !address.contains("://")).collect();
    let first = *addresses.first().ok_or_else(|| Error::Setting {
        field: "transport",
        value: TCP.name.to_owned(),
        expected: "iroh, because the ticket contains only relays".to_owned(),
    })?;
    // Rank 0 listens at the first of its addresses; the others try all of them.
    let master = if *rank == 0 { first.to_owned() } else { addresses.join(",") };
    let mut join = tcp::Config::new(*rank, *world_size, master);
    join.deadline = Duration::from(*deadline);
    join.pace = *pace;
    join.shared_memory = *shared_memory;
    join.job.clone_from(job);
    join.security.clone_from(security);
    Ok(Communicator::new(tcp::join(&join)?).with_deadline(*deadline))
}
