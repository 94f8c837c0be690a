//! Paxos proposer: proposing the next view.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::super::acceptor::Vote;
use super::super::proposal::{Phase, Proposal, newest};
use super::super::retry::Retry;
use super::super::suspicion::cover;
use super::super::{Accepted, Action, Ballot, Member, MemberId, Message, View};
use super::Step;

impl Step<'_> {
    /// Begins, continues or drops a proposal.
    pub(super) fn pursue(&mut self, admit: bool) {
        let Some(mut proposal) = self.state.proposal.take() else {
            if self.may_propose() && self.wanted(admit).is_some() {
                self.begin(admit, Retry::due(self.now));
            }
            return;
        };
        proposal.at_commit |= admit;
        let (due, at_commit, retry) = (proposal.retry.is_due(self.now), proposal.at_commit, proposal.retry);
        let wanted = self.may_propose() && self.wanted(at_commit).is_some();
        match &proposal.phase {
            Phase::Waiting if due && wanted => self.begin(at_commit, retry),
            Phase::Waiting if due => {}
            // The proposal is dropped. No member can have voted in this ballot.
            Phase::Preparing { .. } if !wanted => {}
            Phase::Accepting { view, own: true, .. } if self.is_late(view) => self.begin(at_commit, retry),
            Phase::Preparing { .. } | Phase::Accepting { .. } if due => {
                proposal.retry = retry.again(self.now, &self.state.settings);
                self.ask(&proposal);
                self.state.proposal = Some(proposal);
                self.count_promises(false);
            }
            _ => self.state.proposal = Some(proposal),
        }
    }

    /// Returns whether this member is the coordinator and hears a quorum.
    fn may_propose(&self) -> bool {
        let gone = self.gone();
        let coordinator = self.view().and_then(|view| view.coordinator(&gone));
        coordinator == Some(&self.state.me.id) && self.state.is_quorum(&self.state.heard())
    }

    /// Returns whether the proposed view contains a member that should now be removed.
    fn is_late(&self, view: &View) -> bool {
        let members = view.members.iter().map(|member| member.id);
        let kept: BTreeSet<MemberId> = members.collect();
        self.may_propose() && self.lost().iter().any(|id| kept.contains(id))
    }

    /// Returns the view to propose, if any. Removals come first. Leaves are included only at a commit or
    /// together with removals, newcomers only at a commit. If all members ask to repeat a step and there is no
    /// other change, the view has the same members.
    fn wanted(&self, at_commit: bool) -> Option<View> {
        let view = self.view()?;
        let mut remove = self.lost();
        if at_commit || !remove.is_empty() {
            remove.extend(self.state.leaving.iter().filter(|id| view.has(id)));
        }
        if remove.len() == view.members.len() {
            // This member leaves last.
            remove.remove(&self.state.me.id);
        }
        if !remove.is_empty() {
            return view.without(&remove, self.state.start);
        }
        let ready: Vec<Member> = self.state.ready.values().copied().collect();
        let grown = at_commit.then(|| view.with(&ready, self.state.start)).flatten();
        grown.or_else(|| self.state.all_ask_to_repeat().then(|| view.again(self.state.start)).flatten())
    }

    /// Returns the members that are considered lost, and those whose machine asks to join as a newcomer.
    fn gone(&self) -> BTreeSet<MemberId> {
        let replaced = self.state.ready.keys().filter(|id| self.view().is_some_and(|view| view.has(id)));
        self.state.silent.iter().chain(replaced).copied().collect()
    }

    /// Returns the members to remove: lost ones, and those that [`cover`] selects because pairs do not hear
    /// each other.
    fn lost(&self) -> BTreeSet<MemberId> {
        let gone = self.gone();
        let Some(view) = self.view() else { return gone };
        let is_here = |id: &MemberId| view.has(id) && !gone.contains(id);
        let mut broken = BTreeSet::new();
        for (from, suspicion) in self.state.suspicions.iter().filter(|(from, _)| is_here(from)) {
            for (id, since) in suspicion.silent(self.now, &self.state.settings) {
                if id != from && is_here(id) && self.now >= since.saturating_add(self.state.settings.grace) {
                    broken.insert((*from.min(id), *from.max(id)));
                }
            }
        }
        &gone | &cover(view, broken, &self.state.me.id)
    }

    /// Returns when the next suspicion becomes older than the grace period.
    pub(super) fn next_grace(&self) -> Option<Nanos> {
        let settings = &self.state.settings;
        let said = self.state.suspicions.values().flat_map(|said| said.silent(self.now, settings));
        let due = said.map(|(_, since)| since.saturating_add(settings.grace));
        due.filter(|&at| at > self.now).min()
    }

    /// Begins a new ballot.
    fn begin(&mut self, at_commit: bool, retry: Retry) {
        let me = self.state.me.id;
        let Some(kept) = self.state.durable.as_mut() else { return };
        let promised = kept.promised.map_or(0, |ballot| ballot.number);
        let number = self.state.highest.max(promised).saturating_add(1);
        let ballot = Ballot { number, proposer: me };
        // The proposer's own promise is written before requests are sent, so that it uses no ballot twice after
        // a restart.
        if matches!(kept.promise(ballot), Vote::No { .. }) {
            return;
        }
        let promises = BTreeMap::from([(me, kept.accepted.clone())]);
        self.keep_if(true, ballot);
        let retry = retry.again(self.now, &self.state.settings);
        let proposal = Proposal { ballot, at_commit, phase: Phase::Preparing { promises }, retry };
        self.ask(&proposal);
        self.state.proposal = Some(proposal);
        self.count_promises(true);
    }

    /// Sends the request of the proposal's phase to all members that have not answered.
    fn ask(&mut self, proposal: &Proposal) {
        let Some(at) = self.view_id() else { return };
        let ballot = proposal.ballot;
        let message = match &proposal.phase {
            Phase::Waiting => return,
            Phase::Preparing { .. } => Message::Prepare { at, ballot },
            Phase::Accepting { view, .. } => Message::Accept { at, ballot, view: view.clone() },
        };
        for id in self.state.others() {
            if !proposal.phase.has_answered(&id) {
                self.send(id, message.clone());
            }
        }
    }

    /// Records a promise.
    pub(super) fn promised(&mut self, from: MemberId, ballot: Ballot, accepted: Option<Accepted>) {
        if let (Some(accepted), Some(view)) = (&accepted, self.view())
            && let Err(fault) = accepted.view.follows(view)
        {
            self.actions.push(Action::Fault { peer: from, fault });
            return;
        }
        if let Some(Proposal { ballot: mine, phase: Phase::Preparing { promises }, .. }) =
            &mut self.state.proposal
            && *mine == ballot
        {
            promises.insert(from, accepted);
            self.count_promises(true);
        }
    }

    /// Requests votes if a quorum has promised.
    ///
    /// If the promises name a view that contains lost members, it must be proposed again only if it may have
    /// been decided. The answers of the other heard members can rule that out, so with `waits` the proposer
    /// waits for them. It does so until it next sends its requests again.
    fn count_promises(&mut self, waits: bool) {
        let me = self.state.me.id;
        let Some(mut proposal) = self.state.proposal.take() else { return };
        let Phase::Preparing { promises } = &proposal.phase else {
            self.state.proposal = Some(proposal);
            return;
        };
        let found = self.may_be_decided(promises);
        let more = self.state.heard().iter().any(|id| !promises.contains_key(id));
        let is_early = waits && more && found.is_some_and(|view| self.is_late(view));
        if is_early || !self.state.is_quorum(&promises.keys().copied().collect()) {
            self.state.proposal = Some(proposal);
            return;
        }
        let found = found.cloned();
        let own = found.is_none();
        // If there is nothing to propose, the proposal is dropped.
        let Some(view) = found.or_else(|| self.wanted(proposal.at_commit)) else { return };
        if own && !self.can_go_on(&view, promises) {
            self.state.proposal = Some(proposal);
            return;
        }
        let ballot = proposal.ballot;
        match self.state.durable.as_mut().map(|kept| kept.accept(ballot, &view)) {
            Some(Vote::Yes { changed }) => {
                self.keep_if(changed, ballot);
                proposal.phase = Phase::Accepting { view, own, votes: BTreeSet::from([me]) };
                proposal.retry = Retry::due(self.now).again(self.now, &self.state.settings);
                self.ask(&proposal);
                self.state.proposal = Some(proposal);
                self.count_votes();
            }
            Some(Vote::No { promised }) => {
                self.state.proposal = Some(proposal);
                self.refused(ballot, promised);
            }
            None => {}
        }
    }

    /// Returns whether the members that have promised and the newcomers that are ready are a majority of the
    /// proposed view. If not, the view could remove members that are alive and depend on members that are not.
    fn can_go_on(&self, view: &View, promises: &BTreeMap<MemberId, Option<Accepted>>) -> bool {
        let is_there = |id: &MemberId| promises.contains_key(id) || self.state.ready.contains_key(id);
        let mut there = view.ids();
        there.retain(is_there);
        view.has_majority(&there)
    }

    /// Returns the view that may have been decided: the one with the newest vote.
    ///
    /// `None` if the members that reported a vote and those that have not answered are not a majority. A member
    /// that promised without a vote has not voted in this epoch, so no view can have been decided.
    fn may_be_decided<'a>(&self, promises: &'a BTreeMap<MemberId, Option<Accepted>>) -> Option<&'a View> {
        #[cfg(test)]
        if self.state.ignores_votes {
            return None;
        }
        let mut voters = self.view().map(View::ids).unwrap_or_default();
        voters.retain(|id| !matches!(promises.get(id), Some(None)));
        if self.state.is_quorum(&voters) { newest(promises) } else { None }
    }

    /// Records a vote.
    pub(super) fn accepted(&mut self, from: MemberId, ballot: Ballot) {
        if let Some(Proposal { ballot: mine, phase: Phase::Accepting { votes, .. }, .. }) =
            &mut self.state.proposal
            && *mine == ballot
        {
            votes.insert(from);
            self.count_votes();
        }
    }

    /// Decides the view if a quorum has voted.
    fn count_votes(&mut self) {
        if let Some(Proposal { phase: Phase::Accepting { view, votes, .. }, .. }) = &self.state.proposal
            && self.state.is_quorum(votes)
        {
            let view = view.clone();
            self.decide(view);
        }
    }

    /// Handles a rejection because of a higher ballot: the proposal waits, longer each time. The wait also
    /// depends on the member's position in the view, so that two proposers do not retry at the same time.
    pub(super) fn refused(&mut self, ballot: Ballot, promised: Ballot) {
        self.state.highest = self.state.highest.max(promised.number);
        let (settings, me) = (self.state.settings, self.state.me.id);
        let position = self.view().and_then(|view| view.members.iter().position(|m| m.id == me)).unwrap_or(0);
        if let Some(proposal) = &mut self.state.proposal
            && proposal.ballot == ballot
            && proposal.phase != Phase::Waiting
        {
            proposal.phase = Phase::Waiting;
            let turn = Nanos(settings.resend.0.saturating_mul(position as u64));
            proposal.retry = proposal.retry.later(self.now, turn, &settings);
        }
    }
}
