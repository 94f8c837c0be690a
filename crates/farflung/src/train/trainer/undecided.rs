//! A step of a pipeline that this rank has voted on without hearing the outcome. Whoever commits a step has
//! every rank's vote, so all ranks have their averaged gradients by then: when the others say that it was
//! committed, this rank commits it too, and all stand behind the same step.

use farflung_optim::Prepared;
use farflung_parallel::pipeline::Updates;

use super::Trainer;
use crate::Result;
use crate::train::part::Part;

/// What a rank knows of the votes on its last step and on the one in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Undecided {
    /// The squares of all gradients in the last step that was committed, where a vote told them.
    squares: Option<f64>,
    /// Whether the vote on the step in flight has left and has not come back.
    open: bool,
    /// Whether a copy of a part was on its way to any rank when the last step was voted on.
    copies: bool,
}

impl Undecided {
    /// Nothing is open: the next step begins, or a vote came back.
    pub(super) const fn begin(&mut self) {
        self.open = false;
    }

    /// The vote on the step in flight leaves.
    pub(super) const fn voted(&mut self) {
        self.open = true;
    }

    /// The step is committed, with what its vote told.
    pub(super) const fn committed(&mut self, squares: Option<f64>, copies: bool) {
        *self = Self { squares, open: false, copies };
    }

    pub(super) const fn is_open(self) -> bool {
        self.open
    }
}

impl Trainer {
    /// The step that it last committed, with the squares of all gradients in it, as its vote told them.
    pub(in crate::train) const fn committed(&self) -> (u64, Option<f64>) {
        (self.step, self.undecided.squares)
    }

    /// Tells the others with the next vote whether a copy of a part is still on its way here.
    pub(in crate::train) const fn tell_copying(&mut self, copies: bool) {
        self.told.copies = copies;
    }

    /// Whether no copy of a part was on its way to any rank when the last step was voted on.
    pub(in crate::train) const fn all_have_copied(&self) -> bool {
        !self.undecided.copies
    }

    /// Takes the outcome of a vote from the others: the newest step that any of them has committed, with its
    /// squares. The step in flight is committed if it is that one, and dropped otherwise.
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
