//! A view: the members of a run in one epoch, and the rules by which one follows another.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Member, MemberId};
use crate::plan::Digest;

/// The members of a run from one epoch to the next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Which view of the run it is: the first has 1.
    pub epoch: u64,
    /// How often a host has started the run again from a checkpoint.
    pub incarnation: u64,
    /// The members, by the epoch in which they joined, then by id.
    pub members: Vec<Member>,
    /// The digest of the view before; zeros for the first.
    pub parent: Digest,
    /// The digest of the weights at its start.
    pub weights: Digest,
    /// The digest of the plan at its start.
    pub plan: Digest,
    /// The member that counts one and a half.
    pub tie_breaker: MemberId,
}

/// Which view of which incarnation: later views compare greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    /// As [`View::incarnation`].
    pub incarnation: u64,
    /// As [`View::epoch`].
    pub epoch: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {} of incarnation {}", self.epoch, self.incarnation)
    }
}

/// What a view says about the run at its start, besides its members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The digest of the weights.
    pub weights: Digest,
    /// The digest of the plan.
    pub plan: Digest,
}

/// Why a view is not valid, or does not follow another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewFault {
    /// No members.
    #[error("a view without members")]
    Empty,
    /// A member is missing that should be in it.
    #[error("{0} is not in the view, or has another slot")]
    NotIn(MemberId),
    /// Another view of an epoch that is decided. This breaks the promise that there is one: a member has lost
    /// its votes.
    #[error("another view of {0}")]
    Another(Place),
    /// Too many members.
    #[error("a view of {0} members: at most {most}", most = View::MOST_MEMBERS)]
    TooLarge(usize),
    /// Members are not in order, or one is there twice.
    #[error("members of a view are not sorted by (joined, id), or {0} is there twice")]
    Unsorted(MemberId),
    /// A slot is there twice.
    #[error("two members of a view have slot {0}")]
    SlotTwice(u32),
    /// A member joins in an epoch after the view's.
    #[error("{0} joined after its view's epoch")]
    JoinedLater(MemberId),
    /// The tie-breaker is not a member, or is not the one that follows by the rule.
    #[error("the tie-breaker {0} is not the one that the rule gives")]
    TieBreaker(MemberId),
    /// Not the next epoch of the same incarnation.
    #[error("{found} does not follow {old}")]
    Place {
        /// The view before.
        old: Place,
        /// The view that is wrong.
        found: Place,
    },
    /// Another parent.
    #[error("a view whose parent is {found}, expected {expected}")]
    Parent {
        /// The digest of the old view.
        expected: Digest,
        /// The parent that the view names.
        found: Digest,
    },
    /// Members leave and others come.
    #[error("a view that removes {0} and admits newcomers")]
    RemovesAndAdmits(MemberId),
    /// More newcomers than members.
    #[error("a view that admits {newcomers} newcomers to {members} members")]
    TooManyNewcomers {
        /// Members that are new.
        newcomers: usize,
        /// Members of the old view.
        members: usize,
    },
}

impl View {
    /// The most members of a view.
    pub const MOST_MEMBERS: usize = 2048;

    /// The first view of a run, or of an incarnation of it. The tie-breaker is the first member by id.
    ///
    /// `epoch` is 1, or for a run that goes on from a checkpoint the epoch after the newest one it knows.
    ///
    /// Errors: as [`View::check`].
    pub fn first(place: Place, members: &[Member], start: Start) -> Result<Self, ViewFault> {
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

    /// Where it stands among the views of its run.
    #[must_use]
    pub const fn place(&self) -> Place {
        Place { incarnation: self.incarnation, epoch: self.epoch }
    }

    /// The member of that name.
    #[must_use]
    pub fn member(&self, id: &MemberId) -> Option<&Member> {
        self.members.iter().find(|member| member.id == *id)
    }

    /// Whether it is a member.
    #[must_use]
    pub fn has(&self, id: &MemberId) -> bool {
        self.member(id).is_some()
    }

    /// The names of all members.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<MemberId> {
        self.members.iter().map(|member| member.id).collect()
    }

    /// The blake3 hash of the view's fields, integers little endian: equal views have equal digests.
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

    /// Whether these members are more than half of the view, where the tie-breaker counts one and a half.
    ///
    /// Two sets that both are share a member. Names of strangers do not count.
    #[must_use]
    pub fn has_majority(&self, voters: &BTreeSet<MemberId>) -> bool {
        let halves: usize = voters.iter().map(|id| self.half_votes(id)).sum();
        2 * halves > 2 * self.members.len() + 1
    }

    /// Twice what a member counts: an integer.
    fn half_votes(&self, id: &MemberId) -> usize {
        match self.has(id) {
            true if *id == self.tie_breaker => 3,
            true => 2,
            false => 0,
        }
    }

    /// The member that proposes: of those not silent the one that joined first, ties by id.
    #[must_use]
    pub fn coordinator(&self, silent: &BTreeSet<MemberId>) -> Option<&MemberId> {
        self.members.iter().map(|member| &member.id).find(|id| !silent.contains(id))
    }

    /// The next view without these members; `None` where nobody would be left, or nobody leaves.
    #[must_use]
    pub fn without(&self, lost: &BTreeSet<MemberId>, start: Start) -> Option<Self> {
        let left: Vec<Member> = self.members.iter().filter(|m| !lost.contains(&m.id)).copied().collect();
        (left.len() < self.members.len()).then(|| self.next(left, start)).flatten()
    }

    /// The next view with these newcomers; `None` where none is new.
    ///
    /// At most as many come in as there are members, first by id: then the old members alone have a majority
    /// of the new view, so that newcomers that die cannot stop the run. The others wait for the view after.
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

    /// The next view with the same members, for a step that is done again. `None` where it has no members.
    #[must_use]
    pub fn again(&self, start: Start) -> Option<Self> {
        self.next(self.members.clone(), start)
    }

    /// The next epoch's view of these members, which are sorted.
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

    /// The tie-breaker stays while it is a member; else the first member takes its place.
    fn next_tie_breaker(&self, members: &[Member]) -> Option<MemberId> {
        let stays = members.iter().any(|member| member.id == self.tie_breaker);
        if stays { Some(self.tie_breaker) } else { members.first().map(|member| member.id) }
    }

    /// Whether it is a view at all: members in order, each once, the tie-breaker among them.
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

    /// Whether it may follow `old`: the next epoch, without some of its members, with newcomers, or with the
    /// same members.
    ///
    /// Errors: the rule that is broken.
    pub fn follows(&self, old: &Self) -> Result<(), ViewFault> {
        self.check()?;
        if self.incarnation != old.incarnation || old.epoch.checked_add(1) != Some(self.epoch) {
            return Err(ViewFault::Place { old: old.place(), found: self.place() });
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
            return Err(ViewFault::Unsorted(early.id));
        }
        if old.next_tie_breaker(&self.members) == Some(self.tie_breaker) {
            Ok(())
        } else {
            Err(ViewFault::TieBreaker(self.tie_breaker))
        }
    }
}

/// What members of a view are sorted by.
const fn order(member: &Member) -> (u64, MemberId) {
    (member.joined, member.id)
}
