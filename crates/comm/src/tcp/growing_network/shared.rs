//! What a member's own threads and its listener share: the known peers, the calls to other members, and the
//! answers to processes that connect.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use farflung_base::PeerId;

use super::super::Tcp;
use super::super::acceptor::{Acceptor, AuthenticatedConnection};
use super::super::listeners::Listeners;
use super::super::rendezvous::answer_of;
use super::super::stream::Stream;
use super::super::target::{Target, hung_up};
use super::member::Connected;
use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::second_network::{ConnectTarget, GreetingHandler, SecondNetwork, SecondNetworkAccess, of_sockets};
use crate::secure::{JoinSecret, PublicKey, Security};
use crate::wire::{self, Message, Parsed};
use crate::{CommError, FRAME_BYTES, Transport as _};

/// Time between two checks whether the [`GrowingNetwork`](super::GrowingNetwork) was dropped, and between two
/// attempts to connect.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for the connection to one member.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of attempts to connect to a member. Members keep listening, so one that does not answer has left.
const CONNECT_ATTEMPTS: u32 = 4;
/// Whether a member assumes that its machine has more endpoints than cores. It does not, because it cannot know
/// this in advance.
pub(super) const OVERSUBSCRIBED: bool = false;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) tcp: Arc<Tcp>,
    /// The second network, if there is one.
    pub(super) second_network_access: Option<Arc<dyn SecondNetworkAccess>>,
    pub(super) second_network: Option<Arc<dyn SecondNetwork>>,
    pub(super) job: String,
    pub(super) slots: u32,
    pub(super) sockets: bool,
    /// Security between members, and towards processes that join.
    pub(super) security: Security,
    /// Secret that connections among members prove; `None` if they are not encrypted.
    pub(super) secret: Option<JoinSecret>,
    pub(super) address: String,
    /// This member, and all peers that have connected.
    pub(super) known: Mutex<BTreeMap<u32, Connected>>,
    pub(super) connecting: Mutex<Connecting>,
    pub(super) welcome: Mutex<Vec<u8>>,
    pub(super) closed: AtomicBool,
}

/// Peers whose connection is being made. Two peers may call each other at the same time.
#[derive(Debug, Default)]
pub(super) struct Connecting {
    /// Peers that this one calls.
    calling: BTreeSet<u32>,
    /// Peers that have called this one and were accepted.
    called: BTreeSet<u32>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Returns whether a member is this process, or has this process's address: a call to it would come back
    /// here.
    pub(super) fn is_here(&self, member: &Connected) -> bool {
        // Without sockets, members that are reached over a relay alone have the same address, and different
        // keys.
        let is_one_place = self.sockets || member.key == self.security.own_key();
        member.peer == self.tcp.me() || member.address == self.address && is_one_place
    }

    /// Connects to a member as a member, unless it has connected to this one.
    pub(super) fn reach(&self, member: &Connected, until: Deadline) -> Result<(), CommError> {
        {
            let mut meeting = lock(&self.connecting);
            if self.tcp.driver().is_connected(member.peer) || meeting.called.contains(&member.peer.0) {
                return Ok(());
            }
            meeting.calling.insert(member.peer.0);
        }
        let reached = self.call(member, until);
        lock(&self.connecting).calling.remove(&member.peer.0);
        match reached {
            // The connection that the member made to this one is kept.
            Err(CommError::Refused { reason: Refusal::SimultaneousConnect, .. }) => Ok(()),
            reached => reached,
        }
    }

