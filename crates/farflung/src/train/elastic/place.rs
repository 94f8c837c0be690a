//! A member's connection to a run whose members change: the view in force, the connected peers, and the service
//! that receives messages about members while the rank computes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::{Nanos, PeerId, Pending};
use farflung_comm::{CommError, Communicator, PeerEvent, ServiceTags, Transport, WaitMode};
use farflung_parallel::membership::{Event, MemberId, State, View, ViewId};

use super::arrivals::{Arrivals, Newcomer};
use super::blobs::OfferedBlobs;
use super::membership_service::{MembershipService, event};
use super::promises::PromiseFile;
use super::ready::{Admission, FollowProgress, Ready, measured};
use super::run_id::RunId;
use super::too_long::Refused;
use super::watchdog::{Pinger, numbered};
use crate::{Result, RunDir};

/// Context number of the communicator for messages about members; it exists in all views.
const CONTROL: u64 = u64::MAX;
/// Context number of the communicator of a rank that is alone.
const ALONE: u64 = u64::MAX - 1;
/// Time within which a newcomer must have been heard to be admitted. It announces itself more often.
const FRESH: Nanos = Nanos::from_millis(1_500);
/// Time after which a newcomer that is silent counts as gone, and nothing is kept for it any more.
const GONE: Nanos = Nanos::from_millis(10_000);
/// Time between two measurements of the round trips to the other members.
const CALM_INTERVAL: Nanos = Nanos::from_millis(30_000);
/// Tags of messages about members.
pub(super) const TAGS: ServiceTags = ServiceTags { ask: 1, answer: 2 };

/// Whether a member keeps a log of its steps for newcomers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Logs {
    /// It keeps one.
    Yes,
    /// It keeps none now.
    No,
    /// It keeps none, because it does not hold the part of the model that the newcomer needs. Members that hold
    /// it do.
    OfOthers,
    /// No member can keep one, because of the method of synchronisation or of the newcomer's place.
    Never,
    /// Members keep them for spares that form a further pipeline. Newcomers wait until that is done.
    OfSpares,
}

/// A process's connection to a run, as a member or a possible member.
#[derive(Debug)]
pub struct Place {
    transport: Arc<dyn Transport>,
    me: Newcomer,
    pub(super) arrivals: Arc<dyn Arrivals>,
    membership: Arc<Mutex<MembershipService>>,
    offered_blobs: Arc<Mutex<OfferedBlobs>>,
    control: Option<Control>,
    /// The view in force on this rank; `None` for a newcomer.
    view: Option<View>,
    /// Endpoints whose connections are broken.
    gone: BTreeSet<PeerId>,
    /// Those of them whose frames may still be kept.
    unforgotten: Vec<PeerId>,
    /// Endpoints of former members. Their messages are answered, but they never become members again.
    former: BTreeSet<PeerId>,
    /// Ids of all endpoints that were ever connected.
    names: BTreeMap<PeerId, MemberId>,
    /// Maximum time to wait for other ranks.
    pub(super) deadline: Nanos,
    /// Time until which this rank requests no change.
    pub(super) pause: Nanos,
    calm: CalmPings,
    /// The rates of the links from the other members, as measured when this rank was a newcomer.
    pub(super) measured: Option<Ready>,
    /// Newcomers that were refused.
    pub(super) refused: Refused,
    /// The member's folder.
    pub(super) run: Option<RunDir>,
    /// The last view of this run in which this machine was a member before, by its folder.
    pub(super) former_view: Option<ViewId>,
}

/// A member's folder, and the run that it is for.
#[derive(Debug)]
pub(super) struct OwnFolder {
    pub(super) dir: RunDir,
    pub(super) run: RunId,
    /// Addresses of the other members that are known before the first promise in the run.
    pub(super) members: Option<Vec<String>>,
    /// The last view of the run in which this machine was a member before.
    pub(super) former_view: Option<ViewId>,
}

/// Pings that are sent while no member is missed, so that round trips are known before one is.
#[derive(Debug, Default)]
struct CalmPings {
    /// Time of the next ones.
    due: Nanos,
    _sending: Vec<Pending<std::result::Result<(), CommError>>>,
}

