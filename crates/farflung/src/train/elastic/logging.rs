//! What a member does for newcomers between two steps: it offers them its copy of the state, and tells them
//! of each step that it has recorded.

use farflung_base::{Nanos, PeerId};
use farflung_parallel::membership::MemberId;

use super::change::Member;
use super::decide::ReadySpare;
use super::join_limit::too_long;
use super::membership_service::MembershipService;
use super::ready::{Cost, FollowProgress};
use super::state_transfer::chunk_fault;
use super::team::{FuturePlace, FutureRank, Team};
use crate::Result;
use crate::train::job::Job;
use crate::train::trainer::{StateBytes, Trainer};

/// Longest time for which newcomers wait until a further pipeline is formed: half of the time after which they
/// give up if replicas agree at each step.
const MAKE_WAIT: Nanos = Nanos::from_millis(300_000);

impl Member<'_> {
    /// Predicts which part of the model a newcomer would get. All members predict the same.
    ///
    /// Errors: those of the settings from which pools are planned.
    pub(super) fn predict_newcomer(&mut self, job: &Job) -> Result<()> {
        let team = self.team.as_ref();
        self.newcomer_place =
            team.map(|team| team.place_of_newcomer(job, &self.pools)).transpose()?.flatten();
        let growing = team.map_or_else(Vec::new, |team| team.growing(job));
        if growing != self.growing {
            self.grows_since = self.place.transport().now();
        }
        self.growing = growing;
        Ok(())
    }

    /// Returns whether newcomers wait until a further pipeline is formed. They give up after some time, so they
    /// do not wait for spares that take longer.
    pub(super) fn makes_newcomers_wait(&self) -> bool {
        let waits = self.place.transport().now().saturating_sub(self.grows_since);
        !self.growing.is_empty() && waits < MAKE_WAIT
    }

    /// Returns the spares that can form a further pipeline and have told that they are ready.
    pub(super) fn spares(&self) -> Vec<ReadySpare> {
        let Some(team) = &self.team else { return Vec::new() };
        let ready = |&FutureRank { member, .. }: &FutureRank| {
            let id = team.id(member);
            let ready = self.place.spare(&id, team.epoch).filter(|_| self.place.is_fresh(&id))?;
            ready.follows.is_ready().then(|| ReadySpare { peer: team.peer(member), ready })
        };
        self.growing.iter().filter_map(ready).collect()
    }

    /// Returns whether all spares that can form a further pipeline are ready, and the members need not wait too
    /// long for any of them.
    pub(super) fn can_grow(&self, trainer: &Trainer) -> bool {
        let spares = self.spares();
        if self.growing.is_empty() || spares.len() != self.growing.len() {
            return false;
        }
        let sizes: Vec<(MemberId, StateBytes)> =
            self.working().into_iter().map(|id| (id, trainer.state_bytes())).collect();
        let cost = |spare: &ReadySpare| Cost::new(&spare.ready, &sizes, trainer.steps_done());
        spares.iter().all(|spare| too_long(&cost(spare), self.join_wait).is_none())
    }

    /// Returns the newcomers or spares that need this member's log.
    fn followers(&self) -> Vec<(PeerId, MemberId, FollowProgress)> {
        let Some(team) = self.team.as_ref().filter(|_| !self.growing.is_empty()) else {
            return self.place.followers();
        };
        let own = self.growing.iter().filter(|future| Some(future.position) == team.position());
        let follows = |future: &FutureRank| {
            let id = team.id(future.member);
            let follows = self.place.spare(&id, team.epoch)?.follows;
            follows.needs_log().then(|| (team.peer(future.member), id, follows))
        };
        own.filter_map(follows).collect()
    }

    /// Starts a log of this member's steps. In pipelines, only members that hold the newcomer's part keep one.
    /// All members call it after the same step.
    ///
    /// Errors: those of the device.
    pub(super) fn begin_log(&mut self, trainer: &Trainer, job: &Job) -> Result<()> {
        // In pools, the speeds may have changed since the view began.
        self.predict_newcomer(job)?;
        if !self.holds_newcomers_part() {
            return Ok(());
        }
        self.log_from_now(trainer, job)?;
        self.look_at_log(trainer, job)
    }

    fn log_from_now(&mut self, trainer: &Trainer, job: &Job) -> Result<()> {
        let fault = chunk_fault(job, trainer.comm().rank(), trainer.steps_done());
        self.log.begin(&mut self.place.offered_blobs(), (trainer, job), fault)
    }

    /// Returns whether this member holds what a newcomer needs; always true without pipelines.
    pub(super) fn holds_newcomers_part(&self) -> bool {
        self.team.as_ref().is_none_or(|team| {
            team.position().map(FuturePlace::Position).is_some_and(|own| Some(own) == self.newcomer_place)
        })
    }

    /// Returns whether this member holds what newcomers, or the spares of a further pipeline, need.
    pub(super) fn holds_followers_part(&self) -> bool {
        if self.growing.is_empty() {
            return self.holds_newcomers_part();
        }
        let position = self.team.as_ref().and_then(Team::position);
        self.growing.iter().any(|future| Some(future.position) == position)
    }

    /// Offers the copy to newcomers that ask for one, and drops the log if no newcomer needs it. If a spare of
    /// a further pipeline asks for one, starts a log. Called between two steps.
    ///
    /// Errors: those of the device.
    pub(super) fn look_at_log(&mut self, trainer: &Trainer, job: &Job) -> Result<()> {
        self.log.check(&mut self.place.offered_blobs(), trainer);
        let followers = self.followers();
        let asks = |follows: &FollowProgress| *follows == FollowProgress::Asks;
        if self.log.begins_later() && followers.iter().any(|(.., follows)| asks(follows)) {
            self.log.drop_log(&mut self.place.offered_blobs());
        }
        if !self.log.is_kept() {
            self.tell_dropped();
            if self.growing.is_empty() || !followers.iter().any(|(.., follows)| asks(follows)) {
                return Ok(());
            }
            self.log_from_now(trainer, job)?;
        }
        self.log.is_offered = true;
        if followers.is_empty() {
            self.log.drop_log(&mut self.place.offered_blobs());
            self.log.is_offered = false;
            return Ok(());
        }
        // A spare may wait long for those that have other positions.
        let replayed = followers.iter().map(|(.., follows)| follows.replayed());
        let all = replayed.collect::<Option<Vec<u64>>>().filter(|_| !self.growing.is_empty());
        if let Some(step) = all.and_then(|steps| steps.into_iter().min()) {
            self.log.forget(&mut self.place.offered_blobs(), step);
        }
        let asking = followers.into_iter().filter(|(.., follows)| asks(follows));
        let asking: Vec<(PeerId, MemberId)> = asking.map(|(peer, id, _)| (peer, id)).collect();
        for words in self.log.offers(trainer) {
            self.log.sends(self.place.tell_others(&asking, &words));
        }
        Ok(())
    }

    /// Tells newcomers that a log was dropped that they may follow, in pipelines: they must follow another one,
    /// perhaps of another part. In other runs they take the whole state if they lack a record.
    pub(super) fn tell_dropped(&mut self) {
        if !std::mem::take(&mut self.log.is_offered) || self.team.is_none() {
            return;
        }
        self.tell_followers(&MembershipService::dropping());
    }

    /// Sends a message to the newcomers that need a log.
    pub(super) fn tell_followers(&mut self, words: &[u8]) {
        let followers: Vec<_> = self.followers().into_iter().map(|(peer, id, _)| (peer, id)).collect();
        self.log.sends(self.place.tell_others(&followers, words));
    }

    /// Returns the sizes of the state that a newcomer fetches, of the states of all members by rank.
    pub(super) fn copied(&self, sizes: &[StateBytes]) -> Option<StateBytes> {
        let Some(team) = &self.team else { return sizes.first().copied() };
        let place = |rank| team.position_of_rank(rank).map(FuturePlace::Position);
        let holds = |(rank, _): &(u32, &StateBytes)| place(*rank) == self.newcomer_place;
        (0..).zip(sizes).find(holds).map(|(_, sizes)| *sizes)
    }

    /// Records the step that was just done, and tells newcomers of it.
    ///
    /// Errors: those of the device.
    pub(super) fn log_step(&mut self, trainer: &Trainer, job: &Job) -> Result<()> {
        let now = self.place.transport().now();
        let words = self.log.after_step(&mut self.place.offered_blobs(), now, (trainer, job))?;
        if let Some(words) = words {
            self.tell_followers(&words);
        }
        Ok(())
    }
}
