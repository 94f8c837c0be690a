//! Rendezvous: how the ranks of a job find each other. All connect to the master's address and get a table of
//! addresses, or have such a list from the start. Then they connect pairwise, and each side sends its rank.
//! Everything has a deadline. A connection that does not belong to the job is refused with the reason.

mod streams;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farflung_base::Rank;

use super::acceptor::{Acceptor, AuthenticatedConnection};
use super::shared_memory::SharedMemory;
use super::stream::Stream;
use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::rate::Pace;
use crate::secure::{Admission, JoinSecret, PublicKey, Role, Security, refused};
use crate::wire::{self, Message, Parsed};
use crate::{CommError, WireError};
use streams::multiply;

/// Greatest number of streams to one peer.
const MOST_STREAMS: usize = 16;
/// Time between two checks for new connections. Attempts to connect are five times as far apart.
const PAUSE: Duration = Duration::from_millis(2);
/// Time limit of one attempt to connect, so that a host that drops packets does not use up the time of the
/// others.
const ATTEMPT: Duration = Duration::from_secs(2);

/// The rank of this process, and where the other ranks are.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Rank of this process; rank 0 is the master.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Address at which rank 0 listens, as `host:port` (`[::1]:port` for IPv6): `MASTER_ADDR:MASTER_PORT`. If
    /// several are given, separated by commas, they are tried in turn. Not used with `peers`.
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

fn missing(config: &Config, ranks: Vec<Rank>) -> CommError {
    let master = if config.peers.is_empty() { config.master.clone() } else { "the listed peers".to_owned() };
    CommError::Missing { master, ranks, after: config.deadline.into() }
}

/// Resolves a `host:port`, or several separated by commas. Fails only if none of them can be resolved.
pub(super) fn resolve(what: &'static str, address: &str) -> Result<Vec<SocketAddr>, CommError> {
    let mut all = Vec::new();
    let mut wrong = None;
    for one in address.split(',') {
        match one.to_socket_addrs() {
            Ok(addresses) => all.extend(addresses),
            Err(e) => wrong = Some(CommError::io(what, &one, &e)),
        }
    }
    wrong.filter(|_| all.is_empty()).map_or(Ok(all), Err)
}

/// Listens at the master's address. If that is not an address of this machine, but of a router in front of it,
/// and connections are encrypted, listens at all addresses of this machine.
fn listen(config: &Config) -> Result<TcpListener, CommError> {
    let addresses = resolve("master address", &config.master)?;
    let elsewhere =
        |e: &std::io::Error| e.kind() == ErrorKind::AddrNotAvailable && config.security.is_encrypted();
    TcpListener::bind(&addresses[..])
        .or_else(|e| match addresses.first().filter(|_| elsewhere(&e)) {
            Some(first) if first.is_ipv6() => TcpListener::bind((Ipv6Addr::UNSPECIFIED, first.port())),
            Some(first) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, first.port())),
            None => Err(e),
        })
        .map_err(|e| CommError::io("listen at", &config.master, &e))
}

fn nobody(config: &Config) -> Streams {
    (0..config.world_size).map(|_| None).collect()
}

/// Runs the rendezvous on rank 0: admits all ranks, then sends each the table of addresses and, if connections
/// are encrypted, the keys and the secret.
fn host(config: &mut Config, until: Deadline) -> Result<Streams, CommError> {
    let listener = listen(config)?;
    let mut streams = nobody(config);
    let mut table = vec![String::new(); config.world_size as usize];
    let never = AtomicBool::new(false);
    let come =
        admit(config, &listener, until, (&never, false), &mut streams, |rank, listen| table[rank] = listen);
    if let Err(ranks) = come {
        let message = Control::Missing(BoundedVec(ranks.iter().map(|rank| rank.0).collect()));
        for stream in streams.iter().flatten() {
            // An error is ignored: the ranks have their own deadlines.
            let _ = stream.send_message(&message);
        }
        return Err(missing(config, ranks));
    }
    let key = |stream: &Option<Stream>| stream.as_ref().and_then(Stream::peer_key);
    let own = config.security.own_key().into_iter();
    let members: Vec<PublicKey> = own.chain(streams[1..].iter().filter_map(key)).collect();
    let admission = config.security.admission(members)?;
    let message = Control::Table {
        addresses: BoundedVec(table.iter().map(String::as_str).collect()),
        keys: BoundedVec(admission.iter().flat_map(|a| &a.members).map(|key| &key.bytes()[..]).collect()),
        secret: admission.as_ref().map_or(&[], |admission| &admission.secret.bytes()[..]),
    };
    for (rank, stream) in streams.iter().enumerate() {
        if let Some(stream) = stream {
            stream
                .send_message(&message)
                .map_err(|e| CommError::io("send the table of addresses to", &Rank(rank as u32), &e))?;
        }
    }
    if let Some(admission) = admission {
        config.security = config.security.among(admission);
    }
    Ok(streams)
}

