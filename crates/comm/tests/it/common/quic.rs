//! Clusters over QUIC alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use farflung_comm::mixed;
use farflung_comm::quic::{Socket, SocketConfig};
use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
use farflung_comm::tcp::{GateConfig, Pace, Tcp};
use farflung_comm::{CommError, Transport};

use super::Cluster;

/// Settings of a job's ranks: a key for each, and for all but the first a ticket of the first.
pub(crate) struct Job {
    pub(crate) identities: Vec<Identity>,
    pub(crate) secret: JoinSecret,
    pub(crate) ticket: Ticket,
}

impl Job {
    pub(crate) fn new(n: usize) -> Self {
        let identities: Vec<_> = (0..n).map(|_| Identity::generate().unwrap()).collect();
        let secret = JoinSecret::generate().unwrap();
        let expiry = unix_seconds() + 600;
        let ticket = Ticket {
            addresses: vec![format!("127.0.0.1:{}", free_port())],
            host: identities[0].public(),
            secret: secret.until(expiry),
            expiry,
        };
        Self { identities, secret, ticket }
    }

    /// Returns the protection of a rank that has the ticket, or made it.
    pub(crate) fn security(&self, rank: u32) -> Security {
        let identity = &self.identities[rank as usize];
        match rank {
            0 => Security::by_secret(identity, &self.secret),
            _ => Security::by_ticket(identity, &self.ticket),
        }
    }

    pub(crate) fn config(&self, rank: u32) -> Config {
        Config {
            rank,
            world_size: self.identities.len() as u32,
            host: self.ticket.addresses.clone(),
            job: "farflung".to_owned(),
            deadline: Duration::from_mins(1),
            pace: Pace::default(),
            socket: SocketConfig::new(self.security(rank)),
        }
    }

    /// Starts all ranks, with the settings changed by `set`.
    pub(crate) fn join(&self, set: impl Fn(&mut Config) + Sync) -> Vec<Result<Arc<Tcp>, CommError>> {
        std::thread::scope(|scope| {
            let joins: Vec<_> = (0..self.identities.len() as u32)
                .map(|rank| {
                    let mut config = self.config(rank);
                    set(&mut config);
                    scope.spawn(move || config.join())
                })
                .collect();
            joins.into_iter().map(|join| join.join().unwrap()).collect()
        })
    }
}

/// Settings of a rank that uses QUIC alone.
pub(crate) struct Config {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    /// Addresses of rank 0: `host:port`, or URLs of relays.
    pub(crate) host: Vec<String>,
    pub(crate) job: String,
    pub(crate) deadline: Duration,
    pub(crate) pace: Pace,
    pub(crate) socket: SocketConfig,
}

impl Config {
    /// Opens the rank's socket: rank 0's at its address, the others' at any port.
    pub(crate) fn open(&self) -> Result<Arc<Socket>, CommError> {
        let is_relay = |one: &&String| one.contains("://");
        let mut socket = self.socket.clone();
        socket.relays.extend(self.host.iter().filter(is_relay).cloned());
        let at = self.host.iter().find(|one| self.rank == 0 && !is_relay(one)).cloned();
        socket.listen = Some(at.unwrap_or_else(|| "127.0.0.1:0".to_owned()));
        Socket::open(&socket)
    }

    /// Meets the other ranks through a socket.
    pub(crate) fn join_by(&self, socket: &Arc<Socket>) -> Result<Arc<Tcp>, CommError> {
        let mut gate = GateConfig::new("", &*self.job, self.socket.security.clone()).over_quic(socket, false);
        gate.deadline = self.deadline;
        let quic = |one: &String| if one.contains("://") { one.clone() } else { format!("quic:{one}") };
        let host = self.host.iter().map(quic).collect::<Vec<_>>().join(",");
        let mut config = mixed::Config::new(self.rank, self.world_size, vec![host], gate);
        config.pace = self.pace;
        mixed::join(&config)
    }

    pub(crate) fn join(&self) -> Result<Arc<Tcp>, CommError> {
        self.join_by(&self.open()?)
    }
}

/// Returns a port that was free for TCP and UDP a moment ago. It is below the ports that the system gives to
/// outgoing connections (from 32768 on Linux): a rank that calls before rank 0 listens could otherwise get this
/// very port for its call.
pub(crate) fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    loop {
        let calls = CALLS.fetch_add(1, Ordering::Relaxed);
        let at = std::process::id().wrapping_mul(7919).wrapping_add(calls.wrapping_mul(13)) % 12_000;
        let address = ("127.0.0.1", 20_000 + at as u16);
        if std::net::TcpListener::bind(address).is_ok() && std::net::UdpSocket::bind(address).is_ok() {
            return address.1;
        }
    }
}

pub(crate) fn cluster(n: usize) -> Cluster {
    Job::new(n).join(|_| {}).into_iter().map(|t| t.unwrap() as Arc<dyn Transport>).collect()
}
