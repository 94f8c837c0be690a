//! Checks of members without a part. No step depends on such a member, so its loss would not be noticed: the
//! member at rank 0 pings them from time to time.

use farflung_base::{Nanos, PeerId, Pending};
use farflung_comm::CommError;
use farflung_parallel::membership::MemberId;

use super::place::Place;
use super::team::Team;

/// Time between two rounds of pings, in units of [`Place::roll_call`].
const EVERY: u64 = 6;
/// Time after which a member without an answer is silent, in units of [`Place::roll_call`].
const SILENCE: u64 = 2;

/// The current round of pings, and the result of the rounds before.
#[derive(Default)]
pub(super) struct Idle {
    pending: Option<PendingPings>,
    silent: Vec<MemberId>,
}

struct PendingPings {
    at: Nanos,
    whom: Vec<(PeerId, MemberId)>,
    /// Pings being sent.
    _sending: Vec<Pending<Result<(), CommError>>>,
}

impl Idle {
    /// Starts anew after a change of members.
    pub(super) fn begin_anew(&mut self) {
        *self = Self::default();
    }

    /// Returns the members without a part that have not answered. Only rank 0 of the team pings; other ranks
    /// return an empty list. Called between two steps.
    pub(super) fn check(&mut self, place: &mut Place, team: Option<&Team>) -> &[MemberId] {
        let Some(team) = team.filter(|team| team.leads()) else { return &[] };
        let (now, roll_call) = (place.transport().now(), place.roll_call());
        let after = |at: Nanos, calls: u64| at.saturating_add(Nanos(roll_call.0.saturating_mul(calls)));
        if let Some(asked) = &self.pending
            && now >= after(asked.at, SILENCE)
        {
            let quiet = |id: &MemberId| !place.membership().has_heard(id, asked.at);
            self.silent = asked.whom.iter().map(|(_, id)| *id).filter(quiet).collect();
        }
        if self.pending.as_ref().is_none_or(|asked| now >= after(asked.at, EVERY)) {
            let working = team.working();
            let mut whom = place.others();
            whom.retain(|(_, id)| !working.contains(id));
            let sending = place.ping(&whom);
            self.pending = Some(PendingPings { at: now, whom, _sending: sending });
        }
        &self.silent
    }
}
