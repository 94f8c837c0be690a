//! What the suites share: clusters of every transport, and one thread per rank.
#![allow(dead_code, reason = "each suite uses its part")]

use std::sync::Arc;

use farflung_base::{Nanos, Topology};
use farflung_comm::{Communicator, Transport, memory, simulated};

pub(crate) type Cluster = Vec<Arc<dyn Transport>>;

/// Every transport, by name.
pub(crate) const TRANSPORTS: [(&str, fn(usize) -> Cluster); 2] =
    [("memory", memory_cluster), ("simulated", simulated_cluster)];

pub(crate) fn memory_cluster(n: usize) -> Cluster {
    memory::cluster(n).into_iter().map(|t| t as Arc<dyn Transport>).collect()
}

pub(crate) fn simulated_cluster(n: usize) -> Cluster {
    over(&Topology::uniform(n, "100mbit,5ms".parse().unwrap()))
}

/// A simulated network.
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