/// The communicator of the membership services of all connected peers.
struct Control {
    comm: Communicator,
    peers: Vec<Newcomer>,
    serving: Pending<std::result::Result<(), CommError>>,
    /// Answers requests for offered blobs, and probes.
    _offering: Pending<std::result::Result<(), CommError>>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Control({:?})", self.peers)
    }
}

impl Place {
    /// Creates the connection of endpoint `me`. Promises of `state` are written to its folder.
    ///
    /// Errors: [`Error::Io`](crate::Error::Io).
    pub(super) fn new(
        transport: Arc<dyn Transport>,
        me: Newcomer,
        arrivals: Arc<dyn Arrivals>,
        (state, own): (State, Option<OwnFolder>),
        deadline: Nanos,
    ) -> Result<Self> {
        let view = state.view().cloned();
        let names = view.iter().flat_map(|view| &view.members);
        let names = names.map(|member| (PeerId(member.slot), member.id)).collect();
        let (promises, run, former_view) = match own {
            Some(OwnFolder { dir, run, members, former_view }) => {
                (Some(PromiseFile::new(dir.path(), run, members)?), Some(dir), former_view)
            }
            None => (None, None, None),
        };
        let membership = Arc::new(Mutex::new(MembershipService::new(state, promises)?));
        let (control, gone, former, pause) = (None, BTreeSet::new(), BTreeSet::new(), Nanos::ZERO);
        let blobs = Arc::default();
        Ok(Self {
            transport,
            me,
            arrivals,
            membership,
            offered_blobs: blobs,
            control,
            view,
            gone,
            unforgotten: Vec::new(),
            former,
            names,
            deadline,
            pause,
            calm: CalmPings::default(),
            measured: None,
            refused: Refused::default(),
            run,
            former_view,
        })
    }

    /// Sets the folder for checkpoints and records.
    #[must_use]
    pub fn saves_in(self, run: RunDir) -> Self {
        Self { run: Some(run), ..self }
    }

    /// Returns the view in force.
    #[must_use]
    pub const fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// Returns the transport.
    #[must_use]
    pub const fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    pub(super) fn membership(&self) -> MutexGuard<'_, MembershipService> {
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the blobs that all connected peers can fetch.
    pub(super) fn offered_blobs(&self) -> MutexGuard<'_, OfferedBlobs> {
        self.offered_blobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes which connections have broken since the last call, and returns the ids of all peers that were
    /// connected and are gone.
    pub(super) fn lost(&mut self) -> Vec<MemberId> {
        for happened in self.transport.events() {
            if let PeerEvent::Down(peer, _) = happened
                && self.gone.insert(peer)
            {
                self.unforgotten.push(peer);
            }
        }
        self.gone.iter().filter_map(|peer| self.names.get(peer)).copied().collect()
    }

    /// Returns this member's id.
    pub(super) const fn own_id(&self) -> MemberId {
        self.me.id
    }

    pub(super) fn name(&self, peer: PeerId) -> Option<MemberId> {
        self.names.get(&peer).copied()
    }

    /// Returns the endpoint of a peer that is or was connected.
    pub(super) fn peer_of(&self, id: &MemberId) -> Option<PeerId> {
        self.names.iter().find(|(_, name)| *name == id).map(|(&peer, _)| peer)
    }

    /// Returns the endpoints and ids of the other members whose connections are not broken.
    pub(super) fn others(&self) -> Vec<(PeerId, MemberId)> {
        let members = self.view.iter().flat_map(|view| &view.members);
        let others = members.map(|member| (PeerId(member.slot), member.id));
        others.filter(|(peer, _)| *peer != self.me.peer && !self.gone.contains(peer)).collect()
    }

    fn is_member(&self, peer: PeerId) -> bool {
        self.view.iter().flat_map(|view| &view.members).any(|member| member.slot == peer.0)
    }

    /// Returns the connected peers that are not members and never were, as of the last [`Place::renew`].
    pub(super) fn newcomers(&self) -> Vec<Newcomer> {
        let here = self.control.iter().flat_map(|control| &control.peers);
        here.filter(|peer| peer.peer != self.me.peer && !self.is_member(peer.peer))
            .filter(|peer| !self.former.contains(&peer.peer))
            .cloned()
            .collect()
    }

