//! How the ranks of a job find each other: all meet at the master's address, get a table of addresses, and connect
//! pairwise, each end naming itself. Everything has a deadline; what does not belong here is refused with the reason.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use farflung_base::Rank;

use crate::error::Refusal;
use crate::memory::real_start;
use crate::wire::{self, HEADER_BYTES, Kind, NO_TAG, VERSION};
use crate::{CommError, WireError};

/// The longest control message.
const CONTROL: usize = 64 * 1024;
/// Strangers that may stand at the door at a time.
const AT_THE_DOOR: usize = 256;
/// Between two looks at the door.
const PAUSE: Duration = Duration::from_millis(2);

/// Who this process is and where the others are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// This process's rank; rank 0 is the master.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// `host:port` (`[::1]:port` for IPv6) at which rank 0 listens: `MASTER_ADDR:MASTER_PORT`.
    pub master: String,
    /// Processes of other jobs are refused.
    pub job: String,
    /// The time that the whole rendezvous may take.
    pub deadline: Duration,
    /// The address at which this rank listens for its peers; by default the one from which it reaches the master.
    pub listen: Option<IpAddr>,
}

impl Config {
    /// A member of the job `farflung` with a minute for everyone to come.
    #[must_use]
    pub fn new(rank: u32, world_size: u32, master: impl Into<String>) -> Self {
        let (master, job) = (master.into(), "farflung".to_owned());
        Self { rank, world_size, master, job, deadline: Duration::from_mins(1), listen: None }
    }
}

/// A time after which nothing is tried any more.
#[derive(Clone, Copy)]
struct Until {
    start: Instant,
    limit: Duration,
}

impl Until {
    fn left(self) -> Option<Duration> {
        self.limit.checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())
    }
}

/// Streams to all peers by rank, none to the own.
pub(super) fn meet(config: &Config) -> Result<Vec<Option<TcpStream>>, CommError> {
    let (rank, size) = (config.rank, config.world_size);
    if rank >= size {
        let (got, want) = (rank as usize, size as usize);
        return Err(CommError::Argument { op: "rendezvous", what: "rank", got, want });
    }
    if config.job.len() > 512 {
        let got = config.job.len();
        return Err(CommError::Argument { op: "rendezvous", what: "length of the job id", got, want: 512 });
    }
    let until = Until { start: real_start(), limit: config.deadline };
    if rank == 0 { host(config, until) } else { visit(config, until) }
}

fn missing(config: &Config, ranks: Vec<Rank>) -> CommError {
    CommError::Missing { master: config.master.clone(), ranks, after: config.deadline.into() }
}

fn resolve(config: &Config) -> Result<Vec<SocketAddr>, CommError> {
    match config.master.to_socket_addrs() {
        Ok(addresses) => Ok(addresses.collect()),
        Err(e) => Err(CommError::io("master address", &config.master, &e)),
    }
}

/// Rank 0: lets everyone in, then tells everyone where the others are.
fn host(config: &Config, until: Until) -> Result<Vec<Option<TcpStream>>, CommError> {
    let addresses = resolve(config)?;
    let listener =
        TcpListener::bind(&addresses[..]).map_err(|e| CommError::io("listen at", &config.master, &e))?;
    let mut streams: Vec<Option<TcpStream>> = (0..config.world_size).map(|_| None).collect();
    let mut table = vec![String::new(); config.world_size as usize];
    let come = admit(config, &listener, until, &mut streams, 0, |hello| {
        table[hello.rank as usize] = hello.listen;
    });
    if let Err(ranks) = come {
        let message: Vec<u8> = ranks.iter().flat_map(|r| r.0.to_le_bytes()).collect();
        for stream in streams.iter_mut().flatten() {
            // They have deadlines of their own.
            let _ = say(stream, Kind::Missing, &message);
        }
        return Err(missing(config, ranks));
    }
    let mut message = Vec::new();
    for address in &table {
        text(&mut message, address);
    }
    for (rank, stream) in streams.iter_mut().enumerate() {
        if let Some(stream) = stream {
            say(stream, Kind::Table, &message)
                .map_err(|e| CommError::io("table to", &Rank(rank as u32), &e))?;
        }
    }
    Ok(streams)
}

