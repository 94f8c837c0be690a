//! Helpers of all test modules: clusters on every transport, and one thread per rank.
#![allow(dead_code, reason = "each suite uses its part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;

use farflung_base::{Nanos, Topology};
use farflung_comm::secure::{Identity, JoinSecret, Security};
use farflung_comm::{Communicator, Transport, memory, simulated, tcp};

#[cfg(feature = "iroh")]
pub(crate) mod mixed;
#[cfg(feature = "iroh")]
pub(crate) mod quic;

pub(crate) type Cluster = Vec<Arc<dyn Transport>>;

/// Makes a cluster of this number of endpoints.
pub(crate) type Make = fn(usize) -> Cluster;

/// Every transport except MPI, by name.
pub(crate) const TRANSPORTS: [(&str, Make); 6 + 2 * cfg!(feature = "iroh") as usize] = [
    ("memory", memory_cluster),
    ("simulated", simulated_cluster),
    ("tcp", tcp_cluster),
    ("tcp with three streams", |n| tcp_at(n, &format!("127.0.0.1:{}", free_port()), 3)),
    ("tls", tls_cluster),
    ("shared memory", shared_memory_cluster),
    #[cfg(feature = "iroh")]
    ("iroh", quic::cluster),
    #[cfg(feature = "iroh")]
    ("mixed", mixed::cluster),
];

pub(crate) fn memory_cluster(n: usize) -> Cluster {
    memory::cluster(n).into_iter().map(|t| t as Arc<dyn Transport>).collect()
}

pub(crate) fn simulated_cluster(n: usize) -> Cluster {
    over(&Topology::uniform(n, "100mbit,5ms".parse().unwrap()))
}

/// Returns a port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub(crate) fn tcp_cluster(n: usize) -> Cluster {
    tcp_at(n, &format!("127.0.0.1:{}", free_port()), 1)
}

/// A cluster over encrypted TCP, with a join secret.
pub(crate) fn tls_cluster(n: usize) -> Cluster {
    let secret = JoinSecret::generate().unwrap();
    let security = || Security::by_secret(&Identity::generate().unwrap(), &secret);
    tcp_by(n, &format!("127.0.0.1:{}", free_port()), |config| config.security = security())
}

/// A cluster over shared memory.
pub(crate) fn shared_memory_cluster(n: usize) -> Cluster {
    tcp_by(n, &format!("127.0.0.1:{}", free_port()), |config| {
        config.shared_memory = tcp::SharedMemory::Always;
    })
}

pub(crate) fn tcp_at(n: usize, master: &str, streams: usize) -> Cluster {
    tcp_by(n, master, |config| config.streams = streams)
}

/// A cluster over TCP, whose settings `set` changes.
pub(crate) fn tcp_by(n: usize, master: &str, set: impl Fn(&mut tcp::Config)) -> Cluster {
    std::thread::scope(|scope| {
        let joins: Vec<_> = (0..n as u32)
            .map(|rank| {
                let mut config = tcp::Config::new(rank, n as u32, master);
                set(&mut config);
                scope.spawn(move || tcp::join(&config).unwrap() as Arc<dyn Transport>)
            })
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    })
}

/// A cluster on a simulated network.
pub(crate) fn over(topology: &Topology) -> Cluster {
    simulated::cluster(topology).into_iter().map(|t| t as Arc<dyn Transport>).collect()
}

/// Runs `f` on a thread per rank and returns the results in rank order.
pub(crate) fn on_ranks<T: Send>(cluster: Cluster, f: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = cluster
            .into_iter()
            .map(|transport| {
                let f = &f;
                let comm = Communicator::new(transport).with_deadline(Nanos::from_millis(20_000));
                scope.spawn(move || f(comm))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
