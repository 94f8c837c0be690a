//! Rendezvous: how the ranks of a job find each other. All connect to the master's address and get a table of
//! addresses, or have such a list from the start. Then they connect pairwise, and each side sends its rank.
//! Everything has a deadline. A connection that does not belong to the job is refused with the reason.

mod admit;
mod progress;
mod streams;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farflung_base::Rank;

use super::is_within_one_machine;
use super::listeners::{AddressUse, Listeners, host_of, literal_ip};
use super::shared_memory::SharedMemory;
use super::stream::{Stream, is_late};
use super::target::{RETRY, Target, hung_up};
use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::rate::Pace;
use crate::secure::{Admission, JoinSecret, PublicKey, Security, refused};
use crate::wire::{self, Message, Parsed};
use crate::{CommError, WireError};
use admit::admit;
use progress::Absence;
use streams::multiply;

/// Greatest number of streams to one peer.
const MOST_STREAMS: usize = 16;
/// Greatest number of ranks whose addresses are in an error.
const MOST_TOLD: usize = 8;
/// Target of the log line that says where rank 0 waits for the others. The command line shows it by default.
const WHERE: &str = "rendezvous";

/// The rank of this process, and where the other ranks are.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Rank of this process; rank 0 is the master.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Address of rank 0, as `host:port` (`[::1]:port` for IPv6): `MASTER_ADDR:MASTER_PORT`. If several are
    /// given, separated by commas, the others try them in turn. Not used with `peers`.
    ///
    /// Rank 0 listens at all addresses of the name that are its machine's. If there are none but the loopback,
    /// it listens at all addresses of its machine, if [`Config::security`] encrypts or trusts the network.
    pub master: String,
    /// Address of each rank, in the order of ranks, as `host:port`; empty if the master distributes the
    /// addresses. Ranks may have different lists, if they reach a peer by different routes.
    pub peers: Vec<String>,
    /// Name of the job. Processes of other jobs are refused.
    pub job: String,
    /// Time limit of the whole rendezvous.
    pub deadline: Duration,
    /// Address at which this rank listens for its peers. By default the one from which it reaches the master,
    /// or its own entry of `peers`. The port is that of its entry; without `peers` the system chooses it.
    /// Without `peers`, rank 0 listens at `master`, and uses this address only if there are several streams.
    pub listen: Option<IpAddr>,
    /// Number of connections to each peer, 1 to 16, the same on all ranks. On a link with high bandwidth and
    /// latency, the window of one connection may be too small to fill it. Each message, and each lane of a
    /// pipelined all-reduce, uses one of them, chosen by its tag. Connections after the first use ports that
    /// the ranks send to each other, so the network must not block these.
    pub streams: usize,
    /// How connections are protected, and who is admitted. By default they are not protected, and every process
    /// is admitted.
    pub security: Security,
    /// Limits on how fast this rank sends. By default there are none.
    pub pace: Pace,
    /// Whether peers on this machine are reached through shared memory, if each has one connection. Shared
    /// memory is not paced. By default it is not used.
    pub shared_memory: SharedMemory,
}

impl Config {
    /// Returns the configuration of a rank of the job `farflung`, with a deadline of one minute.
    #[must_use]
    pub fn new(rank: u32, world_size: u32, master: impl Into<String>) -> Self {
        let (master, job) = (master.into(), "farflung".to_owned());
        Self {
            rank,
            world_size,
            master,
            peers: Vec::new(),
            job,
            deadline: Duration::from_mins(1),
            listen: None,
            streams: 1,
            security: Security::unencrypted(),
            pace: Pace::default(),
            shared_memory: SharedMemory::default(),
        }
    }

    /// Returns a configuration with the defaults of [`Config::new`], for ranks that have a list of all
    /// addresses and need no master.
    #[must_use]
    pub fn with_peers(rank: u32, peers: Vec<String>) -> Self {
        let first = peers.first().cloned().unwrap_or_default();
        let mut config = Self::new(rank, peers.len() as u32, first);
        config.peers = peers;
        config
    }
}

