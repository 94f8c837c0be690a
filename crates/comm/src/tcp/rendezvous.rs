//! How the ranks of a job find each other: all meet at the master's address and get a table of addresses, or have one
//! from the start; then they connect pairwise, each end naming itself. Everything has a deadline; what does not belong
//! here is refused with the reason.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farflung_base::Rank;

use super::door::{Door, Said};
use super::streams::multiply;
use crate::control::{Control, Listed};
use crate::error::Refusal;
use crate::memory::real_start;
use crate::wire::{self, Message, Parsed, VERSION};
use crate::{CommError, WireError};

/// To one peer.
const MOST_STREAMS: usize = 16;
/// Between two looks at the door.
const PAUSE: Duration = Duration::from_millis(2);
/// For one attempt to connect, so that one host that swallows packets does not take the time of the others.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Who this process is and where the others are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// This process's rank; rank 0 is the master.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// `host:port` (`[::1]:port` for IPv6) at which rank 0 listens: `MASTER_ADDR:MASTER_PORT`. Not used with `peers`.
    pub master: String,
    /// Where each rank is reached, in their order, as `host:port`; empty where the master knows. Ranks may have
    /// different lists, where a peer is reached by different ways.
    pub peers: Vec<String>,
    /// Processes of other jobs are refused.
    pub job: String,
    /// The time that the whole rendezvous may take.
    pub deadline: Duration,
    /// The address at which this rank listens for its peers; by default the one from which it reaches the master, or its
    /// own of `peers`, whose port counts in any case.
    pub listen: Option<IpAddr>,
    /// Connections to each peer, 1 to 16, the same on all ranks: over a long fat link one connection's window may not
    /// fill it. Messages go over one or another by their tags, and so do the lanes of a pipelined all-reduce. Those
    /// beyond the first go to ports that the ranks tell each other, so they need a network that lets them.
    pub streams: usize,
}

impl Config {
    /// A member of the job `farflung` with a minute for everyone to come.
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
        }
    }

    /// The same for ranks that know each other's addresses and need no master.
    #[must_use]
    pub fn with_peers(rank: u32, peers: Vec<String>) -> Self {
        let first = peers.first().cloned().unwrap_or_default();
        let mut config = Self::new(rank, peers.len() as u32, first);
        config.peers = peers;
        config
    }
}

/// A time after which nothing is tried any more.
#[derive(Clone, Copy)]
pub(super) struct Until {
    start: Instant,
    limit: Duration,
}

impl Until {
    pub(super) fn after(limit: Duration) -> Self {
        Self { start: real_start(), limit }
    }

    /// As good as never.
    pub(super) fn never() -> Self {
        Self::after(Duration::from_secs(u32::MAX.into()))
    }

    pub(super) fn left(self) -> Option<Duration> {
        self.limit.checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())
    }
}

/// Streams to all peers by rank, none to the own.
pub(super) type Streams = Vec<Option<TcpStream>>;

/// Finds all peers.
pub(super) fn meet(config: &Config) -> Result<Vec<Vec<TcpStream>>, CommError> {
    let argument = |what, got, want| Err(CommError::Argument { op: "rendezvous", what, got, want });
    let (rank, size) = (config.rank as usize, config.world_size as usize);
    if rank >= size {
        return argument("rank", rank, size);
    }
    if config.job.len() > 512 {
        return argument("length of the job id", config.job.len(), 512);
    }
    if !config.peers.is_empty() && config.peers.len() != size {
        return argument("number of peers", config.peers.len(), size);
    }
    if !(1..=MOST_STREAMS).contains(&config.streams) {
        return argument("streams", config.streams, MOST_STREAMS);
    }
    let until = Until::after(config.deadline);
    let met = if !config.peers.is_empty() {
        by_list(config, until)
    } else if rank == 0 {
        host(config, until)
    } else {
        visit(config, until)
    };
    multiply(config, met?, until)
}

fn missing(config: &Config, ranks: Vec<Rank>) -> CommError {
    let master = if config.peers.is_empty() { config.master.clone() } else { "the listed peers".to_owned() };
    CommError::Missing { master, ranks, after: config.deadline.into() }
}

