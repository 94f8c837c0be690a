//! A network that grows while it is used. Each member keeps listening. A new process asks any member for the
//! addresses of all, then connects to all. Existing connections are not touched.
//!
//! Each endpoint has a number below [`GateConfig::slots`]. The process draws it at random, and it is never used
//! again. This module uses only the job's name, and does not decide who counts as a member.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use farflung_base::PeerId;

use super::acceptor::{Acceptor, AuthenticatedConnection};
use super::rendezvous::{answer_of, attempt, hung_up, resolve};
use super::shared_memory::SharedMemory;
use super::stream::Stream;
use super::{Tcp, open};
use crate::control::{BoundedVec, Control};
use crate::error::Refusal;
use crate::secure::{JoinSecret, PublicKey, Security};
use crate::until::Until;
use crate::wire::{self, Message, Parsed};
use crate::{CommError, FRAME_BYTES, Transport as _};

/// Time between two checks whether the gate is closed, and between two attempts to connect.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for the connection to one member.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of attempts to connect to a member. Members keep listening, so one that does not answer has left.
const CONNECT_ATTEMPTS: u32 = 4;
/// Number of attempts to draw a free number.
const DRAWS: usize = 64;

/// Where a member listens, and which processes it accepts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GateConfig {
    /// `host:port` to listen at; port 0 picks a free one.
    pub listen: String,
    /// Address at which others reach this member, if it differs from `listen`.
    pub advertise: Option<String>,
    /// Name of the job. Processes of other jobs are refused.
    pub job: String,
    /// How connections are protected, and which processes are accepted.
    pub security: Security,
    /// Greatest number of endpoints over the life of the network, counting those that have left; must be the
    /// same on all.
    pub slots: u32,
    /// Time limit for joining.
    pub deadline: Duration,
    /// Whether members on this machine are reached through shared memory. The default is
    /// [`SharedMemory::Never`].
    pub shared_memory: SharedMemory,
}

impl GateConfig {
    /// Creates a configuration with room for 1,024 endpoints and a deadline of one minute.
    #[must_use]
    pub fn new(listen: impl Into<String>, job: impl Into<String>, security: Security) -> Self {
        let (listen, job, advertise) = (listen.into(), job.into(), None);
        let shared_memory = SharedMemory::default();
        Self {
            listen,
            advertise,
            job,
            security,
            slots: 1024,
            deadline: Duration::from_mins(1),
            shared_memory,
        }
    }
}

/// A peer that is, or has been, connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connected {
    /// Number of the peer.
    pub peer: PeerId,
    /// Address at which the peer listens.
    pub address: String,
    /// Public key of the peer; `None` if connections are not encrypted.
    pub key: Option<PublicKey>,
}

/// The listener of a member, and its endpoint. Dropping this closes the listener.
#[derive(Debug)]
pub struct GrowingNetwork {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    tcp: Arc<Tcp>,
    job: String,
    slots: u32,
    /// Security between members, and towards processes that join.
    security: Security,
    /// Secret that connections among members prove; `None` if they are not encrypted.
    secret: Option<JoinSecret>,
    address: String,
    /// This member, and all peers that have connected.
    known: Mutex<BTreeMap<u32, Connected>>,
    meeting: Mutex<Meeting>,
    welcome: Mutex<Vec<u8>>,
    closed: AtomicBool,
}

/// Peers whose connection is being made. Two peers may call each other at the same time.
#[derive(Debug, Default)]
struct Meeting {
    /// Peers that this one calls.
    calling: BTreeSet<u32>,
    /// Peers that have called this one and were accepted.
    called: BTreeSet<u32>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A member cannot know in advance whether ranks on its machine will outnumber the cores.
const CROWDED: bool = false;

fn listen_at(config: &GateConfig) -> Result<TcpListener, CommError> {
    let addresses = resolve("own address", &config.listen)?;
    let listener =
        TcpListener::bind(&addresses[..]).map_err(|e| CommError::io("listen at", &config.listen, &e))?;
    // The listening thread must also check whether the gate is closed, so it must not block in `accept`.
    listener.set_nonblocking(true).map_err(|e| CommError::io("listen at", &config.listen, &e))?;
    Ok(listener)
}

impl GrowingNetwork {
    /// Creates the first member, with number 0.
    ///
    /// # Errors
    /// If it cannot listen, or the system has no random bytes.
    pub fn found(config: &GateConfig) -> Result<Self, CommError> {
        let secret = config.security.is_sealed().then(JoinSecret::generate).transpose()?;
        Self::open(config, listen_at(config)?, PeerId(0), secret, None)
    }

