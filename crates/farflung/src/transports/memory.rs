//! Transport between the threads of a process.

use farflung_comm::{Transport, memory};
use std::sync::Arc;

use super::{Connects, TransportMethod};

/// [`farflung_comm::memory`].
pub const MEMORY: TransportMethod = TransportMethod {
    name: "memory",
    summary: "between threads of one process, as fast as memory",
    simulated: false,
    fixed: None,
    ends: Connects::Threads(|world, _| {
        memory::cluster(world).into_iter().map(|end| end as Arc<dyn Transport>).collect()
    }),
};
