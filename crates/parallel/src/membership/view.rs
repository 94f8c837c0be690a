//! Views: the members of a run in one epoch, and the rules by which one view may follow another.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Member, MemberId};
use crate::plan::Digest;

/// The members of a run during one epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Number of the view in the run; the first view has 1.
    pub epoch: u64,
    /// Number of the incarnation: it grows each time a host restarts the run from a checkpoint.
    pub incarnation: u64,
    /// The members, sorted by the epoch in which they joined, then by id.
    pub members: Vec<Member>,
    /// Digest of the previous view; zeros for the first.
    pub parent: Digest,
    /// Digest of the weights at the start of the view, as its proposer had them: after a loss, others may be a
    /// step ahead. A proposer that holds a part of the model has the digest of that part.
    pub weights: Digest,
    /// Digest of the plan that the proposer had before the view. The members make the view's own plan together
    /// once they are in it.
    pub plan: Digest,
    /// Id of the member whose vote counts one and a half.
    pub tie_breaker: MemberId,
}

/// Identifies a view within its run. A later view has a greater `ViewId`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ViewId {
    /// The view's [`View::incarnation`].
    pub incarnation: u64,
    /// The view's [`View::epoch`].
    pub epoch: u64,
}

impl fmt::Display for ViewId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {} of incarnation {}", self.epoch, self.incarnation)
    }
}

/// The digests that a view contains: of the weights and of the plan at its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Digest of the weights.
    pub weights: Digest,
    /// Digest of the plan.
    pub plan: Digest,
}

/// Reason why a view is not valid or does not follow another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewFault {
    /// The view has no members.
    #[error("the view has no members")]
    Empty,
    /// This member is missing from the view.
    #[error("{0} is not in the view")]
    NotIn(MemberId),
    /// A different view of an epoch that is already decided. This violates the guarantee of one view per epoch:
    /// a member has lost its votes.
    #[error("a different view of {0} was decided before")]
    Another(ViewId),
    /// The view has too many members.
    #[error("the view has {0} members, at most {most} are allowed", most = View::MOST_MEMBERS)]
    TooLarge(usize),
    /// The members are not sorted, or this member is listed twice.
    #[error("the members of the view are not sorted by (joined, id), or {0} is listed twice")]
    Unsorted(MemberId),
    /// Two members have this slot.
    #[error("two members of the view have slot {0}")]
    SlotTwice(u32),
    /// This member joined in an epoch after the view's.
    #[error("{0} joined in an epoch after the view's")]
    JoinedLater(MemberId),
    /// This newcomer joined in an epoch before the view's.
    #[error("{0} is new in the view, but joined in an epoch before the view's")]
    JoinedEarlier(MemberId),
    /// The tie-breaker is not a member, or not the one that the rules determine.
    #[error("the tie-breaker {0} is not the member that the rules determine")]
    TieBreaker(MemberId),
    /// The view is not of the next epoch of the same incarnation.
    #[error("{found} does not follow {old}")]
    NotNext {
        /// Epoch and incarnation of the previous view.
        old: ViewId,
        /// Epoch and incarnation of the invalid view.
        found: ViewId,
    },
    /// The view has another parent.
    #[error("the parent of the view is {found}, expected {expected}")]
    Parent {
        /// Digest of the previous view.
        expected: Digest,
        /// Parent digest in the view.
        found: Digest,
    },
    /// The view both removes this member and admits newcomers.
    #[error("the view removes {0} and also admits newcomers")]
    RemovesAndAdmits(MemberId),
    /// The view admits more newcomers than the previous view had members.
    #[error("the view admits {newcomers} newcomers, more than the {members} members of the previous view")]
    TooManyNewcomers {
        /// Number of newcomers.
        newcomers: usize,
        /// Number of members of the previous view.
        members: usize,
    },
}

impl View {
    /// Maximum number of members of a view.
    pub const MOST_MEMBERS: usize = 2048;

