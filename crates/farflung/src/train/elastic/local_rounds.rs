//! What a member does for newcomers between two steps if steps are local: it offers them the state after the
//! last synchronisation, which no member changes before the next one, and the first member also its optimizer;
//! in pipelines, each member of the first one.

use farflung_base::PeerId;

use super::change::Member;
use super::ready::FollowProgress;
use crate::Result;
use crate::train::job::Job;
use crate::train::trainer::Trainer;

impl Member<'_> {
    /// Returns whether members are to agree on newcomers, and on a further pipeline, after the next
    /// synchronisation. With local steps, this is so for every newcomer and spare: one that is not ready yet
    /// may be so by then.
    pub(super) fn wants_round(&self, trainer: &Trainer) -> bool {
        trainer.state_bytes().every > 1 && (self.place.has_newcomers() || !self.growing.is_empty())
    }

    /// Begins a log if a newcomer asks for a copy of the state, and returns that newcomer. It need not be
    /// agreed on, because all members have the same state after the last synchronisation. Does nothing if
    /// replicas agree at each step.
    ///
    /// Errors: those of the device.
    pub(super) fn offer_round(&mut self, trainer: &mut Trainer, job: &Job) -> Result<Option<PeerId>> {
        if job.averages_each_step() {
            return Ok(None);
        }
        // The first member of the next view is the first one of this view, unless it is lost.
        let gives_optimizer = trainer.replica() == 0;
        // In pipelines, all may have to return to the last average.
        if gives_optimizer || self.team.is_some() {
            trainer.mark_round()?;
        }
        if !self.holds_followers_part() || !self.place.has_newcomers() && self.growing.is_empty() {
            self.log.drop_optimizers(&mut self.place.offered_blobs());
            return Ok(None);
        }
        if gives_optimizer {
            let words = self.log.keep_optimizer(&mut self.place.offered_blobs(), trainer)?;
            if let Some(words) = words {
                self.tell_followers(&words);
            }
        }
        if self.makes_newcomers_wait() {
            return Ok(None);
        }
        let followers = self.place.followers();
        let asking = followers.iter().find(|(.., follows)| *follows == FollowProgress::Asks);
        let Some(&(newcomer, ..)) = asking.filter(|_| !self.log.is_kept() && trainer.keeps_averages()) else {
            return Ok(None);
        };
        self.begin_log(trainer, job)?;
        Ok(self.log.is_kept().then_some(newcomer))
    }
}
