//! A member's place in a run whose members change: the view in force, who is connected, and the service by
//! which it hears of the others whatever it computes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::{Nanos, PeerId, Pending};
use farflung_comm::{CommError, Communicator, Look, PeerEvent, ServiceTags, Transport};
use farflung_parallel::membership::{Event, MemberId, State, View};

use super::arrivals::{Arrivals, Newcomer};
use super::keeper::{Keeper, event};
use super::kept;
use super::ready::{Admission, Ready, measured};
use super::shelf::Shelf;
use super::watchman::{Caller, numbered};
use crate::{Result, RunDir};

/// The context of messages about members, which is in use while they change.
const CONTROL: u64 = u64::MAX;
/// The context of one that has left.
const ALONE: u64 = u64::MAX - 1;
/// Their tags.
const TAGS: ServiceTags = ServiceTags { ask: 1, answer: 2 };

/// A member's place, or that of a process that is to become one.
#[derive(Debug)]
pub struct Place {
    transport: Arc<dyn Transport>,
    me: Newcomer,
    pub(super) arrivals: Arc<dyn Arrivals>,
    keeper: Arc<Mutex<Keeper>>,
    shelf: Arc<Mutex<Shelf>>,
    control: Option<Control>,
    /// The view that is in force here; none of a newcomer.
    view: Option<View>,
    /// Endpoints whose connections are gone.
    gone: BTreeSet<PeerId>,
    /// Endpoints that were members once: they are answered, but never become members again.
    former: BTreeSet<PeerId>,
    /// All that were ever here.
    names: BTreeMap<PeerId, MemberId>,
    /// The longest wait for others.
    pub(super) deadline: Nanos,
    /// Until when this rank asks for no change.
    pub(super) pause: Nanos,
    /// The member's folder.
    pub(super) run: Option<RunDir>,
}

/// The keepers of all that are connected, by the numbers that they have here.
struct Control {
    comm: Communicator,
    peers: Vec<Newcomer>,
    serving: Pending<std::result::Result<(), CommError>>,
    /// Answers probes.
    _shelf: Pending<std::result::Result<(), CommError>>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Control({:?})", self.peers)
    }
}

impl Place {
    /// Where `me` is at the network. What `state` must not forget is written to the folder.
    ///
    /// Errors: [`Error::Io`](crate::Error::Io).
    pub fn new(
        transport: Arc<dyn Transport>,
        me: Newcomer,
        arrivals: Arc<dyn Arrivals>,
        (state, run): (State, Option<RunDir>),
        deadline: Nanos,
    ) -> Result<Self> {
        let view = state.view().cloned();
        let names = view.iter().flat_map(|view| &view.members);
        let names = names.map(|member| (PeerId(member.slot), member.id)).collect();
        let promises = run.as_ref().map(|run| kept::path(run.path()));
        let keeper = Arc::new(Mutex::new(Keeper::new(state, promises)?));
        let (control, gone, former, pause) = (None, BTreeSet::new(), BTreeSet::new(), Nanos::ZERO);
        let shelf = Arc::default();
        Ok(Self {
            transport,
            me,
            arrivals,
            keeper,
            shelf,
            control,
            view,
            gone,
            former,
            names,
            deadline,
            pause,
            run,
        })
    }

    /// The same of a member whose checkpoints and records go to a folder.
    #[must_use]
    pub fn saves_in(self, run: RunDir) -> Self {
        Self { run: Some(run), ..self }
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

    pub(super) fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of endpoints that are gone, and gives those that were here.
    pub(super) fn lost(&mut self) -> Vec<MemberId> {
        for happened in self.transport.events() {
            if let PeerEvent::Down(peer, _) = happened {
                self.gone.insert(peer);
            }
        }
        self.gone.iter().filter_map(|peer| self.names.get(peer)).copied().collect()
    }

    pub(super) fn name(&self, peer: PeerId) -> Option<MemberId> {
        self.names.get(&peer).copied()
    }

    /// The other members, by their endpoints, whose connections hold.
    pub(super) fn others(&self) -> Vec<(PeerId, MemberId)> {
        let members = self.view.iter().flat_map(|view| &view.members);
        let others = members.map(|member| (PeerId(member.slot), member.id));
        others.filter(|(peer, _)| *peer != self.me.peer && !self.gone.contains(peer)).collect()
    }

    fn is_member(&self, peer: PeerId) -> bool {
        self.view.iter().flat_map(|view| &view.members).any(|member| member.slot == peer.0)
    }

    /// Those that are connected, are no members and never were.
    /// As of the last [`Place::renew`].
    pub(super) fn newcomers(&self) -> Vec<Newcomer> {
        let here = self.control.iter().flat_map(|control| &control.peers);
        here.filter(|peer| peer.peer != self.me.peer && !self.is_member(peer.peer))
            .filter(|peer| !self.former.contains(&peer.peer))
            .cloned()
            .collect()
    }

    /// Whether members should change, as far as is known here. To be asked between two steps.
    pub(in crate::train) fn wants_change(&mut self) -> Result<bool> {
        self.renew();
        // One that is alone waits for nobody, so that nothing else has its services look.
        if let Some(Control { comm, serving, .. }) = &mut self.control {
            comm.first(&mut [serving], Look::Now);
        }
        let now = self.transport.now();
        let due = self.keeper().wake().is_some_and(|at| at <= now);
        if due {
            self.tell(Event::Tick)?;
        }
        Ok(now >= self.pause && (!self.ready_newcomers().is_empty() || !self.lost_members().is_empty()))
    }

    /// Newcomers that have said that they are ready.
    pub(super) fn ready_newcomers(&self) -> Vec<Newcomer> {
        let mut newcomers = self.newcomers();
        newcomers.retain(|peer| self.keeper().ready(&peer.id).is_some());
        newcomers
    }

    /// Measures how fast those that are connected send to this newcomer, which will take a state of so many
    /// bytes.
    pub(super) fn measure_links(&mut self, state: u64) -> Ready {
        self.renew();
        let Control { comm, peers, .. } = self.control();
        let ids: Vec<MemberId> = peers.iter().map(|peer| peer.id).collect();
        measured(comm, &ids, state)
    }

    /// Tells all that are connected that this newcomer is ready.
    pub(super) fn tell_ready(&self, ready: &Ready) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let others = self.control().peers.iter().filter(|peer| peer.peer != self.me.peer);
        let others: Vec<(PeerId, MemberId)> = others.map(|peer| (peer.peer, peer.id)).collect();
        self.tell_others(&others, &Keeper::is_ready(ready))
    }

