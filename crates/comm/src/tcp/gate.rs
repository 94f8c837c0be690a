//! A network that grows while it is used: each member listens all along, and a process that comes later asks
//! any of them where the others are, then connects to all. No connection that exists is touched.
//!
//! Each endpoint has a number below [`GateConfig::slots`], which the process draws for itself and which nobody
//! has again. It knows no job beyond its name, and does not decide who counts as a member.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use farflung_base::PeerId;

use super::door::{Door, Guest};
use super::near::SharedMemory;
use super::rendezvous::{answer_of, attempt, hung_up, resolve};
use super::stream::Stream;
use super::{Tcp, open};
use crate::control::{Control, Listed};
use crate::error::Refusal;
use crate::secure::{JoinSecret, PublicKey, Security};
use crate::until::Until;
use crate::wire::{self, Message, Parsed};
use crate::{CommError, FRAME_BYTES, Transport as _};

/// Between two looks whether the gate is closed.
const LOOK: Duration = Duration::from_millis(100);
/// For the connection to one member, of several.
const EACH: Duration = Duration::from_secs(10);
/// How often a connection to a member is tried: it listens all along, so that whoever does not answer has left.
const TRIES: u32 = 4;
/// How often a newcomer draws a number that nobody has.
const DRAWS: usize = 64;

/// Where a member listens, and whom it lets in.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GateConfig {
    /// `host:port` at which it listens; port 0 takes any that is free.
    pub listen: String,
    /// Where others reach it, if that is elsewhere.
    pub advertise: Option<String>,
    /// Processes of other jobs are refused.
    pub job: String,
    /// How connections are protected, and who is let in.
    pub security: Security,
    /// The greatest number of endpoints that the network ever has, those that have left included; the same for
    /// all.
    pub slots: u32,
    /// The time that coming in may take.
    pub deadline: Duration,
    /// Whether members of this machine are reached through shared memory. By default they are not.
    pub shared_memory: SharedMemory,
}

impl GateConfig {
    /// Room for 1,024 endpoints, and a minute to come in.
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

/// A peer that has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connected {
    /// Its number.
    pub peer: PeerId,
    /// Where it listens.
    pub address: String,
    /// Its key, where connections are encrypted.
    pub key: Option<PublicKey>,
}

/// A member's open door, and its endpoint behind it. The door closes when this is dropped.
#[derive(Debug)]
pub struct Gate {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    tcp: Arc<Tcp>,
    job: String,
    slots: u32,
    /// Of the members among each other, and of newcomers.
    security: Security,
    /// What connections among members prove; none where they are not encrypted.
    secret: Option<JoinSecret>,
    address: String,
    /// This one, and those that have come.
    known: Mutex<BTreeMap<u32, Connected>>,
    meeting: Mutex<Meeting>,
    welcome: Mutex<Vec<u8>>,
    closed: AtomicBool,
}

/// Peers that are about to be connected: two may call each other at the same time.
#[derive(Debug, Default)]
struct Meeting {
    /// This one calls them.
    calling: BTreeSet<u32>,
    /// They have called, and are welcome.
    called: BTreeSet<u32>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether ranks of one machine outnumber its cores is not known before they come.
const CROWDED: bool = false;

fn listen_at(config: &GateConfig) -> Result<TcpListener, CommError> {
    let addresses = resolve("own address", &config.listen)?;
    let listener =
        TcpListener::bind(&addresses[..]).map_err(|e| CommError::io("listen at", &config.listen, &e))?;
    // A listener that blocks would only be looked at when somebody comes.
    listener.set_nonblocking(true).map_err(|e| CommError::io("listen at", &config.listen, &e))?;
    Ok(listener)
}

impl Gate {
    /// The first member, with the number 0.
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
        // One that listens at all addresses is reached where it has been seen.
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

    /// The endpoint. Peers that have not come are as if they were silent.
    #[must_use]
    pub fn transport(&self) -> Arc<Tcp> {
        Arc::clone(&self.shared.tcp)
    }

    /// Where others reach it.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// The peers that are connected, by number. One that stands still is, until its connection breaks.
    #[must_use]
    pub fn connected(&self) -> Vec<Connected> {
        let (me, inbox) = (self.shared.tcp.me(), &self.shared.tcp.driver().inbox);
        let here = |known: &&Connected| known.peer != me && !inbox.is_down(known.peer);
        lock(&self.shared.known).values().filter(here).cloned().collect()
    }

    /// This member, as others know it.
    #[must_use]
    pub fn own(&self) -> Connected {
        let me = self.shared.tcp.me();
        Connected { peer: me, address: self.shared.address.clone(), key: self.shared.security.own_key() }
    }

