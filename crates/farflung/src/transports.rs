//! Transports by name: one file per transport, one row each in [`TRANSPORTS`].

mod iroh;
mod memory;
mod mixed;
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

pub use iroh::{IROH, Reach};
pub use memory::MEMORY;
pub use mixed::{is_second_network_address, meet_by_auto};
pub use mpi::{MPI, MPI_NATIVE};
pub use shared_memory::SHARED_MEMORY;
pub use simulated::SIMULATED;
pub use tcp::TCP;

/// Data that a process needs to meet the other processes of its job.
#[derive(Debug, Clone)]
pub struct JoinSettings {
    /// This process's rank.
    pub rank: u32,
    /// Number of processes of the job.
    pub world_size: u32,
    /// Host and port of rank 0, as `host:port`; several addresses are separated by commas. Relays, as
    /// `http://host:port`, may be among them.
    pub master: String,
    /// Further relays that this process may use, by their URLs.
    pub relays: Vec<String>,
    /// Protection of connections, and the processes that may join.
    pub security: Security,
    /// The job's name.
    pub job: String,
    /// Longest time to wait for the other processes.
    pub deadline: Nanos,
    /// Limit on the rate at which this process sends over sockets.
    pub pace: Pace,
    /// Whether processes of one machine share memory, for transports over sockets.
    pub shared_memory: SharedMemory,
}

/// Opens the endpoints of all ranks; takes the number of ranks, and the topology if links are simulated.
pub type OpenEnds = fn(usize, Option<&Topology>) -> Vec<Arc<dyn Transport>>;

/// Whether a transport connects threads or processes.
#[derive(Debug, Clone, Copy)]
pub enum Connects {
    /// Threads of one process: opens the endpoints of all ranks. The topology declares the links if they are
    /// simulated.
    Threads(OpenEnds),
    /// Processes: meets the others and returns the communicator.
    Processes(fn(&JoinSettings) -> Result<Communicator>),
}

/// A row of the table of transports.
#[derive(Debug, Clone, Copy)]
pub struct TransportMethod {
    /// The name on command lines.
    pub name: &'static str,
    /// One-line description of the transport.
    pub summary: &'static str,
    /// Whether links are declared in a topology and time is virtual.
    pub simulated: bool,
    /// Why members cannot join or leave a run over this transport; `None` if they can.
    pub fixed: Option<&'static str>,
    /// Whether the transport connects threads or processes.
    pub ends: Connects,
}

/// All transports. The default between threads is the first row for threads; the default between processes is
/// the first row for processes.
pub const TRANSPORTS: &[TransportMethod] = &[SIMULATED, MEMORY, TCP, SHARED_MEMORY, IROH, MPI, MPI_NATIVE];

impl TransportMethod {
    /// Returns whether ranks are processes, rather than threads of one process.
    #[must_use]
    pub const fn joins_processes(&self) -> bool {
        matches!(self.ends, Connects::Processes(_))
    }
}

/// Ends MPI, if this process uses it, before the process exits with `code`. Other transports need no such call.
pub fn leave(code: u8) {
    mpi::leave(code);
}