/// Every other rank: asks the master, then connects to the lower ranks and lets the higher ones in.
fn visit(config: &Config, until: Until) -> Result<Vec<Option<TcpStream>>, CommError> {
    let addresses = resolve(config)?;
    let mut master = connect(&addresses, until).ok_or_else(|| missing(config, vec![Rank(0)]))?;
    let io = |what| move |e: std::io::Error| CommError::io(what, &config.master, &e);
    let local = match config.listen {
        Some(ip) => ip,
        None => master.local_addr().map_err(io("socket to"))?.ip(),
    };
    let listener = TcpListener::bind((local, 0)).map_err(|e| CommError::io("listen at", &local, &e))?;
    let own = listener.local_addr().map_err(|e| CommError::io("listen at", &local, &e))?;
    let hello = Hello {
        rank: config.rank,
        world_size: config.world_size,
        job: config.job.clone(),
        listen: own.to_string(),
    };
    say(&mut master, Kind::Hello, &hello.encode()).map_err(io("hello to"))?;
    // The master gives up at its own deadline and then says who is missing; there is a moment for that.
    let patient = Until { limit: until.limit + Duration::from_secs(1), ..until };
    let table = answer(config, &config.master, &mut master, patient, Kind::Table)?;
    let mut table = Reader(&table);
    let mut streams: Vec<Option<TcpStream>> = (0..config.world_size).map(|_| None).collect();
    streams[0] = Some(master);
    for (rank, stream) in streams.iter_mut().enumerate() {
        let lie =
            || CommError::Handshake { peer: config.master.clone(), source: WireError::Malformed("table") };
        let address = table.text().ok_or_else(lie)?;
        if rank == 0 || rank >= config.rank as usize {
            continue;
        }
        let to: SocketAddr = address.parse().map_err(|_| lie())?;
        let absent = || missing(config, vec![Rank(rank as u32)]);
        let mut peer = connect(&[to], until).ok_or_else(absent)?;
        say(&mut peer, Kind::Hello, &hello.encode()).map_err(|e| CommError::io("hello to", &to, &e))?;
        let welcome = answer(config, &address, &mut peer, until, Kind::Welcome)?;
        if Reader(&welcome).u32() != Some(rank as u32) {
            let source = WireError::Malformed("welcome");
            return Err(CommError::Handshake { peer: address, source });
        }
        *stream = Some(peer);
    }
    let me = config.rank as usize;
    admit(config, &listener, until, &mut streams, me, |_| {}).map_err(|ranks| missing(config, ranks))?;
    Ok(streams)
}

/// Lets in all ranks above `me`; strangers are turned away. The ranks that have not come by the deadline are the error.
fn admit(
    config: &Config,
    listener: &TcpListener,
    until: Until,
    streams: &mut [Option<TcpStream>],
    me: usize,
    mut note: impl FnMut(Hello),
) -> Result<(), Vec<Rank>> {
    let mut door: Vec<(TcpStream, Vec<u8>)> = Vec::new();
    // A listener that blocks would only be looked at when somebody comes.
    let _ = listener.set_nonblocking(true);
    loop {
        let absent: Vec<Rank> =
            (me + 1..streams.len()).filter(|&r| streams[r].is_none()).map(|r| Rank(r as u32)).collect();
        if absent.is_empty() {
            return Ok(());
        }
        if until.left().is_none() {
            return Err(absent);
        }
        while let Ok((stream, _)) = listener.accept() {
            if door.len() < AT_THE_DOOR && stream.set_nonblocking(true).is_ok() {
                door.push((stream, Vec::new()));
            }
        }
        let mut moved = false;
        let mut still = Vec::new();
        for (mut stream, mut bytes) in door.drain(..) {
            match hear(&mut stream, &mut bytes) {
                Heard::Nothing => still.push((stream, bytes)),
                Heard::Nonsense => {}
                Heard::Other(version) => {
                    refuse(&mut stream, Refusal::Version { want: VERSION, got: version });
                }
                Heard::Hello(hello) => {
                    if let Err(refusal) = check(config, &hello, streams, me) {
                        refuse(&mut stream, refusal);
                        continue;
                    }
                    let welcome = (me as u32).to_le_bytes();
                    let ready = stream.set_nonblocking(false).is_ok()
                        && (me == 0 || say(&mut stream, Kind::Welcome, &welcome).is_ok());
                    if ready {
                        moved = true;
                        streams[hello.rank as usize] = Some(stream);
                        note(hello);
                    }
                }
            }
        }
        door = still;
        if !moved {
            std::thread::sleep(PAUSE);
        }
    }
}