    /// Returns whether this newcomer is connected to any peer that does not announce itself as a newcomer, as
    /// of the last [`Place::renew`].
    pub(super) fn has_members_connected(&self) -> bool {
        let membership = self.membership();
        let is_member =
            |peer: &Newcomer| membership.ready(&peer.id).is_none_or(|ready| ready.spare_in.is_some());
        self.newcomers().iter().any(is_member)
    }

    /// Returns whether this rank sees a reason for a change of members, or for a log of steps. Called between
    /// two steps.
    pub(super) fn wants_change(&mut self, logs: Logs) -> Result<bool> {
        self.renew();
        self.poll_services();
        let now = self.transport.now();
        let due = self.membership().wake().is_some_and(|at| at <= now);
        if due {
            self.tell(Event::Tick)?;
        }
        if now >= self.calm.due {
            let sending = self.ping(&self.others());
            self.calm = CalmPings { due: now.saturating_add(CALM_INTERVAL), _sending: sending };
        }
        let calls = self.callers(logs).iter().any(|(_, is_ready)| *is_ready || logs == Logs::No);
        Ok(now >= self.pause && (calls || !self.lost_members().is_empty()))
    }

    /// Lets the services answer all that has arrived. A rank that is alone never waits for messages, so they
    /// must be polled between steps. On a virtual clock they answer each message at its own time.
    pub(super) fn poll_services(&mut self) {
        if let Some(Control { comm, serving, .. }) = &mut self.control {
            comm.first(&mut [serving], WaitMode::Now);
        }
    }

    /// Returns the newcomers that have announced themselves and were heard within `within`.
    fn announced(&self, within: Nanos) -> Vec<(Newcomer, FollowProgress)> {
        let since = self.transport.now().saturating_sub(within);
        let membership = self.membership();
        let is_here = |peer: &Newcomer| membership.has_heard(&peer.id, since) && !self.refused.has(&peer.id);
        let newcomers = self.newcomers().into_iter().filter(is_here);
        newcomers.filter_map(|peer| membership.ready(&peer.id).map(|ready| (peer, ready.follows))).collect()
    }

    /// Returns the newcomers that are ready, or ask for a copy of the state, and whether they are ready. A
    /// newcomer that was not heard recently is left out, so that no member waits for it. If members cannot
    /// keep a log, newcomers that ask also count as ready.
    pub(super) fn callers(&self, logs: Logs) -> Vec<(Newcomer, bool)> {
        if logs == Logs::OfSpares {
            return Vec::new();
        }
        let never = logs == Logs::Never;
        let announced = self.announced(FRESH).into_iter();
        let calls = |(peer, follows): (Newcomer, FollowProgress)| {
            (follows.is_ready() || follows == FollowProgress::Asks)
                .then_some((peer, follows.is_ready() || never))
        };
        announced.filter_map(calls).collect()
    }

    /// Returns whether any newcomer has announced itself that is not gone.
    pub(super) fn has_newcomers(&self) -> bool {
        !self.announced(GONE).is_empty()
    }

    /// Returns the newcomers that need a log of this member's steps.
    pub(super) fn followers(&self) -> Vec<(PeerId, MemberId, FollowProgress)> {
        let newcomers = self.announced(GONE).into_iter().filter(|(_, follows)| follows.needs_log());
        newcomers.map(|(peer, follows)| (peer.peer, peer.id, follows)).collect()
    }

    /// Returns how far a spare is with its part, as it has told in the view of `epoch`.
    pub(super) fn spare(&self, id: &MemberId, epoch: u64) -> Option<Ready> {
        let membership = self.membership();
        membership.ready(id).filter(|ready| ready.spare_in == Some(epoch)).cloned()
    }

    /// Returns whether a peer was heard recently.
    pub(super) fn is_fresh(&self, id: &MemberId) -> bool {
        self.membership().has_heard(id, self.transport.now().saturating_sub(FRESH))
    }