/// Streams to all peers, by rank; `None` for this rank itself.
pub(super) type Streams = Vec<Option<Stream>>;

/// Connects to all peers.
pub(super) fn meet(config: &Config) -> Result<Vec<Vec<Stream>>, CommError> {
    let argument = |what, got, want| Err(CommError::Argument { op: "rendezvous", what, got, want });
    let (rank, size) = (config.rank as usize, config.world_size as usize);
    if rank >= size {
        return argument("rank (must be below the world size)", rank, size);
    }
    if config.job.len() > 512 {
        return argument("length of the job id in bytes (maximum)", config.job.len(), 512);
    }
    if !config.peers.is_empty() && config.peers.len() != size {
        return argument("number of peers", config.peers.len(), size);
    }
    if !(1..=MOST_STREAMS).contains(&config.streams) {
        return argument("number of streams (from 1 to the maximum)", config.streams, MOST_STREAMS);
    }
    let until = Deadline::after(config.deadline);
    let mut config = config.clone();
    let met = if !config.peers.is_empty() {
        by_list(&config, until)
    } else if rank == 0 {
        host(&mut config, until)
    } else {
        visit(&mut config, until)
    };
    multiply(&config, met?, until)
}

fn missing(config: &Config, Absence { ranks, progress }: Absence) -> CommError {
    let master = if config.peers.is_empty() { config.master.clone() } else { "the listed peers".to_owned() };
    CommError::Missing { master, ranks, progress, after: config.deadline.into() }
}

/// Returns the error of a rank that did not reach the master.
fn not_reached(config: &Config, master: &Target) -> CommError {
    missing(config, Absence { ranks: vec![Rank(0)], progress: vec![master.outcome()] })
}

fn nobody(config: &Config) -> Streams {
    (0..config.world_size).map(|_| None).collect()
}

/// Describes where a rank listens that others did not reach.
fn place(rank: u32, listeners: &Listeners) -> String {
    let whether = if listeners.is_loopback() { ", which only processes of this machine reach" } else { "" };
    format!("{} listens at {listeners}{whether}", Rank(rank))
}

/// Runs the rendezvous on rank 0: admits all ranks, then sends each the table of addresses and, if connections
/// are encrypted, the keys and the secret.
fn host(config: &mut Config, until: Deadline) -> Result<Streams, CommError> {
    let first = config.master.split(',').next().unwrap_or_default();
    let listeners = Listeners::of_name("master address", first, AddressUse::Meet, &config.security)?;
    if !listeners.is_loopback() && config.world_size > 1 {
        tracing::info!(target: WHERE, "rank 0 of {} waits for the others at {listeners}", config.world_size);
    }
    let mut streams = nobody(config);
    let mut table = vec![String::new(); config.world_size as usize];
    let never = AtomicBool::new(false);
    let come =
        admit(config, &listeners, until, (&never, false), &mut streams, |rank, listen| table[rank] = listen);
    if let Err(mut absence) = come {
        let message = Control::Missing(BoundedVec(absence.ranks.iter().map(|rank| rank.0).collect()));
        for stream in streams.iter().flatten() {
            // An error is ignored: the ranks have their own deadlines.
            let _ = stream.send_message(&message);
        }
        absence.progress.push(place(0, &listeners));
        return Err(missing(config, absence));
    }
    let key = |stream: &Option<Stream>| stream.as_ref().and_then(Stream::peer_key);
    let own = config.security.own_key().into_iter();
    let members: Vec<PublicKey> = own.chain(streams[1..].iter().filter_map(key)).collect();
    let admission = config.security.admission(members)?;
    for (rank, stream) in (0..).zip(&streams).filter_map(|(rank, stream)| Some((rank, stream.as_ref()?))) {
        let addresses = seen_by(stream, &table, &streams);
        let message = Control::Table {
            addresses: BoundedVec(addresses.iter().map(String::as_str).collect()),
            keys: BoundedVec(admission.iter().flat_map(|a| &a.members).map(|key| &key.bytes()[..]).collect()),
            secret: admission.as_ref().map_or(&[], |admission| &admission.secret.bytes()[..]),
        };
        stream
            .send_message(&message)
            .map_err(|e| CommError::io("send the table of addresses to", &Rank(rank), &e))?;
    }
    if let Some(admission) = admission {
        config.security = config.security.among(admission);
    }
    Ok(streams)
}

