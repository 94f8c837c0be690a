//! How members agree on the next view. Events are passed to the rules of [`farflung_parallel::membership`] (a
//! pure state machine), and the rank waits until the rules produce a view.

use std::collections::BTreeSet;

use farflung_base::{Nanos, PeerId};
use farflung_comm::Communicator;
use farflung_parallel::membership::{Event, Member, MemberId, Reason, Start, View};
use serde::{Deserialize, Serialize};

use super::all_gather::all_gather;
use super::arrivals::Newcomer;
use super::membership_service::Outcome;
use super::place::{Logs, Place};
use super::ready::{Admission, Cost, Ready};
use super::team::Team;
use super::watchdog::ROLL_CALL;
use crate::train::blame::{Evidence, evidence};
use crate::train::trainer::StateBytes;
use crate::{Error, Result};

/// Time between two checks while waiting for others.
pub(super) const POLL_INTERVAL: Nanos = Nanos::from_millis(50);
/// Time after a change that was requested but not reached, before the next change may be requested.
pub(super) const PAUSE: Nanos = Nanos::from_millis(1000);

/// Message that each member sends to the others when they agree on a change between two steps.
#[derive(Debug, Serialize, Deserialize)]
struct ChangeMessage {
    leaves: bool,
    /// Ids of members without a part that have announced that they leave.
    departing: Vec<[u8; 32]>,
    /// Whether it has heard that all spares that form a further pipeline are ready.
    grows: bool,
    /// Ids of members without a part that do not answer.
    silent: Vec<[u8; 32]>,
    /// The newcomers that are connected to this member and are ready, or ask for a copy of the state.
    here: Vec<KnownNewcomer>,
    /// Whether the sender keeps a log of its steps for newcomers.
    logs: bool,
    /// Sizes of the sender's state in memory.
    state: StateBytes,
}

/// A newcomer of which a member has heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct KnownNewcomer {
    /// Its endpoint's number.
    slot: u32,
    id: [u8; 32],
    /// Whether it is ready. If not, it asks for a copy of the state.
    is_ready: bool,
}

impl KnownNewcomer {
    /// Returns the first newcomer that every member has heard of, of those that are ready or of those that are
    /// not, by what rank 0 has heard. A newcomer must be connected to all members, so that one that comes after
    /// another is connected to that one, too.
    fn first_of(told: &[ChangeMessage], is_ready: bool) -> Option<Self> {
        let (first, others) = told.split_first()?;
        let met =
            |here: &[Self], caller: &Self| here.iter().any(|h| (h.slot, h.id) == (caller.slot, caller.id));
        let callers = first.here.iter().filter(|caller| caller.is_ready == is_ready);
        callers.copied().find(|caller| others.iter().all(|told| met(&told.here, caller)))
    }
}

/// Returns the peer that this rank itself found broken or silent, according to its error. `None` if the error
/// only follows from a failure that another rank has detected: that rank reports it.
pub(super) fn suspect(error: &Error) -> Option<PeerId> {
    match error {
        Error::PeerLost { peer, .. } if evidence(error) != Evidence::Secondary => Some(*peer),
        _ => None,
    }
}

/// A view on which members agree between two steps.
pub(super) struct NextView {
    pub(super) view: View,
    /// Reason for the change, if a member does not answer.
    pub(super) reason: Option<String>,
}

/// What the working members agree on between two steps.
pub(super) enum Agreement {
    /// Nothing.
    GoOn,
    /// Members begin a log of their steps for this newcomer: in pipelines those that hold its part, otherwise
    /// all.
    Log {
        /// The newcomer's endpoint.
        newcomer: PeerId,
        /// Sizes of the members' states, by rank.
        sizes: Vec<StateBytes>,
    },
    /// Members change.
    Change(Agreed),
    /// Members leave that hold a part of the model which no remaining member holds. They hand it over first.
    HandOver,
    /// All members leave.
    End,
    /// Spares form a further pipeline. Has the one that receives most.
    Grow(Option<Admission>),
}

/// What a member asks for between two steps.
pub(super) struct Asks<'a> {
    /// Whether it leaves.
    pub(super) leaves: bool,
    /// Members without a part that do not answer.
    pub(super) silent: &'a [MemberId],
    /// Members without a part that have announced that they leave.
    pub(super) departing: &'a [MemberId],
    /// The members' places; `None` if each member holds the whole model.
    pub(super) team: Option<&'a Team>,
    /// Whether the spares that form a further pipeline are ready.
    pub(super) grows: bool,
    /// Whether a newcomer receives anything when it joins.
    pub(super) costs: bool,
    /// Longest time for which members wait for a newcomer's state.
    pub(super) join_wait: Nanos,
}