    /// What whoever asks is told beside where the members are; at most 128 KiB.
    ///
    /// # Errors
    /// [`CommError::Argument`] for more.
    pub fn set_welcome(&self, bytes: Vec<u8>) -> Result<(), CommError> {
        let (got, want) = (bytes.len(), FRAME_BYTES / 2);
        if got > want {
            return Err(CommError::Argument { op: "gate", what: "length of the welcome", got, want });
        }
        *lock(&self.shared.welcome) = bytes;
        Ok(())
    }

    /// Asks peers who else is there, and connects to those that this one has not met: two that come at the same
    /// time do not know each other. `config` is the one that it came in with.
    ///
    /// # Errors
    /// As [`Gate::ask_again`].
    pub fn meet_others(&self, config: &GateConfig) -> Result<(), CommError> {
        let until = Until::after(config.deadline.min(EACH));
        let quick = GateConfig { deadline: config.deadline.min(EACH), ..config.clone() };
        let asked = self.ask_again(&quick)?;
        for member in asked.members.iter().filter(|member| !self.shared.is_here(member)) {
            // Whoever cannot be reached is met another time.
            if let Err(error) = self.shared.reach(member, until) {
                tracing::debug!(peer = member.peer.0, %error, "not met");
            }
        }
        Ok(())
    }

    /// Asks the peers that this one has ever met where all are, as one of them: also where the host that let
    /// it in is gone. With the answer it may come in anew; `config` is the one that it came in with.
    ///
    /// # Errors
    /// As [`Gate::ask`].
    pub fn ask_again(&self, config: &GateConfig) -> Result<Asked, CommError> {
        let me = self.shared.tcp.me();
        let known: Vec<Connected> = lock(&self.shared.known).values().cloned().collect();
        let others = known.into_iter().filter(|peer| peer.peer != me);
        let addresses: Vec<String> = others.map(|peer| peer.address).collect();
        // Members prove themselves to each other by what they share.
        let asks = GateConfig { security: self.shared.security.clone(), ..config.clone() };
        let asked = Self::ask(&asks, &addresses)?;
        Ok(Asked { config: config.clone(), ..asked })
    }

