//! Waiting of a spare: a member without a part of the model, until a view gives it a place or the run is over.

use farflung_base::Nanos;
use farflung_parallel::membership::{Event, Start, View};

use super::decide::{Loss, POLL_INTERVAL, stopped};
use super::membership_service::Outcome;
use super::place::Place;
use super::team::Team;
use crate::train::job::Job;
use crate::{Error, Result, Signal};

/// Tag of the message to spares that the run is over.
const OVER: u32 = u32::MAX / 2 - 11;

/// The event that ended a spare's waiting.
pub(super) enum SpareEvent {
    /// There is a new view.
    View(View),
    /// The run is over.
    Over,
}

impl Team {
    /// Notifies the spares that the run is over. Called by the member at rank 0.
    pub(super) fn tell_over(&self) {
        let telling: Vec<_> =
            self.spares().map(|spare| self.all.start_send(spare, OVER, Vec::new())).collect();
        for told in telling {
            if let Err(error) = told.wait() {
                tracing::debug!(%error, "failed to tell a spare that the run has ended");
            }
        }
    }
}

impl Place {
    /// Waits as a spare of a team for a new view or the end of the run.
    ///
    /// Errors: [`Error::Removed`], [`Error::NoMajority`]; [`Error::Stopped`] after a signal.
    pub(super) fn wait_as_spare(&mut self, team: &Team, job: &Job) -> Result<SpareEvent> {
        let over = team.all.clone().with_deadline(Nanos::MAX).start_recv(team.lead(), OVER);
        let mut told = Vec::new();
        self.renew();
        if let Some(view) = self.view() {
            // If this member proposes the next view, that view contains the hashes of the current one.
            let start = Start { weights: view.weights, plan: view.plan };
            self.tell(Event::Starts(start))?;
        }
        loop {
            self.renew();
            self.membership().awaited = true;
            let outcome = self.membership().outcome();
            let waited = match outcome {
                Some(Outcome::Installed(view)) => Some(Ok(SpareEvent::View(view))),
                Some(Outcome::Stopped(reason)) => Some(Err(stopped(reason))),
                None => None,
            };
            let signal = || job.stop.requested().map(|signal: Signal| Err(Error::Stopped(signal)));
            if let Some(waited) = waited.or_else(signal) {
                self.membership().awaited = false;
                return waited;
            }
            for id in self.lost() {
                if !told.contains(&id) {
                    self.tell(Event::Silent(id))?;
                    told.push(id);
                }
            }
            if over.is_ready() {
                self.membership().awaited = false;
                // The member at rank 0 may be lost. Then a new view follows.
                return match over.wait() {
                    Ok(_) => Ok(SpareEvent::Over),
                    Err(error) => {
                        tracing::debug!(%error, "the leading member will not report the end of the run");
                        // Or the others' step has failed: they decide whether to repeat it.
                        let loss = Loss { suspect: None, silent: Vec::new(), again: true };
                        self.after_loss(loss, None).map(SpareEvent::View)
                    }
                };
            }
            let now = self.transport().now();
            if self.membership().wake().is_some_and(|at| at <= now) {
                self.tell(Event::Tick)?;
            }
            self.wait(POLL_INTERVAL)?;
        }
    }
}