    /// Creates the first view of a run or of an incarnation. The tie-breaker is the first member by id.
    ///
    /// The epoch in `place` is 1 for a new run. For a run that continues from a checkpoint, it is the epoch
    /// after the newest one that the checkpoint names.
    ///
    /// Errors: as [`View::check`].
    pub fn first(place: ViewId, members: &[Member], start: Start) -> Result<Self, ViewFault> {
        let mut members: Vec<Member> =
            members.iter().map(|&member| Member { joined: place.epoch, ..member }).collect();
        members.sort_by_key(order);
        let view = Self {
            epoch: place.epoch,
            incarnation: place.incarnation,
            tie_breaker: members.first().ok_or(ViewFault::Empty)?.id,
            members,
            parent: Digest::new([0; 32]),
            weights: start.weights,
            plan: start.plan,
        };
        view.check()?;
        Ok(view)
    }

    /// Returns the view's epoch and incarnation.
    #[must_use]
    pub const fn id(&self) -> ViewId {
        ViewId { incarnation: self.incarnation, epoch: self.epoch }
    }

    /// Returns the member with this id.
    #[must_use]
    pub fn member(&self, id: &MemberId) -> Option<&Member> {
        self.members.iter().find(|member| member.id == *id)
    }

    /// Returns whether the view has a member with this id.
    #[must_use]
    pub fn has(&self, id: &MemberId) -> bool {
        self.member(id).is_some()
    }

