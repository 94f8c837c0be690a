//! The service through which a member takes part in decisions about members. It passes events to the pure state
//! machine of [`farflung_parallel::membership`] and carries out the actions that this returns. It processes
//! messages as they arrive, even while the rank computes.

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank};
use farflung_comm::{Answer, Cancel, Question, Service};
use farflung_parallel::membership::{Action, Event, MemberId, Message, Reason, Start, State, View};
use serde::{Deserialize, Serialize};

use super::offers::{Growth, Logged, Offer, Offers};
use super::promises::PromiseFile;
use super::ready::{Cost, Ready};
use super::round_trips::RoundTrips;
use super::too_long::{TooLong, is_fresh};
use crate::Result;

/// Message to a membership service.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum MembershipMessage {
    /// An event, from the service's own rank.
    Event(Event),
    /// A message of the membership rules, from another member.
    Message(Message),
    /// A question of another member whether this one is reachable, at a time of its clock, with the sender's
    /// position in the sequence of views.
    Ping { asked: Nanos, here: Option<Message> },
    /// The answer to a ping with its time, and the sender's position in the sequence of views.
    Pong { asked: Nanos, here: Option<Message> },
    /// From another member of pipelines: its step in the view of this epoch has failed because a member is
    /// lost.
    GivenUp { epoch: u64 },
    /// From a member that takes steps in the view of this epoch to a member that takes none: the events on
    /// which the working members have agreed.
    Agreed { epoch: u64, events: Vec<Event> },
    /// From a newcomer to all members: it is ready to be admitted.
    Ready(Ready),
    /// From a member to a newcomer: it is not admitted, because it has reported what cannot be true.
    Refused,
    /// From a member to a newcomer: it is not admitted, because all would wait too long for its state.
    TooLong(TooLong),
    /// From another member: it continues without these newcomers of the view of this epoch, which do not
    /// answer or take too long.
    GivesUpNewcomers { epoch: u64, ids: Vec<MemberId> },
    /// From a member to a newcomer that is about to be admitted: the cost of its state.
    Costs(Cost),
    /// From a member to a newcomer: the copy of the state that it offers.
    Offers(Offer, Growth),
    /// From a member to a newcomer: its newest records of steps.
    Logged(Vec<Logged>),
    /// From a member to a newcomer, with local steps: its optimizer after the last synchronisation.
    Optimizer(Offer),
    /// From a member of pipelines to a newcomer: it does not offer its copy and its records any more.
    Dropped,
}

/// Outcome of a decision about members.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    /// A new view, of which this rank is a member.
    Installed(View),
    /// This rank must not continue.
    Stopped(Reason),
}

/// A member's state in the membership rules, with its messages and promises.
#[derive(Debug)]
pub(super) struct MembershipService {
    state: State,
    /// Ids of the connected peers, by rank in the communicator of the membership services.
    ranks: Vec<MemberId>,
    outcome: Option<Outcome>,
    /// The hashes with which the next view begins, of which the rules do not know yet.
    starts: Option<Start>,
    /// Time at which the rules need the next tick.
    wake: Option<Nanos>,
    /// Whether the service's rank is waiting and must be notified of each message.
    pub(super) awaited: bool,
    /// Whether the rank was notified and has not read that yet.
    notified: bool,
    /// Time of the last message from each peer.
    heard: BTreeMap<MemberId, Nanos>,
    /// File to which promises are written; `None` if they are not saved.
    promises: Option<PromiseFile>,
    /// Cancels this rank's pending operations in the view of this epoch.
    steps: Option<(u64, Cancel)>,
    /// The newest epoch whose steps have failed, as reported by other members.
    given_up: u64,
    /// Newcomers that have announced that they are ready.
    ready: BTreeMap<MemberId, Ready>,
    /// What newcomers and spares have announced that cannot be true, until it is taken.
    nonsense: BTreeMap<MemberId, String>,
    /// Whether another member says that this newcomer has announced what cannot be true.
    is_refused: bool,
    /// Why a member refuses this newcomer.
    too_long: Option<TooLong>,
    /// The newest view whose members have all that they need: none of them is a newcomer any more.
    settled: u64,
    /// Cost of this newcomer's state, as sent by the members.
    costs: Option<Cost>,
    /// What members offer to this newcomer.
    offers: Offers,
    round_trips: RoundTrips,
}