/// A spare that is ready to be in a further pipeline.
pub(super) struct ReadySpare {
    pub(super) peer: PeerId,
    pub(super) ready: Ready,
}

/// A change on which the working members agree between two steps.
pub(super) struct Agreed {
    events: Vec<Event>,
    reason: Option<String>,
    /// The newcomer that is about to be admitted.
    pub(super) admission: Option<Admission>,
}

/// Information about other members from a failure.
pub(super) struct Loss {
    /// The peer that this rank itself found broken or silent; see [`suspect`].
    pub(super) suspect: Option<PeerId>,
    /// Members that this rank found silent.
    pub(super) silent: Vec<MemberId>,
    /// Whether the same members may repeat the step if all of them answer.
    pub(super) again: bool,
}

/// A round of pings to the other members.
struct PingRound {
    at: Nanos,
    asked: Vec<(PeerId, MemberId)>,
}

impl Place {
    /// Returns how long an answer to a ping is waited for: at least the longest two round trips to any other
    /// member, as far as they are measured, and at most the deadline.
    pub(super) fn roll_call(&self) -> Nanos {
        let others = self.others();
        let longest = self.membership().round_trips().longest(others.iter().map(|(_, id)| id));
        ROLL_CALL.max(Nanos(longest.0.saturating_mul(2))).min(self.deadline)
    }

    /// Passes events to the rules and waits until the members have agreed on a view. `None` if they have not
    /// within `patience` although all of them answer.
    ///
    /// Errors: [`Error::Removed`] if the others continue without this rank; [`Error::NoMajority`] if too few
    /// members are left.
    fn decide(
        &mut self,
        start: Option<Start>,
        events: Vec<Event>,
        (suspect, again): (Option<PeerId>, bool),
        patience: Nanos,
    ) -> Result<Option<View>> {
        self.renew();
        self.membership().starts(start);
        self.membership().awaited = true;
        let decided = self.wait_for_outcome(events, (suspect, again), patience);
        self.membership().awaited = false;
        self.membership().starts(None);
        decided
    }

    fn wait_for_outcome(
        &mut self,
        events: Vec<Event>,
        (mut suspect, mut again): (Option<PeerId>, bool),
        patience: Nanos,
    ) -> Result<Option<View>> {
        let mut told: Vec<MemberId> = Vec::new();
        for happened in events {
            if let Event::Silent(id) = happened {
                told.push(id);
            }
            self.tell(happened)?;
        }
        let until = self.transport().now().saturating_add(patience);
        // Time at which the suspect is reported as silent. It is later if the step may first be repeated.
        let mut names = Nanos::ZERO;
        let begun = self.transport().now();
        let mut calling = PingRound { at: begun, asked: self.others() };
        let mut _asking = self.ping(&calling.asked);
        loop {
            let outcome = self.membership().outcome();
            match outcome {
                Some(Outcome::Installed(view)) => return Ok(Some(view)),
                Some(Outcome::Stopped(reason)) => return Err(stopped(reason)),
                None => {}
            }
            let now = self.transport().now();
            if now >= until {
                return Ok(None);
            }
            self.renew();
            let mut silent = self.lost();
            // A member that was pinged and has not answered in time is silent, too.
            let quiet = |id: &MemberId| !self.membership().has_heard(id, calling.at);
            let unheard: Vec<MemberId> = calling.asked.iter().map(|(_, id)| *id).filter(quiet).collect();
            let is_over = now >= calling.at.saturating_add(self.roll_call());
            // Answers may wait behind gradients in the queue of a slow link. So that this does not end the run,
            // members whose loss would leave no majority are pinged again until the deadline.
            let waits_longer = now < begun.saturating_add(self.deadline)
                && !self.is_majority_without(silent.iter().chain(&told).chain(&unheard));
            let names_unheard = is_over && !waits_longer;
            if names_unheard || unheard.iter().all(|id| silent.contains(id)) {
                if names_unheard {
                    silent.extend(&unheard);
                }
                let nobody = !silent.iter().chain(&told).any(|id| self.is_named(id));
                if nobody && again {
                    // All members answer: ask for a repetition of the step. It takes place once all members
                    // have asked for it.
                    again = false;
                    names = now.saturating_add(self.deadline.saturating_add(self.deadline));
                    self.tell(Event::Repeat)?;
                } else if now >= names {
                    // All members answer, but the suspect has kept this rank waiting until the deadline.
                    let named = suspect.take().and_then(|peer| self.name(peer));
                    silent.extend(named.filter(|_| nobody));
                }
            }
            if is_over {
                calling = PingRound { at: now, asked: self.others() };
                _asking = self.ping(&calling.asked);
            }
            silent.retain(|id| !told.contains(id));
            for id in silent {
                self.tell(Event::Silent(id))?;
                told.push(id);
            }
            let wake = self.membership().wake().unwrap_or(Nanos::MAX);
            if wake <= now {
                self.tell(Event::Tick)?;
            }
            let next =
                until.min(calling.at.saturating_add(self.roll_call())).min(now.saturating_add(POLL_INTERVAL));
            let next = if wake > now { next.min(wake) } else { next };
            self.wait(next.saturating_sub(now))?;
        }
    }

