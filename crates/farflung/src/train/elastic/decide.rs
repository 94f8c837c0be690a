//! How members agree on the next view: what they have seen goes to the rules, and they wait for what these
//! decide.

use std::collections::BTreeSet;

use farflung_base::{Nanos, PeerId};
use farflung_comm::Communicator;
use farflung_parallel::membership::{Event, Member, MemberId, Reason, Start, View};
use serde::{Deserialize, Serialize};

use super::keeper::Outcome;
use super::place::Place;
use super::ready::{Admission, Cost};
use crate::train::blame::{Evidence, evidence};
use crate::train::trainer::StateBytes;
use crate::{Error, Result};

/// Between two looks while others are waited for.
pub(super) const LOOK: Nanos = Nanos::from_millis(50);
/// Whoever says nothing for so long when it is asked whether it is there is silent: two round trips around
/// the world.
pub(super) const ROLL_CALL: Nanos = Nanos::from_millis(800);
/// Between two attempts of a newcomer to meet others that come.
const MEETS: Nanos = Nanos::from_millis(1000);
/// After a change for which somebody asked and that did not come about, the next is asked for so much later.
const PAUSE: Nanos = Nanos::from_millis(1000);

/// What the members tell each other between two steps.
#[derive(Debug, Serialize, Deserialize)]
struct Standing {
    leaves: bool,
    /// Names of members without a part that do not answer.
    silent: Vec<[u8; 32]>,
    /// Number and name of each newcomer that is connected here and has said that it is ready.
    here: Vec<(u32, [u8; 32])>,
    /// How much it has in memory.
    state: StateBytes,
}

/// Whom this rank itself has found broken or silent, by its failure. Where somebody else has, that one tells.
pub(super) fn suspect(error: &Error) -> Option<PeerId> {
    match error {
        Error::PeerLost { peer, .. } if evidence(error) != Evidence::Secondary => Some(*peer),
        _ => None,
    }
}

/// What members agree on between two steps.
pub(super) struct Next {
    pub(super) view: View,
    /// Why, where somebody does not answer.
    pub(super) reason: Option<String>,
}

/// What members that take steps will do between two of them.
pub(super) struct Agreed {
    events: Vec<Event>,
    reason: Option<String>,
    /// Who is about to come in.
    pub(super) admission: Option<Admission>,
}

/// What a failure says of the other members.
pub(super) struct Loss {
    /// Whom this rank has waited for in vain.
    pub(super) suspect: Option<PeerId>,
    /// Those that it has found silent.
    pub(super) silent: Vec<MemberId>,
    /// Whether the same members may try again where all of them answer.
    pub(super) again: bool,
}

/// Asking the others whether they are there.
struct RollCall {
    at: Nanos,
    asked: Vec<(PeerId, MemberId)>,
}

impl Place {
    /// How long a question whether somebody is there stays open.
    pub(super) fn roll_call(&self) -> Nanos {
        ROLL_CALL.min(self.deadline)
    }

    /// Whether this member would be the one to propose, as far as it knows.
    pub(in crate::train) fn proposes(&mut self) -> bool {
        let gone = self.lost().into_iter().collect();
        let me = PeerId(self.transport().me().0);
        let me = self.name(me);
        self.view().is_some_and(|view| view.coordinator(&gone).copied() == me)
    }

