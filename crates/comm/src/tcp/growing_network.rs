//! A network that grows while it is used. Each member keeps listening. A new process asks any member for the
//! addresses of all, then connects to all. Existing connections are not touched.
//!
//! Each endpoint has a number below [`GateConfig::slots`], which is never used again. The first one has 0; each
//! later process draws its own at random, unless the numbers are ranks (`ranks.rs`). Of the job, this module
//! uses only the name. It does not decide who counts as a member of the run.

mod member;
mod ranks;
mod shared;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use farflung_base::PeerId;

use super::listeners::{AddressUse, Listeners};
use super::rendezvous::answer_of;
use super::shared_memory::SharedMemory;
use super::stream::{Stream, is_late};
use super::target::{Target, hung_up};
use super::{Tcp, open};
use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::interfaces::reachable_addresses;
use crate::second_network::{ConnectTarget, SecondNetworkAccess, key_in, of_sockets};
use crate::secure::{JoinSecret, PublicKey, Security, refused};
use crate::wire::{self, Message, Parsed};
use crate::{CommError, FRAME_BYTES, Transport as _};
pub use member::Connected;
use shared::{CONNECT_TIMEOUT, OVERSUBSCRIBED, POLL_INTERVAL, Shared, lock};

/// Maximum number of random draws of a peer number that no other member has.
const DRAWS: usize = 64;

/// Greatest number of bytes that [`GrowingNetwork::set_welcome`] takes. The rest of a frame is for the
/// addresses of the members.
pub const WELCOME_BYTES: usize = FRAME_BYTES / 2;

/// Where a member listens, and which processes it accepts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GateConfig {
    /// `host:port` to listen at; port 0 picks a free one.
    pub listen: String,
    /// Address at which others reach this member, if it differs from `listen`; several are separated by commas.
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
    /// Whether members connect over TCP. By default they do.
    pub sockets: bool,
    /// Whether more endpoints may be on this machine than it has cores. By default not.
    pub(crate) crowded: bool,
    /// A second network, over which members connect where TCP does not reach them.
    pub(crate) second_network: Option<Arc<dyn SecondNetworkAccess>>,
}

impl GateConfig {
    /// Creates a configuration with room for 16,384 endpoints, which takes 4 MB, and a deadline of one minute.
    #[must_use]
    pub fn new(listen: impl Into<String>, job: impl Into<String>, security: Security) -> Self {
        let (listen, job, advertise) = (listen.into(), job.into(), None);
        let shared_memory = SharedMemory::default();
        Self {
            listen,
            advertise,
            job,
            security,
            slots: 16_384,
            deadline: Duration::from_mins(1),
            shared_memory,
            sockets: true,
            crowded: OVERSUBSCRIBED,
            second_network: None,
        }
    }
}

/// The listener of a member, and its endpoint. Dropping this closes the listener.
#[derive(Debug)]
pub struct GrowingNetwork {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Listens at the configured address; `None` if members do not connect over TCP.
fn listen_at(config: &GateConfig, used: AddressUse) -> Result<Option<Listeners>, CommError> {
    let listen = || Listeners::of_name("own address", &config.listen, used, &config.security);
    config.sockets.then(listen).transpose()
}

/// Returns the addresses that a member which listens at `at` tells others. If it listens at all addresses of
/// this machine, it is the one by which it reached the others, or those at which others may reach this machine.
fn advertised(at: SocketAddr, seen: Option<IpAddr>) -> String {
    if !at.ip().is_unspecified() {
        return at.to_string();
    }
    let mut own = match seen.filter(|seen| !seen.is_loopback()) {
        Some(seen) => vec![seen],
        None => reachable_addresses(),
    };
    if own.is_empty() {
        own.push(seen.unwrap_or(Ipv4Addr::LOCALHOST.into()));
    }
    let own: Vec<String> = own.iter().map(|ip| SocketAddr::new(*ip, at.port()).to_string()).collect();
    own.join(",")
}

impl GrowingNetwork {
    /// Creates the first member, with number 0.
    ///
    /// # Errors
    /// If it cannot listen, or the system has no random bytes.
    pub fn found(config: &GateConfig) -> Result<Self, CommError> {
        let secret = config.security.is_encrypted().then(JoinSecret::generate).transpose()?;
        Self::open(config, listen_at(config, AddressUse::Listen)?, PeerId(0), secret, None)
    }

