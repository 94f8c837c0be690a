//! The state of one member.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::proposal::Proposal;
use super::retry::Retry;
use super::suspicion::Suspicion;
use super::{Kept, Member, MemberId, Reason, Settings, Start, View, ViewFault};
use crate::plan::Digest;

/// One member: its view and votes, the proposal under way, and what it knows of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct State {
    pub(super) me: Member,
    pub(super) settings: Settings,
    /// For views that this member proposes.
    pub(super) start: Start,
    /// `None`: a newcomer that is in no view yet.
    pub(super) kept: Option<Kept>,
    pub(super) proposal: Option<Proposal>,
    /// The highest number of a ballot that was seen in this epoch.
    pub(super) highest: u64,
    pub(super) silent: BTreeSet<MemberId>,
    pub(super) leaving: BTreeSet<MemberId>,
    pub(super) ready: BTreeMap<MemberId, Member>,
    /// Members that ask for a view of the same members.
    pub(super) repeats: BTreeSet<MemberId>,
    pub(super) suspicions: BTreeMap<MemberId, Suspicion>,
    /// Members that have not said that they have the view.
    pub(super) untold: Round,
    /// Members of an older incarnation, to be asked whether it still runs.
    pub(super) former: Round,
    /// When this member says again whom it has given up, or that it leaves.
    pub(super) announcement: Option<Retry>,
    /// Since when too few members are heard.
    pub(super) alone_since: Option<Nanos>,
    /// The newest view of an older incarnation whose members refuse this one, and who has.
    pub(super) refusals: Option<Refusals>,
    pub(super) stopped: Option<Reason>,
    /// A wrong rule, for tests of `check`: one vote is a majority.
    #[cfg(test)]
    pub(crate) one_vote_is_a_majority: bool,
    /// Another: votes of earlier proposers are not looked for.
    #[cfg(test)]
    pub(crate) ignores_votes: bool,
}

/// Members that the view is sent to again and again, until they answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) to: BTreeSet<MemberId>,
    pub(super) retry: Option<Retry>,
}

impl Round {
    /// Begins at the next step.
    pub(super) const fn new(to: BTreeSet<MemberId>) -> Self {
        Self { to, retry: None }
    }

    /// When the next message is due.
    pub(super) fn wake(&self) -> Option<Nanos> {
        self.retry.filter(|_| !self.to.is_empty()).map(Retry::at)
    }
}

/// Members of an older incarnation that still have a majority, by their own account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusals {
    pub(super) view: View,
    pub(super) from: BTreeSet<MemberId>,
}

impl State {
    /// A member of a run's first view.
    ///
    /// [`State::kept`] is to be written before the first step.
    ///
    /// Errors: the view is not valid, or does not have the member.
    pub fn first(me: MemberId, view: View, settings: Settings) -> Result<Self, ViewFault> {
        Self::in_view(me, Kept::new(view), settings)
    }

    /// A member that restarts with its votes.
    ///
    /// It tells all others its view until they answer: they may be in a newer one.
    ///
    /// Errors: as [`State::first`].
    pub fn restored(me: MemberId, kept: Kept, settings: Settings) -> Result<Self, ViewFault> {
        let mut state = Self::in_view(me, kept, settings)?;
        state.untold = Round::new(state.others());
        Ok(state)
    }

    /// A host that starts a run again from a checkpoint: `view` has a higher incarnation than the run before.
    ///
    /// `former` are the members of the newest view that the checkpoint knows. They are told of the new
    /// incarnation until they answer; if more than half of an older view refuse it, [`step`](super::step)
    /// stops with [`Reason::StillRuns`].
    ///
    /// Errors: as [`State::first`].
    pub fn again(
        me: MemberId,
        view: View,
        former: BTreeSet<MemberId>,
        settings: Settings,
    ) -> Result<Self, ViewFault> {
        let mut state = Self::in_view(me, Kept::new(view), settings)?;
        state.former = Round::new(former);
        state.former.to.remove(&me);
        Ok(state)
    }

    /// A machine that is in no view. It enters the first decided view that has its id and slot.
    pub fn newcomer(me: Member, settings: Settings) -> Self {
        let zeros = Digest::new([0; 32]);
        Self {
            me,
            settings,
            start: Start { weights: zeros, plan: zeros },
            kept: None,
            proposal: None,
            highest: 0,
            silent: BTreeSet::new(),
            leaving: BTreeSet::new(),
            ready: BTreeMap::new(),
            repeats: BTreeSet::new(),
            suspicions: BTreeMap::new(),
            untold: Round::default(),
            former: Round::default(),
            announcement: None,
            alone_since: None,
            refusals: None,
            stopped: None,
            #[cfg(test)]
            one_vote_is_a_majority: false,
            #[cfg(test)]
            ignores_votes: false,
        }
    }

    fn in_view(me: MemberId, kept: Kept, settings: Settings) -> Result<Self, ViewFault> {
        kept.view.check()?;
        let me = *kept.view.member(&me).ok_or(ViewFault::NotIn(me))?;
        let start = Start { weights: kept.view.weights, plan: kept.view.plan };
        let highest = kept.promised.map_or(0, |ballot| ballot.number);
        Ok(Self { start, highest, kept: Some(kept), ..Self::newcomer(me, settings) })
    }

    /// The member itself.
    #[must_use]
    pub const fn me(&self) -> &Member {
        &self.me
    }

    /// The view that it is in; `None` for a newcomer.
    #[must_use]
    pub fn view(&self) -> Option<&View> {
        self.kept.as_ref().map(|kept| &kept.view)
    }

    /// What must be on disk; `None` for a newcomer.
    #[must_use]
    pub const fn kept(&self) -> Option<&Kept> {
        self.kept.as_ref()
    }

    /// Members that are given up.
    #[must_use]
    pub const fn silent(&self) -> &BTreeSet<MemberId> {
        &self.silent
    }

    /// Newcomers that are ready.
    pub fn ready(&self) -> impl Iterator<Item = &Member> {
        self.ready.values()
    }

    /// Whether this member is the one that proposes.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.view().and_then(|view| view.coordinator(&self.silent)) == Some(&self.me.id)
    }

    /// Whether a change of the view is being decided, as far as this member knows.
    #[must_use]
    pub fn is_deciding(&self) -> bool {
        self.proposal.is_some()
    }

    /// Why it has stopped.
    #[must_use]
    pub const fn stopped(&self) -> Option<&Reason> {
        self.stopped.as_ref()
    }

    /// All other members of the view.
    pub(super) fn others(&self) -> BTreeSet<MemberId> {
        let mut ids = self.view().map(View::ids).unwrap_or_default();
        ids.remove(&self.me.id);
        ids
    }

    /// Members that are not given up, this one included.
    pub(super) fn heard(&self) -> BTreeSet<MemberId> {
        self.view().map(|view| &view.ids() - &self.silent).unwrap_or_default()
    }

    /// Whether all members ask for a view of the same members.
    pub(super) fn all_ask_to_repeat(&self) -> bool {
        self.view().is_some_and(|view| view.ids().is_subset(&self.repeats))
    }

    /// Whether these may decide.
    pub(super) fn is_quorum(&self, voters: &BTreeSet<MemberId>) -> bool {
        #[cfg(test)]
        if self.one_vote_is_a_majority {
            return !voters.is_empty();
        }
        self.view().is_some_and(|view| view.has_majority(voters))
    }
}