    /// Returns whether the other members of the view are a majority without this one.
    pub(super) fn can_be_missed(&self) -> bool {
        let me = self.name(PeerId(self.transport().me().0));
        self.is_majority_without(me.iter())
    }

    /// Returns whether the members that have not announced that they leave are a majority of the view.
    pub(super) fn are_majority_without_leavers(&self) -> bool {
        let membership = self.membership();
        let members = self.view().into_iter().flat_map(|view| &view.members).map(|member| member.id);
        let leaving: Vec<MemberId> = members.filter(|id| membership.is_leaving(id)).collect();
        drop(membership);
        self.is_majority_without(leaving.iter())
    }

    /// Returns whether the members of the view other than these are a majority.
    fn is_majority_without<'a>(&self, gone: impl Iterator<Item = &'a MemberId>) -> bool {
        let gone: BTreeSet<MemberId> = gone.copied().collect();
        self.view().is_some_and(|view| {
            let left = view.members.iter().map(|member| member.id).filter(|id| !gone.contains(id));
            view.has_majority(&left.collect())
        })
    }

    /// Returns the next view after a failure. It has the same members if all of them answer and the step may be
    /// repeated.
    ///
    /// Errors: as [`Place::decide`].
    pub(super) fn after_loss(&mut self, loss: Loss, start: Option<Start>) -> Result<View> {
        let Loss { suspect, silent, again } = loss;
        let mut events = Vec::new();
        let lost = self.lost();
        events.extend(silent.into_iter().filter(|id| !lost.contains(id)).map(Event::Silent));
        events.extend(lost.into_iter().map(Event::Silent));
        // Several deadlines: if only the connection between two members is broken, it takes another deadline or
        // more to find out which of them is removed.
        let patience = Nanos(self.deadline.0.saturating_mul(4));
        self.decide(start, events, (suspect, again), patience)?.ok_or_else(|| Error::NoMajority {
            reason: format!("within {patience} the members did not agree on who continues"),
            left: None,
        })
    }

    /// Agrees on a change after a step at which a member requested it. All members that take steps must have
    /// finished the step, and all call this together. `comm` connects them, and `working` lists their ids by
    /// rank. `step` is the number of steps done, and `spares` are those that form a further pipeline.
    ///
    /// Errors: a member that is lost meanwhile.
    pub(super) fn agree(
        &mut self,
        (comm, working): (&Communicator, &[MemberId]),
        &Asks { leaves, silent, departing, team, grows, costs, join_wait }: &Asks<'_>,
        (step, state, logs): (u64, StateBytes, Logs),
        spares: &[ReadySpare],
    ) -> Result<Agreement> {
        self.renew();
        self.poll_services();
        let caller = |&(ref peer, is_ready): &(Newcomer, bool)| {
            let Newcomer { peer, id } = peer;
            KnownNewcomer { slot: peer.0, id: id.0, is_ready }
        };
        let mut here = self.callers(logs);
        here.retain(|(peer, is_ready)| {
            !(*is_ready && costs && self.refuses(peer, (working, state, step), join_wait))
        });
        let here = here.iter().map(caller).collect();
        // Members that take no steps, since a step would notice the loss of another.
        let idle = |id: &MemberId| !working.contains(id);
        let lost = self.lost_members();
        let silent: BTreeSet<MemberId> = silent.iter().copied().chain(lost).filter(idle).collect();
        let silent = silent.iter().map(|id| id.0).collect();
        let departing = departing.iter().map(|id| id.0).collect();
        let logging = logs == Logs::Yes;
        let standing = ChangeMessage { leaves, departing, grows, silent, here, logs: logging, state };
        let told = all_gather(comm, &standing)?;
        let mut leaving: BTreeSet<MemberId> =
            working.iter().zip(&told).filter(|(_, told)| told.leaves).map(|(&id, _)| id).collect();
        let holders_leave = !leaving.is_empty();
        leaving.extend(told.iter().flat_map(|told| &told.departing).map(|id| MemberId(*id)).filter(idle));
        // A member without a part is needed by no step, so its loss must be reported here.
        let quiet: BTreeSet<MemberId> =
            told.iter().flat_map(|told| &told.silent).map(|id| MemberId(*id)).filter(idle).collect();
        let quiet = &quiet - &leaving;
        let reason = (!quiet.is_empty()).then(|| "a member without a part does not answer".to_owned());
        let stays = |id: &MemberId| !leaving.contains(id) && !quiet.contains(id);
        if holders_leave && !self.view().is_some_and(|view| view.ids().iter().any(stays)) {
            return Ok(Agreement::End);
        }
        if holders_leave && team.is_some_and(|team| team.lacks_a_part_without(&leaving)) {
            return Ok(Agreement::HandOver);
        }
        let mut events: Vec<Event> = leaving.into_iter().map(Event::Leave).collect();
        let idle = quiet.into_iter().filter(|id| self.is_named(id));
        events.extend(idle.map(Event::Silent));
        let mut admission = None;
        if events.is_empty() {
            if told.iter().all(|told| told.grows) {
                let sizes: Vec<_> = working.iter().copied().zip(told.iter().map(|told| told.state)).collect();
                let costs = spares
                    .iter()
                    .map(|spare| Admission { peer: spare.peer, cost: Cost::new(&spare.ready, &sizes, step) });
                return Ok(Agreement::Grow(costs.max_by_key(|admission| admission.cost.state)));
            }
            if let Some(KnownNewcomer { slot, id, .. }) = KnownNewcomer::first_of(&told, true) {
                let id = MemberId(id);
                events.push(Event::Ready(Member::new(id, slot)));
                let sizes: Vec<_> = working.iter().copied().zip(told.iter().map(|told| told.state)).collect();
                let cost = self.membership().ready(&id).map(|ready| Cost::new(ready, &sizes, step));
                admission = cost.filter(|_| costs).map(|cost| Admission { peer: PeerId(slot), cost });
            } else if let Some(KnownNewcomer { slot, .. }) = KnownNewcomer::first_of(&told, false)
                && !told.iter().any(|told| told.logs)
            {
                let sizes = told.iter().map(|told| told.state).collect();
                return Ok(Agreement::Log { newcomer: PeerId(slot), sizes });
            }
        }
        self.pause = self.transport().now().saturating_add(PAUSE);
        if events.is_empty() {
            return Ok(Agreement::GoOn);
        }
        events.push(Event::Admit);
        // The member that proposes the view may be one that takes no steps.
        let _telling = if comm.rank().0 == 0 { self.tell_agreed(working, &events) } else { Vec::new() };
        let _costing = admission.map(|admission| self.tell_costs(admission)).unwrap_or_default();
        Ok(Agreement::Change(Agreed { events, reason, admission }))
    }

    /// Returns the next view after members have agreed on a change; `None` if they did not reach one.
    ///
    /// Errors: as [`Place::decide`].
    pub(super) fn between_steps(&mut self, agreed: Agreed, start: Start) -> Result<Option<NextView>> {
        let Agreed { events, reason, .. } = agreed;
        let view = self.decide(Some(start), events, (None, false), self.deadline)?;
        if view.is_some() {
            self.pause = Nanos::ZERO;
        }
        Ok(view.map(|view| NextView { view, reason }))
    }

    /// Returns a new view of the same members after a step that all have done, for a change that does not
    /// concern the list of members. All members that take steps call this together; the one whose `leads` is
    /// true notifies those that take none. `None` if there is no view within the deadline.
    ///
    /// Errors: as [`Place::decide`].
    pub(super) fn once_more(
        &mut self,
        working: &[MemberId],
        leads: bool,
        start: Start,
    ) -> Result<Option<View>> {
        self.renew();
        let _telling = if leads { self.tell_agreed(working, &[Event::Repeat]) } else { Vec::new() };
        self.decide(Some(start), vec![Event::Repeat], (None, false), self.deadline)
    }

    /// Advances a virtual clock to the time at which this newcomer appears.
    pub(super) fn wait_to_begin(&self) {
        let begins = self.arrivals.begins(self.transport().me());
        self.transport().advance(begins.saturating_sub(self.transport().now()));
    }
}

/// Returns the error for the reason for which this rank must not continue.
pub(super) fn stopped(reason: Reason) -> Error {
    match reason {
        Reason::NoMajority { .. } | Reason::StillRuns { .. } => {
            Error::NoMajority { reason: reason.to_string(), left: None }
        }
        reason => Error::Removed { reason: reason.to_string() },
    }
}