    fn open(
        config: &GateConfig,
        listeners: Option<Listeners>,
        me: PeerId,
        secret: Option<JoinSecret>,
        seen: Option<IpAddr>,
    ) -> Result<Self, CommError> {
        let io = |e: std::io::Error| CommError::io("listen at", &config.listen, &e);
        let at = listeners.as_ref().map(Listeners::address).transpose().map_err(io)?;
        let own = at.map(|at| config.advertise.clone().unwrap_or_else(|| advertised(at, seen)));
        let second_network = config.second_network.as_ref().map(|access| access.address());
        let address: Vec<String> = own.into_iter().chain(second_network).collect();
        let address = address.join(",");
        let tcp = open(me, config.slots as usize, config.crowded, config.shared_memory).map_err(io)?;
        let second_network = config.second_network.as_ref().map(|access| {
            let parts = tcp.driver().endpoint_parts(config.slots as usize);
            Arc::clone(tcp.driver().second_network.get_or_init(|| Arc::clone(access).open(parts)))
        });
        let security = match &secret {
            Some(secret) => config.security.growing(secret.clone()),
            None => config.security.clone(),
        };
        let own = Connected { peer: me, address: address.clone(), key: security.own_key() };
        let shared = Arc::new(Shared {
            tcp,
            second_network_access: config.second_network.clone(),
            second_network,
            job: config.job.clone(),
            slots: config.slots,
            sockets: config.sockets,
            security,
            secret,
            address,
            known: Mutex::new(BTreeMap::from([(me.0, own)])),
            connecting: Mutex::default(),
            welcome: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        if let Some(second_network) = &shared.second_network {
            let host: Weak<Shared> = Arc::downgrade(&shared);
            second_network.listen(&shared.security, host);
        }
        let thread = listeners.map(|listeners| {
            let gate = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("farflung-gate".to_owned());
            thread.spawn(move || gate.listen(&listeners))
        });
        Ok(Self { thread: thread.transpose().map_err(io)?, shared })
    }

    /// Returns the endpoint. A peer that has not connected yet looks like one that is silent.
    #[must_use]
    pub fn transport(&self) -> Arc<Tcp> {
        Arc::clone(&self.shared.tcp)
    }

    /// Returns the addresses at which others reach this member, separated by commas: `host:port`, and with a
    /// second network also `quic:host:port` and the URLs of relays.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Returns the address by which a peer is reached over the second network now, or that of a relay; `None`
    /// for a peer that is connected over TCP, or before the address is known.
    #[must_use]
    pub fn second_network_path(&self, peer: PeerId) -> Option<String> {
        self.shared.second_network.as_ref()?.path_to(peer)
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

    /// Sets the bytes that this member sends to processes that ask for the members, besides the addresses.
    ///
    /// # Errors
    /// [`CommError::Argument`] if there are more than [`WELCOME_BYTES`].
    pub fn set_welcome(&self, bytes: Vec<u8>) -> Result<(), CommError> {
        let (got, want) = (bytes.len(), WELCOME_BYTES);
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
        let until = Deadline::after(config.deadline.min(CONNECT_TIMEOUT));
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

    /// Asks the peers that this one has ever been connected to, one after the other, for all members. It asks
    /// as a member, so it also works if the member that let it in has gone. With the answer this process may
    /// join again; `config` must be the one that it joined with.
    ///
    /// # Errors
    /// The same as for [`GrowingNetwork::ask`].
    pub fn ask_again(&self, config: &GateConfig) -> Result<MemberList, CommError> {
        let me = self.shared.tcp.me();
        let known: Vec<Connected> = lock(&self.shared.known).values().cloned().collect();
        let others = known.into_iter().filter(|peer| peer.peer != me);
        let addresses: Vec<String> = others.map(|peer| peer.to_reach()).collect();
        // Members prove themselves to each other by the secret that they share.
        let asks = GateConfig { security: self.shared.security.clone(), ..config.clone() };
        let asked = Self::ask(&asks, &addresses)?;
        Ok(MemberList { config: config.clone(), ..asked })
    }

    /// Asks the members at these addresses, one after the other until one answers, for all members: the first
    /// step of a process that wants to join.
    ///
    /// # Errors
    /// The error of the first member that is reached but refuses or answers wrongly, or [`CommError::Missing`]
    /// if none was reached within the deadline.
    pub fn ask(config: &GateConfig, addresses: &[String]) -> Result<MemberList, CommError> {
        let until = Deadline::after(config.deadline);
        let mut targets: BTreeMap<&str, Target> = BTreeMap::new();
        loop {
            for address in addresses {
                match MemberList::at(config, address, &mut targets, until) {
                    Ok(Some(asked)) => return Ok(asked),
                    Ok(None) => {}
                    Err(error) => return Err(error),
                }
            }
            let Some(left) = until.remaining() else {
                let (master, after) = (addresses.join(","), config.deadline.into());
                let progress = targets.values().map(Target::outcome).collect();
                let ranks = vec![farflung_base::Rank(0)];
                return Err(CommError::Missing { master, ranks, progress, after });
            };
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
    }
}

impl Drop for GrowingNetwork {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        if let Some(second_network) = &self.shared.second_network {
            second_network.stop_listening();
        }
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
    /// Asks the member at these addresses, over TCP, then over the second network; `None` if it was not
    /// reached. `targets` holds the outcomes over TCP.
    fn at<'a>(
        config: &GateConfig,
        address: &'a str,
        targets: &mut BTreeMap<&'a str, Target>,
        until: Deadline,
    ) -> Result<Option<Self>, CommError> {
        let sockets = of_sockets(address);
        if config.sockets && !sockets.is_empty() {
            let target = match targets.entry(address) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(Target::new("address of a member", &sockets)?),
            };
            let expected = key_in(address).or(config.security.host());
            match target.attempt(&config.security, expected, until) {
                Ok(Some(stream)) => match Self::over(config, &sockets, &stream, until) {
                    Err(error) if is_late(&error) => target.note(&error),
                    asked => return asked.map(Some),
                },
                Ok(None) => {}
                Err(error) if hung_up(&error) || is_late(&error) => {}
                // Another process listens at this address now.
                Err(CommError::Unproven { reason: Refusal::Key, .. }) if key_in(address).is_some() => {}
                Err(error) => return Err(error),
            }
        }
        let access = config.second_network.as_ref().filter(|access| access.has_address(address));
        let (Some(access), Some(key)) = (access, key_in(address).or(config.security.host())) else {
            return Ok(None);
        };
        if config.security.own_key() == Some(key) {
            return Err(refused(address, Refusal::SameKey));
        }
        let to = ConnectTarget { address, key, security: &config.security, until };
        let wrong = |source| CommError::Handshake { peer: key.to_string(), source };
        let question = wire::framed(&Control::Ask(&config.job)).map_err(wrong)?;
        let answer = match Arc::clone(access).ask(&to, question) {
            Err(CommError::Io { what, kind, message, .. }) => {
                tracing::debug!(address, what, ?kind, message, "a member is not reached");
                return Ok(None);
            }
            answer => answer?,
        };
        match wire::parse(&answer).map_err(wrong)? {
            Parsed::Whole(Message::Control(Control::Refuse(reason)), _) => Err(refused(address, reason)),
            Parsed::Whole(Message::Control(message), _) => Self::read(config, &message)
                .map(Some)
                .ok_or_else(|| wrong(crate::WireError::Malformed("answer"))),
            _ => Err(wrong(crate::WireError::Malformed("control message"))),
        }
    }

    fn over(config: &GateConfig, name: &str, stream: &Stream, until: Deadline) -> Result<Self, CommError> {
        let io = |e: std::io::Error| CommError::io("send the request to", &name, &e);
        stream.send_message(&Control::Ask(&config.job)).map_err(io)?;
        let told = answer_of(name, stream, until, |message| Self::read(config, message))?;
        Ok(Self { seen: stream.socket.local_addr().ok().map(|at| at.ip()), ..told })
    }

    /// Reads a member's answer; `None` if it is not valid.
    fn read(config: &GateConfig, message: &Control<'_>) -> Option<Self> {
        let Control::Members { slots, addresses, keys, secret, welcome } = message else { return None };
        let (BoundedVec(slots), BoundedVec(addresses), BoundedVec(keys)) = (slots, addresses, keys);
        let is_sealed = config.security.is_encrypted();
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

    /// Sets whether members on this machine are reached through shared memory, for callers that learn it from
    /// [`MemberList::welcome`].
    #[must_use]
    pub fn with_shared_memory(mut self, shared_memory: SharedMemory) -> Self {
        self.config.shared_memory = shared_memory;
        self
    }

    /// Listens, and connects to all members. A member that does not answer is skipped;
    /// [`GrowingNetwork::connected`] returns those that were reached.
    ///
    /// # Errors
    /// If it cannot listen, if a member refuses it, if no free number is found, or if there are members and
    /// none was reached.
    pub fn join(self) -> Result<GrowingNetwork, CommError> {
        let config = &self.config;
        let taken: Vec<u32> = self.members.iter().map(|member| member.peer.0).collect();
        let mut listeners = Some(listen_at(config, AddressUse::Listen)?);
        for _ in 0..DRAWS {
            let slot = draw(config.slots)?;
            if slot == 0 || taken.contains(&slot) {
                continue;
            }
            let at = match listeners.take() {
                Some(listeners) => listeners,
                None => listen_at(config, AddressUse::Listen)?,
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
        let until = Deadline::after(self.config.deadline);
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