/// Returns the table of addresses for the rank behind `stream`. A rank on the master's machine may know an
/// address of that machine that other machines do not reach, such as the loopback. A rank on another machine
/// gets the address by which it has reached the master.
fn seen_by(stream: &Stream, table: &[String], streams: &Streams) -> Vec<String> {
    let by = stream.socket.local_addr().ok().filter(|_| !is_within_one_machine(&stream.socket));
    let seen = |(address, other): (&String, &Option<Stream>)| {
        let is_here = other.as_ref().is_some_and(|other| is_within_one_machine(&other.socket));
        match (by, address.parse::<SocketAddr>()) {
            (Some(by), Ok(at)) if is_here => SocketAddr::new(by.ip(), at.port()).to_string(),
            _ => address.clone(),
        }
    };
    table.iter().zip(streams).map(seen).collect()
}

/// The master's answer, and this rank's own listener.
struct RankRequest {
    master: Stream,
    listeners: Listeners,
    own: String,
    /// Addresses of the ranks between the master and this one.
    between: Vec<SocketAddr>,
    admission: Option<Admission>,
}

/// Reads the master's table on the rank that received it; `None` if it is invalid.
fn read_table(config: &Config, message: &Control<'_>) -> Option<(Vec<SocketAddr>, Option<Admission>)> {
    let Control::Table { addresses: BoundedVec(addresses), keys: BoundedVec(keys), secret } = message else {
        return None;
    };
    let size = config.world_size as usize;
    if addresses.len() != size {
        return None;
    }
    let between = addresses[1..config.rank as usize].iter().map(|address| address.parse().ok());
    let between = between.collect::<Option<_>>()?;
    if !config.security.is_encrypted() {
        return Some((between, None));
    }
    let members = keys.iter().map(|key| PublicKey::from_slice(key));
    let members: Vec<PublicKey> = members.collect::<Option<_>>()?;
    let secret = JoinSecret::new((*secret).try_into().ok()?);
    (members.len() == size).then_some((between, Some(Admission { members, secret })))
}

/// Listens for the ranks above this one. A rank on the master's machine listens as the master does, so that
/// ranks on other machines reach it by the master's addresses. Returns the address for the master's table, too.
fn listen(config: &Config, master: &Stream) -> Result<(Listeners, String), CommError> {
    let seen = master.socket.local_addr().map_err(|e| CommError::io("socket to", &config.master, &e))?.ip();
    let own = config.listen.unwrap_or(seen);
    let failed = |e: std::io::Error| CommError::io("listen at", &own, &e);
    let first = config.master.split(',').next().unwrap_or_default();
    let by_name = config.listen.is_none()
        && is_within_one_machine(&master.socket)
        && literal_ip(first).is_none()
        && config.security.allows_all_addresses();
    let listeners = if by_name {
        let any_port = format!("{}:0", host_of(first));
        Listeners::of_name("master address", &any_port, AddressUse::Meet, &config.security)?
    } else {
        Listeners::first_of(&[SocketAddr::new(own, 0)]).map_err(failed)?
    };
    let port = listeners.address().map_err(failed)?.port();
    Ok((listeners, SocketAddr::new(own, port).to_string()))
}

/// Listens, sends the address to the master, and receives the addresses of the ranks between the master and
/// this one.
fn ask(
    config: &Config,
    target: &mut Target,
    until: Deadline,
    patient: Deadline,
) -> Result<RankRequest, CommError> {
    let expected = config.security.host();
    let master = target.connect(&config.security, expected, until)?;
    let master = master.ok_or_else(|| not_reached(config, target))?;
    let (listeners, own) = listen(config, &master)?;
    hello(config, &own, |hello| master.send_message(hello))
        .map_err(|e| CommError::io("send the greeting to", &config.master, &e))?;
    let table = answer(config, &config.master, &master, patient, |message| read_table(config, message));
    let (between, admission) = table.inspect_err(|error| target.note(error))?;
    Ok(RankRequest { master, listeners, own, between, admission })
}

