//! What ranks agree on at the end of a pass, in one small all-reduce: losses, squares of gradients, and
//! whether to stop.

use farflung_base::{Pending, Rank};
use farflung_comm::{CommError, ReduceOp};
use farflung_parallel::pipeline::{Action, ComputeKind};
use farflung_parallel::plan::Measured;

use super::Trainer;
use super::speed::Speedometer;
use crate::Result;

/// What voters know after a pass, the same on all of them.
#[derive(Debug)]
pub(super) struct Vote {
    /// Mean loss over all tokens of the voters' replicas.
    pub(super) loss: f64,
    /// What any of them wishes.
    pub(super) wish: Wish,
    /// Sum of the squares of the gradients of all parts, where the model has several.
    pub(super) squares: Option<f64>,
    /// What steps take on each replica, where all of them vote and tell it.
    pub(super) speeds: Vec<Measured>,
}

/// What ranks would have happen after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wish {
    /// That the run stops.
    pub(super) stop: bool,
    /// That members change: one has come, or leaves.
    pub(super) change: bool,
    /// That no new copy of parts begins: one is still on its way.
    pub(super) copies: bool,
}

impl Wish {
    /// What a wish for change counts beside one to stop: that of no number of ranks adds up to one to stop.
    const CHANGE: f64 = 1.0 / (1 << 20) as f64;

    /// As a number to be summed over ranks: exact for up to 4096 of them.
    fn weigh(self) -> f64 {
        let one = |wish| f64::from(u8::from(wish));
        one(self.stop) + (one(self.change) + one(self.copies) * Self::CHANGE) * Self::CHANGE
    }

    /// What any rank wishes, of the sum.
    fn of_sum(sum: f64) -> Self {
        let changes = sum.fract() / Self::CHANGE;
        Self { stop: sum >= 1.0, change: changes >= 1.0, copies: changes.fract() > 0.0 }
    }
}

/// What all ranks know when replicas have met after local steps.
#[derive(Debug)]
pub(super) struct Met {
    /// Mean loss over all replicas of each step since they last met.
    pub(super) losses: Vec<f64>,
    /// What any rank wishes.
    pub(super) wish: Wish,
    /// What steps take on each replica, where they tell it.
    pub(super) speeds: Vec<Measured>,
}

/// A vote on its way.
#[must_use]
pub(super) struct Voting<T> {
    sums: Pending<Result<Vec<f64>, CommError>>,
    read: Box<dyn FnOnce(Vec<f64>) -> T + Send>,
}

impl<T> std::fmt::Debug for Voting<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Voting")
    }
}

impl<T> Voting<T> {
    pub(super) fn wait(self) -> Result<T> {
        Ok((self.read)(self.sums.wait()?))
    }
}

impl Trainer {
    /// Starts the vote of a pass. `loss` is the replica's mean where this rank has the last part, else 0;
    /// `squares` are by part, each told by one rank of those that vote.
    pub(super) fn start_vote(&self, loss: f64, stop: bool, squares: &[f64]) -> Voting<Vote> {
        let replicas = if self.each_step { self.replicas } else { 1 };
        // An equal part is exactly 1, so that equal replicas have the bits of a plain mean.
        let weight = if self.each_step { self.part_of(self.step + 1) } else { 1.0 };
        let wish = self.wish(stop);
        let mut mine = vec![loss * weight, wish.weigh()];
        mine.extend(squares);
        let told = if self.each_step { self.told_speeds() } else { Vec::new() };
        mine.extend(&told);
        let told = told.len();
        let sums = self.voters.start_all_reduce(mine, ReduceOp::Sum);
        let read = move |sums: Vec<f64>| {
            let (sums, speeds) = sums.split_at(sums.len() - told);
            Vote {
                loss: sums[0] / f64::from(replicas),
                wish: Wish::of_sum(sums[1]),
                squares: (sums.len() > 2).then(|| sums[2..].iter().sum()),
                speeds: Speedometer::read(speeds),
            }
        };
        Voting { sums, read: Box::new(read) }
    }

    const fn wish(&self, stop: bool) -> Wish {
        Wish { stop, change: self.told.wants_change, copies: self.told.copies }
    }

    /// This replica's or rank's speed in its place among all, where they tell it.
    fn told_speeds(&self) -> Vec<f64> {
        let Some(speed) = &self.speed else { return Vec::new() };
        if speed.by_rank {
            return speed.told(self.position.0, self.schedule.placement().ranks(), true);
        }
        speed.told(self.replica, self.replicas, self.position.0 == 0)
    }

    /// Takes up what the step took that was done. A rank of a pool computes some of the microbatches, and waits
    /// for others in between.
    pub(super) fn measure_step(&mut self, meets: bool) {
        let Some(speed) = &mut self.speed else { return };
        let ((from, to), spent) = (self.pass, self.executor.spent);
        let pass = to.saturating_sub(from);
        let order = self.schedule.schedule.order();
        let (microbatches, computing) = if speed.by_rank {
            let mine = |&(rank, action): &(Rank, Action)| {
                rank == self.position && action.kind == ComputeKind::Forward
            };
            (order.actions().filter(mine).count() as u32, pass.saturating_sub(spent.wait))
        } else {
            (self.schedule.microbatches(), pass)
        };
        speed.step(microbatches, computing, spent.took, meets);
    }

    /// All replicas have told what their steps take.
    pub(super) fn tell_speeds(&mut self, speeds: &[Measured]) {
        if let Some(speed) = self.speed.as_mut().filter(|_| !speeds.is_empty()) {
            speed.all = speeds.to_vec();
        }
    }

    /// This replica's part of the mean loss of a step.
    fn part_of(&self, step: u64) -> f64 {
        self.local.weight(self.replica, step - 1..step)
    }

    /// Starts the vote of all replicas on the steps since they last voted.
    pub(super) fn vote_on_window(&mut self, stop: bool) -> Voting<Met> {
        // All ranks of a pipeline know its losses: one tells them.
        let tells = self.position.0 == 0;
        let window = std::mem::take(&mut self.window);
        let first = self.step + 1 - window.len() as u64;
        let told = |(step, loss): (u64, f64)| if tells { loss * self.part_of(step) } else { 0.0 };
        let mut mine: Vec<f64> = (first..).zip(window).map(told).collect();
        mine.push(self.wish(stop).weigh());
        let told = self.told_speeds();
        mine.extend(&told);
        let told = told.len();
        let sums = self.executor.comm.start_all_reduce(mine, ReduceOp::Sum);
        let replicas = f64::from(self.replicas);
        let read = move |mut sums: Vec<f64>| {
            let speeds = Speedometer::read(&sums.split_off(sums.len() - told));
            let wish = Wish::of_sum(sums.pop().unwrap_or(0.0));
            Met { losses: sums.iter().map(|sum| sum / replicas).collect(), wish, speeds }
        };
        Voting { sums, read: Box::new(read) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_wishes_says_what_any_rank_wishes() {
        for number in 0..8_u8 {
            let wish = Wish { stop: number & 1 > 0, change: number & 2 > 0, copies: number & 4 > 0 };
            for ranks in [1, 3, 4000] {
                let sum = (0..ranks).map(|_| wish.weigh()).sum();
                assert_eq!(Wish::of_sum(sum), wish, "{ranks} ranks");
            }
            let others = Wish { stop: false, change: false, copies: true }.weigh() * 4000.0;
            assert_eq!(Wish::of_sum(wish.weigh() + others), Wish { copies: true, ..wish });
        }
    }
}
