//! State of one member, the argument of `step`.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::proposal::Proposal;
use super::retry::Retry;
use super::suspicion::Suspicion;
use super::{DurableState, Member, MemberId, Reason, Settings, Start, View, ViewFault};
use crate::plan::Digest;

/// State of one member: its view and votes, its unfinished proposal, and what it has heard of the other
/// members.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct State {
    pub(super) me: Member,
    pub(super) settings: Settings,
    /// Weights and plan named by views that this member proposes.
    pub(super) start: Start,
    /// `None` for a newcomer that is not in a view yet.
    pub(super) durable: Option<DurableState>,
    pub(super) proposal: Option<Proposal>,
    /// Highest ballot number seen in this epoch.
    pub(super) highest: u64,
    pub(super) silent: BTreeSet<MemberId>,
    pub(super) leaving: BTreeSet<MemberId>,
    pub(super) ready: BTreeMap<MemberId, Member>,
    /// Members that have asked for a view of the same members.
    pub(super) repeats: BTreeSet<MemberId>,
    pub(super) suspicions: BTreeMap<MemberId, Suspicion>,
    /// Number of announcements sent in this view.
    pub(super) announced: u64,
    /// Members that have not acknowledged the view yet.
    pub(super) unacknowledged: Round,
    /// Members of an older incarnation that have not answered. The view is sent to them to learn whether that
    /// incarnation still runs.
    pub(super) former: Round,
    /// Timer for repeating this member's announcements; see `announce`.
    pub(super) announcement: Option<Retry>,
    /// Time since which this member hears from too few members to decide a view.
    pub(super) alone_since: Option<Nanos>,
    /// Members of the view that are in a newer incarnation.
    pub(super) in_newer: BTreeSet<MemberId>,
    /// A newer incarnation that this member met since it has no majority.
    pub(super) superseded_by: Option<u64>,
    /// Older incarnations that reject this member's incarnation, by number.
    pub(super) older: BTreeMap<u64, OlderRun>,
    /// The view that does not contain this member, until it stops.
    pub(super) departure: Option<Departure>,
    pub(super) stopped: Option<Reason>,
    /// A deliberate flaw for tests: one vote counts as a majority.
    #[cfg(test)]
    pub(crate) one_vote_is_a_majority: bool,
    /// A deliberate flaw for tests: votes for earlier proposals are ignored.
    #[cfg(test)]
    pub(crate) ignores_votes: bool,
    /// A deliberate flaw for tests: newer incarnations are ignored.
    #[cfg(test)]
    pub(crate) ignores_incarnations: bool,
}

/// Members to which the view is sent repeatedly until they answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) to: BTreeSet<MemberId>,
    pub(super) retry: Option<Retry>,
}

impl Round {
    /// Creates a round whose first message is due at the next step.
    pub(super) const fn new(to: BTreeSet<MemberId>) -> Self {
        Self { to, retry: None }
    }

    /// Returns whether a message is due now.
    pub(super) fn is_due(&self, now: Nanos) -> bool {
        !self.to.is_empty() && self.retry.is_none_or(|retry| retry.is_due(now))
    }

    /// Returns the time at which the next message is due.
    pub(super) fn wake(&self) -> Option<Nanos> {
        self.retry.filter(|_| !self.to.is_empty()).map(Retry::at)
    }
}

/// An older incarnation: its newest known view, and the members that claim to have a majority of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OlderRun {
    pub(super) view: View,
    /// Time of each member's last rejection.
    pub(super) refusals: BTreeMap<MemberId, Nanos>,
}

impl OlderRun {
    /// Returns the members whose last rejection counts at `now`: for twice the longest time between two
    /// requests. A member may have stopped after it sent a rejection. If rejections of different times counted
    /// together, both incarnations could end.
    pub(super) fn valid_refusals(&self, now: Nanos, settings: &Settings) -> impl Iterator<Item = MemberId> {
        let window = Nanos(settings.slowest_resend.0.saturating_mul(2));
        let is_valid = move |at: Nanos| at.saturating_add(window) > now;
        self.refusals.iter().filter(move |(_, at)| is_valid(**at)).map(|(id, _)| *id)
    }
}

/// What a member does that a decided view does not contain: it sends the view to its members, until one of them
/// knows of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Departure {
    pub(super) view: View,
    pub(super) reason: Reason,
    pub(super) round: Round,
    /// Time at which the member stops in any case.
    pub(super) until: Nanos,
}

impl State {
    /// Creates the state of a member of a run's first view.
    ///
    /// [`State::durable`] must be written to disk before the first step.
    ///
    /// Errors: the view is not valid or does not contain the member.
    pub fn first(me: MemberId, view: View, settings: Settings) -> Result<Self, ViewFault> {
        Self::in_view(me, DurableState::new(view), settings)
    }

    /// Creates the state of a member that restarts with its saved votes.
    ///
    /// The member sends its view to all others until they answer, because they may be in a newer one.
    ///
    /// Errors: as [`State::first`].
    pub fn restored(me: MemberId, kept: DurableState, settings: Settings) -> Result<Self, ViewFault> {
        let mut state = Self::in_view(me, kept, settings)?;
        state.unacknowledged = Round::new(state.others());
        Ok(state)
    }