    fn open(
        config: &GateConfig,
        listener: TcpListener,
        me: PeerId,
        secret: Option<JoinSecret>,
        seen: Option<IpAddr>,
    ) -> Result<Self, CommError> {
        let io = |e: std::io::Error| CommError::io("listen at", &config.listen, &e);
        let mut at = listener.local_addr().map_err(io)?;
        // A member that listens at all addresses advertises the one by which it reached the others.
        if let Some(seen) = seen.filter(|_| at.ip().is_unspecified()) {
            at.set_ip(seen);
        }
        let address = config.advertise.clone().unwrap_or_else(|| at.to_string());
        let tcp = open(me, config.slots as usize, CROWDED, config.shared_memory).map_err(io)?;
        let security = match &secret {
            Some(secret) => config.security.growing(secret.clone()),
            None => config.security.clone(),
        };
        let own = Connected { peer: me, address: address.clone(), key: security.own_key() };
        let shared = Arc::new(Shared {
            tcp,
            job: config.job.clone(),
            slots: config.slots,
            security,
            secret,
            address,
            known: Mutex::new(BTreeMap::from([(me.0, own)])),
            meeting: Mutex::default(),
            welcome: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        let gate = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("farflung-gate".to_owned());
        let thread = thread.spawn(move || gate.listen(&listener)).map_err(io)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Returns the endpoint. A peer that has not connected yet looks like one that is silent.
    #[must_use]
    pub fn transport(&self) -> Arc<Tcp> {
        Arc::clone(&self.shared.tcp)
    }

    /// Returns the address at which others reach this member.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Returns the connected peers by number. A peer that hangs counts as connected until its connection
    /// breaks.
    #[must_use]
    pub fn connected(&self) -> Vec<Connected> {
        let (me, inbox) = (self.shared.tcp.me(), &self.shared.tcp.driver().inbox);
        let here = |known: &&Connected| known.peer != me && !inbox.is_down(known.peer);
        lock(&self.shared.known).values().filter(here).cloned().collect()
    }

    /// Returns this member's entry, as other members see it.
    #[must_use]
    pub fn own(&self) -> Connected {
        let me = self.shared.tcp.me();
        Connected { peer: me, address: self.shared.address.clone(), key: self.shared.security.own_key() }
    }

    /// Sets the bytes that this member sends to processes that ask for the members, besides the addresses; at
    /// most 128 KiB.
    ///
    /// # Errors
    /// [`CommError::Argument`] if there are more bytes.
    pub fn set_welcome(&self, bytes: Vec<u8>) -> Result<(), CommError> {
        let (got, want) = (bytes.len(), FRAME_BYTES / 2);
        if got > want {
            return Err(CommError::Argument {
                op: "gate",
                what: "length of the welcome in bytes (maximum)",
                got,
                want,
            });
        }
        *lock(&self.shared.welcome) = bytes;
        Ok(())
    }

    /// Asks peers for all members, and connects to those that are not connected yet: two processes that join at
    /// the same time do not learn of each other. `config` must be the one that this process joined with.
    ///
    /// # Errors
    /// The same as for [`GrowingNetwork::ask_again`].
    pub fn meet_others(&self, config: &GateConfig) -> Result<(), CommError> {
        let until = Until::after(config.deadline.min(CONNECT_TIMEOUT));
        let quick = GateConfig { deadline: config.deadline.min(CONNECT_TIMEOUT), ..config.clone() };
        let asked = self.ask_again(&quick)?;
        for member in asked.members.iter().filter(|member| !self.shared.is_here(member)) {
            // A member that cannot be reached is tried again at the next call.
            if let Err(error) = self.shared.reach(member, until) {
                tracing::debug!(peer = member.peer.0, %error, "could not connect to a member");
            }
        }
        Ok(())
    }

    /// Asks all peers that this one has ever connected to for the members. It asks as a member, so it also
    /// works if the member that let it in has gone. With the answer this process may join again; `config` must
    /// be the one that it joined with.
    ///
    /// # Errors
    /// The same as for [`GrowingNetwork::ask`].
    pub fn ask_again(&self, config: &GateConfig) -> Result<MemberList, CommError> {
        let me = self.shared.tcp.me();
        let known: Vec<Connected> = lock(&self.shared.known).values().cloned().collect();
        let others = known.into_iter().filter(|peer| peer.peer != me);
        let addresses: Vec<String> = others.map(|peer| peer.address).collect();
        // Members prove themselves to each other by the secret that they share.
        let asks = GateConfig { security: self.shared.security.clone(), ..config.clone() };
        let asked = Self::ask(&asks, &addresses)?;
        Ok(MemberList { config: config.clone(), ..asked })
    }

    /// Asks the members at these addresses, one after the other, for all members: the first step of a process
    /// that wants to join.
    ///
    /// # Errors
    /// The reason of the first member that refuses, or [`CommError::Missing`] if none was reached within the
    /// deadline.
    pub fn ask(config: &GateConfig, addresses: &[String]) -> Result<MemberList, CommError> {
        let until = Until::after(config.deadline);
        loop {
            for address in addresses {
                let Ok(resolved) = resolve("address of a member", address) else { continue };
                let expected = config.security.host();
                match attempt(&config.security, &resolved, expected, until) {
                    Ok(Some(stream)) => return MemberList::at(config, address, &stream, until),
                    Ok(None) => {}
                    Err(error) if hung_up(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            let Some(left) = until.left() else {
                let (master, after) = (addresses.join(","), config.deadline.into());
                return Err(CommError::Missing { master, ranks: vec![farflung_base::Rank(0)], after });
            };
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
    }
}

impl Drop for GrowingNetwork {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The runtime has already reported a panic in it.
            let _ = thread.join();
        }
    }
}

/// The answer of a member to a process that wants to join.
#[derive(Debug)]
pub struct MemberList {
    config: GateConfig,
    members: Vec<Connected>,
    secret: Option<JoinSecret>,
    /// Own address on the connection that asked.
    seen: Option<IpAddr>,
    /// Bytes that the member added to its answer.
    pub welcome: Vec<u8>,
}

impl MemberList {
    fn at(config: &GateConfig, name: &str, stream: &Stream, until: Until) -> Result<Self, CommError> {
        let io = |e: std::io::Error| CommError::io("send the request to", &name, &e);
        stream.say(&Control::Ask(&config.job)).map_err(io)?;
        let told = answer_of(name, stream, until, |message| Self::read(config, message))?;
        Ok(Self { seen: stream.socket.local_addr().ok().map(|at| at.ip()), ..told })
    }

    /// Reads a member's answer; `None` if it is not valid.
    fn read(config: &GateConfig, message: &Control<'_>) -> Option<Self> {
        let Control::Members { slots, addresses, keys, secret, welcome } = message else { return None };
        let (BoundedVec(slots), BoundedVec(addresses), BoundedVec(keys)) = (slots, addresses, keys);
        let is_sealed = config.security.is_sealed();
        let good = slots.len() == addresses.len() && slots.iter().all(|&slot| slot < config.slots);
        if !good || is_sealed && keys.len() != slots.len() {
            return None;
        }
        let mut members = Vec::new();
        for (i, (&slot, address)) in slots.iter().zip(addresses).enumerate() {
            let key = is_sealed.then(|| Some(PublicKey::new(keys[i].try_into().ok()?)));
            let key = match key {
                Some(key) => Some(key?),
                None => None,
            };
            members.push(Connected { peer: PeerId(slot), address: (*address).to_owned(), key });
        }
        let secret = if is_sealed { Some(JoinSecret::new((*secret).try_into().ok()?)) } else { None };
        Some(Self { config: config.clone(), members, secret, seen: None, welcome: welcome.to_vec() })
    }

    /// Returns the members and their addresses.
    #[must_use]
    pub fn members(&self) -> &[Connected] {
        &self.members
    }

    /// Sets whether members on this machine are reached through shared memory. [`MemberList::welcome`] may
    /// decide it.
    #[must_use]
    pub fn with_shared_memory(mut self, shared_memory: SharedMemory) -> Self {
        self.config.shared_memory = shared_memory;
        self
    }

    /// Listens, and connects to all members. A member that does not answer is skipped;
    /// [`GrowingNetwork::connected`] returns those that were reached.
    ///
    /// # Errors
    /// If it cannot listen, if a member refuses it, or if there are members and none was reached.
    pub fn join(self) -> Result<GrowingNetwork, CommError> {
        let config = &self.config;
        let taken: Vec<u32> = self.members.iter().map(|member| member.peer.0).collect();
        let mut listener = Some(listen_at(config)?);
        for _ in 0..DRAWS {
            let slot = draw(config.slots)?;
            if slot == 0 || taken.contains(&slot) {
                continue;
            }
            let at = match listener.take() {
                Some(listener) => listener,
                None => listen_at(config)?,
            };
            let gate = GrowingNetwork::open(config, at, PeerId(slot), self.secret.clone(), self.seen)?;
            match self.reach_all(&gate) {
                // Another process has used this number before: draw again.
                Err(CommError::Refused { reason: Refusal::Taken(_), .. }) => {}
                reached => return reached.map(|()| gate),
            }
        }
        let (got, want) = (taken.len(), config.slots as usize);
        Err(CommError::Argument {
            op: "gate",
            what: "number of members (no free number was found)",
            got,
            want,
        })
    }

    fn reach_all(&self, gate: &GrowingNetwork) -> Result<(), CommError> {
        let until = Until::after(self.config.deadline);
        let mut reached = 0;
        let mut failed = None;
        for member in self.members.iter().filter(|member| !gate.shared.is_here(member)) {
            match gate.shared.reach(member, until) {
                Ok(()) => reached += 1,
                Err(error @ CommError::Refused { .. }) => return Err(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed.filter(|_| reached == 0) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Returns a random number below `bound`.
fn draw(bound: u32) -> Result<u32, CommError> {
    let random = JoinSecret::generate()?;
    let word = random.bytes().first_chunk::<4>().copied().unwrap_or_default();
    Ok(u32::from_le_bytes(word) % bound.max(1))
}

impl Shared {
    /// Returns whether a member is this process, or has this process's address: a call to it would come back
    /// here.
    fn is_here(&self, member: &Connected) -> bool {
        member.peer == self.tcp.me() || member.address == self.address
    }

    /// Connects to a member as a member, unless it has connected to this one.
    fn reach(&self, member: &Connected, until: Until) -> Result<(), CommError> {
        {
            let mut meeting = lock(&self.meeting);
            if self.tcp.driver().is_connected(member.peer) || meeting.called.contains(&member.peer.0) {
                return Ok(());
            }
            meeting.calling.insert(member.peer.0);
        }
        let reached = self.call(member, until);
        lock(&self.meeting).calling.remove(&member.peer.0);
        match reached {
            // The connection that the member made to this one is kept.
            Err(CommError::Refused { reason: Refusal::Crossed, .. }) => Ok(()),
            reached => reached,
        }
    }

    fn call(&self, member: &Connected, until: Until) -> Result<(), CommError> {
        let me = self.tcp.me();
        let addresses = resolve("address of a member", &member.address)?;
        let until = until.at_most(CONNECT_TIMEOUT);
        let missing = || CommError::Missing {
            master: member.address.clone(),
            ranks: vec![farflung_base::Rank(member.peer.0)],
            after: CONNECT_TIMEOUT.into(),
        };
        let mut found = None;
        for _ in 0..CONNECT_ATTEMPTS {
            found = match attempt(&self.security, &addresses, member.key, until) {
                Err(error) if hung_up(&error) => None,
                tried => tried?,
            };
            if found.is_some() {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let stream = found.ok_or_else(missing)?;
        let io = |e: std::io::Error| CommError::io("send the greeting to", &member.address, &e);
        let key = self.security.own_key();
        let key = key.as_ref().map_or(&[][..], |key| key.bytes());
        let (job, listen, world_size) = (&*self.job, &*self.address, self.slots);
        let hello = Control::Hello { rank: me.0, world_size, job, listen, epoch: 0, key, digest: &[] };
        stream.say(&hello).map_err(io)?;
        answer_of(&member.address, &stream, until, |message| match message {
            Control::Welcome(by) if *by == member.peer.0 => Some(()),
            _ => None,
        })?;
        match self.connect(member.clone(), stream) {
            // The member has connected to this one meanwhile.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            connected => connected.map_err(io),
        }
    }

    fn connect(&self, peer: Connected, stream: Stream) -> std::io::Result<()> {
        let mut known = lock(&self.known);
        self.tcp.driver().connect(peer.peer, vec![stream], CROWDED)?;
        known.insert(peer.peer.0, peer);
        Ok(())
    }

    /// Accepts connections until the gate closes.
    fn listen(&self, listener: &TcpListener) {
        let mut door = Acceptor::new(self.security.clone());
        while !self.closed.load(Ordering::Acquire) {
            door.wait(listener, POLL_INTERVAL);
            for AuthenticatedConnection { stream, greeting } in door.listen(listener) {
                let Ok(Parsed::Whole(Message::Control(greeting), _)) = wire::parse(&greeting) else {
                    continue;
                };
                if let Err(refusal) = self.receive(&greeting, &stream) {
                    door.refuse(&stream, refusal);
                } else if let Control::Hello { rank, listen, .. } = greeting {
                    let (peer, key) = (PeerId(rank), stream.peer_key());
                    // If the socket breaks now, the peer connects again.
                    let _ = self.connect(Connected { peer, address: listen.to_owned(), key }, stream);
                    lock(&self.meeting).called.remove(&rank);
                }
            }
        }
    }

    /// Answers a greeting; returns the reason if it is refused.
    fn receive(&self, greeting: &Control<'_>, stream: &Stream) -> Result<(), Refusal> {
        match *greeting {
            Control::Ask(job) if job == self.job => {
                // If the answer cannot be sent, the asking process finds out by itself.
                let _ = stream.socket.set_nonblocking(false).and_then(|()| self.tell(stream));
                Ok(())
            }
            Control::Hello { rank, world_size, job, key, .. } if job == self.job => {
                if world_size != self.slots {
                    return Err(Refusal::WorldSize { want: self.slots, got: world_size });
                }
                if stream.peer_key().is_some_and(|proven| key != proven.bytes()) {
                    return Err(Refusal::Key);
                }
                let (peer, me) = (PeerId(rank), self.tcp.me());
                if rank >= self.slots {
                    return Err(Refusal::Rank(rank));
                }
                let mut meeting = lock(&self.meeting);
                if peer == me || self.tcp.driver().is_connected(peer) || meeting.called.contains(&rank) {
                    return Err(Refusal::Taken(rank));
                }
                // If two peers call each other, the call of the peer with the greater number is kept.
                if me > peer && meeting.calling.contains(&rank) {
                    return Err(Refusal::Crossed);
                }
                meeting.called.insert(rank);
                drop(meeting);
                // If the peer has gone, reading finds out.
                let welcome = Control::Welcome(me.0);
                let _ = stream.socket.set_nonblocking(false).and_then(|()| stream.say(&welcome));
                Ok(())
            }
            _ => Err(Refusal::Job),
        }
    }

    /// Sends the numbers, addresses and keys of the members that are still connected.
    fn tell(&self, stream: &Stream) -> std::io::Result<()> {
        let known: Vec<Connected> = lock(&self.known).values().cloned().collect();
        let here: Vec<&Connected> =
            known.iter().filter(|known| !self.tcp.driver().inbox.is_down(known.peer)).collect();
        let keys = here.iter().filter_map(|known| known.key.as_ref()).map(|key| &key.bytes()[..]);
        let secret = self.secret.as_ref().map_or(&[][..], |secret| &secret.bytes()[..]);
        let welcome = lock(&self.welcome).clone();
        stream.say(&Control::Members {
            slots: BoundedVec(here.iter().map(|known| known.peer.0).collect()),
            addresses: BoundedVec(here.iter().map(|known| &*known.address).collect()),
            keys: BoundedVec(keys.collect()),
            secret,
            welcome: &welcome,
        })
    }
}
