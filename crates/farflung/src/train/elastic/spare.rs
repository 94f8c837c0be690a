//! A member without a part waits: until a view gives it a place, or the run is over.

use farflung_base::Nanos;
use farflung_parallel::membership::{Event, Start, View};

use super::decide::{LOOK, Loss, stopped};
use super::keeper::Outcome;
use super::place::Place;
use super::team::Team;
use crate::train::job::Job;
use crate::{Error, Result, Signal};

/// The tag by which spares hear that the run is over.
const OVER: u32 = u32::MAX / 2 - 11;

/// What a spare has waited for.
pub(super) enum Waited {
    /// Members change.
    View(View),
    /// The run is over.
    Over,
}

impl Team {
    /// Tells the spares that the run is over. For the member at rank 0.
    pub(super) fn tell_over(&self) {
        let telling: Vec<_> =
            self.spares().map(|spare| self.all.start_send(spare, OVER, Vec::new())).collect();
        for told in telling {
            if let Err(error) = told.wait() {
                tracing::debug!(%error, "a spare does not hear that the run is over");
            }
        }
    }
}

impl Place {
    /// Waits as a spare of a team.
    ///
    /// Errors: [`Error::Removed`], [`Error::NoMajority`]; [`Error::Stopped`] after a signal.
    pub(super) fn wait_as_spare(&mut self, team: &Team, job: &Job) -> Result<Waited> {
        let over = team.all.clone().with_deadline(Nanos::MAX).start_recv(team.lead(), OVER);
        let mut told = Vec::new();
        self.renew();
        if let Some(view) = self.view() {
            // Where this member proposes, it says of the run what it has heard.
            let start = Start { weights: view.weights, plan: view.plan };
            self.tell(Event::Starts(start))?;
        }
        loop {
            self.renew();
            self.keeper().awaited = true;
            let outcome = self.keeper().outcome();
            let waited = match outcome {
                Some(Outcome::Installed(view)) => Some(Ok(Waited::View(view))),
                Some(Outcome::Stopped(reason)) => Some(Err(stopped(reason))),
                None => None,
            };
            let signal = || job.stop.requested().map(|signal: Signal| Err(Error::Stopped(signal)));
            if let Some(waited) = waited.or_else(signal) {
                self.keeper().awaited = false;
                return waited;
            }
            for id in self.lost() {
                if !told.contains(&id) {
                    self.tell(Event::Silent(id))?;
                    told.push(id);
                }
            }
            if over.is_ready() {
                self.keeper().awaited = false;
                // Whoever was to say it may be lost; then a view follows.
                return match over.wait() {
                    Ok(_) => Ok(Waited::Over),
                    Err(error) => {
                        tracing::debug!(%error, "who leads does not say any more when the run is over");
                        // It may be as well that the others' step has failed: they say whether they try again.
                        let loss = Loss { suspect: None, silent: Vec::new(), again: true };
                        self.after_loss(loss, None).map(Waited::View)
                    }
                };
            }
            let now = self.transport().now();
            if self.keeper().wake().is_some_and(|at| at <= now) {
                self.tell(Event::Tick)?;
            }
            self.wait(LOOK)?;
        }
    }
}