    /// Tells a newcomer what it costs the members.
    pub(super) fn tell_costs(
        &self,
        Admission { peer, cost }: Admission,
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Some(id) = self.name(peer) else { return Vec::new() };
        self.tell_others(&[(peer, id)], &Keeper::costing(cost))
    }

    /// How many are connected, this one included.
    pub(super) fn connected(&self) -> usize {
        self.control().peers.len()
    }

    /// Whether the view in force has a member of this name.
    pub(super) fn is_named(&self, id: &MemberId) -> bool {
        self.view().is_some_and(|view| view.has(id))
    }

    /// Members of the view whose connections are gone.
    pub(super) fn lost_members(&mut self) -> Vec<MemberId> {
        let lost = self.lost();
        let members = self.view.iter().flat_map(|view| &view.members).map(|member| member.id);
        members.filter(|id| lost.contains(id)).collect()
    }

    /// Has a service between this rank and all that are connected, which hears of members while the rank
    /// computes.
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
        self.names.extend(peers.iter().map(|peer| (peer.peer, peer.id)));
        self.keeper().reaches(peers.iter().map(|peer| peer.id).collect());
        let members: Vec<PeerId> = peers.iter().map(|peer| peer.peer).collect();
        let comm = Communicator::of_members(Arc::clone(&self.transport), &members, CONTROL);
        let comm = comm.expect("this endpoint is among the peers, and all of them are in its network");
        let serving = comm.start_service(TAGS, &self.keeper);
        let shelf = comm.start_service(super::fetch::TAGS, &self.shelf);
        self.control = Some(Control { comm, peers, serving, _shelf: shelf });
    }

    fn control(&self) -> &Control {
        self.control.as_ref().expect("it was renewed")
    }

    /// Tells the own keeper what happened.
    pub(super) fn tell(&self, happened: Event) -> Result<()> {
        let comm = &self.control().comm;
        Ok(comm.send(comm.rank(), TAGS.ask, &event(happened))?)
    }

    /// Asks others whether they are there. The answers come to the own keeper.
    pub(super) fn ping(
        &self,
        others: &[(PeerId, MemberId)],
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        self.caller(others).call()
    }

    /// Tells the other members that the steps of the view in force cannot be done, so that none of them waits
    /// for its deadline.
    pub(super) fn give_up(&mut self) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Some(epoch) = self.view.as_ref().map(|view| view.epoch) else { return Vec::new() };
        self.renew();
        self.tell_others(&self.others(), &Keeper::gives_up(epoch))
    }

    /// Tells members without a part what the others have agreed on.
    pub(super) fn tell_agreed(
        &self,
        working: &[MemberId],
        events: &[Event],
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Some(view) = &self.view else { return Vec::new() };
        let mut idle = self.others();
        idle.retain(|(_, id)| !working.contains(id));
        self.tell_others(&idle, &Keeper::agreed(view.epoch, events))
    }

    fn tell_others(
        &self,
        others: &[(PeerId, MemberId)],
        word: &[u8],
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Control { comm, peers, .. } = self.control();
        let told = numbered(peers, others).into_iter();
        told.map(|(rank, _)| comm.start_send(rank, TAGS.ask, word.to_vec())).collect()
    }

    /// Whoever asks them, from whatever thread.
    pub(super) fn caller(&self, others: &[(PeerId, MemberId)]) -> Caller {
        let Control { comm, peers, .. } = self.control();
        let (comm, keeper) = (comm.clone(), Arc::clone(&self.keeper));
        Caller { comm, keeper, others: numbered(peers, others), tag: TAGS.ask }
    }

    /// Waits until the own keeper has heard something, at most for so long.
    pub(super) fn wait(&self, patience: Nanos) -> Result<()> {
        let comm = self.control().comm.clone().with_deadline(patience.max(Nanos(1)));
        match comm.recv(comm.rank(), TAGS.answer) {
            Ok(_) | Err(CommError::Deadline { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Goes over to a view, and gives the communicator of its members. Those that were members and are not
    /// are never taken for newcomers.
    ///
    /// Errors: a view without this endpoint.
    pub(in crate::train) fn enter(&mut self, view: View) -> Result<Communicator> {
        for member in self.view.iter().flat_map(|view| &view.members) {
            if !view.members.iter().any(|stays| stays.id == member.id) {
                self.former.insert(PeerId(member.slot));
            }
        }
        let members: Vec<PeerId> = view.members.iter().map(|member| PeerId(member.slot)).collect();
        let comm = Communicator::of_members(Arc::clone(&self.transport), &members, view.epoch)?;
        self.names.extend(view.members.iter().map(|member| (PeerId(member.slot), member.id)));
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