    /// Returns how far each newcomer is, and each spare of a further pipeline, as text, by endpoint.
    pub(super) fn coming(&self) -> BTreeMap<u32, String> {
        let membership = self.membership();
        let newcomers = self.newcomers().into_iter().map(|peer| (peer.peer, peer.id, None));
        let spares = self.view.iter().flat_map(|view| {
            view.members.iter().map(|member| (PeerId(member.slot), member.id, Some(view.epoch)))
        });
        let line = |(peer, id, spare_in): (PeerId, MemberId, Option<u64>)| {
            let ready = membership.ready(&id).filter(|ready| ready.spare_in == spare_in)?;
            Some((peer.0, ready.follows.to_string()))
        };
        newcomers.chain(spares).filter_map(line).collect()
    }

    /// Returns the communicator of the membership services, and the ids of its members by rank.
    pub(super) fn membership_comm(&self) -> (Communicator, Vec<MemberId>) {
        let Control { comm, peers, .. } = self.control();
        (comm.clone(), peers.iter().map(|peer| peer.id).collect())
    }

    /// Measures how fast all connected peers send to this newcomer. `state` is the bytes of the state that it
    /// will receive; `time` is the number of measurements before this one.
    pub(super) fn measure_links(&mut self, state: u64, time: u32) -> Ready {
        self.renew();
        let Control { comm, peers, .. } = self.control();
        measured(comm, peers, state, time)
    }