/// Runs the rendezvous on a rank other than 0: asks the master, then connects to the other ranks.
fn visit(config: &mut Config, until: Deadline) -> Result<Streams, CommError> {
    let mut target = Target::new("master address", &config.master)?;
    // At its own deadline, the master sends which ranks are missing. One second more leaves time for that.
    let patient = until.extended_by(Duration::from_secs(1));
    let asked = loop {
        match ask(config, &mut target, until, patient) {
            Err(e) if is_late(&e) => {
                target.note(&e);
                return Err(not_reached(config, &target));
            }
            Err(e) if hung_up(&e) => match until.remaining() {
                Some(rest) => std::thread::sleep(rest.min(RETRY)),
                None => return Err(not_reached(config, &target)),
            },
            asked => break asked?,
        }
    };
    if let Some(admission) = asked.admission {
        config.security = config.security.among(admission);
    }
    let lower = (1..).zip(asked.between).map(|(rank, address)| (rank, Target::at(address))).collect();
    let mut streams = pairwise(config, &asked.listeners, &asked.own, lower, until)?;
    streams[0] = Some(asked.master);
    Ok(streams)
}

/// Runs the rendezvous on any rank, if all have a list of all addresses.
fn by_list(config: &Config, until: Deadline) -> Result<Streams, CommError> {
    let me = config.rank as usize;
    let own = &config.peers[me];
    let listeners = match config.listen {
        None => Listeners::of_name("own address", own, AddressUse::Meet, &config.security)?,
        Some(ip) => {
            let port = super::target::resolve("own address", own)?.first().map_or(0, SocketAddr::port);
            Listeners::first_of(&[SocketAddr::new(ip, port)])
                .map_err(|e| CommError::io("listen at", own, &e))?
        }
    };
    let target = |(rank, peer): (usize, &String)| Ok((rank, Target::new("address of a peer", peer)?));
    let lower = config.peers[..me].iter().enumerate().map(target).collect::<Result<_, CommError>>()?;
    pairwise(config, &listeners, own, lower, until)
}

/// Connects to the lower ranks at their addresses and admits the higher ones, at the same time.
pub(super) fn pairwise(
    config: &Config,
    listeners: &Listeners,
    own: &str,
    lower: Vec<(usize, Target)>,
    until: Deadline,
) -> Result<Streams, CommError> {
    let mut streams = nobody(config);
    let given_up = AtomicBool::new(false);
    let (come, reached) = std::thread::scope(|scope| {
        let reaching = scope.spawn(|| {
            reach(config, own, lower, until).inspect_err(|_| given_up.store(true, Ordering::Relaxed))
        });
        let come = admit(config, listeners, until, (&given_up, true), &mut streams, |_, _| {});
        (come, reaching.join().expect("the connecting thread does not panic"))
    });
    let (mut absent, found) = match reached {
        Ok(found) => (Absence::default(), found),
        Err(CommError::Missing { ranks, progress, .. }) => (Absence { ranks, progress }, Vec::new()),
        Err(other) => return Err(other),
    };
    if let Err(above) = come {
        absent.ranks.extend(above.ranks);
        absent.progress.extend(above.progress);
        absent.progress.push(place(config.rank, listeners));
    }
    if !absent.ranks.is_empty() {
        return Err(missing(config, absent));
    }
    for (rank, stream) in found {
        streams[rank] = Some(stream);
    }
    Ok(streams)
}