/// Decodes a message. The connection proves who the sender is, but the content may be malformed: then `None`.
fn decode(bytes: &[u8]) -> Option<MembershipMessage> {
    postcard::from_bytes(bytes).ok()
}

fn encode(word: &MembershipMessage) -> Vec<u8> {
    postcard::to_stdvec(word).expect("messages can be serialized")
}

/// Encodes an event for the rank's own service.
pub(super) fn event(event: Event) -> Vec<u8> {
    encode(&MembershipMessage::Event(event))
}

impl MembershipService {
    /// Creates a service, and writes the state's promises to the file.
    ///
    /// Errors: [`Error::Io`](crate::Error::Io).
    pub(super) fn new(state: State, promises: Option<PromiseFile>) -> Result<Self> {
        let (ranks, heard) = (Vec::new(), BTreeMap::new());
        let (steps, given_up) = (None, 0);
        let mut membership = Self {
            state,
            ranks,
            outcome: None,
            starts: None,
            wake: None,
            awaited: false,
            notified: false,
            heard,
            promises,
            steps,
            given_up,
            ready: BTreeMap::new(),
            nonsense: BTreeMap::new(),
            is_refused: false,
            too_long: None,
            settled: 0,
            costs: None,
            offers: Offers::default(),
            round_trips: RoundTrips::default(),
        };
        if let (Some(kept), Some(promises)) = (membership.state.durable(), &mut membership.promises) {
            promises.write(kept)?;
        }
        Ok(membership)
    }

    /// Sets the ids of the connected peers, by rank in the communicator of the membership services.
    pub(super) fn reaches(&mut self, ranks: Vec<MemberId>) {
        self.ready.retain(|id, _| ranks.contains(id));
        self.nonsense.retain(|id, _| ranks.contains(id));
        self.offers.keep(&ranks);
        self.round_trips.keep(&ranks);
        self.ranks = ranks;
    }

    /// Returns whether this member's folder has the checkpoints of another run.
    pub(super) fn holds_another(&self) -> bool {
        self.promises.as_ref().is_some_and(|file| file.holds_another)
    }

    /// Writes that this member's folder has the checkpoints of another run no more.
    ///
    /// Errors: [`Error::Io`](crate::Error::Io).
    pub(super) fn holds_no_other(&mut self) -> Result<()> {
        let (Some(kept), Some(file)) = (self.state.durable(), &mut self.promises) else { return Ok(()) };
        file.holds_another = false;
        file.write(kept)
    }

    /// Sets the hashes with which the next view begins; `None` keeps those that the rules have. The rules get
    /// them with the next event: on a virtual clock, a message of this rank to itself would delay the answers
    /// to earlier ones of other ranks.
    pub(super) const fn starts(&mut self, start: Option<Start>) {
        self.starts = start;
    }