    fn call(&self, member: &Connected, until: Deadline) -> Result<(), CommError> {
        let until = until.at_most(CONNECT_TIMEOUT);
        let sockets = of_sockets(&member.address);
        let access = self.second_network_access.as_ref().filter(|access| access.has_address(&member.address));
        let second_network = access.and(self.second_network.as_ref());
        let mut failed = None;
        let by_sockets = self.sockets && !sockets.is_empty();
        let mut target = by_sockets.then(|| Target::new("address of a member", &sockets)).transpose()?;
        for _ in 0..CONNECT_ATTEMPTS {
            if let Some(target) = &mut target {
                match self.call_over_tcp(member, &sockets, target, until) {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    // At an address behind a router there may be another machine.
                    Err(error) if second_network.is_none() || matches!(error, CommError::Refused { .. }) => {
                        return Err(error);
                    }
                    Err(error) => failed = Some(error),
                }
            }
            if let (Some(second_network), Some(key)) = (second_network, member.key) {
                let to = ConnectTarget { address: &member.address, key, security: &self.security, until };
                match second_network.call(member.peer, &to, self.hello()?) {
                    Ok(()) => {
                        lock(&self.known).insert(member.peer.0, member.clone());
                        return Ok(());
                    }
                    Err(error @ CommError::Io { .. }) => failed = Some(error),
                    Err(error) => return Err(error),
                }
            }
            if until.remaining().is_none() {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let missing = || CommError::Missing {
            master: member.address.clone(),
            ranks: vec![farflung_base::Rank(member.peer.0)],
            progress: target.iter().map(Target::outcome).collect(),
            after: CONNECT_TIMEOUT.into(),
        };
        Err(failed.unwrap_or_else(missing))
    }

    /// Returns this member's greeting as a frame.
    fn hello(&self) -> Result<Vec<u8>, CommError> {
        let key = self.security.own_key();
        let key = key.as_ref().map_or(&[][..], |key| key.bytes());
        let (job, listen, world_size) = (&*self.job, &*self.address, self.slots);
        let rank = self.tcp.me().0;
        let hello = Control::Hello { rank, world_size, job, listen, epoch: 0, key, digest: &[] };
        let wrong = |source| CommError::Handshake { peer: "this member".to_owned(), source };
        wire::framed(&hello).map_err(wrong)
    }

    /// Connects to a member over TCP; false if it was not reached.
    fn call_over_tcp(
        &self,
        member: &Connected,
        address: &str,
        target: &mut Target,
        until: Deadline,
    ) -> Result<bool, CommError> {
        let stream = match target.attempt(&self.security, member.key, until) {
            Ok(Some(stream)) => stream,
            Ok(None) => return Ok(false),
            Err(error) if hung_up(&error) => return Ok(false),
            Err(error) => return Err(error),
        };
        let io = |e: std::io::Error| CommError::io("send the greeting to", &address, &e);
        stream.write_all(&self.hello()?).map_err(io)?;
        answer_of(address, &stream, until, |message| match message {
            Control::Welcome(by) if *by == member.peer.0 => Some(()),
            _ => None,
        })?;
        match self.connect(member.clone(), stream) {
            // The member has connected to this one meanwhile.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(true),
            connected => connected.map(|()| true).map_err(io),
        }
    }

    fn connect(&self, peer: Connected, stream: Stream) -> std::io::Result<()> {
        let mut known = lock(&self.known);
        self.tcp.driver().connect(peer.peer, vec![stream], OVERSUBSCRIBED)?;
        known.insert(peer.peer.0, peer);
        Ok(())
    }

    /// Accepts connections until the [`GrowingNetwork`](super::GrowingNetwork) is dropped.
    pub(super) fn listen(&self, listeners: &Listeners) {
        let mut door = Acceptor::new(self.security.clone());
        while !self.closed.load(Ordering::Acquire) {
            door.wait(listeners, POLL_INTERVAL);
            for AuthenticatedConnection { stream, greeting } in door.listen(listeners) {
                let Ok(Parsed::Whole(Message::Control(greeting), _)) = wire::parse(&greeting) else {
                    continue;
                };
                if let Err(refusal) = self.receive(&greeting, &stream) {
                    door.refuse(&stream, refusal);
                } else if let Control::Hello { rank, listen, .. } = greeting {
                    let (peer, key) = (PeerId(rank), stream.peer_key());
                    // If the socket breaks now, the peer connects again.
                    let _ = self.connect(Connected { peer, address: listen.to_owned(), key }, stream);
                    lock(&self.connecting).called.remove(&rank);
                }
            }
        }
    }

    /// Answers a greeting over TCP; returns the reason if it is refused.
    fn receive(&self, greeting: &Control<'_>, stream: &Stream) -> Result<(), Refusal> {
        let answer = self.answer_to(greeting, stream.peer_key())?;
        // If the answer cannot be sent, the process finds out by itself.
        let _ = stream.socket.set_nonblocking(false).and_then(|()| stream.write_all(&answer));
        Ok(())
    }

    /// Returns the frame that answers a greeting, or the reason to refuse it. `proven` is the key that the
    /// process has proven to hold, if connections are encrypted.
    fn answer_to(&self, greeting: &Control<'_>, proven: Option<PublicKey>) -> Result<Vec<u8>, Refusal> {
        match *greeting {
            Control::Ask(job) if job == self.job => self.members(),
            Control::Hello { rank, world_size, job, key, .. } if job == self.job => {
                if world_size != self.slots {
                    return Err(Refusal::WorldSize { want: self.slots, got: world_size });
                }
                if proven.is_some_and(|proven| key != proven.bytes()) {
                    return Err(Refusal::Key);
                }
                let (peer, me) = (PeerId(rank), self.tcp.me());
                if rank >= self.slots {
                    return Err(Refusal::Rank(rank));
                }
                let mut meeting = lock(&self.connecting);
                if peer == me || self.tcp.driver().is_connected(peer) || meeting.called.contains(&rank) {
                    return Err(Refusal::Taken(rank));
                }
                // If two peers call each other, the call of the peer with the greater number is kept.
                if me > peer && meeting.calling.contains(&rank) {
                    return Err(Refusal::SimultaneousConnect);
                }
                meeting.called.insert(rank);
                Ok(wire::framed_bytes(&Control::Welcome(me.0).encode()))
            }
            _ => Err(Refusal::Job),
        }
    }

    /// Returns a frame with the numbers, addresses and keys of the members that are still connected, or the
    /// reason to refuse the process if they do not fit into one.
    fn members(&self) -> Result<Vec<u8>, Refusal> {
        let known: Vec<Connected> = lock(&self.known).values().cloned().collect();
        let here: Vec<&Connected> =
            known.iter().filter(|known| !self.tcp.driver().inbox.is_down(known.peer)).collect();
        let keys = here.iter().filter_map(|known| known.key.as_ref()).map(|key| &key.bytes()[..]);
        let secret = self.secret.as_ref().map_or(&[][..], |secret| &secret.bytes()[..]);
        let welcome = lock(&self.welcome).clone();
        let members = Control::Members {
            slots: BoundedVec(here.iter().map(|known| known.peer.0).collect()),
            addresses: BoundedVec(here.iter().map(|known| &*known.address).collect()),
            keys: BoundedVec(keys.collect()),
            secret,
            welcome: &welcome,
        };
        let payload = members.encode();
        if payload.len() > FRAME_BYTES {
            let refusal = Refusal::ListTooLong { members: here.len() as u32, bytes: payload.len() as u64 };
            return Err(refusal);
        }
        Ok(wire::framed_bytes(&payload))
    }
}

impl GreetingHandler for Shared {
    fn answer(&self, greeting: &Control<'_>, key: PublicKey) -> Result<Vec<u8>, Refusal> {
        // Over the second network a process is reached by its key.
        if self.security.own_key() == Some(key) {
            return Err(Refusal::SameKey);
        }
        self.answer_to(greeting, Some(key))
    }
    fn peer_accepted(&self, peer: PeerId, listen: &str, key: PublicKey) {
        let connected = Connected { peer, address: listen.to_owned(), key: Some(key) };
        lock(&self.known).insert(peer.0, connected);
    }
    fn connect_ended(&self, peer: PeerId) {
        lock(&self.connecting).called.remove(&peer.0);
    }
}