    /// Waits until the members have agreed on what follows from these events; `None` where nothing has within
    /// `patience` although all of them are there.
    ///
    /// Errors: [`Error::Removed`] where the others go on without this rank, [`Error::NoMajority`] where too
    /// few are left.
    fn decide(
        &mut self,
        events: Vec<Event>,
        (suspect, again): (Option<PeerId>, bool),
        patience: Nanos,
    ) -> Result<Option<View>> {
        self.renew();
        self.keeper().awaited = true;
        let decided = self.wait_for_outcome(events, (suspect, again), patience);
        self.keeper().awaited = false;
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
        // Whoever kept this rank waiting is named then.
        let mut names = Nanos::ZERO;
        let mut calling = RollCall { at: self.transport().now(), asked: self.others() };
        let mut _asking = self.ping(&calling.asked);
        loop {
            let outcome = self.keeper().outcome();
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
            // Whoever was asked and says nothing is silent, too.
            let quiet = |id: &MemberId| !self.keeper().has_heard(id, calling.at);
            let unheard: Vec<MemberId> = calling.asked.iter().map(|(_, id)| *id).filter(quiet).collect();
            let is_over = now >= calling.at.saturating_add(self.roll_call());
            if is_over || unheard.iter().all(|id| silent.contains(id)) {
                if is_over {
                    silent.extend(&unheard);
                }
                let nobody = !silent.iter().chain(&told).any(|id| self.is_named(id));
                if nobody && again {
                    // All answer: they try again, once all have come to ask for it.
                    again = false;
                    names = now.saturating_add(self.deadline.saturating_add(self.deadline));
                    self.tell(Event::Repeat)?;
                } else if now >= names {
                    // All answer, and yet one of them kept this rank waiting for as long as may be.
                    let named = suspect.take().and_then(|peer| self.name(peer));
                    silent.extend(named.filter(|_| nobody));
                }
            }
            if is_over {
                calling = RollCall { at: now, asked: self.others() };
                _asking = self.ping(&calling.asked);
            }
            silent.retain(|id| !told.contains(id));
            for id in silent {
                self.tell(Event::Silent(id))?;
                told.push(id);
            }
            let wake = self.keeper().wake().unwrap_or(Nanos::MAX);
            if wake <= now {
                self.tell(Event::Tick)?;
            }
            let next = until.min(calling.at.saturating_add(self.roll_call())).min(now.saturating_add(LOOK));
            let next = if wake > now { next.min(wake) } else { next };
            self.wait(next.saturating_sub(now))?;
        }
    }

    /// The next view after a failure. Where all members answer it has the same ones, if these may try again.
    ///
    /// Errors: as [`Place::decide`].
    pub(super) fn after_loss(&mut self, loss: Loss, start: Option<Start>) -> Result<View> {
        let Loss { suspect, silent, again } = loss;
        let mut events: Vec<Event> = start.map(Event::Starts).into_iter().collect();
        let lost = self.lost();
        events.extend(silent.into_iter().filter(|id| !lost.contains(id)).map(Event::Silent));
        events.extend(lost.into_iter().map(Event::Silent));
        // Two members that are cut from each other only are told apart after as long again.
        let patience = Nanos(self.deadline.0.saturating_mul(4));
        self.decide(events, (suspect, again), patience)?.ok_or_else(|| Error::NoMajority {
            reason: format!("the members did not agree on who goes on within {patience}"),
            left: None,
        })
    }

    /// What the members agree to change after a step at which some member asked for it: all that take steps are
    /// well, and call this together over their `comm`, in which they are `working`. `None` where there is
    /// nothing to change after all.
    ///
    /// Errors: a member that is lost meanwhile.
    pub(super) fn agree(
        &mut self,
        (comm, working): (&Communicator, &[MemberId]),
        (leaves, silent): (bool, &[MemberId]),
        state: StateBytes,
    ) -> Result<Option<Agreed>> {
        self.renew();
        let here = self.ready_newcomers().iter().map(|peer| (peer.peer.0, peer.id.0)).collect();
        let silent = silent.iter().map(|id| id.0).collect();
        let standing = Standing { leaves, silent, here, state };
        let mine = postcard::to_stdvec(&standing).expect("numbers are plain data");
        let told = comm.all_gather_bytes(mine)?;
        let told: Vec<Standing> = told.iter().filter_map(|bytes| postcard::from_bytes(bytes).ok()).collect();
        let leaving = working.iter().zip(&told).filter(|(_, told)| told.leaves);
        let mut events: Vec<Event> = leaving.map(|(&id, _)| Event::Leave(id)).collect();
        // Members that take no part in steps are missed by nobody else.
        let quiet: BTreeSet<MemberId> =
            told.iter().flat_map(|told| &told.silent).map(|id| MemberId(*id)).collect();
        let reason = (!quiet.is_empty()).then(|| "a member without a part does not answer".to_owned());
        let idle: BTreeSet<MemberId> = self.lost_members().into_iter().chain(quiet).collect();
        let idle = idle.into_iter().filter(|id| self.is_named(id) && !working.contains(id));
        events.extend(idle.map(Event::Silent));
        let mut admission = None;
        if events.is_empty()
            && let Some((first, others)) = told.split_first()
        {
            // One that every member reaches. The next has to reach this one, too.
            let met = |come: &&(u32, [u8; 32])| others.iter().all(|told| told.here.contains(come));
            if let Some(&(slot, id)) = first.here.iter().find(met) {
                let id = MemberId(id);
                events.push(Event::Ready(Member::new(id, slot)));
                let sizes: Vec<_> = working.iter().copied().zip(told.iter().map(|told| told.state)).collect();
                let cost = self.keeper().ready(&id).map(|ready| Cost::new(ready, &sizes));
                admission = cost.map(|cost| Admission { peer: PeerId(slot), cost });
            }
        }
        self.pause = self.transport().now().saturating_add(PAUSE);
        if events.is_empty() {
            return Ok(None);
        }
        events.push(Event::Admit);
        // The one that proposes may be a member that takes no steps.
        let _telling = if comm.rank().0 == 0 { self.tell_agreed(working, &events) } else { Vec::new() };
        let _costing = admission.map(|admission| self.tell_costs(admission)).unwrap_or_default();
        Ok(Some(Agreed { events, reason, admission }))
    }