    /// Returns and clears the newest outcome; `None` if there was none since the last call.
    pub(super) fn outcome(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    /// Returns whether a member has announced that it leaves.
    pub(super) fn is_leaving(&self, id: &MemberId) -> bool {
        self.state.leaving().contains(id)
    }

    /// Returns whether there is an outcome that has not been taken.
    pub(super) const fn has_outcome(&self) -> bool {
        self.outcome.is_some()
    }

    /// Notes that the rank has read the notice of a message.
    pub(super) const fn has_read_notice(&mut self) {
        self.notified = false;
    }

    /// Returns the time at which the rules need the next tick.
    pub(super) const fn wake(&self) -> Option<Nanos> {
        self.wake
    }

    /// Returns whether a message from a peer has arrived at or after `since`.
    pub(super) fn has_heard(&self, id: &MemberId, since: Nanos) -> bool {
        self.heard.get(id).is_some_and(|&at| at >= since)
    }

    /// Encodes a ping that is sent now. The round trips of its answers are measured.
    pub(super) fn ping(&mut self, now: Nanos) -> Vec<u8> {
        self.round_trips.ask(now);
        encode(&MembershipMessage::Ping { asked: now, here: self.here() })
    }

    /// Returns the measured round trips.
    pub(super) const fn round_trips(&self) -> &RoundTrips {
        &self.round_trips
    }

    /// Encodes the message that a step in the view of `epoch` has failed.
    pub(super) fn gives_up(epoch: u64) -> Vec<u8> {
        encode(&MembershipMessage::GivenUp { epoch })
    }

    /// Encodes the events on which the working members have agreed, for members that take no steps.
    pub(super) fn agreed(epoch: u64, events: &[Event]) -> Vec<u8> {
        encode(&MembershipMessage::Agreed { epoch, events: events.to_vec() })
    }

    /// Encodes a newcomer's announcement that it is ready.
    pub(super) fn is_ready(ready: &Ready) -> Vec<u8> {
        encode(&MembershipMessage::Ready(ready.clone()))
    }

    /// Encodes the reason for which a newcomer is refused, for that newcomer.
    pub(super) fn refusing(why: TooLong) -> Vec<u8> {
        encode(&MembershipMessage::TooLong(why))
    }

    /// Encodes the message that newcomers of the view of `epoch` are given up.
    pub(super) fn gives_up_newcomers(epoch: u64, ids: &[MemberId]) -> Vec<u8> {
        encode(&MembershipMessage::GivesUpNewcomers { epoch, ids: ids.to_vec() })
    }

    /// Notes that the change to the view of `epoch` is complete.
    pub(super) const fn settles(&mut self, epoch: u64) {
        self.settled = epoch;
    }

    /// Returns why a member refuses this newcomer.
    pub(super) const fn too_long(&self) -> Option<TooLong> {
        self.too_long
    }

    /// Encodes the cost of a newcomer's state, for that newcomer.
    pub(super) fn costing(cost: Cost) -> Vec<u8> {
        encode(&MembershipMessage::Costs(cost))
    }

    /// Encodes the offer of a copy of the state, for a newcomer.
    pub(super) fn offering(offer: Offer, growth: Growth) -> Vec<u8> {
        encode(&MembershipMessage::Offers(offer, growth))
    }

    /// Encodes a list of records of steps, for a newcomer.
    pub(super) fn logging(records: &[Logged]) -> Vec<u8> {
        encode(&MembershipMessage::Logged(records.to_vec()))
    }

    /// Encodes the offer of a member's optimizer, for a newcomer.
    pub(super) fn offering_optimizer(offer: Offer) -> Vec<u8> {
        encode(&MembershipMessage::Optimizer(offer))
    }

    /// Encodes the message to newcomers that this member offers its copy and its records no more.
    pub(super) fn dropping() -> Vec<u8> {
        encode(&MembershipMessage::Dropped)
    }

    /// Returns what members offer to this newcomer.
    pub(super) const fn offers(&self) -> &Offers {
        &self.offers
    }

    /// Forgets the records of steps up to `step` that members have offered: this newcomer has replayed them.
    pub(super) fn forget_records(&mut self, step: u64) {
        self.offers.forget_records(step);
    }

    /// Forgets all that members have offered.
    pub(super) fn forget_offers(&mut self) {
        self.offers = Offers::default();
    }

    /// Forgets the copies of the state that members have offered.
    pub(super) fn forget_copies(&mut self) {
        self.offers.forget_copies();
    }

    /// Returns a newcomer's announcement; `None` if it is not ready.
    pub(super) fn ready(&self, id: &MemberId) -> Option<&Ready> {
        self.ready.get(id)
    }

    /// Returns and clears what others have announced that cannot be true.
    pub(super) fn nonsense(&mut self) -> BTreeMap<MemberId, String> {
        std::mem::take(&mut self.nonsense)
    }

    /// Returns whether another member says that this newcomer has announced what cannot be true. Any peer can
    /// say so.
    pub(super) const fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// Returns and clears the cost of this newcomer's state, if the members have sent it.
    pub(super) const fn costs(&mut self) -> Option<Cost> {
        self.costs.take()
    }

    /// Sets the cancel token of this rank's operations in the view of `epoch`. It is triggered when another
    /// member reports that a step of that view has failed, or at once if one already has.
    pub(super) fn ends(&mut self, epoch: u64, cancel: Cancel) {
        self.steps = Some((epoch, cancel));
        self.end_steps();
    }

    fn end_steps(&self) {
        if let Some((epoch, cancel)) = &self.steps
            && *epoch <= self.given_up
        {
            cancel.cancel();
        }
    }

    /// Returns a message with this member's position in the sequence of views; `None` without a view.
    fn here(&self) -> Option<Message> {
        self.state.view().map(|view| Message::Here { at: view.id() })
    }

    fn rank(&self, id: &MemberId) -> Option<Rank> {
        self.ranks.iter().position(|rank| rank == id).map(|rank| Rank(rank as u32))
    }

    /// Carries out actions in their order, and returns the messages to be sent.
    fn act(&mut self, actions: Vec<Action>) -> Vec<Answer> {
        let mut leaving = Vec::new();
        for action in actions {
            match action {
                Action::Send { to, message } => {
                    // A peer that is not connected gets no message; the rules treat it like a silent one.
                    let to = self.rank(&to);
                    leaving.extend(
                        to.map(|to| Answer::to_service(to, encode(&MembershipMessage::Message(message)))),
                    );
                }
                // Without the saved promise, the actions after it must not happen: send nothing, as if this
                // member were lost.
                Action::Persist(kept) => match self.promises.as_mut().map(|file| file.write(&kept)) {
                    None | Some(Ok(())) => {}
                    Some(Err(error)) => {
                        tracing::error!(%error, "failed to write a promise of the membership rules");
                        break;
                    }
                },
                Action::Install(view) => self.outcome = Some(Outcome::Installed(view)),
                Action::Stop(reason) => self.outcome = Some(Outcome::Stopped(reason)),
                Action::Wake { at } => self.wake = Some(at),
                Action::Fault { peer, fault } => tracing::warn!(%peer, %fault, "a view was rejected"),
                _ => {}
            }
        }
        leaving
    }

    fn step(&mut self, event: Event, now: Nanos) -> Vec<Answer> {
        self.wake = None;
        let starts = self.starts.take().map(Event::Starts);
        let actions: Vec<Action> =
            starts.into_iter().chain([event]).flat_map(|event| self.state.step(event, now)).collect();
        self.act(actions)
    }

    fn receive_message(&mut self, word: MembershipMessage, from: Rank, now: Nanos) -> Vec<Answer> {
        let Some(&sender) = self.ranks.get(from.index()) else { return Vec::new() };
        let own = sender == self.state.me().id;
        self.heard.insert(sender, now);
        let (message, asked) = match word {
            MembershipMessage::Event(event) if own => return self.step(event, now),
            MembershipMessage::Event(_) => return Vec::new(),
            MembershipMessage::Message(message) => (Some(message), None),
            MembershipMessage::Pong { asked, here } => {
                self.round_trips.answered(sender, asked, now);
                (here, None)
            }
            MembershipMessage::Ping { asked, here } => (here, Some(asked)),
            MembershipMessage::GivenUp { epoch } => {
                // Only members take steps. This member may be one view behind the sender.
                let view = self.state.view();
                let steps = |view: &View| {
                    epoch <= view.epoch.saturating_add(1)
                        && view.members.iter().any(|member| member.id == sender)
                };
                if view.is_some_and(steps) {
                    self.given_up = self.given_up.max(epoch);
                    self.end_steps();
                }
                (None, None)
            }
            MembershipMessage::Ready(ready) => {
                let Some(reason) = ready.nonsense() else {
                    self.ready.insert(sender, ready);
                    return Vec::new();
                };
                self.ready.remove(&sender);
                self.nonsense.insert(sender, reason);
                return vec![Answer::to_service(from, encode(&MembershipMessage::Refused))];
            }
            MembershipMessage::Refused => {
                self.is_refused = true;
                (None, None)
            }
            MembershipMessage::TooLong(why) => {
                // Newcomers refuse nobody.
                if !self.ready.contains_key(&sender) {
                    self.too_long = Some(why);
                }
                (None, None)
            }
            MembershipMessage::GivesUpNewcomers { epoch, ids } => {
                let is_open = |view: &&View| view.epoch == epoch && epoch > self.settled && view.has(&sender);
                let view = self.state.view().filter(is_open);
                let fresh = |id: &MemberId| view.is_some_and(|view| is_fresh(view, id));
                let lost: Vec<MemberId> = ids.into_iter().filter(fresh).collect();
                return lost.into_iter().flat_map(|id| self.step(Event::Silent(id), now)).collect();
            }
            MembershipMessage::Costs(cost) => {
                self.costs = Some(cost);
                (None, None)
            }
            MembershipMessage::Offers(offer, growth) => {
                self.offers.offer(sender, offer, growth);
                (None, None)
            }
            MembershipMessage::Logged(records) => {
                self.offers.log(sender, &records);
                (None, None)
            }
            MembershipMessage::Optimizer(offer) => {
                self.offers.offer_optimizer(sender, offer);
                (None, None)
            }
            MembershipMessage::Dropped => {
                self.offers.forget(&sender);
                (None, None)
            }
            MembershipMessage::Agreed { epoch, events } => {
                let view = self.state.view();
                let members = || view.iter().flat_map(|view| &view.members).any(|member| member.id == sender);
                if view.is_none_or(|view| view.epoch != epoch) || !members() {
                    return Vec::new();
                }
                return events.into_iter().flat_map(|event| self.step(event, now)).collect();
            }
        };
        let mut leaving = Vec::new();
        if let Some(asked) = asked {
            let pong = encode(&MembershipMessage::Pong { asked, here: self.here() });
            leaving.push(Answer::to_service(from, pong));
        }
        if let Some(message) = message {
            leaving.extend(self.step(Event::Message { from: sender, message }, now));
        }
        leaving
    }
}

impl Service for MembershipService {
    fn receive(&mut self, Question { from, at, bytes }: Question) -> Vec<Answer> {
        let Some(word) = decode(&bytes) else {
            tracing::warn!(from = from.0, "a message about members cannot be parsed");
            return Vec::new();
        };
        let mut leaving = self.receive_message(word, from, at);
        // Wakes the rank if it is waiting. One notice is enough: more would stay unread.
        let own = self.rank(&self.state.me().id).filter(|_| self.awaited && !self.notified);
        self.notified |= own.is_some();
        leaving.extend(own.map(|me| Answer::new(me, Vec::new())));
        leaving
    }
}

#[cfg(test)]
mod tests {
    use farflung_parallel::membership::{Member, Settings, Start, ViewId};
    use farflung_parallel::plan::Digest;