    /// Creates the state of a host that restarts a run from a checkpoint. `view` must have a higher incarnation
    /// than the earlier run.
    ///
    /// `former` are the members of the newest view that the checkpoint names. They are sent the new view until
    /// they answer, and so are the members of any newer view of the earlier run that one of them names. If a
    /// majority of an older view rejects it, [`step`](super::step) stops with [`Reason::StillRuns`].
    ///
    /// If no former member can be reached, both incarnations run until a member of one gets a message from a
    /// member of the other. Former members are not in [`DurableState`]: a host that crashes and is restored
    /// does not ask them again.
    ///
    /// Errors: as [`State::first`].
    pub fn again(
        me: MemberId,
        view: View,
        former: BTreeSet<MemberId>,
        settings: Settings,
    ) -> Result<Self, ViewFault> {
        let mut state = Self::in_view(me, DurableState::new(view), settings)?;
        state.former = Round::new(former);
        state.former.to.remove(&me);
        Ok(state)
    }

    /// Creates the state of a newcomer. It enters the first decided view that contains its id and slot.
    pub fn newcomer(me: Member, settings: Settings) -> Self {
        let zeros = Digest::new([0; 32]);
        Self {
            me,
            settings,
            start: Start { weights: zeros, plan: zeros },
            durable: None,
            proposal: None,
            highest: 0,
            silent: BTreeSet::new(),
            leaving: BTreeSet::new(),
            ready: BTreeMap::new(),
            repeats: BTreeSet::new(),
            suspicions: BTreeMap::new(),
            announced: 0,
            unacknowledged: Round::default(),
            former: Round::default(),
            announcement: None,
            alone_since: None,
            in_newer: BTreeSet::new(),
            superseded_by: None,
            older: BTreeMap::new(),
            departure: None,
            stopped: None,
            #[cfg(test)]
            one_vote_is_a_majority: false,
            #[cfg(test)]
            ignores_votes: false,
            #[cfg(test)]
            ignores_incarnations: false,
        }
    }

    fn in_view(me: MemberId, kept: DurableState, settings: Settings) -> Result<Self, ViewFault> {
        kept.view.check()?;
        let me = *kept.view.member(&me).ok_or(ViewFault::NotIn(me))?;
        let start = Start { weights: kept.view.weights, plan: kept.view.plan };
        let highest = kept.promised.map_or(0, |ballot| ballot.number);
        Ok(Self { start, highest, durable: Some(kept), ..Self::newcomer(me, settings) })
    }

    /// Returns this member.
    #[must_use]
    pub const fn me(&self) -> &Member {
        &self.me
    }

    /// Returns the member's view; `None` for a newcomer.
    #[must_use]
    pub fn view(&self) -> Option<&View> {
        self.durable.as_ref().map(|kept| &kept.view)
    }

    /// Returns the state that must be on disk; `None` for a newcomer.
    #[must_use]
    pub const fn durable(&self) -> Option<&DurableState> {
        self.durable.as_ref()
    }

    /// Returns the members that are considered lost.
    #[must_use]
    pub const fn silent(&self) -> &BTreeSet<MemberId> {
        &self.silent
    }

    /// Returns the members that have announced that they leave.
    #[must_use]
    pub const fn leaving(&self) -> &BTreeSet<MemberId> {
        &self.leaving
    }

    /// Returns the newcomers that are ready to be admitted.
    pub fn ready(&self) -> impl Iterator<Item = &Member> {
        self.ready.values()
    }

    /// Returns whether this member is the coordinator, which proposes views.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.view().and_then(|view| view.coordinator(&self.silent)) == Some(&self.me.id)
    }

    /// Returns whether this member has an unfinished proposal.
    #[must_use]
    pub fn is_deciding(&self) -> bool {
        self.proposal.is_some()
    }

    /// Returns why the member has stopped, if it has.
    #[must_use]
    pub const fn stopped(&self) -> Option<&Reason> {
        self.stopped.as_ref()
    }

    /// Returns all other members of the view.
    pub(super) fn others(&self) -> BTreeSet<MemberId> {
        let mut ids = self.view().map(View::ids).unwrap_or_default();
        ids.remove(&self.me.id);
        ids
    }

    /// Returns the members that are not considered lost, this one included.
    pub(super) fn heard(&self) -> BTreeSet<MemberId> {
        self.view().map(|view| &view.ids() - &self.silent).unwrap_or_default()
    }

    /// Returns the members that may still vote, this one included: those that are not considered lost, not in a
    /// newer incarnation, and whose machine does not ask to join as a newcomer.
    pub(super) fn present(&self) -> BTreeSet<MemberId> {
        let mut ids = &self.heard() - &self.in_newer;
        ids.retain(|id| !self.ready.contains_key(id));
        ids
    }

    /// Returns whether all members have asked for a view of the same members.
    pub(super) fn all_ask_to_repeat(&self) -> bool {
        self.view().is_some_and(|view| view.ids().is_subset(&self.repeats))
    }

    /// Returns whether these members are a quorum: together they may decide a view.
    pub(super) fn is_quorum(&self, voters: &BTreeSet<MemberId>) -> bool {
        #[cfg(test)]
        if self.one_vote_is_a_majority {
            return !voters.is_empty();
        }
        self.view().is_some_and(|view| view.has_majority(voters))
    }
}
