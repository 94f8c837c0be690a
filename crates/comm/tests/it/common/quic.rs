//! Clusters over QUIC.

use std::sync::Arc;

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

/// Returns a UDP port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub(crate) fn cluster(n: usize) -> Cluster {
    Job::new(n).join(|_| {}).into_iter().map(|t| t.unwrap() as Arc<dyn Transport>).collect()
}