enum Heard {
    Nothing,
    Nonsense,
    Other(u8),
    Hello(Hello),
}

/// Reads on in a greeting without blocking.
fn hear(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Heard {
    let mut buffer = [0; 512];
    loop {
        // A header first, then exactly its payload: what follows belongs to the link.
        let want = match bytes.first_chunk::<HEADER_BYTES>().map(wire::decode) {
            None => HEADER_BYTES,
            Some(Err(WireError::Version { got, .. })) => return Heard::Other(got),
            Some(Ok(header)) if header.kind == Kind::Hello && header.length <= 1024 => {
                HEADER_BYTES + header.length
            }
            Some(_) => return Heard::Nonsense,
        };
        let rest = want - bytes.len();
        if rest == 0 {
            return whole(bytes).and_then(Hello::decode).map_or(Heard::Nonsense, Heard::Hello);
        }
        match stream.read(&mut buffer[..rest.min(512)]) {
            Ok(0) => return Heard::Nonsense,
            Ok(n) => bytes.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
            Err(_) => return Heard::Nonsense,
        }
    }
}

/// The payload of a message that is complete and unharmed.
fn whole(bytes: &[u8]) -> Option<&[u8]> {
    let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let decoded = wire::decode(header).ok()?;
    (wire::checksum(header, payload) == decoded.crc).then_some(payload)
}

fn check(config: &Config, hello: &Hello, streams: &[Option<TcpStream>], me: usize) -> Result<(), Refusal> {
    if hello.job != config.job {
        return Err(Refusal::Job);
    }
    if hello.world_size != config.world_size {
        return Err(Refusal::WorldSize { want: config.world_size, got: hello.world_size });
    }
    match streams.get(hello.rank as usize) {
        None => Err(Refusal::Rank(hello.rank)),
        Some(None) if hello.rank as usize > me => Ok(()),
        Some(_) => Err(Refusal::Taken(hello.rank)),
    }
}

/// Tries until the deadline.
fn connect(addresses: &[SocketAddr], until: Until) -> Option<TcpStream> {
    loop {
        for address in addresses {
            let left = until.left()?;
            if let Ok(stream) = TcpStream::connect_timeout(address, left) {
                return Some(stream);
            }
        }
        std::thread::sleep(PAUSE.min(until.left()?) * 5);
    }
}

fn say(stream: &mut TcpStream, kind: Kind, payload: &[u8]) -> std::io::Result<()> {
    let header = wire::encode(kind, NO_TAG, 0, payload);
    stream.write_all(&[&header[..], payload].concat())
}

fn refuse(stream: &mut TcpStream, refusal: Refusal) {
    let (code, want, got) = match refusal {
        Refusal::WorldSize { want, got } => (1, want, got),
        Refusal::Job => (2, 0, 0),
        Refusal::Rank(rank) => (3, 0, rank),
        Refusal::Taken(rank) => (4, 0, rank),
        Refusal::Version { want, got } => (5, want.into(), got.into()),
    };
    let message = [&[code][..], &u32::to_le_bytes(want), &u32::to_le_bytes(got)].concat();
    // Whoever is refused may be gone already.
    let _ = say(stream, Kind::Refuse, &message);
}

/// Waits for a message of the given kind; refusals and losses become errors.
fn answer(
    config: &Config,
    from: &str,
    stream: &mut TcpStream,
    until: Until,
    kind: Kind,
) -> Result<Vec<u8>, CommError> {
    let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
    let mut header = [0; HEADER_BYTES];
    read_all(config, from, stream, until, &mut header)?;
    let decoded = wire::decode(&header).map_err(wrong)?;
    if decoded.length > CONTROL {
        return Err(wrong(WireError::Length { max: CONTROL, got: decoded.length }));
    }
    let mut payload = vec![0; decoded.length];
    read_all(config, from, stream, until, &mut payload)?;
    if wire::checksum(&header, &payload) != decoded.crc {
        return Err(wrong(WireError::Checksum));
    }
    let mut reader = Reader(&payload);
    match decoded.kind {
        got if got == kind => Ok(payload),
        Kind::Missing => {
            let mut ranks = Vec::new();
            while let Some(rank) = reader.u32() {
                ranks.push(Rank(rank));
            }
            Err(missing(config, ranks))
        }
        Kind::Refuse => {
            let code = reader.u8();
            let (Some(code), Some(want), Some(got)) = (code, reader.u32(), reader.u32()) else {
                return Err(wrong(WireError::Malformed("refusal")));
            };
            let reason = match code {
                1 => Refusal::WorldSize { want, got },
                2 => Refusal::Job,
                3 => Refusal::Rank(got),
                4 => Refusal::Taken(got),
                5 => Refusal::Version { want: want as u8, got: got as u8 },
                _ => return Err(wrong(WireError::Malformed("refusal"))),
            };
            Err(CommError::Refused { peer: from.to_owned(), reason })
        }
        other => Err(wrong(WireError::Kind(other as u8))),
    }
}

fn read_all(
    config: &Config,
    from: &str,
    stream: &mut TcpStream,
    until: Until,
    mut bytes: &mut [u8],
) -> Result<(), CommError> {
    while !bytes.is_empty() {
        let late = || CommError::Io {
            what: "no answer in time of",
            address: from.to_owned(),
            kind: ErrorKind::TimedOut,
            message: format!("waited for {:?}", config.deadline),
        };
        let left = until.left().ok_or_else(late)?;
        let io = |e: &std::io::Error| CommError::io("answer of", &from, e);
        stream.set_read_timeout(Some(left)).map_err(|e| io(&e))?;
        match stream.read(bytes) {
            Ok(0) => return Err(io(&ErrorKind::UnexpectedEof.into())),
            Ok(n) => bytes = &mut bytes[n..],
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(e) => return Err(io(&e)),
        }
    }
    Ok(())
}

/// The greeting.
struct Hello {
    rank: u32,
    world_size: u32,
    job: String,
    listen: String,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut out = [self.rank.to_le_bytes(), self.world_size.to_le_bytes()].concat();
        text(&mut out, &self.job);
        text(&mut out, &self.listen);
        out
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        Some(Self {
            rank: reader.u32()?,
            world_size: reader.u32()?,
            job: reader.text()?,
            listen: reader.text()?,
        })
    }
}

/// A length of two bytes and so much of the text.
fn text(out: &mut Vec<u8>, text: &str) {
    let len = u16::try_from(text.len()).unwrap_or(u16::MAX);
    out.extend(len.to_le_bytes());
    out.extend(&text.as_bytes()[..len as usize]);
}

/// Reads control messages of untrusted bytes.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, n: usize) -> Option<&[u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }
    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }
    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }
    fn text(&mut self) -> Option<String> {
        let len = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        String::from_utf8(self.take(len.into())?.to_vec()).ok()
    }
}
