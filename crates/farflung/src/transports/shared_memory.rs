//! Transport over memory that the processes of one machine share.

use farflung_comm::tcp::SharedMemory;

use super::{Connects, JoinSettings, TransportMethod, tcp};

/// [`farflung_comm::tcp`] with [`SharedMemory::Always`].
pub const SHARED_MEMORY: TransportMethod = TransportMethod {
    name: "shared-memory",
    summary: "memory shared by all processes, which are on one machine; without --up",
    simulated: false,
    fixed: Some(
        "with auto members of one machine share memory by themselves, and others may come from elsewhere",
    ),
    ends: Connects::Processes(|meeting| {
        tcp::meet(&JoinSettings { shared_memory: SharedMemory::Always, ..meeting.clone() })
    }),
};
