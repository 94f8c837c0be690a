//! What carries bytes between ranks, by name: one file a transport, one row in [`TRANSPORTS`].

mod iroh;
mod memory;
mod mpi;
mod shared_memory;
mod simulated;
mod tcp;

use std::sync::Arc;

use farflung_base::{Nanos, Topology};
use farflung_comm::secure::Security;
use farflung_comm::tcp::{Pace, SharedMemory};
use farflung_comm::{Communicator, Transport};

use crate::Result;

pub use iroh::IROH;
pub use memory::MEMORY;
pub use mpi::MPI;
pub use shared_memory::SHARED_MEMORY;
pub use simulated::SIMULATED;
pub use tcp::TCP;

/// Where the processes of a job meet.
#[derive(Debug, Clone)]
pub struct Meeting {
    /// This process's rank.
    pub rank: u32,
    /// All processes.
    pub world_size: u32,
    /// Host and port of rank 0; several with commas between. Relays, as `http://host:port`, may be among them.
    pub master: String,
    /// Further relays that this process may use, by their URLs.
    pub relays: Vec<String>,
    /// How connections are protected, and who may join.
    pub security: Security,
    /// The job's name.
    pub job: String,
    /// Longest wait for the others.
    pub deadline: Nanos,
    /// How fast this process sends over sockets.
    pub pace: Pace,
    /// Whether processes of one machine share memory, where the transport leaves that open.
    pub shared_memory: SharedMemory,
}

/// Opens the ends of all ranks.
pub type OpenEnds = fn(usize, Option<&Topology>) -> Vec<Arc<dyn Transport>>;

/// Who is at the ends of a transport.
#[derive(Debug, Clone, Copy)]
pub enum Ends {
    /// Threads of one process: the endpoints of all ranks. Simulated links are declared.
    Threads(OpenEnds),
    /// Processes, which meet.
    Processes(fn(&Meeting) -> Result<Communicator>),
}

/// A row of the table of transports.
#[derive(Debug, Clone, Copy)]
pub struct TransportMethod {
    /// The name on command lines.
    pub name: &'static str,
    /// One line on what it is.
    pub summary: &'static str,
    /// Whether links are declared, and time is virtual.
    pub simulated: bool,
    /// Why members of a run cannot come and leave over it, where that is so.
    pub fixed: Option<&'static str>,
    /// Who is at its ends.
    pub ends: Ends,
}

/// All transports: the first of those between threads, and the first of those between processes, is taken where
/// nothing is said.
pub const TRANSPORTS: &[TransportMethod] = &[SIMULATED, MEMORY, TCP, SHARED_MEMORY, IROH, MPI];

impl TransportMethod {
    /// Whether ranks are processes, rather than threads of one.
    #[must_use]
    pub const fn joins_processes(&self) -> bool {
        matches!(self.ends, Ends::Processes(_))
    }
}

/// To be called by a process that is about to exit with this code: ends what has to end in all processes of a
/// job together, which is MPI.
pub fn leave(code: u8) {
    mpi::leave(code);
}