    /// The next view after members have agreed on a change; `None` where it did not come about.
    ///
    /// Errors: as [`Place::decide`].
    pub(super) fn between_steps(&mut self, agreed: Agreed, start: Option<Start>) -> Result<Option<Next>> {
        let Agreed { events, reason, .. } = agreed;
        let events = start.map(Event::Starts).into_iter().chain(events).collect();
        let view = self.decide(events, (None, false), self.deadline)?;
        if view.is_some() {
            self.pause = Nanos::ZERO;
        }
        Ok(view.map(|view| Next { view, reason }))
    }

    /// A view of the same members behind a step that all have done, where something else than the members
    /// changes: all that take steps call this together, and the one that `leads` tells those that take none.
    /// `None` where there is none within the deadline.
    ///
    /// Errors: as [`Place::decide`].
    pub(super) fn once_more(
        &mut self,
        working: &[MemberId],
        leads: bool,
        start: Option<Start>,
    ) -> Result<Option<View>> {
        self.renew();
        let _telling = if leads { self.tell_agreed(working, &[Event::Repeat]) } else { Vec::new() };
        let events = start.map(Event::Starts).into_iter().chain([Event::Repeat]).collect();
        self.decide(events, (None, false), self.deadline)
    }

    /// On a virtual clock, a newcomer has nothing to do before it is there.
    pub(super) fn wait_to_begin(&self) {
        let begins = self.arrivals.begins(self.transport().me());
        self.transport().advance(begins.saturating_sub(self.transport().now()));
    }

    /// Says that this newcomer is ready for a state of so many bytes, and waits until a view has it. `tell`
    /// hears what that costs the members.
    ///
    /// Errors: [`Error::Removed`] where none has within `patience`.
    pub(in crate::train) fn wait_for_view(
        &mut self,
        (patience, state): (Nanos, u64),
        tell: &mut dyn FnMut(Cost),
    ) -> Result<View> {
        self.wait_to_begin();
        let until = self.transport().now().saturating_add(patience);
        let ready = self.measure_links(state);
        let (mut connected, mut meets) = (0, Nanos::ZERO);
        let mut _telling = Vec::new();
        self.keeper().awaited = true;
        loop {
            self.renew();
            let costs = self.keeper().costs();
            if let Some(cost) = costs {
                tell(cost);
            }
            let outcome = self.keeper().outcome();
            if let Some(Outcome::Installed(view)) = outcome {
                self.keeper().awaited = false;
                return Ok(view);
            }
            let now = self.transport().now();
            if now >= until {
                let reason = format!("no member took this one in within {patience}");
                return Err(Error::Removed { reason });
            }
            if now >= meets {
                if connected > 0 {
                    self.arrivals.meet();
                }
                meets = now.saturating_add(MEETS);
                connected = 0;
            }
            if connected != self.connected() {
                // Also those that have come since, and those that have missed it.
                connected = self.connected();
                _telling = self.tell_ready(&ready);
            }
            self.wait(LOOK.min(until.saturating_sub(now)))?;
        }
    }
}

/// Why this rank may not go on.
pub(super) fn stopped(reason: Reason) -> Error {
    match reason {
        Reason::NoMajority { .. } | Reason::StillRuns { .. } => {
            Error::NoMajority { reason: reason.to_string(), left: None }
        }
        reason => Error::Removed { reason: reason.to_string() },
    }
}
