//! Endpoints of a fixed number of processes that use several networks in one run: shared memory within a
//! machine, TCP where it reaches, and a second network (QUIC) elsewhere.
//!
//! Each rank asks rank 0 first, over the network that reaches it. When all ranks have connected to rank 0, it
//! sends each the addresses and keys of all, and each rank connects to those below its own. The endpoints are
//! returned once all ranks are connected to all others. The networks are those of a [`GrowingNetwork`], whose
//! members here have the numbers of their ranks.

use std::sync::Arc;
use std::time::Duration;

use farflung_base::{Nanos, PeerId, Rank};

use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::second_network::with_key;
use crate::tcp::{Connected, GateConfig, GrowingNetwork, Pace, Tcp};
use crate::{CommError, Communicator, Transport};

/// Context of the communicator over which ranks exchange addresses. The numbers of a user's communicators are
/// unlikely to equal it.
const RENDEZVOUS: u64 = 0x7261_6e6b_735f_6174;
/// Tag of the table of addresses, or of the list of missing ranks.
const TABLE: u32 = 0;
/// Time between two checks whether all ranks have connected, and between two attempts to reach a rank.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time that other ranks have to receive the list of missing ranks after the deadline.
const GRACE: Duration = Duration::from_secs(1);
/// Maximum number of connections that an error about missing ranks lists.
const MOST_TOLD: usize = 8;
/// Maximum number of peers to which a rank connects at the same time.
const AT_ONCE: usize = 16;

/// The rank of this process, and how it reaches the others.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Rank of this process. Rank 0 listens where the others look for it.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Addresses of rank 0, which are tried in turn: `host:port` for TCP; for QUIC `quic:host:port`, or the URL
    /// of a relay. An element may hold several, separated by commas, if they reach the same process. Rank 0
    /// itself does not use them.
    pub host: Vec<String>,
    /// The networks and their security. `listen` is the address at which rank 0 listens; other ranks listen
    /// there only if it is not empty, and else at any port of the address from which they reach rank 0.
    /// `slots` is not used. The deadline is that of the whole rendezvous.
    pub network: GateConfig,
    /// Limits of the rate at which it sends.
    pub pace: Pace,
}

impl Config {
    /// Creates the configuration of a rank without limits of its rate.
    #[must_use]
    pub fn new(rank: u32, world_size: u32, host: Vec<String>, network: GateConfig) -> Self {
        Self { rank, world_size, host, network, pace: Pace::default() }
    }
}

/// Meets the other ranks and connects to each of them. Rank `r` becomes `PeerId(r)`.
///
/// # Errors
/// If an address is wrong, rank 0 refuses, or ranks are missing at the deadline; [`CommError::Argument`] for a
/// setting out of range.
pub fn join(config: &Config) -> Result<Arc<Tcp>, CommError> {
    let Config { rank, world_size, .. } = *config;
    if rank >= world_size {
        let (got, want) = (rank as usize, world_size as usize);
        let what = "rank (must be below the world size)";
        return Err(CommError::Argument { op: "rendezvous", what, got, want });
    }
    let until = Deadline::after(config.network.deadline);
    let mut network = GateConfig { slots: world_size, ..config.network.clone() };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    network.crowded = !network.sockets || world_size as usize >= cores;
    if rank > 0 {
        // A secret that all ranks have is proven as newcomers to a growing network prove it.
        network.security = network.security.joining();
    }
    let has_key = network.security.host().is_some();
    if rank > 0 && !network.sockets && !has_key {
        let reason =
            "over QUIC it is reached by its key, which a ticket contains and a secret alone does not";
        return Err(CommError::NoEncryptedConnection {
            peer: "rank 0".to_owned(),
            reason: reason.to_owned(),
        });
    }
    let host: Vec<String> = match network.security.host() {
        Some(key) => config.host.iter().map(|address| with_key(address, key)).collect(),
        None => config.host.clone(),
    };
    let gate = match rank {
        0 => GrowingNetwork::first_rank(&network)?,
        _ => GrowingNetwork::ask_for_ranks(&network, &host)?.join_as(&network, PeerId(rank), &host, until)?,
    };
    let end = gate.transport();
    end.keep_pace(config.pace)?;
    let meeting =
        Meeting { rank, world_size, host: config.host.join(","), deadline: network.deadline, until, gate };
    meeting.complete()?;
    Ok(end)
}

/// A rank that has connected to rank 0, or is rank 0.
struct Meeting {
    rank: u32,
    world_size: u32,
    host: String,
    deadline: Duration,
    until: Deadline,
    gate: GrowingNetwork,
}

