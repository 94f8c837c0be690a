//! The limit on the time for which all members wait for one newcomer (`--join-wait`). A newcomer whose state
//! would take longer is refused before it is admitted. If the state takes longer than was predicted, if the
//! newcomer falls silent, or if a member is asked to stop meanwhile, the members continue without the
//! newcomer.

use farflung_base::{Nanos, PeerId};
use farflung_comm::Communicator;
use farflung_parallel::membership::MemberId;

use super::arrivals::Newcomer;
use super::change::Member;
use super::fetch::Sending;
use super::membership_service::MembershipService;
use super::place::Place;
use super::ready::Cost;
use super::too_long::{Refusal, TooLong, is_fresh};
use super::watchdog::{ChangeLimit, StepStart};
use crate::Error;
use crate::train::job::Job;
use crate::train::trainer::StateBytes;

impl Place {
    /// Returns whether a newcomer that is ready must be refused, because the members would wait longer than
    /// `limit` for its state. Tells it so. `sizes` are those of a member's state after `step` steps.
    pub(super) fn refuses(
        &mut self,
        newcomer: &Newcomer,
        (working, sizes, step): (&[MemberId], StateBytes, u64),
        limit: Nanos,
    ) -> bool {
        let sizes: Vec<(MemberId, StateBytes)> = working.iter().map(|&id| (id, sizes)).collect();
        let cost = self.membership().ready(&newcomer.id).map(|ready| Cost::new(ready, &sizes, step));
        let Some(why) = cost.and_then(|cost| too_long(&cost, limit)) else { return false };
        self.refuse(newcomer.peer, newcomer.id, why);
        true
    }

    /// Refuses a newcomer, and tells it why.
    fn refuse(&mut self, peer: PeerId, id: MemberId, why: TooLong) {
        let telling = self.tell_others(&[(peer, id)], &MembershipService::refusing(why));
        self.refused.note(id, Refusal { peer, why }, telling);
    }

    /// Returns the members that have joined with the view in force, unless this member is one of them.
    fn fresh(&self) -> Vec<(PeerId, MemberId)> {
        let Some(view) = self.view().filter(|view| !is_fresh(view, &self.own_id())) else {
            return Vec::new();
        };
        let fresh = view.members.iter().filter(|member| is_fresh(view, &member.id));
        fresh.map(|member| (PeerId(member.slot), member.id)).collect()
    }

    /// Tells the other members that the view's newcomers among `silent` are given up, so that all members
    /// continue without them.
    pub(super) fn give_up_newcomers(&mut self, silent: &[MemberId]) -> Vec<Sending> {
        let fresh: Vec<MemberId> =
            self.fresh().into_iter().map(|(_, id)| id).filter(|id| silent.contains(id)).collect();
        let Some(epoch) = self.view().map(|view| view.epoch).filter(|_| !fresh.is_empty()) else {
            return Vec::new();
        };
        self.renew();
        self.tell_others(&self.others(), &MembershipService::gives_up_newcomers(epoch, &fresh))
    }
}

/// Returns whether members would wait for the state of a newcomer longer than `limit`. A time that is not known
/// is not too long.
pub(super) fn too_long(cost: &Cost, limit: Nanos) -> Option<TooLong> {
    let takes = cost.predicted.filter(|&takes| takes > limit)?;
    Some(TooLong { state: cost.state, takes, limit })
}

impl Member<'_> {
    /// Watches a change to a view with newcomers. A newcomer tells the others again and again that it is
    /// there: their own pings may wait behind its state on a slow link. On a member that was there before, the
    /// change is cancelled if a newcomer falls silent, if this member is asked to stop, or after the time for
    /// which members wait for a newcomer. `None` if there is nothing to watch.
    pub(super) fn watch_newcomers(&mut self, job: &Job, comm: &Communicator) -> Option<StepStart> {
        self.watchdog.as_ref()?;
        let own = self.place.own_id();
        if self.place.view().is_some_and(|view| is_fresh(view, &own)) {
            self.place.renew();
            let caller = self.place.pinger(&self.place.others());
            let stopped = self.publisher.stopped_step(self.place);
            return Some(self.watchdog.as_mut()?.begin_beats(comm, caller, stopped));
        }
        let fresh = self.place.fresh();
        if fresh.is_empty() {
            return None;
        }
        self.place.renew();
        let until = comm.now().saturating_add(self.join_wait);
        let newcomers = fresh.iter().map(|(_, id)| *id).collect();
        let limit = ChangeLimit { newcomers, until, stop: job.stop.clone() };
        let (caller, roll_call) = (self.place.pinger(&fresh), self.place.roll_call());
        let stopped = self.publisher.stopped_step(self.place);
        let watchdog = self.watchdog.as_mut()?;
        Some(watchdog.begin_change(comm, caller, (roll_call, stopped), limit))
    }

    /// Replaces the error of a newcomer that was removed by the reason for which the members have refused it:
    /// it was admitted, and then took too long.
    pub(super) fn refused_first(&self, error: Error) -> Error {
        let too_long = self.place.membership().too_long();
        match too_long.filter(|_| matches!(error, Error::Removed { .. })) {
            Some(why) => Error::JoinRefused(why.to_string()),
            None => error,
        }
    }

    /// Ends the watch of a change. After a failure, refuses newcomers that have taken too long. Returns the
    /// members that are given up.
    pub(super) fn end_watch(&mut self, begun: Option<StepStart>, state: u64) -> Vec<MemberId> {
        let (Some(begun), Some(watchdog)) = (begun, &mut self.watchdog) else { return Vec::new() };
        let now = self.place.transport().now();
        let (takes, limit) = (now.saturating_sub(begun.at()), self.join_wait);
        watchdog.end(begun, false);
        let silent = watchdog.given_up();
        if takes >= limit {
            for (peer, id) in self.place.fresh().into_iter().filter(|(_, id)| silent.contains(id)) {
                self.place.refuse(peer, id, TooLong { state, takes, limit });
            }
        }
        silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_above_the_limit_is_too_long_and_one_that_is_not_known_is_not() {
        let cost = |predicted| Cost { state: 1_450_000, predicted, at_most: false, replays: None };
        let limit = Nanos::from_millis(60_000);
        let too = |millis: u64| too_long(&cost(Some(Nanos::from_millis(millis))), limit);
        assert_eq!((too(60_000), too_long(&cost(None), limit)), (None, None));
        let text = too(174_700).unwrap().to_string();
        assert!(text.contains("174.7") && text.contains("--join-wait 60s"), "{text}");
    }
}
