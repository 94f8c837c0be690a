//! The votes at the end of a pass: small all-reduces over losses, requests (to stop, or to change the members)
//! and step times, and over the squares of gradients, which may be a vote of its own among the ranks of one
//! pipeline.

use farflung_base::{Pending, Rank};
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_parallel::pipeline::{Action, ComputeKind};
use farflung_parallel::plan::Measured;

use super::speed::{Measures, Speedometer};
use super::{TRIES, Trainer};
use crate::Result;
use crate::metrics::MixtureMetrics;
use crate::train::bound_plan::BoundPlan;
use crate::train::executor::Routers;
use crate::train::fault::FaultyValue;

/// The ranks that vote on each step: all ranks, or those of one replica if steps are local.
#[derive(Debug)]
pub(super) struct Voters {
    pub(super) comm: Communicator,
    /// Their ranks in the job.
    pub(super) ranks: Vec<Rank>,
}

impl Voters {
    /// Makes those of a replica. A collective of all ranks of `comm`, unless all vote.
    pub(super) fn new(plan: &BoundPlan, comm: &Communicator, replica: u32) -> Result<Self> {
        if plan.averages_each_step() {
            return Ok(Self { comm: comm.clone(), ranks: (0..plan.ranks()).map(Rank).collect() });
        }
        Ok(Self { comm: comm.split(replica, comm.rank().0)?, ranks: plan.ranks_of(replica) })
    }
}

/// Result of the vote after a pass, the same on all ranks that voted.
#[derive(Debug)]
pub(super) struct Vote {
    /// Mean loss over all tokens of the voters' replicas.
    pub(super) loss: f64,
    /// Union of the requests of all voters.
    pub(super) requests: StepRequests,
    /// Sum of the squares of the gradients of all parts; `None` if no vote has them.
    pub(super) squares: Option<f64>,
    /// Measured step times of each replica (of each rank in pools); empty if not all of them vote or if they
    /// are not measured.
    pub(super) speeds: Vec<Measured>,
    /// Whether all voters are at the same attempt of the same step.
    pub(super) is_of_one_attempt: bool,
    /// What the routers of experts chose on all voters.
    pub(super) experts: Vec<MixtureMetrics>,
}

/// What a rank may request with its vote, from the highest weight in the sum of all requests to the lowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// The run stops.
    Stop,
    /// The members change, because one has come or leaves.
    Change,
    /// No new copy of parts begins, because one is still being transferred.
    NoCopy,
    /// No rank moves to another part, because a newcomer follows one.
    NoMove,
}

/// Requests of a rank, or of all ranks, that take effect after a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StepRequests(u8);

impl StepRequests {
    const ALL: [Request; 4] = [Request::Stop, Request::Change, Request::NoCopy, Request::NoMove];
    /// Weight of a request relative to the one before it. The requests of 4096 ranks sum to less than one of
    /// the request before.
    const NEXT: f64 = 1.0 / (1 << 13) as f64;

    pub(super) const fn has(self, request: Request) -> bool {
        self.0 & (1 << request as u8) != 0
    }

    /// Returns the requests with or without this one.
    pub(super) const fn with(self, request: Request, wished: bool) -> Self {
        let bit = 1 << request as u8;
        Self(if wished { self.0 | bit } else { self.0 & !bit })
    }

    /// Encodes the requests as a number to be summed over ranks. The sum is exact for up to 4096 ranks: it has
    /// at most 52 bits.
    fn weigh(self) -> f64 {
        let one = |request: &Request| f64::from(u8::from(self.has(*request)));
        Self::ALL.iter().rev().fold(0.0, |sum, request| sum * Self::NEXT + one(request))
    }

    /// Decodes the union of the requests from the sum of [`StepRequests::weigh`] over ranks.
    fn of_sum(mut sum: f64) -> Self {
        let mut union = Self::default();
        for request in Self::ALL {
            union = union.with(request, sum >= 1.0);
            sum = sum.fract() / Self::NEXT;
        }
        union
    }
}

