//! What a member does for newcomers between two steps: it offers them its copy of the state, and tells them
//! of each step that it has recorded.

use farflung_base::PeerId;
use farflung_parallel::membership::MemberId;

use super::change::Member;
use super::membership_service::MembershipService;
use super::ready::FollowProgress;
use super::state_transfer::chunk_fault;
use crate::Result;
use crate::train::job::Job;
use crate::train::trainer::{StateBytes, Trainer};

impl Member<'_> {
    /// Predicts which part of the model a newcomer would get. All members predict the same.
    ///
    /// Errors: those of the settings from which pools are planned.
    pub(super) fn predict_newcomer(&mut self, job: &Job) -> Result<()> {
        let team = self.team.as_ref();
        let position = team.map(|team| team.position_of_newcomer(job, &self.pools)).transpose()?;
        self.newcomer_position = position.flatten();
        Ok(())
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
        let fault = chunk_fault(job, trainer.comm().rank(), trainer.steps_done());
        self.log.begin(&mut self.place.offered_blobs(), (trainer, job), fault)?;
        self.look_at_log(trainer);
        Ok(())
    }

    /// Returns whether this member holds what a newcomer needs; always true without pipelines.
    pub(super) fn holds_newcomers_part(&self) -> bool {
        self.team.as_ref().is_none_or(|team| team.position() == self.newcomer_position)
    }

    /// Offers the copy to newcomers that ask for one, and drops the log if no newcomer needs it. Called between
    /// two steps.
    pub(super) fn look_at_log(&mut self, trainer: &Trainer) {
        self.log.check(&mut self.place.offered_blobs(), trainer);
        if !self.log.is_kept() {
            self.tell_dropped();
            return;
        }
        self.log.is_offered = true;
        let followers = self.place.followers();
        if followers.is_empty() {
            self.log.drop_log(&mut self.place.offered_blobs());
            self.log.is_offered = false;
            return;
        }
        let asking = followers.into_iter().filter(|(.., follows)| *follows == FollowProgress::Asks);
        let asking: Vec<(PeerId, MemberId)> = asking.map(|(peer, id, _)| (peer, id)).collect();
        for words in self.log.offers(trainer) {
            self.log.sends(self.place.tell_others(&asking, &words));
        }
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
        let followers: Vec<_> = self.place.followers().into_iter().map(|(peer, id, _)| (peer, id)).collect();
        self.log.sends(self.place.tell_others(&followers, words));
    }

    /// Returns the sizes of the state that a newcomer fetches, of the states of all members by rank.
    pub(super) fn copied(&self, sizes: &[StateBytes]) -> Option<StateBytes> {
        let Some(team) = &self.team else { return sizes.first().copied() };
        let holds = |(rank, _): &(u32, &StateBytes)| team.position_of_rank(*rank) == self.newcomer_position;
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
