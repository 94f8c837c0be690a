//! Clusters over QUIC.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use farflung_comm::quic::{self, Config, Quic};
use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
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

    pub(crate) fn config(&self, rank: u32) -> Config {
        let identity = &self.identities[rank as usize];
        let security = match rank {
            0 => Security::by_secret(identity, &self.secret),
            _ => Security::by_ticket(identity, &self.ticket),
        };
        Config::new(rank, self.identities.len() as u32, self.ticket.addresses.join(","), security)
    }

    /// Starts all ranks, with the settings changed by `set`.
    pub(crate) fn join(&self, set: impl Fn(&mut Config) + Sync) -> Vec<Result<Arc<Quic>, CommError>> {
        std::thread::scope(|scope| {
            let joins: Vec<_> = (0..self.identities.len() as u32)
                .map(|rank| {
                    let mut config = self.config(rank);
                    set(&mut config);
                    scope.spawn(move || quic::join(&config))
                })
                .collect();
            joins.into_iter().map(|join| join.join().unwrap()).collect()
        })
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