/// Result of the vote when replicas meet after local steps, the same on all ranks.
#[derive(Debug)]
pub(super) struct SyncVote {
    /// Mean loss over all replicas of each step since they last voted.
    pub(super) losses: Vec<f64>,
    /// Union of the requests of all ranks.
    pub(super) requests: StepRequests,
    /// Measured step times of each replica (of each rank in pools); empty if they are not measured.
    pub(super) speeds: Vec<Measured>,
}

/// A vote that was started and whose result has not been received.
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
    /// Starts the vote of a pass. `loss` is the mean loss of this replica if this rank has the last part (or
    /// its share, if several ranks have it), else 0. `squares` are sums of squared gradients by part: each is
    /// sent by one of the voting ranks, and the others send 0. If this vote has no norm, `squares` is empty.
    ///
    /// Errors: those of the sampler.
    pub(super) fn start_vote(&self, loss: f64, stop: bool, squares: &[f64]) -> Result<Voting<Vote>> {
        let replicas = if self.each_step { self.replicas } else { 1 };
        // An equal share has a weight of exactly 1, so that with equal replicas the result has the bits of a
        // plain mean.
        let weight = if self.each_step { self.part_of(self.step + 1)? } else { 1.0 };
        let wish = self.wish(stop);
        // What routers add is a mean over all sequences, whatever the numbers of their targets.
        let of_routers = self.executor.routers.loss() * f64::from(replicas) / self.sequences as f64;
        // The ranks along the tensor axis have the same losses.
        let tells = self.tensor == 0;
        let mut mine = vec![if tells { loss * weight + of_routers } else { 0.0 }, wish.weigh()];
        // If each pipeline votes on the norm alone, one of them may repeat a step that the others apply: a
        // value that is not finite may be in a copy of one rank only.
        let attempt = self.norm_voters.as_ref().map(|_| (self.step * u64::from(TRIES + 1)) as f64);
        let attempt = attempt.map(|steps| steps + f64::from(self.tries));
        mine.extend(attempt);
        mine.extend(squares);
        let told = if self.each_step { self.own_speeds(self.step + 1) } else { Vec::new() };
        mine.extend(&told);
        let told = told.len();
        let routers = &self.executor.routers;
        mine.extend(routers.told().iter().map(|count| if tells { *count } else { 0.0 }));
        let (routed, mixtures) = (routers.told().len(), routers.mixtures().to_vec());
        let Voters { comm, .. } = &self.voters;
        let (sums, voters) = (comm.start_all_reduce(mine, ReduceOp::Sum), comm.size());
        let read = move |sums: Vec<f64>| {
            let (sums, routed) = sums.split_at(sums.len() - routed);
            let (sums, speeds) = sums.split_at(sums.len() - told);
            let squares = &sums[2 + usize::from(attempt.is_some())..];
            Vote {
                loss: sums[0] / f64::from(replicas),
                requests: StepRequests::of_sum(sums[1]),
                squares: (!squares.is_empty()).then(|| squares.iter().sum()),
                speeds: Speedometer::read(speeds),
                is_of_one_attempt: attempt
                    .is_none_or(|own| sums[2].to_bits() == (own * voters as f64).to_bits()),
                experts: Routers::read(&mixtures, routed),
            }
        };
        Ok(Voting { sums, read: Box::new(read) })
    }

    /// Starts the vote of a pipeline's ranks on the sum of its squared gradients, which are given by part.
    pub(super) fn start_norm_vote(&self, squares: Vec<f64>) -> Voting<f64> {
        let voters = self.norm_voters.as_ref().expect("a list with this vote has its voters");
        let sums = voters.start_all_reduce(squares, ReduceOp::Sum);
        Voting { sums, read: Box::new(|sums: Vec<f64>| sums.iter().sum()) }
    }

    const fn wish(&self, stop: bool) -> StepRequests {
        self.told.wished.with(Request::Stop, stop)
    }

    /// Returns this replica's or rank's step times at its own index and zeros elsewhere, to be summed over all
    /// ranks; empty if step times are not measured. `step` is the step after which it tells them.
    fn own_speeds(&self, step: u64) -> Vec<f64> {
        let Some(speed) = &self.speed else { return Vec::new() };
        let (own, count) = match speed.measures {
            Measures::Replicas => (self.replica, self.replicas),
            Measures::RanksOfPools | Measures::RanksOfPipelines => {
                (self.rank().0, self.replicas * self.schedule.placement().ranks())
            }
        };
        let mut told = speed.contribution(own, count);
        if let Some(fault) =
            self.fault.filter(|fault| fault.is_in_all_since(own, step, FaultyValue::StepTime))
        {
            let time = &mut told[2 * own as usize];
            *time = fault.flip_bit_in_number(*time);
        }
        told
    }

    /// Adds the step that was just done to the measured step times. `meets` says whether all replicas agreed on
    /// it. A rank of a pool or a pipeline waits for other ranks within the pass: this is not counted as
    /// computing. A rank of a pool computes only some of the microbatches.
    pub(super) fn measure_step(&mut self, meets: bool) {
        let Some(speed) = &mut self.speed else { return };
        let ((from, to), spent) = (self.pass, self.executor.spent);
        let pass = to.saturating_sub(from);
        let order = self.schedule.schedule.order();
        let all = self.schedule.microbatches();
        let (microbatches, computing) = match speed.measures {
            Measures::Replicas => (all, pass),
            Measures::RanksOfPipelines => (all, pass.saturating_sub(spent.wait)),
            Measures::RanksOfPools => {
                let mine = |&(rank, action): &(Rank, Action)| {
                    rank == self.position && action.kind == ComputeKind::Forward
                };
                (order.actions().filter(mine).count() as u32, pass.saturating_sub(spent.wait))
            }
        };
        speed.step(microbatches, computing, spent.took, meets);
    }

    /// Stores the step times of all replicas, if the vote contained them.
    pub(super) fn tell_speeds(&mut self, speeds: &[Measured]) {
        if let Some(speed) = self.speed.as_mut().filter(|_| !speeds.is_empty()) {
            speed.all = speeds.to_vec();
        }
    }

    /// Returns this replica's weight in the mean loss of a step, where 1 is an equal share.
    fn part_of(&self, step: u64) -> Result<f64> {
        self.samples.weight(step - 1..step)
    }

    /// Starts the vote of all replicas on the steps since they last voted, and clears the list of their losses.
    ///
    /// Errors: those of the sampler.
    pub(super) fn vote_on_window(&mut self, stop: bool) -> Result<Voting<SyncVote>> {
        // All ranks of a replica have its losses; only its first rank sends them, so that they count once.
        let tells = self.position.0 == 0 && self.tensor == 0;
        let window = std::mem::take(&mut self.window);
        let first = self.step + 1 - window.len() as u64;
        let told = |(step, loss): (u64, f64)| Ok(if tells { loss * self.part_of(step)? } else { 0.0 });
        let mut mine = (first..).zip(window).map(told).collect::<Result<Vec<f64>>>()?;
        mine.push(self.wish(stop).weigh());
        let told = self.own_speeds(self.step);
        mine.extend(&told);
        let told = told.len();
        let sums = self.executor.comm.start_all_reduce(mine, ReduceOp::Sum);
        let replicas = f64::from(self.replicas);
        let read = move |mut sums: Vec<f64>| {
            let speeds = Speedometer::read(&sums.split_off(sums.len() - told));
            let wish = StepRequests::of_sum(sums.pop().unwrap_or(0.0));
            SyncVote { losses: sums.iter().map(|sum| sum / replicas).collect(), requests: wish, speeds }
        };
        Ok(Voting { sums, read: Box::new(read) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_wishes_says_what_any_rank_wishes() {
        for number in 0..16_u8 {
            let wish = StepRequests(number);
            for ranks in [1, 3, 4000, 4096] {
                let sum = (0..ranks).map(|_| wish.weigh()).sum();
                assert_eq!(StepRequests::of_sum(sum), wish, "{ranks} ranks");
            }
            for other in StepRequests::ALL {
                let others = StepRequests::default().with(other, true).weigh() * 4000.0;
                assert_eq!(StepRequests::of_sum(wish.weigh() + others), wish.with(other, true));
            }
        }
    }
}