/// Connects to the ranks in `lower`, each as soon as it is up and answers. The error names those that did not
/// answer.
fn reach(
    config: &Config,
    own: &str,
    mut left: Vec<(usize, Target)>,
    until: Deadline,
) -> Result<Vec<(usize, Stream)>, CommError> {
    let mut welcomed = Vec::new();
    loop {
        let mut greeted = Vec::new();
        for (rank, mut target) in std::mem::take(&mut left) {
            let expected = config.security.member(rank);
            let stream = match target.attempt(&config.security, expected, until) {
                Ok(Some(stream)) => stream,
                Ok(None) => {
                    left.push((rank, target));
                    continue;
                }
                Err(e) if hung_up(&e) || is_late(&e) => {
                    left.push((rank, target));
                    continue;
                }
                Err(e) => return Err(e),
            };
            // Sent at once, so that the peer does not report this rank as missing while this rank connects to
            // others. If this fails, so does the wait for the answer.
            let _ = hello(config, own, |hello| stream.send_message(hello));
            greeted.push((rank, target, stream));
        }
        for (rank, mut target, stream) in greeted {
            let name = stream.address().map_or_else(|| Rank(rank as u32).to_string(), |at| at.to_string());
            let answered = answer(config, &name, &stream, until, |message| match message {
                Control::Welcome(by) if *by as usize == rank => Some(()),
                _ => None,
            });
            match answered {
                Ok(()) => welcomed.push((rank, stream)),
                Err(e) if hung_up(&e) || is_late(&e) => {
                    target.note(&e);
                    left.push((rank, target));
                }
                Err(e) => return Err(e),
            }
        }
        if left.is_empty() {
            return Ok(welcomed);
        }
        let Some(rest) = until.remaining() else {
            let said =
                |(rank, target): &(usize, Target)| format!("{}: {}", Rank(*rank as u32), target.outcome());
            return Err(missing(
                config,
                Absence {
                    ranks: left.iter().map(|(rank, _)| Rank(*rank as u32)).collect(),
                    progress: left.iter().take(MOST_TOLD).map(said).collect(),
                },
            ));
        };
        std::thread::sleep(rest.min(RETRY));
    }
}

/// Passes this rank's hello to `say`.
pub(super) fn hello<T>(config: &Config, listen: &str, say: impl FnOnce(&Control<'_>) -> T) -> T {
    let key = config.security.own_key();
    let key = key.as_ref().map_or(&[][..], |key| key.bytes());
    let &Config { rank, world_size, ref job, .. } = config;
    say(&Control::Hello { rank, world_size, job, listen, epoch: 0, key, digest: &[] })
}

/// Waits for one message, and returns what `wanted` makes of it. Errors: a refusal, a list of missing ranks, a
/// lost connection, the deadline, and a message that `wanted` does not accept.
pub(super) fn answer<T>(
    config: &Config,
    from: &str,
    stream: &Stream,
    until: Deadline,
    wanted: impl FnOnce(&Control<'_>) -> Option<T>,
) -> Result<T, CommError> {
    let mut absent = Vec::new();
    let answered = answer_of(from, stream, until, |message| match message {
        Control::Missing(BoundedVec(ranks)) => {
            absent = ranks.iter().copied().map(Rank).collect();
            None
        }
        other => wanted(other),
    });
    if absent.is_empty() {
        return answered;
    }
    let progress = vec![format!("{from} says so; this rank had connected to it, and waited")];
    Err(missing(config, Absence { ranks: absent, progress }))
}

/// Waits for a message like [`answer`], for callers without a configuration of ranks.
pub(super) fn answer_of<T>(
    from: &str,
    stream: &Stream,
    until: Deadline,
    wanted: impl FnOnce(&Control<'_>) -> Option<T>,
) -> Result<T, CommError> {
    let bytes = stream.read_message(from, until)?;
    let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
    let Parsed::Whole(Message::Control(message), _) = wire::parse(&bytes).map_err(wrong)? else {
        return Err(wrong(WireError::Malformed("control message")));
    };
    match &message {
        Control::Refuse(reason) => Err(refused(from, *reason)),
        other => wanted(other).ok_or_else(|| wrong(WireError::Malformed("answer"))),
    }
}
