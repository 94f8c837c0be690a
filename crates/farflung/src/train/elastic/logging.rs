//! What a member does for newcomers between two steps: it offers them its copy of the state, and tells them
//! of each step that it has recorded.

use farflung_base::PeerId;
use farflung_parallel::membership::MemberId;

use super::change::Member;
use super::ready::FollowProgress;
use super::state_transfer::chunk_fault;
use crate::Result;
use crate::train::job::Job;
use crate::train::trainer::Trainer;

impl Member<'_> {
    /// Starts a log of this member's steps.
    ///
    /// Errors: those of the device.
    pub(super) fn begin_log(&mut self, trainer: &Trainer, job: &Job) -> Result<()> {
        let fault = chunk_fault(job, trainer.comm().rank(), trainer.steps_done());
        self.log.begin(&mut self.place.offered_blobs(), trainer, fault)?;
        self.look_at_log(trainer);
        Ok(())
    }

    /// Offers the copy to newcomers that ask for one, and drops the log if no newcomer needs it. Called between
    /// two steps.
    pub(super) fn look_at_log(&mut self, trainer: &Trainer) {
        self.log.check(&mut self.place.offered_blobs(), trainer);
        if !self.log.is_kept() {
            return;
        }
        let followers = self.place.followers();
        if followers.is_empty() {
            self.log.drop_log(&mut self.place.offered_blobs());
            return;
        }
        let asking = followers.into_iter().filter(|(.., follows)| *follows == FollowProgress::Asks);
        let asking: Vec<(PeerId, MemberId)> = asking.map(|(peer, id, _)| (peer, id)).collect();
        for words in self.log.offers(trainer) {
            self.log.sends(self.place.tell_others(&asking, &words));
        }
    }

    /// Records the step that was just done, and tells newcomers of it.
    ///
    /// Errors: those of the device.
    pub(super) fn log_step(&mut self, trainer: &Trainer, job: &Job) -> Result<()> {
        let now = self.place.transport().now();
        let words = self.log.after_step(&mut self.place.offered_blobs(), now, (trainer, job))?;
        if let Some(words) = words {
            let followers: Vec<_> =
                self.place.followers().into_iter().map(|(peer, id, _)| (peer, id)).collect();
            self.log.sends(self.place.tell_others(&followers, &words));
        }
        Ok(())
    }
}
