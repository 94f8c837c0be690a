//! A member's place in a run whose members change: how it hears of them, and how it agrees with them on the next
//! view.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::{Nanos, PeerId, Pending};
use farflung_comm::{CommError, Communicator, PeerEvent, ServiceTags, Transport};
use farflung_parallel::membership::{Event, Member, State, View};

use super::arrivals::{Arrivals, Newcomer};
use super::keeper::{Keeper, Outcome, event};
use crate::{Error, Result};

/// The context of messages about members, which is in use while they change.
const CONTROL: u64 = u64::MAX;
/// The context of one that has left.
const ALONE: u64 = u64::MAX - 1;
/// Their tags.
const TAGS: ServiceTags = ServiceTags { ask: 1, answer: 2 };
/// Parts of the deadline after which an answer is asked for again where the rules name no time.
const LOOKS: u64 = 8;

/// A member's place, or that of a process that is to become one.
#[derive(Debug)]
pub struct Place {
    transport: Arc<dyn Transport>,
    me: Newcomer,
    arrivals: Arc<dyn Arrivals>,
    keeper: Arc<Mutex<Keeper>>,
    control: Option<Control>,
    /// The view that is in force here; none of a newcomer.
    view: Option<View>,
    /// Endpoints that are gone, and those that were members once.
    gone: BTreeSet<PeerId>,
    /// The longest wait for others.
    deadline: Nanos,
}

/// The keepers of all that are connected, by the numbers that they have here.
struct Control {
    comm: Communicator,
    peers: Vec<Newcomer>,
    serving: Pending<std::result::Result<(), CommError>>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Control({:?})", self.peers)
    }
}

/// What the members tell each other between two steps.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Standing {
    leaves: bool,
    /// Number and name of each newcomer that is connected here.
    here: Vec<(u32, [u8; 32])>,
}

impl Place {
    /// A member of the first `view`, or a newcomer where there is none. `promises` is the file of what it has promised.
    #[must_use]
    pub fn new(
        transport: Arc<dyn Transport>,
        me: Newcomer,
        arrivals: Arc<dyn Arrivals>,
        (view, promises): (Option<View>, Option<PathBuf>),
        deadline: Nanos,
    ) -> Self {
        let state = view.clone().map(|view| State::new(me.id, view));
        let keeper = Arc::new(Mutex::new(Keeper::new(me.id, state, promises)));
        let (control, gone) = (None, BTreeSet::new());
        Self { transport, me, arrivals, keeper, control, view, gone, deadline }
    }

    /// The view in force.
    #[must_use]
    pub const fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// The network underneath.
    #[must_use]
    pub const fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of endpoints that are gone, and gives those that are members.
    fn lost(&mut self) -> Vec<PeerId> {
        for happened in self.transport.events() {
            if let PeerEvent::Down(peer, _) = happened {
                self.gone.insert(peer);
            }
        }
        let members = self.view.iter().flat_map(|view| &view.members);
        members.map(|member| PeerId(member.slot)).filter(|peer| self.gone.contains(peer)).collect()
    }

    fn is_member(&self, peer: PeerId) -> bool {
        self.view.iter().flat_map(|view| &view.members).any(|member| member.slot == peer.0)
    }

    /// Those that are connected, are no members and never were.
    fn newcomers(&mut self) -> Vec<Newcomer> {
        self.lost();
        let here = self.arrivals.here(self.transport.now());
        here.into_iter()
            .filter(|peer| peer.peer != self.me.peer)
            .filter(|peer| !self.is_member(peer.peer) && !self.gone.contains(&peer.peer))
            .collect()
    }

    /// Whether members should change, as far as is known here.
    pub(in crate::train) fn wants_change(&mut self) -> bool {
        self.renew();
        !self.newcomers().is_empty()
    }

    /// Has a service between this rank and all that are connected, which hears of members while the rank computes.
    pub(in crate::train) fn renew(&mut self) {
        self.lost();
        let mut peers: Vec<Newcomer> = self.arrivals.here(self.transport.now());
        peers.retain(|peer| !self.gone.contains(&peer.peer) && peer.peer != self.me.peer);
        peers.push(self.me.clone());
        peers.sort_by_key(|peer| peer.peer);
        if self.control.as_ref().is_some_and(|c| c.peers == peers && !c.serving.is_ready()) {
            return;
        }
        self.control = None;
        self.keeper().reaches(peers.iter().map(|peer| peer.id).collect());
        let members: Vec<PeerId> = peers.iter().map(|peer| peer.peer).collect();
        let comm = Communicator::of_members(Arc::clone(&self.transport), &members, CONTROL);
        let comm = comm.expect("this endpoint is among the peers, and all of them are in its network");
        let serving = comm.start_service(TAGS, &self.keeper);
        self.control = Some(Control { comm, peers, serving });
    }

    /// Tells the own keeper what happened.
    fn tell(&self, happened: &Event) -> Result<()> {
        let control = self.control.as_ref().expect("it was renewed");
        Ok(control.comm.send(control.comm.rank(), TAGS.ask, &event(happened))?)
    }