pub(super) fn resolve(what: &'static str, address: &str) -> Result<Vec<SocketAddr>, CommError> {
    match address.to_socket_addrs() {
        Ok(addresses) => Ok(addresses.collect()),
        Err(e) => Err(CommError::io(what, &address, &e)),
    }
}

fn nobody(config: &Config) -> Streams {
    (0..config.world_size).map(|_| None).collect()
}

/// Rank 0: lets everyone in, then tells everyone where the others are.
fn host(config: &Config, until: Until) -> Result<Streams, CommError> {
    let addresses = resolve("master address", &config.master)?;
    let listener =
        TcpListener::bind(&addresses[..]).map_err(|e| CommError::io("listen at", &config.master, &e))?;
    let mut streams = nobody(config);
    let mut table = vec![String::new(); config.world_size as usize];
    let never = AtomicBool::new(false);
    let come =
        admit(config, &listener, until, (&never, false), &mut streams, |rank, listen| table[rank] = listen);
    if let Err(ranks) = come {
        let message = Control::Missing(Listed(ranks.iter().map(|rank| rank.0).collect()));
        for stream in streams.iter_mut().flatten() {
            // They have deadlines of their own.
            let _ = say(stream, &message);
        }
        return Err(missing(config, ranks));
    }
    let message = Control::Table(Listed(table.iter().map(String::as_str).collect()));
    for (rank, stream) in streams.iter_mut().enumerate() {
        if let Some(stream) = stream {
            say(stream, &message).map_err(|e| CommError::io("table to", &Rank(rank as u32), &e))?;
        }
    }
    Ok(streams)
}

type Asked = (TcpStream, TcpListener, String, Vec<SocketAddr>);

/// Listens, and tells the master where; it tells where the ranks between it and this one are.
fn ask(config: &Config, addresses: &[SocketAddr], until: Until, patient: Until) -> Result<Asked, CommError> {
    let mut master = connect(addresses, until).ok_or_else(|| missing(config, vec![Rank(0)]))?;
    let io = |what| move |e: std::io::Error| CommError::io(what, &config.master, &e);
    let local = match config.listen {
        Some(ip) => ip,
        None => master.local_addr().map_err(io("socket to"))?.ip(),
    };
    let listener = TcpListener::bind((local, 0)).map_err(|e| CommError::io("listen at", &local, &e))?;
    let own = listener.local_addr().map_err(|e| CommError::io("listen at", &local, &e))?.to_string();
    say(&mut master, &hello(config, &own)).map_err(io("hello to"))?;
    let table = answer(config, &config.master, &mut master, patient, |message| match message {
        Control::Table(Listed(table)) if table.len() == config.world_size as usize => {
            table[1..config.rank as usize].iter().map(|address| address.parse().ok()).collect()
        }
        _ => None,
    })?;
    Ok((master, listener, own, table))
}

/// Every other rank: asks the master, then meets the others where they are.
fn visit(config: &Config, until: Until) -> Result<Streams, CommError> {
    let addresses = resolve("master address", &config.master)?;
    // The master gives up at its own deadline and then says who is missing; there is a moment for that.
    let patient = Until { limit: until.limit + Duration::from_secs(1), ..until };
    let (master, listener, own, table) = loop {
        match ask(config, &addresses, until, patient) {
            Err(e) if hung_up(&e) => match until.left() {
                Some(rest) => std::thread::sleep(rest.min(5 * PAUSE)),
                None => return Err(missing(config, vec![Rank(0)])),
            },
            asked => break asked?,
        }
    };
    let lower: Vec<_> = (1..).zip(table).map(|(rank, address)| (rank, vec![address])).collect();
    let mut streams = pairwise(config, &listener, &own, &lower, until)?;
    streams[0] = Some(master);
    Ok(streams)
}

