//! Paxos acceptor: answers to proposers.

use super::super::acceptor::Vote;
use super::super::{Action, Ballot, MemberId, Message, View};
use super::Step;

impl Step<'_> {
    /// Answers a request for a promise.
    pub(super) fn prepare(&mut self, from: MemberId, ballot: Ballot) {
        let (Some(at), true) = (self.view_id(), ballot.proposer == from) else { return };
        let Some(kept) = self.durable() else { return };
        match kept.promise(ballot) {
            Vote::Yes { changed } => {
                let accepted = kept.accepted.clone();
                self.keep_if(changed, ballot);
                self.send(from, Message::Promised { at, ballot, accepted });
            }
            Vote::No { promised } => self.send(from, Message::Refused { at, ballot, promised }),
        }
    }

    /// Answers a request for a vote.
    pub(super) fn accept(&mut self, from: MemberId, ballot: Ballot, view: &View) {
        let (Some(at), true) = (self.view_id(), ballot.proposer == from) else { return };
        let Some(kept) = self.durable() else { return };
        if let Err(fault) = view.follows(&kept.view) {
            self.actions.push(Action::Fault { peer: from, fault });
            return;
        }
        match kept.accept(ballot, view) {
            Vote::Yes { changed } => {
                self.keep_if(changed, ballot);
                self.send(from, Message::Accepted { at, ballot });
            }
            Vote::No { promised } => self.send(from, Message::Refused { at, ballot, promised }),
        }
    }

    /// Notes the ballot's number, and requests a write if `DurableState` has changed.
    pub(super) fn keep_if(&mut self, changed: bool, ballot: Ballot) {
        self.state.highest = self.state.highest.max(ballot.number);
        if changed {
            self.persist();
        }
    }
}