    use super::*;

    #[test]
    fn a_newcomer_that_reports_impossible_rates_is_refused_with_the_reason() {
        let ids = [0, 1].map(MemberId::number);
        let of = |n: u32| Member::new(MemberId::number(n), n);
        let start = Start { weights: Digest::new([0; 32]), plan: Digest::new([0; 32]) };
        let view = View::first(ViewId { incarnation: 1, epoch: 1 }, &[of(0)], start).unwrap();
        let settings = Settings::default;
        let state = State::first(ids[0], view, settings()).unwrap();
        let mut member = MembershipService::new(state, None).unwrap();
        let mut newcomer = MembershipService::new(State::newcomer(of(1), settings()), None).unwrap();
        member.reaches(ids.to_vec());
        newcomer.reaches(ids.to_vec());
        let at = Nanos::from_millis(5);
        let mut announce = |rate: u64| {
            let ready = Ready { rates: [(ids[0], rate)].into(), ..Ready::default() };
            member.receive(Question { from: Rank(1), at, bytes: MembershipService::is_ready(&ready) })
        };
        assert!(announce(1_000_000).is_empty());
        let answers = announce(u64::MAX);
        for answer in answers {
            newcomer.receive(Question { from: Rank(0), at, bytes: answer.bytes });
        }
        // The earlier announcement counts no more.
        assert_eq!(member.ready(&ids[1]), None);
        let reason = member.nonsense().remove(&ids[1]).unwrap();
        assert!(reason.contains(&u64::MAX.to_string()), "{reason}");
        assert!(newcomer.is_refused());
        assert!(member.nonsense().is_empty());
    }
}
