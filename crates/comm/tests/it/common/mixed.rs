//! Clusters whose ranks use several networks in one run.

use std::sync::Arc;
use std::time::Duration;

use farflung_comm::mixed::{self, Config};
use farflung_comm::quic::{Relay, Socket, SocketConfig};
use farflung_comm::secure::Security;
use farflung_comm::tcp::{GateConfig, SharedMemory, Tcp};
use farflung_comm::{CommError, Transport};

use super::{Cluster, quic};

/// Networks that a rank uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// Shared memory, TCP where it reaches the other rank, QUIC elsewhere.
    Both,
    /// TCP where this rank reaches the other one, QUIC elsewhere. No rank reaches this one over TCP, because
    /// the address that it advertises is wrong.
    Unreached,
    Quic,
    /// QUIC over the relay alone.
    Relay,
}

/// The ranks of a job with a ticket.
pub(crate) struct Job<'a> {
    ranks: Vec<Over>,
    keys: quic::Job,
    relay: Option<&'a Relay>,
}

impl<'a> Job<'a> {
    pub(crate) fn new(ranks: &[Over], relay: Option<&'a Relay>) -> Self {
        Self { ranks: ranks.to_vec(), keys: quic::Job::new(ranks.len()), relay }
    }

    /// Returns the protection of a rank that has the ticket, or made it.
    pub(crate) fn by_ticket(&self, rank: u32) -> Security {
        self.keys.security(rank)
    }

    /// Returns the configuration of a rank.
    pub(crate) fn config(&self, rank: u32, security: Security) -> Result<Config, CommError> {
        let over = self.ranks[rank as usize];
        let at = self.keys.ticket.addresses[0].clone();
        let mut socket = SocketConfig::new(security.clone());
        socket.relays = self.relay.iter().map(|relay| relay.url()).collect();
        socket.listen = Some(if rank == 0 { at.clone() } else { "127.0.0.1:0".to_owned() });
        socket.direct = over != Over::Relay;
        let listen = if rank == 0 { at.clone() } else { String::new() };
        let mut gate = GateConfig::new(listen, "night", security);
        gate.deadline = Duration::from_secs(30);
        gate.shared_memory = SharedMemory::WherePossible;
        if over == Over::Unreached {
            gate.advertise = Some("127.0.0.1:1".to_owned());
            gate.shared_memory = SharedMemory::Never;
        }
        let sockets = matches!(over, Over::Both | Over::Unreached);
        let gate = gate.over_quic(&Socket::open(&socket)?, sockets);
        let relays = self.relay.map(|relay| format!(",{}", relay.url())).unwrap_or_default();
        let host = vec![at.clone(), format!("quic:{at}{relays}")];
        Ok(Config::new(rank, self.ranks.len() as u32, host, gate))
    }

    /// Starts all ranks, each with the protection that `security` returns.
    pub(crate) fn join(&self, security: impl Fn(u32) -> Security + Sync) -> Vec<Result<Arc<Tcp>, CommError>> {
        std::thread::scope(|scope| {
            let security = &security;
            let joins: Vec<_> = (0..self.ranks.len() as u32)
                .map(|rank| scope.spawn(move || mixed::join(&self.config(rank, security(rank))?)))
                .collect();
            joins.into_iter().map(|join| join.join().unwrap()).collect()
        })
    }
}

/// Makes a cluster in which rank 1 uses QUIC alone, and rank 2 uses TCP only where rank 2 makes the connection.
pub(crate) fn cluster(n: usize) -> Cluster {
    let over = |rank| match rank {
        1 => Over::Quic,
        2 => Over::Unreached,
        _ => Over::Both,
    };
    let ranks: Vec<Over> = (0..n).map(over).collect();
    let job = Job::new(&ranks, None);
    job.join(|rank| job.by_ticket(rank)).into_iter().map(|end| end.unwrap() as Arc<dyn Transport>).collect()
}
