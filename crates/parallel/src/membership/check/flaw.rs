//! Rules that members break on purpose, so that a test can see that breaking them is found.

#[cfg(test)]
use super::super::State;

/// A rule that members break on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flaw {
    /// What a member has promised and voted for is gone when it restarts.
    ForgetsVotes,
    /// One vote decides.
    #[cfg(test)]
    OneVoteDecides,
    /// A proposer does not look for votes of earlier proposers.
    #[cfg(test)]
    ProposesAnew,
}

#[cfg(test)]
impl Flaw {
    /// A state that follows the rules but for one.
    pub(super) const fn put_into(flaw: Option<Self>, mut state: State) -> State {
        state.one_vote_is_a_majority = matches!(flaw, Some(Self::OneVoteDecides));
        state.ignores_votes = matches!(flaw, Some(Self::ProposesAnew));
        state
    }
}