    /// Waits until the members have agreed on what follows from these events.
    ///
    /// Errors: [`Error::Removed`] where this rank may not go on.
    fn decide(&mut self, events: &[Event]) -> Result<View> {
        self.renew();
        for happened in events {
            self.tell(happened)?;
        }
        loop {
            match self.keeper().outcome() {
                Some(Outcome::Installed(view)) => return Ok(view),
                Some(Outcome::Stopped(reason)) => return Err(Error::Removed { reason: reason.to_string() }),
                None => {}
            }
            let now = self.transport.now();
            let at = self.keeper().wake.unwrap_or(Nanos::MAX);
            let look = Nanos(self.deadline.0 / LOOKS).max(Nanos::from_millis(1));
            let patience = at.saturating_sub(now).clamp(Nanos(1), look);
            let control = self.control.as_ref().expect("it was renewed");
            let comm = control.comm.clone().with_deadline(patience);
            match comm.recv(comm.rank(), TAGS.answer) {
                Ok(_) => {}
                Err(CommError::Deadline { .. }) => {
                    self.renew();
                    for peer in self.lost() {
                        self.silent(peer)?;
                    }
                    self.tell(&Event::Tick)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn silent(&self, peer: PeerId) -> Result<()> {
        let members = self.view.iter().flat_map(|view| &view.members);
        let member = members.into_iter().find(|member| member.slot == peer.0);
        member.map_or(Ok(()), |member| self.tell(&Event::Silent(member.id)))
    }

    /// The next view after a failure that `peer` may be the reason of.
    ///
    /// Errors: as [`Place::decide`].
    pub(in crate::train) fn after_loss(&mut self, peer: Option<PeerId>) -> Result<View> {
        let mut lost = self.lost();
        lost.extend(peer.filter(|peer| self.is_member(*peer) && *peer != self.me.peer));
        lost.sort_unstable();
        lost.dedup();
        let view = self.view.clone();
        let id = |peer: &PeerId| {
            let members = view.iter().flat_map(|view| &view.members);
            members.into_iter().find(|member| member.slot == peer.0).map(|member| Event::Silent(member.id))
        };
        let events: Vec<Event> = lost.iter().filter_map(id).collect();
        self.decide(&events)
    }

    /// The next view after a step at which some member asked for one: all members are well, and call this together over
    /// their `comm`. `None` where there is nothing to change after all.
    ///
    /// Errors: as [`Place::decide`]; a member that is lost meanwhile.
    pub(in crate::train) fn between_steps(
        &mut self,
        comm: &Communicator,
        leaves: bool,
    ) -> Result<Option<View>> {
        self.renew();
        let here = self.newcomers().iter().map(|peer| (peer.peer.0, peer.id.0)).collect();
        let mine = postcard::to_stdvec(&Standing { leaves, here }).expect("numbers are plain data");
        let told = comm.all_gather_bytes(mine)?;
        let told: Vec<Standing> = told.iter().filter_map(|bytes| postcard::from_bytes(bytes).ok()).collect();
        let view = self.view.clone().expect("a member has a view");
        let mut events = Vec::new();
        for (member, _) in view.members.iter().zip(&told).filter(|(_, told)| told.leaves) {
            events.push(Event::Leave(member.id));
        }
        if told.len() == view.members.len() && events.is_empty() {
            // Only those that every member reaches can take part.
            let first = &told[0].here;
            for &(slot, id) in first.iter().filter(|come| told.iter().all(|told| told.here.contains(come))) {
                let joined = view.epoch + 1;
                events.push(Event::Ready(Member {
                    id: farflung_parallel::membership::MemberId(id),
                    slot,
                    joined,
                }));
            }
        }
        if events.is_empty() {
            return Ok(None);
        }
        events.push(Event::Admit);
        self.decide(&events).map(Some)
    }

    /// Waits until a view has this newcomer.
    ///
    /// Errors: [`Error::Removed`] where none has within the deadline.
    pub(in crate::train) fn wait_for_view(&mut self, patience: Nanos) -> Result<View> {
        let until = self.transport.now().saturating_add(patience);
        loop {
            self.renew();
            if let Some(Outcome::Installed(view)) = self.keeper().outcome() {
                return Ok(view);
            }
            let left = until.saturating_sub(self.transport.now());
            if left == Nanos::ZERO {
                return Err(Error::Removed {
                    reason: format!("no member took this one in within {patience}"),
                });
            }
            let look = Nanos(self.deadline.0 / LOOKS).max(Nanos::from_millis(1));
            let control = self.control.as_ref().expect("it was renewed");
            let comm = control.comm.clone().with_deadline(look.min(left));
            match comm.recv(comm.rank(), TAGS.answer) {
                Ok(_) | Err(CommError::Deadline { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Goes over to a view, and gives the communicator of its members. Those that were members and are not are never
    /// taken for newcomers.
    ///
    /// Errors: a view without this endpoint.
    pub(in crate::train) fn enter(&mut self, view: View) -> Result<Communicator> {
        for member in self.view.iter().flat_map(|view| &view.members) {
            if !view.members.iter().any(|stays| stays.id == member.id) {
                self.gone.insert(PeerId(member.slot));
            }
        }
        let members: Vec<PeerId> = view.members.iter().map(|member| PeerId(member.slot)).collect();
        let comm = Communicator::of_members(Arc::clone(&self.transport), &members, view.epoch)?;
        self.view = Some(view);
        Ok(comm)
    }

    /// This endpoint alone, once it is no member any more.
    ///
    /// Errors: none for an endpoint of the network.
    pub(in crate::train) fn alone(&mut self) -> Result<Communicator> {
        self.view = None;
        Ok(Communicator::of_members(Arc::clone(&self.transport), &[self.me.peer], ALONE)?)
    }
}
