//! Runs ranks as threads, for the benches of collectives.

use std::sync::Arc;
use std::thread;

use anyhow::Result;
use farflung::base::Topology;
use farflung::comm::secure::{Identity, JoinSecret, Security};
use farflung::comm::{CommError, Communicator, Transport, memory, simulated, tcp};

/// The endpoints of a network, one for each rank.
pub(crate) type Cluster = Vec<Arc<dyn Transport>>;

pub(crate) fn over_memory(n: usize) -> Cluster {
    memory::cluster(n).into_iter().map(|t| t as Arc<dyn Transport>).collect()
}

pub(crate) fn over_links(topology: &Topology) -> Cluster {
    simulated::cluster(topology).into_iter().map(|t| t as Arc<dyn Transport>).collect()
}

/// Connects ranks over sockets of the loopback interface.
pub(crate) fn over_tcp(n: usize) -> Result<Cluster> {
    over_sockets(n, &Security::unencrypted(), tcp::Pace::default())
}

/// Connects ranks over encrypted sockets of the loopback interface. All ranks have the same key.
pub(crate) fn over_tls(n: usize) -> Result<Cluster> {
    let security = Security::by_secret(&Identity::generate()?, &JoinSecret::generate()?);
    over_sockets(n, &security, tcp::Pace::default())
}

/// Connects ranks through shared memory.
pub(crate) fn over_shared_memory(n: usize) -> Result<Cluster> {
    meet(n, |config| config.shared_memory = tcp::SharedMemory::Always)
}

/// A kind of network between endpoints of one process.
pub(crate) struct NetworkKind {
    pub(crate) name: &'static str,
    /// Opens a network of this many endpoints.
    pub(crate) open: fn(usize) -> Result<Cluster>,
}

/// All kinds of networks. The first one is memory.
pub(crate) const NETWORK_KINDS: &[NetworkKind] = &[
    NetworkKind { name: "memory", open: |n| Ok(over_memory(n)) },
    NetworkKind { name: "simulated", open: |n| Ok(over_links(&Topology::uniform(n, "1gbit,1ms".parse()?))) },
    NetworkKind { name: "tcp", open: over_tcp },
    NetworkKind { name: "tls", open: over_tls },
    NetworkKind { name: "shared-memory", open: over_shared_memory },
    #[cfg(feature = "iroh")]
    NetworkKind { name: "iroh", open: over_quic },
    #[cfg(feature = "iroh")]
    NetworkKind { name: "mixed", open: over_several },
];

/// Connects ranks over QUIC on the loopback interface, without a relay. Each rank has its own key.
#[cfg(feature = "iroh")]
pub(crate) fn over_quic(n: usize) -> Result<Cluster> {
    use farflung::comm::quic;

    with_tickets(n, &|rank, address, security| {
        let config = quic::Config::new(rank, n as u32, address, security);
        quic::join(&config).map(|end| end as Arc<dyn Transport>)
    })
}

/// Connects ranks over several networks in one run: rank 1 over QUIC, the others over sockets and shared
/// memory.
#[cfg(feature = "iroh")]
fn over_several(n: usize) -> Result<Cluster> {
    use farflung::comm::mixed::{self, Config};
    use farflung::comm::quic::{Socket, SocketConfig};
    use farflung::comm::tcp::GateConfig;

    with_tickets(n, &|rank, address, security| {
        let listen = if rank == 0 { address } else { "" };
        let mut gate = GateConfig::new(listen, "farflung", security.clone());
        gate.shared_memory = tcp::SharedMemory::WherePossible;
        let mut socket = SocketConfig::new(security);
        socket.listen = Some(if rank == 0 { address } else { "127.0.0.1:0" }.to_owned());
        let gate = gate.over_quic(&Socket::open(&socket)?, rank != 1);
        let host = vec![address.to_owned(), format!("quic:{address}")];
        mixed::join(&Config::new(rank, n as u32, host, gate)).map(|end| end as Arc<dyn Transport>)
    })
}

/// Returns a port that was free for TCP and UDP a moment ago. It is below the ports that the system gives to
/// outgoing connections (from 32768 on Linux): a rank that calls before rank 0 listens could otherwise get this
/// very port for its call.
#[cfg(feature = "iroh")]
fn free_port() -> u16 {
    use std::sync::atomic::{AtomicU32, Ordering};

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

/// Connects ranks that each have a key, and a ticket of rank 0. `join` takes the rank, rank 0's address on the
/// loopback interface, and the rank's protection.
#[cfg(feature = "iroh")]
fn with_tickets(
    n: usize,
    join: &(impl Fn(u32, &str, Security) -> Result<Arc<dyn Transport>, CommError> + Sync),
) -> Result<Cluster> {
    use farflung::comm::secure::{Ticket, unix_seconds};

    let address = format!("127.0.0.1:{}", free_port());
    let (host, secret) = (Identity::generate()?, JoinSecret::generate()?);
    let expiry = unix_seconds() + 600;
    let ticket = Ticket {
        addresses: vec![address.clone()],
        host: host.public(),
        secret: secret.until(expiry),
        expiry,
    };
    at_once(n, &|rank| {
        let security = match rank {
            0 => Security::by_secret(&host, &secret),
            _ => Security::by_ticket(&Identity::generate()?, &ticket),
        };
        join(rank, &address, security)
    })
}

/// Connects ranks over sockets of the loopback interface, with these settings.
pub(crate) fn over_sockets(n: usize, security: &Security, pace: tcp::Pace) -> Result<Cluster> {
    meet(n, |config| {
        config.security = security.clone();
        config.pace = pace;
    })
}

/// Connects endpoints of one process in the same way as processes, with settings changed by `set`.
fn meet(n: usize, set: impl Fn(&mut tcp::Config) + Sync) -> Result<Cluster> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let master = format!("127.0.0.1:{port}");
    let join = |rank| {
        let mut config = tcp::Config::new(rank, n as u32, &master);
        set(&mut config);
        tcp::join(&config).map(|t| t as Arc<dyn Transport>)
    };
    at_once(n, &join)
}

/// Calls `join` for all ranks at the same time, each on its own thread.
fn at_once(
    n: usize,
    join: &(impl Fn(u32) -> Result<Arc<dyn Transport>, CommError> + Sync),
) -> Result<Cluster> {
    thread::scope(|scope| {
        let joins: Vec<_> = (0..n as u32).map(|rank| scope.spawn(move || join(rank))).collect();
        joins.into_iter().map(|j| Ok(j.join().expect("no rank panics")?)).collect()
    })
}

/// Runs `work` on a thread for each rank. Results are in order of rank.
pub(crate) fn on_ranks<T: Send>(
    cluster: Cluster,
    work: impl Fn(Communicator) -> Result<T, CommError> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = cluster
            .into_iter()
            .map(|transport| scope.spawn(move || work(Communicator::new(transport))))
            .collect();
        threads.into_iter().map(|t| Ok(t.join().expect("no rank panics")?)).collect()
    })
}