    /// Asks the members that are reached at any of these addresses, in turn, where all are: the first step of a
    /// process that would come in.
    ///
    /// # Errors
    /// The reason of the first that refuses, or that none was reached within the deadline.
    pub fn ask(config: &GateConfig, addresses: &[String]) -> Result<Asked, CommError> {
        let until = Until::after(config.deadline);
        loop {
            for address in addresses {
                let Ok(resolved) = resolve("address of a member", address) else { continue };
                let expected = config.security.host();
                match attempt(&config.security, &resolved, expected, until) {
                    Ok(Some(stream)) => return Asked::at(config, address, &stream, until),
                    Ok(None) => {}
                    Err(error) if hung_up(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            let Some(left) = until.left() else {
                let (master, after) = (addresses.join(","), config.deadline.into());
                return Err(CommError::Missing { master, ranks: vec![farflung_base::Rank(0)], after });
            };
            std::thread::sleep(left.min(LOOK));
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic in it has been reported by the runtime already.
            let _ = thread.join();
        }
    }
}

/// What a process was told that would come in.
#[derive(Debug)]
pub struct Asked {
    config: GateConfig,
    members: Vec<Connected>,
    secret: Option<JoinSecret>,
    /// From where it asked.
    seen: Option<IpAddr>,
    /// What members say beside.
    pub welcome: Vec<u8>,
}

impl Asked {
    fn at(config: &GateConfig, name: &str, stream: &Stream, until: Until) -> Result<Self, CommError> {
        let io = |e: std::io::Error| CommError::io("question to", &name, &e);
        stream.say(&Control::Ask(&config.job)).map_err(io)?;
        let told = answer_of(name, stream, until, |message| Self::read(config, message))?;
        Ok(Self { seen: stream.socket.local_addr().ok().map(|at| at.ip()), ..told })
    }

    /// What a member's answer says; none if it makes no sense.
    fn read(config: &GateConfig, message: &Control<'_>) -> Option<Self> {
        let Control::Members { slots, addresses, keys, secret, welcome } = message else { return None };
        let (Listed(slots), Listed(addresses), Listed(keys)) = (slots, addresses, keys);
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

    /// Where the members are.
    #[must_use]
    pub fn members(&self) -> &[Connected] {
        &self.members
    }

    /// Whether members of this machine are reached through shared memory: what members say beside may decide
    /// it.
    #[must_use]
    pub fn with_shared_memory(mut self, shared_memory: SharedMemory) -> Self {
        self.config.shared_memory = shared_memory;
        self
    }

    /// Listens, and connects to all members. A member that does not answer is left out: whoever decides on
    /// members sees whom this process [has reached](Gate::connected).
    ///
    /// # Errors
    /// If it cannot listen, a member refuses it, or none was reached.
    pub fn join(self) -> Result<Gate, CommError> {
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
            let gate = Gate::open(config, at, PeerId(slot), self.secret.clone(), self.seen)?;
            match self.reach_all(&gate) {
                // Somebody has had the number before.
                Err(CommError::Refused { reason: Refusal::Taken(_), .. }) => {}
                reached => return reached.map(|()| gate),
            }
        }
        let (got, want) = (taken.len(), config.slots as usize);
        Err(CommError::Argument { op: "gate", what: "endpoints so far", got, want })
    }

    fn reach_all(&self, gate: &Gate) -> Result<(), CommError> {
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

/// A random number below `bound`.
fn draw(bound: u32) -> Result<u32, CommError> {
    let random = JoinSecret::generate()?;
    let word = random.bytes().first_chunk::<4>().copied().unwrap_or_default();
    Ok(u32::from_le_bytes(word) % bound.max(1))
}

impl Shared {
    /// Whether a member is this process, or was at this process's address: a call to it would come back here.
    fn is_here(&self, member: &Connected) -> bool {
        member.peer == self.tcp.me() || member.address == self.address
    }

    /// Connects to a member, as one, unless it has connected to this one.
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
            // Its own connection to this one stays.
            Err(CommError::Refused { reason: Refusal::Crossed, .. }) => Ok(()),
            reached => reached,
        }
    }

    fn call(&self, member: &Connected, until: Until) -> Result<(), CommError> {
        let me = self.tcp.me();
        let addresses = resolve("address of a member", &member.address)?;
        let until = until.at_most(EACH);
        let missing = || CommError::Missing {
            master: member.address.clone(),
            ranks: vec![farflung_base::Rank(member.peer.0)],
            after: EACH.into(),
        };
        let mut found = None;
        for _ in 0..TRIES {
            found = match attempt(&self.security, &addresses, member.key, until) {
                Err(error) if hung_up(&error) => None,
                tried => tried?,
            };
            if found.is_some() {
                break;
            }
            std::thread::sleep(LOOK);
        }
        let stream = found.ok_or_else(missing)?;
        let io = |e: std::io::Error| CommError::io("hello to", &member.address, &e);
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
            // It has connected to this one meanwhile.
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

    /// Lets in whoever comes, until the gate closes.
    fn listen(&self, listener: &TcpListener) {
        let mut door = Door::new(self.security.clone());
        while !self.closed.load(Ordering::Acquire) {
            door.wait(listener, LOOK);
            for Guest { stream, greeting } in door.listen(listener) {
                let Ok(Parsed::Whole(Message::Control(greeting), _)) = wire::parse(&greeting) else {
                    continue;
                };
                if let Err(refusal) = self.receive(&greeting, &stream) {
                    door.refuse(&stream, refusal);
                } else if let Control::Hello { rank, listen, .. } = greeting {
                    let (peer, key) = (PeerId(rank), stream.peer_key());
                    // A socket that breaks now comes again.
                    let _ = self.connect(Connected { peer, address: listen.to_owned(), key }, stream);
                    lock(&self.meeting).called.remove(&rank);
                }
            }
        }
    }

    /// Answers a greeting, or says why not.
    fn receive(&self, greeting: &Control<'_>, stream: &Stream) -> Result<(), Refusal> {
        match *greeting {
            Control::Ask(job) if job == self.job => {
                // Whoever asks and does not listen has its own way of noticing.
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
                // Of two calls the one of the greater number stays.
                if me > peer && meeting.calling.contains(&rank) {
                    return Err(Refusal::Crossed);
                }
                meeting.called.insert(rank);
                drop(meeting);
                // Reading finds whether it is still there.
                let welcome = Control::Welcome(me.0);
                let _ = stream.socket.set_nonblocking(false).and_then(|()| stream.say(&welcome));
                Ok(())
            }
            _ => Err(Refusal::Job),
        }
    }

    /// Tells where the members are that are here still.
    fn tell(&self, stream: &Stream) -> std::io::Result<()> {
        let known: Vec<Connected> = lock(&self.known).values().cloned().collect();
        let here: Vec<&Connected> =
            known.iter().filter(|known| !self.tcp.driver().inbox.is_down(known.peer)).collect();
        let keys = here.iter().filter_map(|known| known.key.as_ref()).map(|key| &key.bytes()[..]);
        let secret = self.secret.as_ref().map_or(&[][..], |secret| &secret.bytes()[..]);
        let welcome = lock(&self.welcome).clone();
        stream.say(&Control::Members {
            slots: Listed(here.iter().map(|known| known.peer.0).collect()),
            addresses: Listed(here.iter().map(|known| &*known.address).collect()),
            keys: Listed(keys.collect()),
            secret,
            welcome: &welcome,
        })
    }
}
