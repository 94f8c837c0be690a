//! Members without a part are missed by no step: whoever works at rank 0 asks them from time to time whether
//! they are there.

use farflung_base::{Nanos, PeerId, Pending};
use farflung_comm::CommError;
use farflung_parallel::membership::MemberId;

use super::place::Place;
use super::team::Team;

/// Roll calls between two questions.
const EVERY: u64 = 6;
/// Roll calls that one of them may leave unanswered.
const SILENCE: u64 = 2;

/// A question that is under way, and what came of those before.
#[derive(Default)]
pub(super) struct Idle {
    asked: Option<Asked>,
    silent: Vec<MemberId>,
}

struct Asked {
    at: Nanos,
    whom: Vec<(PeerId, MemberId)>,
    /// What is being sent to those.
    _sending: Vec<Pending<Result<(), CommError>>>,
}

impl Idle {
    /// Members have changed.
    pub(super) fn begin_anew(&mut self) {
        *self = Self::default();
    }

    /// Those that have not answered, as rank 0 of the team knows by now. To be asked between two steps.
    pub(super) fn look(&mut self, place: &mut Place, team: Option<&Team>) -> &[MemberId] {
        let Some(team) = team.filter(|team| team.leads()) else { return &[] };
        let (now, roll_call) = (place.transport().now(), place.roll_call());
        let after = |at: Nanos, calls: u64| at.saturating_add(Nanos(roll_call.0.saturating_mul(calls)));
        if let Some(asked) = &self.asked
            && now >= after(asked.at, SILENCE)
        {
            let quiet = |id: &MemberId| !place.keeper().has_heard(id, asked.at);
            self.silent = asked.whom.iter().map(|(_, id)| *id).filter(quiet).collect();
        }
        if self.asked.as_ref().is_none_or(|asked| now >= after(asked.at, EVERY)) {
            let working = team.working();
            let mut whom = place.others();
            whom.retain(|(_, id)| !working.contains(id));
            let sending = place.ping(&whom);
            self.asked = Some(Asked { at: now, whom, _sending: sending });
        }
        &self.silent
    }
}
