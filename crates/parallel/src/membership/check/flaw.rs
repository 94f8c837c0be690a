//! Deliberate violations of the rules, by which tests check that the simulation detects them.

#[cfg(test)]
use super::super::State;

/// A deliberate violation of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flaw {
    /// A member that restarts has lost its promises and votes.
    ForgetsVotes,
    /// One vote decides a view.
    #[cfg(test)]
    OneVoteDecides,
    /// A proposer ignores votes for earlier proposals.
    #[cfg(test)]
    ProposesAnew,
    /// A member ignores newer incarnations of its run: it neither rejects them nor stops.
    #[cfg(test)]
    IgnoresIncarnations,
}

#[cfg(test)]
impl Flaw {
    /// Returns the state with the flaw, if there is one.
    pub(super) const fn put_into(flaw: Option<Self>, mut state: State) -> State {
        state.one_vote_is_a_majority = matches!(flaw, Some(Self::OneVoteDecides));
        state.ignores_votes = matches!(flaw, Some(Self::ProposesAnew));
        state.ignores_incarnations = matches!(flaw, Some(Self::IgnoresIncarnations));
        state
    }
}
