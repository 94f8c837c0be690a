//! Handling of a pipeline's step on which this rank has voted without receiving the result.
//!
//! The last vote of a pipeline's ranks comes after their averages, and a rank commits a step only after it has
//! received the vote of each of them. So if another rank of its pipeline reports that the step was committed,
//! this rank commits it too. Where members may leave, all pipelines take that vote together, and all ranks are
//! at the same step then. Elsewhere pipelines may be one step apart (`retreat.rs`). If each rank has the whole
//! model, ranks vote before the averages are complete, and such a vote never counts as open here.
//!
//! With local steps, the ranks of one pipeline vote on a step. In pipelines of several stages, the average
//! after a round is handled in the same way: each rank tells all others whether it can apply the average, and
//! applies it once all have told.

use farflung_optim::Prepared;
use farflung_optim::sync::StepEnd;
use farflung_parallel::pipeline::Updates;
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::agree::{Request, StepRequests};
use super::step_done::StepDone;
use crate::Result;
use crate::train::part::Part;

/// The last step that a rank has committed, as sent to the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(in crate::train) struct Committed {
    pub(in crate::train) step: u64,
    /// Mean loss of its tokens.
    pub(in crate::train) loss: f64,
    /// Sum of the squares of all its gradients, if the vote contained it.
    pub(in crate::train) squares: Option<f64>,
}

/// State of the votes on a rank's last step and on the step in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Undecided {
    /// Mean loss of the last committed step.
    loss: f64,
    /// Sum of the squares of all gradients in the last committed step, if its vote contained it.
    squares: Option<f64>,
    /// Whether the last step was committed because of what another rank has reported, or before a stop, and is
    /// not recorded yet.
    settled: bool,
    /// Whether this rank of a pipeline has sent its vote on the step in flight and not received the result.
    open: bool,
    /// Whether this rank has told the others that it can apply the average of a round, and has not applied it.
    averages: bool,
    /// The requests of all ranks in the last vote whose result has arrived.
    requests: StepRequests,
}

impl Undecided {
    /// Records that no vote is open: a step begins, or the result of a vote was received.
    pub(super) const fn begin(&mut self) {
        (self.open, self.averages) = (false, false);
    }

    /// Records that the vote on the step in flight is sent.
    pub(super) const fn voted(&mut self) {
        self.open = true;
    }

    /// Records that this rank tells the others that it can apply the average of a round.
    pub(super) const fn can_average(&mut self) {
        self.averages = true;
    }

    /// Returns whether others may have applied the average of a round that this rank has not applied.
    pub(super) const fn is_average_open(self) -> bool {
        self.averages
    }

    /// Records that the step was committed. `loss` and `squares` are those of its vote; `requests` are those of
    /// the last vote whose result has arrived.
    pub(super) const fn committed(&mut self, loss: f64, squares: Option<f64>, requests: StepRequests) {
        *self = Self { loss, squares, settled: false, open: false, averages: false, requests };
    }

    /// Takes over a step that the rank has not recorded before it moved to another plan.
    pub(super) const fn carry(&mut self, before: Self) {
        self.loss = before.loss;
        self.settled = before.settled;
    }

    /// Records that the last step was committed, and that [`Trainer::step`] does not return it.
    pub(super) const fn unrecorded(&mut self) {
        self.settled = true;
    }

    pub(super) const fn is_open(self) -> bool {
        self.open || self.averages
    }
}

impl Trainer {
    /// Returns the last committed step.
    pub(in crate::train) const fn committed(&self) -> Committed {
        Committed { step: self.step, loss: self.undecided.loss, squares: self.undecided.squares }
    }

    /// Returns the last step if [`Trainer::resolve_vote`] has committed it since the last call: no call of
    /// [`Trainer::step`] has returned it.
    pub(in crate::train) fn take_resolved(&mut self) -> Option<StepDone> {
        let settled = std::mem::take(&mut self.undecided.settled);
        let done = if self.each_step { StepDone::of_all } else { StepDone::local };
        settled.then(|| done(self.step, self.undecided.loss))
    }

    /// Sets what this rank reports with the next vote: whether it is still sending or receiving a copy of a
    /// part.
    pub(in crate::train) const fn tell_copying(&mut self, copies: bool) {
        self.told.wished = self.told.wished.with(Request::NoCopy, copies);
    }

    /// Returns whether no rank was sending or receiving a copy of a part at the vote on the last step.
    pub(in crate::train) const fn all_have_copied(&self) -> bool {
        !self.undecided.requests.has(Request::NoCopy)
    }

    /// Sets what this rank reports with the next vote: whether it keeps records of its steps for a newcomer.
    pub(in crate::train) const fn tell_followed(&mut self, follows: bool) {
        self.told.wished = self.told.wished.with(Request::NoMove, follows);
    }

    /// Returns whether any rank kept records for a newcomer at the vote on the last step.
    pub(in crate::train) const fn is_followed(&self) -> bool {
        self.undecided.requests.has(Request::NoMove)
    }

    /// Resolves an open vote by what the other ranks report: the newest step that any of them has committed.
    /// The step in flight is committed if it is that step, and dropped otherwise.
    ///
    /// Errors: those of the optimizer.
    pub(in crate::train) fn resolve_vote(&mut self, newest: Committed) -> Result<()> {
        if !self.undecided.open {
            return Ok(());
        }
        match newest {
            Committed { step, loss, squares: Some(squares) } if step == self.step + 1 => {
                if self.schedule.updates() == Updates::Flush {
                    self.executor.update_all(&self.list, Prepared::with_norm(squares.sqrt())?)?;
                }
                self.executor.boundaries.commit();
                self.executor.kept.end();
                self.scale.taken();
                self.step += 1;
                self.half_done = false;
                self.undecided.committed(loss, Some(squares), self.undecided.requests);
                self.commit_states()?;
                self.undecided.settled = self.each_step || self.ends_local_step(loss);
            }
            _ => {
                self.undecided.begin();
                self.drop_step();
            }
        }
        Ok(())
    }

    /// Counts a local step whose vote was resolved. Returns whether its row can be written now: if an average
    /// follows, the row is written after it, unless this rank learns of that average from others.
    fn ends_local_step(&mut self, loss: f64) -> bool {
        self.window.push(loss);
        let after = StepEnd { step: self.step, last: self.step == self.steps };
        let mut syncs = self.executor.parts.values().filter_map(|part| part.sync.as_ref());
        self.unmet = syncs.any(|sync| sync.is_due(after));
        !self.unmet
    }

    /// Resolves an average of a round that others may have applied. `agreed` are the numbers of steps after
    /// which the other ranks last had the same parameters. If one of them has applied the average, this rank
    /// does so, too; otherwise it drops it.
    ///
    /// Errors: those of the method.
    pub(in crate::train) fn resolve_average(&mut self, agreed: impl IntoIterator<Item = u64>) -> Result<()> {
        if !self.undecided.is_average_open() {
            return Ok(());
        }
        if agreed.into_iter().any(|step| step == self.step) {
            self.commit_exchanged()?;
            self.window.clear();
            self.unmet = false;
        } else {
            self.executor.parts.values_mut().for_each(Part::rollback);
        }
        self.undecided.begin();
        Ok(())
    }
}