impl Meeting {
    /// Connects to all ranks, and returns once all are connected to all.
    fn complete(&self) -> Result<(), CommError> {
        let transport: Arc<dyn Transport> = self.gate.transport();
        let members: Vec<PeerId> = (0..self.world_size).map(PeerId).collect();
        let comm = Communicator::of_members(transport, &members, RENDEZVOUS)?;
        let table = match self.rank {
            0 => self.invite(&comm).map(|()| Vec::new())?,
            _ => self.connect(&comm)?,
        };
        self.wait_for_all()?;
        self.gate.check_connected(&table)?;
        // Ranks keep listening until all others are connected.
        comm.with_deadline(self.left()).barrier()
    }

    /// Returns the time until the deadline plus [`GRACE`], in which messages of ranks that have reached their
    /// deadline can still arrive.
    fn left(&self) -> Nanos {
        self.until.remaining().unwrap_or_default().saturating_add(GRACE).into()
    }

    fn missing(&self, ranks: Vec<Rank>) -> CommError {
        let refused = |(ip, reason): (std::net::IpAddr, String)| {
            format!("a connection from {ip} was refused ({reason})")
        };
        let connected = |rank: u32| {
            let is_here = rank != self.rank && self.gate.has_connected(PeerId(rank));
            is_here.then(|| format!("{} has connected", Rank(rank)))
        };
        let refused = self.gate.refusals().into_iter().map(refused);
        let progress = refused.chain((0..self.world_size).filter_map(connected)).take(MOST_TOLD).collect();
        CommError::Missing { master: self.host.clone(), ranks, progress, after: self.deadline.into() }
    }

    fn absent(&self) -> Vec<Rank> {
        let others = (0..self.world_size).filter(|&rank| rank != self.rank);
        others.filter(|&rank| !self.gate.has_connected(PeerId(rank))).map(Rank).collect()
    }

    /// Waits until all other ranks are connected to this one.
    fn wait_for_all(&self) -> Result<(), CommError> {
        loop {
            let absent = self.absent();
            if absent.is_empty() {
                return Ok(());
            }
            // Rank 0 ends first if a rank is missing, and may have left already.
            if self.until.remaining().is_none() || self.gate.has_left(PeerId(0)) {
                return Err(self.missing(absent));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Runs rank 0's side: waits for all, and sends each the table, or the list of missing ranks.
    fn invite(&self, comm: &Communicator) -> Result<(), CommError> {
        let met = self.wait_for_all();
        let message = match &met {
            Err(CommError::Missing { ranks, .. }) => {
                Control::Missing(BoundedVec(ranks.iter().map(|rank| rank.0).collect())).encode()
            }
            _ => self.gate.table(),
        };
        let comm = comm.clone().with_deadline(if met.is_ok() { self.left() } else { GRACE.into() });
        let here = (1..self.world_size).filter(|&rank| self.gate.has_connected(PeerId(rank)));
        let sent: Vec<_> = here.map(|rank| comm.start_send(Rank(rank), TABLE, message.clone())).collect();
        for sent in sent {
            // The list of missing ranks goes to all that can still be reached: errors are ignored then.
            let sent = sent.wait();
            if met.is_ok() {
                sent?;
            }
        }
        met
    }

    /// Runs the side of every other rank: receives the table, connects to the ranks below its own, and returns
    /// the table.
    fn connect(&self, comm: &Communicator) -> Result<Vec<Connected>, CommError> {
        let received = comm.clone().with_deadline(self.left()).recv(Rank(0), TABLE);
        let bytes = received.map_err(|error| match error {
            CommError::Deadline { .. } => self.missing(self.absent()),
            other => other,
        })?;
        let malformed = |source| CommError::Handshake { peer: "rank 0".to_owned(), source };
        let message = Control::decode(&bytes).map_err(malformed)?;
        if let Control::Missing(BoundedVec(ranks)) = message {
            return Err(self.missing(ranks.into_iter().map(Rank).collect()));
        }
        let table = self.gate.read_table(&message);
        let table = table.ok_or_else(|| malformed(crate::WireError::Malformed("table of ranks")))?;
        self.gate.check_keys(&table)?;
        let lower: Vec<&Connected> =
            table.iter().filter(|peer| (1..self.rank).contains(&peer.peer.0)).collect();
        for some in lower.chunks(AT_ONCE) {
            std::thread::scope(|scope| {
                let reaching: Vec<_> = some.iter().map(|peer| scope.spawn(|| self.reach(peer))).collect();
                reaching
                    .into_iter()
                    .try_for_each(|one| one.join().expect("a connecting thread does not panic"))
            })?;
        }
        Ok(table)
    }

    /// Connects to a rank, which listens already.
    fn reach(&self, peer: &Connected) -> Result<(), CommError> {
        loop {
            match self.gate.reach_rank(peer, self.until) {
                Err(CommError::Io { .. } | CommError::Missing { .. }) if self.until.remaining().is_some() => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(CommError::Io { what, kind, message, .. }) => {
                    tracing::debug!(rank = peer.peer.0, what, ?kind, message, "a rank cannot be reached");
                    return Err(self.missing(vec![Rank(peer.peer.0)]));
                }
                reached => return reached,
            }
        }
    }
}