    /// Sends all connected peers the announcement that this newcomer is ready.
    pub(super) fn tell_ready(&self, ready: &Ready) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let others = self.control().peers.iter().filter(|peer| peer.peer != self.me.peer);
        let others: Vec<(PeerId, MemberId)> = others.map(|peer| (peer.peer, peer.id)).collect();
        self.tell_others(&others, &MembershipService::is_ready(ready))
    }

    /// Sends a newcomer the cost of its state for the members.
    pub(super) fn tell_costs(
        &self,
        Admission { peer, cost }: Admission,
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Some(id) = self.name(peer) else { return Vec::new() };
        self.tell_others(&[(peer, id)], &MembershipService::costing(cost))
    }

    /// Returns the number of connected peers, this one included.
    pub(super) fn connected(&self) -> usize {
        self.control().peers.len()
    }

    /// Returns whether the view in force has a member with this id.
    pub(super) fn is_named(&self, id: &MemberId) -> bool {
        self.view().is_some_and(|view| view.has(id))
    }

    /// Returns the members of the view whose connections are broken.
    pub(super) fn lost_members(&mut self) -> Vec<MemberId> {
        let lost = self.lost();
        let members = self.view.iter().flat_map(|view| &view.members).map(|member| member.id);
        members.filter(|id| lost.contains(id)).collect()
    }

    /// Updates the communicator of the membership services to the peers that are connected now, and restarts
    /// the services on it if the peers have changed. The services answer while the rank computes.
    pub(in crate::train) fn renew(&mut self) {
        self.lost();
        let mut peers: Vec<Newcomer> = self.arrivals.connected(self.transport.now());
        peers.retain(|peer| !self.gone.contains(&peer.peer) && peer.peer != self.me.peer);
        peers.push(self.me.clone());
        peers.sort_by_key(|peer| peer.peer);
        if self.control.as_ref().is_some_and(|c| c.peers == peers && !c.serving.is_ready()) {
            return;
        }
        self.control = None;
        self.names.extend(peers.iter().map(|peer| (peer.peer, peer.id)));
        self.membership().reaches(peers.iter().map(|peer| peer.id).collect());
        self.refused.keep(&peers);
        let members: Vec<PeerId> = peers.iter().map(|peer| peer.peer).collect();
        let comm = Communicator::of_members(Arc::clone(&self.transport), &members, CONTROL);
        let comm = comm.expect("this endpoint is among the peers, and all of them are in its network");
        let serving = comm.start_service(TAGS, &self.membership);
        let blobs = comm.start_service(super::fetch::TAGS, &self.offered_blobs);
        self.control = Some(Control { comm, peers, serving, _offering: blobs });
        self.forget_gone();
    }

    /// Drops the frames of peers that are gone, once they are not members any more and no service answers them.
    fn forget_gone(&mut self) {
        let (mut gone, served) = (std::mem::take(&mut self.unforgotten), self.control.as_ref());
        gone.retain(|&peer| {
            let serves = |control: &Control| control.peers.iter().any(|served| served.peer == peer);
            let stays = self.is_member(peer) || served.is_some_and(serves);
            if !stays {
                self.transport.forget(peer);
            }
            stays
        });
        self.unforgotten = gone;
    }

    fn control(&self) -> &Control {
        self.control.as_ref().expect("it was renewed")
    }

    /// Sends an event to this member's own service.
    pub(super) fn tell(&self, happened: Event) -> Result<()> {
        let comm = &self.control().comm;
        Ok(comm.send(comm.rank(), TAGS.ask, &event(happened))?)
    }

    /// Pings other members. The answers go to this member's own service.
    pub(super) fn ping(
        &self,
        others: &[(PeerId, MemberId)],
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        self.pinger(others).ping()
    }

    /// Notifies the other members that the steps of the view in force have failed, so that they do not wait for
    /// their deadlines.
    pub(super) fn give_up(&mut self) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Some(epoch) = self.view.as_ref().map(|view| view.epoch) else { return Vec::new() };
        self.renew();
        self.tell_others(&self.others(), &MembershipService::gives_up(epoch))
    }

    /// Sends the events on which the working members have agreed to members without a part.
    pub(super) fn tell_agreed(
        &self,
        working: &[MemberId],
        events: &[Event],
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Some(view) = &self.view else { return Vec::new() };
        let mut idle = self.others();
        idle.retain(|(_, id)| !working.contains(id));
        self.tell_others(&idle, &MembershipService::agreed(view.epoch, events))
    }

    /// Sends a message to the membership services of these peers.
    pub(super) fn tell_others(
        &self,
        others: &[(PeerId, MemberId)],
        word: &[u8],
    ) -> Vec<Pending<std::result::Result<(), CommError>>> {
        let Control { comm, peers, .. } = self.control();
        let told = numbered(peers, others).into_iter();
        told.map(|(rank, _)| comm.start_send(rank, TAGS.ask, word.to_vec())).collect()
    }

    /// Returns a [`Pinger`] that can ping these members from any thread.
    pub(super) fn pinger(&self, others: &[(PeerId, MemberId)]) -> Pinger {
        let Control { comm, peers, .. } = self.control();
        let (comm, membership) = (comm.clone(), Arc::clone(&self.membership));
        Pinger { comm, membership, others: numbered(peers, others), tag: TAGS.ask }
    }

    /// Waits until a message reaches this member's own service, at most for `patience`.
    pub(super) fn wait(&self, patience: Nanos) -> Result<()> {
        let comm = self.control().comm.clone().with_deadline(patience.max(Nanos(1)));
        let received = comm.recv(comm.rank(), TAGS.answer);
        // Also after a timeout: a notice may have been lost with a former communicator.
        self.membership().has_read_notice();
        match received {
            Ok(_) | Err(CommError::Deadline { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Changes to a view, and returns the communicator of its members. Former members are recorded, so that
    /// they are not taken for newcomers.
    ///
    /// Errors: a view without this endpoint.
    pub(in crate::train) fn enter(&mut self, view: View) -> Result<Communicator> {
        for member in self.view.iter().flat_map(|view| &view.members) {
            if !view.members.iter().any(|stays| stays.id == member.id) {
                self.former.insert(PeerId(member.slot));
            }
        }
        let members: Vec<PeerId> = view.members.iter().map(|member| PeerId(member.slot)).collect();
        let comm = Communicator::of_members(Arc::clone(&self.transport), &members, view.epoch)?.single_use();
        self.names.extend(view.members.iter().map(|member| (PeerId(member.slot), member.id)));
        self.view = Some(view);
        // New members are pinged after the next step.
        self.calm = CalmPings::default();
        self.forget_gone();
        Ok(comm)
    }

    /// Returns a communicator of this endpoint alone, which is in no view any more.
    ///
    /// Errors: none for an endpoint of the network.
    pub(in crate::train) fn alone(&mut self) -> Result<Communicator> {
        self.view = None;
        self.own_communicator()
    }

    /// Returns a communicator of this endpoint alone.
    ///
    /// Errors: none for an endpoint of the network.
    pub(super) fn own_communicator(&self) -> Result<Communicator> {
        Ok(Communicator::of_members(Arc::clone(&self.transport), &[self.me.peer], ALONE)?)
    }
}