    /// Returns the ids of all members.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<MemberId> {
        self.members.iter().map(|member| member.id).collect()
    }

    /// Returns the blake3 hash of the view's fields, with integers in little endian. Equal views have equal
    /// digests.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hash = blake3::Hasher::new();
        hash.update(b"farflung view 1\n");
        hash.update(&self.epoch.to_le_bytes());
        hash.update(&self.incarnation.to_le_bytes());
        hash.update(self.parent.bytes());
        hash.update(self.weights.bytes());
        hash.update(self.plan.bytes());
        hash.update(&self.tie_breaker.0);
        hash.update(&(self.members.len() as u64).to_le_bytes());
        for member in &self.members {
            hash.update(&member.id.0);
            hash.update(&member.slot.to_le_bytes());
            hash.update(&member.joined.to_le_bytes());
        }
        Digest::new(*hash.finalize().as_bytes())
    }

    /// Returns whether these members are a majority: whether they have more than half of all votes, where the
    /// tie-breaker's vote counts one and a half and every other vote one.
    ///
    /// Any two majorities share a member. Ids that are not in the view do not count.
    #[must_use]
    pub fn has_majority(&self, voters: &BTreeSet<MemberId>) -> bool {
        let halves: usize = voters.iter().map(|id| self.half_votes(id)).sum();
        2 * halves > 2 * self.members.len() + 1
    }

    /// Returns twice the weight of a member's vote, which is an integer.
    fn half_votes(&self, id: &MemberId) -> usize {
        match self.has(id) {
            true if *id == self.tie_breaker => 3,
            true => 2,
            false => 0,
        }
    }

    /// Returns the coordinator, the member that proposes the next view: the first in the view's order that is
    /// not in `silent`.
    #[must_use]
    pub fn coordinator(&self, silent: &BTreeSet<MemberId>) -> Option<&MemberId> {
        self.members.iter().map(|member| &member.id).find(|id| !silent.contains(id))
    }

    /// Returns the next view without these members. `None` if no member would remain, or if none of them is in
    /// the view.
    #[must_use]
    pub fn without(&self, lost: &BTreeSet<MemberId>, start: Start) -> Option<Self> {
        let left: Vec<Member> = self.members.iter().filter(|m| !lost.contains(&m.id)).copied().collect();
        (left.len() < self.members.len()).then(|| self.next(left, start)).flatten()
    }

    /// Returns the next view with these newcomers added. `None` if none of them can be added.
    ///
    /// Admits at most as many newcomers as there are members, first by id. The old members alone then have a
    /// majority of the new view, so newcomers that fail cannot stop the run. The other newcomers must wait for
    /// a later view.
    #[must_use]
    pub fn with(&self, newcomers: &[Member], start: Start) -> Option<Self> {
        let mut slots: BTreeSet<u32> = self.members.iter().map(|member| member.slot).collect();
        let mut ids = self.ids();
        let mut new: Vec<Member> = newcomers
            .iter()
            .filter(|member| {
                !slots.contains(&member.slot) && ids.insert(member.id) && slots.insert(member.slot)
            })
            .map(|&member| Member { joined: self.epoch + 1, ..member })
            .collect();
        new.sort_by_key(order);
        let places = self.members.len().min(Self::MOST_MEMBERS.saturating_sub(self.members.len()));
        let members: Vec<Member> = self.members.iter().copied().chain(new.into_iter().take(places)).collect();
        (members.len() > self.members.len()).then(|| self.next(members, start)).flatten()
    }

    /// Returns the next view with the same members, under which a failed step is repeated. `None` if the view
    /// has no members.
    #[must_use]
    pub fn again(&self, start: Start) -> Option<Self> {
        self.next(self.members.clone(), start)
    }

    /// Returns the next epoch's view with these members, which must be sorted.
    fn next(&self, members: Vec<Member>, start: Start) -> Option<Self> {
        let tie_breaker = self.next_tie_breaker(&members)?;
        Some(Self {
            epoch: self.epoch + 1,
            incarnation: self.incarnation,
            members,
            parent: self.digest(),
            weights: start.weights,
            plan: start.plan,
            tie_breaker,
        })
    }

    /// Returns the tie-breaker of the next view: the same one if it is still a member, otherwise the first
    /// member.
    fn next_tie_breaker(&self, members: &[Member]) -> Option<MemberId> {
        let stays = members.iter().any(|member| member.id == self.tie_breaker);
        if stays { Some(self.tie_breaker) } else { members.first().map(|member| member.id) }
    }

    /// Checks the view by itself: 1 to [`View::MOST_MEMBERS`] members, sorted and distinct, with distinct
    /// slots, none of which joined in a later epoch; the tie-breaker among the members.
    ///
    /// Errors: the rule that is broken.
    pub fn check(&self) -> Result<(), ViewFault> {
        if self.members.is_empty() {
            return Err(ViewFault::Empty);
        }
        if self.members.len() > Self::MOST_MEMBERS {
            return Err(ViewFault::TooLarge(self.members.len()));
        }
        let (mut ids, mut slots) = (BTreeSet::new(), BTreeSet::new());
        for member in &self.members {
            if !ids.insert(member.id) {
                return Err(ViewFault::Unsorted(member.id));
            }
            if !slots.insert(member.slot) {
                return Err(ViewFault::SlotTwice(member.slot));
            }
            if member.joined > self.epoch {
                return Err(ViewFault::JoinedLater(member.id));
            }
        }
        if let Some(pair) = self.members.windows(2).find(|pair| order(&pair[0]) >= order(&pair[1])) {
            return Err(ViewFault::Unsorted(pair[1].id));
        }
        if ids.contains(&self.tie_breaker) { Ok(()) } else { Err(ViewFault::TieBreaker(self.tie_breaker)) }
    }

    /// Checks that the view may follow `old`: it is of the next epoch, and it either removes members, admits
    /// newcomers, or keeps the same members.
    ///
    /// Errors: the rule that is broken.
    pub fn follows(&self, old: &Self) -> Result<(), ViewFault> {
        self.check()?;
        if self.incarnation != old.incarnation || old.epoch.checked_add(1) != Some(self.epoch) {
            return Err(ViewFault::NotNext { old: old.id(), found: self.id() });
        }
        let expected = old.digest();
        if self.parent != expected {
            return Err(ViewFault::Parent { expected, found: self.parent });
        }
        let newcomers = self.members.iter().filter(|member| !old.members.contains(member));
        let newcomers: Vec<&Member> = newcomers.collect();
        let removed = old.members.iter().find(|member| !self.members.contains(member));
        match (removed, newcomers.len()) {
            (Some(removed), 1..) => return Err(ViewFault::RemovesAndAdmits(removed.id)),
            (None, newcomers) if newcomers > old.members.len() => {
                return Err(ViewFault::TooManyNewcomers { newcomers, members: old.members.len() });
            }
            _ => {}
        }
        if let Some(early) = newcomers.iter().find(|member| member.joined != self.epoch) {
            return Err(ViewFault::JoinedEarlier(early.id));
        }
        if old.next_tie_breaker(&self.members) == Some(self.tie_breaker) {
            Ok(())
        } else {
            Err(ViewFault::TieBreaker(self.tie_breaker))
        }
    }
}

/// Sort key of the members of a view.
const fn order(member: &Member) -> (u64, MemberId) {
    (member.joined, member.id)
}
