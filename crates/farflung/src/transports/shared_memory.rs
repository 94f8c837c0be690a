//! Transport over memory that the processes of one machine share.

use farflung_comm::tcp::SharedMemory;

use super::{Connects, JoinSettings, TransportMethod, tcp};

/// [`farflung_comm::tcp`] with [`SharedMemory::Always`].
pub const SHARED_MEMORY: TransportMethod = TransportMethod {
    name: "shared-memory",
    summary: "shared memory between processes of one machine; not with --up",
    simulated: false,
    fixed: Some(
        "with auto, members on one machine use shared memory automatically, and members on other machines \
         can join",
    ),
    ends: Connects::Processes(|meeting| {
        tcp::meet(&JoinSettings { shared_memory: SharedMemory::Always, ..meeting.clone() })
    }),
};