/// Every rank, where all know where all are.
fn by_list(config: &Config, until: Until) -> Result<Streams, CommError> {
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

/// Connects to lower ranks at their addresses and lets the higher ones in, at the same time.
pub(super) fn pairwise(
    config: &Config,
    listener: &TcpListener,
    own: &str,
    lower: &[(usize, Vec<SocketAddr>)],
    until: Until,
) -> Result<Streams, CommError> {
    let mut streams = nobody(config);
    let given_up = AtomicBool::new(false);
    let (come, reached) = std::thread::scope(|scope| {
        let reaching = scope.spawn(|| {
            reach(config, own, lower, until).inspect_err(|_| given_up.store(true, Ordering::Relaxed))
        });
        let come = admit(config, listener, until, (&given_up, true), &mut streams, |_, _| {});
        (come, reaching.join().expect("nothing in it panics"))
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

/// Connects to all of them, as they come up and answer; the error names those that did not.
fn reach(
    config: &Config,
    own: &str,
    lower: &[(usize, Vec<SocketAddr>)],
    until: Until,
) -> Result<Vec<(usize, TcpStream)>, CommError> {
    let mut welcomed = Vec::new();
    let mut left: Vec<_> = lower.iter().collect();
    loop {
        let mut greeted = Vec::new();
        left.retain(|peer| {
            let Some(mut stream) = attempt(&peer.1, until) else { return true };
            // At once, so that it is not missed there while others still are here. If it fails, so does the answer.
            let _ = say(&mut stream, &hello(config, own));
            greeted.push((*peer, stream));
            false
        });
        for (peer, mut stream) in greeted {
            let rank = peer.0;
            let name = stream.peer_addr().map_or_else(|_| Rank(rank as u32).to_string(), |at| at.to_string());
            let answered = answer(config, &name, &mut stream, until, |message| match message {
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
        let Some(rest) = until.left() else {
            return Err(missing(config, left.iter().map(|(rank, _)| Rank(*rank as u32)).collect()));
        };
        std::thread::sleep(rest.min(5 * PAUSE));
    }
}

/// Whether the other side ended the connection before it said anything: so does what stands before a peer that does not
/// listen yet, be it a relay, a tunnel or a forwarded port.
const fn hung_up(error: &CommError) -> bool {
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

/// Lets in all ranks above the own, with a welcome unless the answer is a table; strangers are turned away. The ranks that
/// have not come by the deadline are the error, also where all is given up before.
fn admit(
    config: &Config,
    listener: &TcpListener,
    until: Until,
    (given_up, welcomes): (&AtomicBool, bool),
    streams: &mut [Option<TcpStream>],
    mut note: impl FnMut(usize, String),
) -> Result<(), Vec<Rank>> {
    let me = config.rank as usize;
    let mut door = Door::new();
    // A listener that blocks would only be looked at when somebody comes.
    let _ = listener.set_nonblocking(true);
    loop {
        let absent: Vec<Rank> =
            (me + 1..streams.len()).filter(|&r| streams[r].is_none()).map(|r| Rank(r as u32)).collect();
        if absent.is_empty() {
            return Ok(());
        }
        if until.left().is_none() || given_up.load(Ordering::Relaxed) {
            return Err(absent);
        }
        let mut moved = false;
        for (mut stream, said) in door.listen(listener) {
            let hello = match said {
                Said::Hello(bytes) => bytes,
                Said::Other(version) => {
                    let reason = Refusal::Version { want: VERSION, got: version };
                    // Whoever is refused may be gone already.
                    let _ = say(&mut stream, &Control::Refuse(reason));
                    continue;
                }
            };
            let Ok(Parsed::Whole(Message::Control(hello), _)) = wire::parse(&hello) else { continue };
            match check(config, &hello, streams) {
                Err(refusal) => {
                    let _ = say(&mut stream, &Control::Refuse(refusal));
                }
                Ok((rank, listen)) => {
                    let ready = stream.set_nonblocking(false).is_ok()
                        && (!welcomes || say(&mut stream, &Control::Welcome(config.rank)).is_ok());
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

/// The rank that greets, and where it listens.
fn check(
    config: &Config,
    hello: &Control<'_>,
    streams: &[Option<TcpStream>],
) -> Result<(usize, String), Refusal> {
    let &Control::Hello { rank, world_size, job, listen } = hello else { return Err(Refusal::Job) };
    if job != config.job {
        return Err(Refusal::Job);
    }
    if world_size != config.world_size {
        return Err(Refusal::WorldSize { want: config.world_size, got: world_size });
    }
    match streams.get(rank as usize) {
        None => Err(Refusal::Rank(rank)),
        // One that comes again takes the place of its dead self.
        Some(before) if rank > config.rank && before.as_ref().is_none_or(is_gone) => {
            Ok((rank as usize, listen.to_owned()))
        }
        Some(_) => Err(Refusal::Taken(rank)),
    }
}

/// Whether the other side has closed the connection, which nobody reads from at this time.
fn is_gone(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let gone = match stream.peek(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    };
    gone || stream.set_nonblocking(false).is_err()
}

pub(super) fn hello<'a>(config: &'a Config, listen: &'a str) -> Control<'a> {
    Control::Hello { rank: config.rank, world_size: config.world_size, job: &config.job, listen }
}

/// Tries each address once.
///
/// Where nobody listens yet on a port of this machine from which sockets are numbered, the system may give the socket
/// that very port and connect it to itself: that is nobody's answer, and would hold the port.
fn attempt(addresses: &[SocketAddr], until: Until) -> Option<TcpStream> {
    addresses.iter().find_map(|address| {
        let stream = TcpStream::connect_timeout(address, until.left()?.min(ATTEMPT)).ok()?;
        (stream.local_addr().ok()? != stream.peer_addr().ok()?).then_some(stream)
    })
}

/// Tries until the deadline.
pub(super) fn connect(addresses: &[SocketAddr], until: Until) -> Option<TcpStream> {
    loop {
        if let Some(stream) = attempt(addresses, until) {
            return Some(stream);
        }
        std::thread::sleep(until.left()?.min(5 * PAUSE));
    }
}

pub(super) fn say(stream: &mut TcpStream, message: &Control<'_>) -> std::io::Result<()> {
    let frame = wire::framed(message).map_err(|e| std::io::Error::new(ErrorKind::InvalidInput, e))?;
    stream.write_all(&frame)
}

/// Waits for a message that `wanted` takes; refusals and losses become errors.
pub(super) fn answer<T>(
    config: &Config,
    from: &str,
    stream: &mut TcpStream,
    until: Until,
    wanted: impl FnOnce(&Control<'_>) -> Option<T>,
) -> Result<T, CommError> {
    let bytes = read_message(from, stream, until)?;
    let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
    let Parsed::Whole(Message::Control(message), _) = wire::parse(&bytes).map_err(wrong)? else {
        return Err(wrong(WireError::Malformed("control message")));
    };
    match &message {
        Control::Missing(Listed(ranks)) => Err(missing(config, ranks.iter().copied().map(Rank).collect())),
        Control::Refuse(reason) => Err(CommError::Refused { peer: from.to_owned(), reason: *reason }),
        other => wanted(other).ok_or_else(|| wrong(WireError::Malformed("answer"))),
    }
}

/// The bytes of one whole message, as many as come: nothing is allocated by a length that is only claimed.
pub(super) fn read_message(from: &str, stream: &mut TcpStream, until: Until) -> Result<Vec<u8>, CommError> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
        let want = match wire::parse(&bytes).map_err(wrong)? {
            Parsed::Part(want) => want,
            Parsed::Whole(..) => return Ok(bytes),
        };
        let io = |e: &std::io::Error| CommError::io("answer of", &from, e);
        let late = || CommError::Io {
            what: "no answer in time of",
            address: from.to_owned(),
            kind: ErrorKind::TimedOut,
            message: format!("waited for {:?}", until.limit),
        };
        stream.set_read_timeout(Some(until.left().ok_or_else(late)?)).map_err(|e| io(&e))?;
        match stream.read(&mut buffer[..(want - bytes.len()).min(4096)]) {
            Ok(0) => return Err(io(&ErrorKind::UnexpectedEof.into())),
            Ok(n) => bytes.extend_from_slice(&buffer[..n]),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(e) => return Err(io(&e)),
        }
    }
}
