//! Handling of a step on which this rank has voted without receiving the result.
//!
//! A rank commits a step only after it has received every rank's vote, and a rank votes only once its gradients
//! are averaged. So if another rank reports that the step was committed, this rank commits it too, and all
//! ranks are at the same step.

use farflung_optim::Prepared;
use farflung_parallel::pipeline::Updates;

use super::Trainer;
use crate::Result;
use crate::train::part::Part;

/// State of the votes on a rank's last step and on the step in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Undecided {
    /// Sum of the squares of all gradients in the last committed step, if its vote contained it.
    squares: Option<f64>,
    /// Whether the vote on the step in flight was sent and its result has not been received.
    open: bool,
    /// Whether a copy of a part was being transferred to any rank at the vote on the last step.
    copies: bool,
}

impl Undecided {
    /// Records that no vote is open: a step begins, or the result of a vote was received.
    pub(super) const fn begin(&mut self) {
        self.open = false;
    }

    /// Records that the vote on the step in flight is sent.
    pub(super) const fn voted(&mut self) {
        self.open = true;
    }

    /// Records that the step was committed, with the squares and the copies of its vote.
    pub(super) const fn committed(&mut self, squares: Option<f64>, copies: bool) {
        *self = Self { squares, open: false, copies };
    }

    pub(super) const fn is_open(self) -> bool {
        self.open
    }
}

impl Trainer {
    /// Returns the last committed step, and the sum of the squares of all its gradients if its vote contained
    /// it.
    pub(in crate::train) const fn committed(&self) -> (u64, Option<f64>) {
        (self.step, self.undecided.squares)
    }

    /// Sets what this rank reports with the next vote: whether a copy of a part is still being received here.
    pub(in crate::train) const fn tell_copying(&mut self, copies: bool) {
        self.told.copies = copies;
    }

    /// Returns whether no copy of a part was being transferred to any rank at the vote on the last step.
    pub(in crate::train) const fn all_have_copied(&self) -> bool {
        !self.undecided.copies
    }

    /// Resolves an open vote by what the other ranks report: the newest step that any of them has committed,
    /// with its sum of squares. The step in flight is committed if it is that step, and dropped otherwise.
    ///
    /// Errors: those of the optimizer.
    pub(in crate::train) fn settle_vote(&mut self, newest: (u64, Option<f64>)) -> Result<()> {
        if !self.undecided.is_open() {
            return Ok(());
        }
        match newest {
            (step, Some(squares)) if step == self.step + 1 => {
                if self.schedule.updates() == Updates::Flush {
                    let prepared = Prepared::with_norm(squares.sqrt())?;
                    for part in self.executor.parts.values_mut() {
                        Part::commit(part, prepared, None)?;
                    }
                }
                self.executor.boundaries.commit();
                self.scale.taken();
                self.step += 1;
                self.half_done = false;
                self.undecided.committed(Some(squares), self.undecided.copies);
            }
            _ => {
                self.undecided.begin();
                self.drop_step();
            }
        }
        Ok(())
    }
}