/// The master's answer, and this rank's own listener.
struct RankRequest {
    master: Stream,
    listener: TcpListener,
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

/// Listens, sends the address to the master, and receives the addresses of the ranks between the master and
/// this one.
fn ask(
    config: &Config,
    addresses: &[SocketAddr],
    until: Deadline,
    patient: Deadline,
) -> Result<RankRequest, CommError> {
    let expected = config.security.host();
    let master = connect(&config.security, addresses, expected, until)?;
    let master = master.ok_or_else(|| missing(config, vec![Rank(0)]))?;
    let io = |what| move |e: std::io::Error| CommError::io(what, &config.master, &e);
    let local = match config.listen {
        Some(ip) => ip,
        None => master.socket.local_addr().map_err(io("socket to"))?.ip(),
    };
    let listener = TcpListener::bind((local, 0)).map_err(|e| CommError::io("listen at", &local, &e))?;
    let own = listener.local_addr().map_err(|e| CommError::io("listen at", &local, &e))?.to_string();
    hello(config, &own, |hello| master.send_message(hello)).map_err(io("send the greeting to"))?;
    let table = answer(config, &config.master, &master, patient, |message| read_table(config, message));
    let (between, admission) = table?;
    Ok(RankRequest { master, listener, own, between, admission })
}

/// Runs the rendezvous on a rank other than 0: asks the master, then connects to the other ranks.
fn visit(config: &mut Config, until: Deadline) -> Result<Streams, CommError> {
    let addresses = resolve("master address", &config.master)?;
    // At its own deadline, the master sends which ranks are missing. One second more leaves time for that.
    let patient = until.extended_by(Duration::from_secs(1));
    let asked = loop {
        match ask(config, &addresses, until, patient) {
            Err(e) if hung_up(&e) => match until.remaining() {
                Some(rest) => std::thread::sleep(rest.min(5 * PAUSE)),
                None => return Err(missing(config, vec![Rank(0)])),
            },
            asked => break asked?,
        }
    };
    if let Some(admission) = asked.admission {
        config.security = config.security.among(admission);
    }
    let lower: Vec<_> = (1..).zip(asked.between).map(|(rank, address)| (rank, vec![address])).collect();
    let mut streams = pairwise(config, &asked.listener, &asked.own, &lower, until)?;
    streams[0] = Some(asked.master);
    Ok(streams)
}

/// Runs the rendezvous on any rank, if all have a list of all addresses.
fn by_list(config: &Config, until: Deadline) -> Result<Streams, CommError> {
    let me = config.rank as usize;
    let own = &config.peers[me];
    let mut at = resolve("own address", own)?;
    if let Some(ip) = config.listen {
        for address in &mut at {
            address.set_ip(ip);
        }
    }
    let listener = TcpListener::bind(&at[..]).map_err(|e| CommError::io("listen at", own, &e))?;
    let resolved = |(rank, peer): (usize, &String)| Ok((rank, resolve("address of a peer", peer)?));
    let lower: Vec<_> =
        config.peers[..me].iter().enumerate().map(resolved).collect::<Result<_, CommError>>()?;
    pairwise(config, &listener, own, &lower, until)
}

/// Connects to the lower ranks at their addresses and admits the higher ones, at the same time.
pub(super) fn pairwise(
    config: &Config,
    listener: &TcpListener,
    own: &str,
    lower: &[(usize, Vec<SocketAddr>)],
    until: Deadline,
) -> Result<Streams, CommError> {
    let mut streams = nobody(config);
    let given_up = AtomicBool::new(false);
    let (come, reached) = std::thread::scope(|scope| {
        let reaching = scope.spawn(|| {
            reach(config, own, lower, until).inspect_err(|_| given_up.store(true, Ordering::Relaxed))
        });
        let come = admit(config, listener, until, (&given_up, true), &mut streams, |_, _| {});
        (come, reaching.join().expect("the connecting thread does not panic"))
    });
    let (mut absent, found) = match reached {
        Ok(found) => (Vec::new(), found),
        Err(CommError::Missing { ranks, .. }) => (ranks, Vec::new()),
        Err(other) => return Err(other),
    };
    absent.extend(come.err().into_iter().flatten());
    if !absent.is_empty() {
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
    lower: &[(usize, Vec<SocketAddr>)],
    until: Deadline,
) -> Result<Vec<(usize, Stream)>, CommError> {
    let mut welcomed = Vec::new();
    let mut left: Vec<_> = lower.iter().collect();
    loop {
        let mut greeted = Vec::new();
        for peer in std::mem::take(&mut left) {
            let expected = config.security.member(peer.0);
            let stream = match attempt(&config.security, &peer.1, expected, until) {
                Ok(Some(stream)) => stream,
                Ok(None) => {
                    left.push(peer);
                    continue;
                }
                Err(e) if hung_up(&e) => {
                    left.push(peer);
                    continue;
                }
                Err(e) => return Err(e),
            };
            // Sent at once, so that the peer does not report this rank as missing while this rank connects to
            // others. If this fails, so does the wait for the answer.
            let _ = hello(config, own, |hello| stream.send_message(hello));
            greeted.push((peer, stream));
        }
        for (peer, stream) in greeted {
            let rank = peer.0;
            let name = stream.address().map_or_else(|| Rank(rank as u32).to_string(), |at| at.to_string());
            let answered = answer(config, &name, &stream, until, |message| match message {
                Control::Welcome(by) if *by as usize == rank => Some(()),
                _ => None,
            });
            match answered {
                Ok(()) => welcomed.push((rank, stream)),
                Err(e) if hung_up(&e) => left.push(peer),
                Err(e) => return Err(e),
            }
        }
        if left.is_empty() {
            return Ok(welcomed);
        }
        let Some(rest) = until.remaining() else {
            return Err(missing(config, left.iter().map(|(rank, _)| Rank(*rank as u32)).collect()));
        };
        std::thread::sleep(rest.min(5 * PAUSE));
    }
}

/// Returns whether the error says that the other side ended the connection. A relay, a tunnel or a forwarded
/// port does that while the peer behind it does not listen yet.
pub(super) const fn hung_up(error: &CommError) -> bool {
    matches!(
        error,
        CommError::Io {
            kind: ErrorKind::UnexpectedEof
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::BrokenPipe,
            ..
        }
    )
}

/// Admits all ranks above this one and refuses other connections. Sends each a welcome, unless the caller
/// answers with a table. If the deadline passes or `given_up` is set, the error lists the ranks that have not
/// connected.
fn admit(
    config: &Config,
    listener: &TcpListener,
    until: Deadline,
    (given_up, welcomes): (&AtomicBool, bool),
    streams: &mut [Option<Stream>],
    mut note: impl FnMut(usize, String),
) -> Result<(), Vec<Rank>> {
    let me = config.rank as usize;
    let mut door = Acceptor::new(config.security.clone());
    // With a blocking listener, the deadline would be checked only when a connection arrives.
    let _ = listener.set_nonblocking(true);
    loop {
        let absent: Vec<Rank> =
            (me + 1..streams.len()).filter(|&r| streams[r].is_none()).map(|r| Rank(r as u32)).collect();
        if absent.is_empty() {
            return Ok(());
        }
        if until.remaining().is_none() || given_up.load(Ordering::Relaxed) {
            return Err(absent);
        }
        let mut moved = false;
        for AuthenticatedConnection { stream, greeting } in door.listen(listener) {
            let Ok(Parsed::Whole(Message::Control(greeting), _)) = wire::parse(&greeting) else { continue };
            match check(config, &greeting, &stream, streams) {
                Err(refusal) => door.refuse(&stream, refusal),
                Ok((rank, listen)) => {
                    let ready = stream.socket.set_nonblocking(false).is_ok()
                        && (!welcomes || stream.send_message(&Control::Welcome(config.rank)).is_ok());
                    if ready {
                        moved = true;
                        streams[rank] = Some(stream);
                        note(rank, listen);
                    }
                }
            }
        }
        if !moved {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Checks a hello. Returns the rank that sent it and the address at which that rank listens.
fn check(
    config: &Config,
    hello: &Control<'_>,
    stream: &Stream,
    streams: &[Option<Stream>],
) -> Result<(usize, String), Refusal> {
    let &Control::Hello { rank, world_size, job, listen, key, .. } = hello else {
        return Err(Refusal::Job);
    };
    if job != config.job {
        return Err(Refusal::Job);
    }
    if world_size != config.world_size {
        return Err(Refusal::WorldSize { want: config.world_size, got: world_size });
    }
    // The key in the hello must be the one that the peer has proven, and the one that the host has listed for
    // the peer's rank.
    let proven = stream.peer_key();
    let known = config.security.member(rank as usize);
    if proven.is_some_and(|proven| key != proven.bytes() || known.is_some_and(|known| known != proven)) {
        return Err(Refusal::Key);
    }
    match streams.get(rank as usize) {
        None => Err(Refusal::Rank(rank)),
        // A rank that connects again replaces its earlier connection, if that is closed.
        Some(before) if rank > config.rank && before.as_ref().is_none_or(is_gone) => {
            Ok((rank as usize, listen.to_owned()))
        }
        Some(_) => Err(Refusal::Taken(rank)),
    }
}

/// Returns whether the other side has closed the connection. Nothing else may read from it at this time.
fn is_gone(stream: &Stream) -> bool {
    let stream = &stream.socket;
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let gone = match stream.peek(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    };
    gone || stream.set_nonblocking(false).is_err()
}

/// Passes this rank's hello to `say`.
pub(super) fn hello<T>(config: &Config, listen: &str, say: impl FnOnce(&Control<'_>) -> T) -> T {
    let key = config.security.own_key();
    let key = key.as_ref().map_or(&[][..], |key| key.bytes());
    let &Config { rank, world_size, ref job, .. } = config;
    say(&Control::Hello { rank, world_size, job, listen, epoch: 0, key, digest: &[] })
}

/// Tries the addresses in turn, each once, until one can be connected to. If connections are encrypted, also
/// does the handshake and sends this side's proof. Returns `None` if no address can be connected to.
///
/// If nothing listens yet on a local port in the range of automatically chosen ports, the system may give the
/// socket that same port and connect it to itself. Such a connection is closed and does not count, because it
/// would occupy the port.
pub(super) fn attempt(
    security: &Security,
    addresses: &[SocketAddr],
    expected: Option<PublicKey>,
    until: Deadline,
) -> Result<Option<Stream>, CommError> {
    let reached = addresses.iter().find_map(|address| {
        let socket = TcpStream::connect_timeout(address, until.remaining()?.min(ATTEMPT)).ok()?;
        (socket.local_addr().ok()? != socket.peer_addr().ok()?).then_some((address, socket))
    });
    let Some((address, socket)) = reached else { return Ok(None) };
    let made = Stream::new(socket, security, Role::Client, expected);
    let stream = made.map_err(|e| CommError::io("session with", address, &e))?;
    stream.greet(until)?;
    Ok(Some(stream))
}

/// Tries to connect until the deadline. Returns `None` if no address has answered by then.
pub(super) fn connect(
    security: &Security,
    addresses: &[SocketAddr],
    expected: Option<PublicKey>,
    until: Deadline,
) -> Result<Option<Stream>, CommError> {
    loop {
        match attempt(security, addresses, expected, until) {
            Ok(None) => {}
            Err(e) if hung_up(&e) => {}
            other => return other,
        }
        let Some(left) = until.remaining() else { return Ok(None) };
        std::thread::sleep(left.min(5 * PAUSE));
    }
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
    if absent.is_empty() { answered } else { Err(missing(config, absent)) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_that_works_is_enough() {
        let all = resolve("master address", "no-such-host.invalid:1,127.0.0.1:2,[::1]:3").unwrap();
        assert_eq!(all, ["127.0.0.1:2".parse().unwrap(), "[::1]:3".parse().unwrap()]);
        assert!(resolve("master address", "no-such-host.invalid:1").is_err());
    }
}
