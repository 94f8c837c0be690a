//! One rank of a run: the parts of the model that the plan gives it, and a step of training.
//!
//! A step: **pass** (the schedule: forward, backward, send, receive; gradients leave as they become final),
//! **reduce** (wait for the averages), **prepare** (norms; nothing has changed yet), **agree** (one vote, the
//! same on all ranks), **commit** (parameters, moments, residuals, counters), **after** (what the method of
//! synchronisation does between steps; copies on unlike devices are compared). A failure or an overflow before
//! the commit leaves no trace.
//!
//! Copies of a part on several ranks, and the token table's two, take the same updates. Where their devices
//! round differently they are compared between steps: the pipeline is empty then, with a flush or without
//! one, so that each copy has a single version.

mod agree;
mod build;
mod carry;
mod gather;
mod meeting;
mod pieces;
mod retreat;
mod snapshot;
mod speed;
mod state;
#[cfg(test)]
mod tests;
mod undecided;
mod verify;

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank, StageId};
use farflung_comm::Communicator;
use farflung_optim::{LossScale, OptimError, Prepared, sum_of_squares};
use farflung_parallel::LocalSteps;
use farflung_parallel::pipeline::{Follower, Placement, Schedule, Updates, run};
use farflung_parallel::plan::Measured;
use farflung_tensor::{Device, Param, Tensor, TensorError};
use farflung_zoo::Stage;

use super::bind::ReplicaSchedule;
use super::executor::{Executor, Pass};
use super::fault::{Failure, Fault, FaultyValue, Moment};
use super::job::Base;
use super::part::Part;
use super::resync::{Drift, Resync};
use super::spent::{Spent, add_since};
use super::tied::{Across, Tied};
use crate::signals::Armed;
use crate::{Error, Result, Stop};
use agree::{Met, Vote, Voting};
pub(super) use build::chain;
pub(super) use carry::check_pipelines;
pub(super) use pieces::{Counted, Pieces, needs};
use retreat::Mark;
pub(super) use snapshot::{Progress, Snapshot, StateBytes};
use speed::Speedometer;
use undecided::Undecided;
pub use verify::Thoroughness;

/// One rank of a run.
#[derive(Debug)]
pub struct Trainer {
    schedule: ReplicaSchedule,
    evaluation: Schedule,
    /// The rank in its pipeline, and which of the replicas that is.
    position: Rank,
    replica: u32,
    /// Number of this replica's first microbatch within a step, and microbatches of all replicas.
    first_microbatch: u64,
    all_microbatches: u64,
    /// Where the plan's numbers begin.
    base: Base,
    replicas: u32,
    /// Who takes a local step when.
    local: LocalSteps,
    /// Steps between two averages.
    every: u64,
    executor: Executor,
    /// The device without the interrupt.
    plain: Device,
    /// Those that agree on each step: all ranks, or those of one pipeline where steps are local.
    voters: Communicator,
    /// Whether replicas are the same after each step.
    each_step: bool,
    /// Losses of this replica's steps since the replicas were last the same.
    window: Vec<f64>,
    /// A vote that left with an average.
    voting: Option<Voting<Met>>,
    /// All that hold a part, by the part's number, where others hold it too.
    holders: BTreeMap<u32, Communicator>,
    resync: Resync,
    /// Of gradients in products of 16 bits.
    scale: LossScale,
    /// All of the model, on rank 0, when it was last asked for of a pipeline.
    whole: Option<(Stage, Tensor)>,
    step: u64,
    steps: u64,
    /// Updates of each part in a step.
    updates: u64,
    /// The transport's clock when the last step's microbatches began to pass here, and when they had.
    pass: (Nanos, Nanos),
    /// A bit that a test changes.
    fault: Option<Fault>,
    failure: Option<Failure>,
    /// Drops a step.
    stop: Stop,
    /// Ranks of the job by their number in the communicator: those that are left after a retreat.
    members: Vec<Rank>,
    /// Where all replicas were last the same, where they move apart in between or change within a step.
    mark: Option<Mark>,
    /// Whether parameters of a step that is not done may have changed.
    half_done: bool,
    /// How often the step in flight was not finite, for another reason than its loss scale.
    tries: u32,
    told: Told,
    /// Whether the last step ended with an average of all replicas that failed: the next does that alone.
    unmet: bool,
    /// What steps take, where shares follow it.
    speed: Option<Speedometer>,
    /// The vote of the last step, and of one that may have been voted on.
    undecided: Undecided,
}

/// What this rank tells the others about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Told {
    /// Whether its own gradients were finite when a step was tried again.
    sound: bool,
    /// Whether it knows of members that come or leave.
    wants_change: bool,
    /// Whether a copy of a part is still on its way here.
    copies: bool,
}

/// How often a step is computed whose gradients are not finite: a fault of the moment passes.
const TRIES: u32 = 3;

/// Whether all replicas are the same after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Synced {
    /// They are.
    Yes,
    /// They have moved apart since they last were.
    No,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepDone {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss of the step's tokens in nats: of all replicas where they are the same now, else of this one's.
    pub loss: f64,
    /// Where replicas have met: the mean loss over all of them of the first steps that were not told yet. This
    /// one's is the last of them, unless the method lets averages and votes take some steps.
    pub losses: Vec<f64>,
    /// Whether all replicas are the same now.
    pub synced: Synced,
    /// Whether any rank wants to stop; known where all agreed.
    pub stop: bool,
    /// Whether any rank knows of members that come or leave; known where all agreed.
    pub change: bool,
    /// Where copies of parameters were compared: how far apart they were.
    pub drift: Option<Drift>,
    /// How often the step was given up because its gradients overflowed, and computed again.
    pub skipped: u32,
}

impl Trainer {
    /// Steps done.
    #[must_use]
    pub const fn steps_done(&self) -> u64 {
        self.step
    }

    /// Its rank in the job.
    pub(super) const fn rank(&self) -> Rank {
        Rank(self.executor.first + self.position.0)
    }

    /// What steps take on each replica, where all of them have told it since this was last asked.
    pub(super) fn measured(&mut self) -> Option<Vec<Measured>> {
        let all = std::mem::take(&mut self.speed.as_mut()?.all);
        (!all.is_empty()).then_some(all)
    }

    /// Its replica's number.
    pub(super) const fn replica(&self) -> u32 {
        self.replica
    }

    /// Asks for a change of members after the next step at which all replicas are the same.
    pub(super) const fn ask_for_change(&mut self, asks: bool) {
        self.told.wants_change = asks;
    }

    /// While this lives, a stop ends what the rank computes.
    pub(super) fn armed(&self) -> Armed {
        self.stop.arm(&self.executor.interrupt)
    }

    /// How it reaches the others.
    #[must_use]
    pub const fn comm(&self) -> &Communicator {
        &self.executor.comm
    }

    /// What its replica carries out in a step.
    #[must_use]
    pub const fn schedule(&self) -> &ReplicaSchedule {
        &self.schedule
    }

    /// The parts of the model that it holds, each with its parameters.
    pub fn parts(&self) -> impl Iterator<Item = (&Stage, &Tensor)> {
        self.executor.parts.values().map(|part| (&part.stage, &part.params))
    }

    fn first(&self) -> &Part {
        self.executor.parts.values().next().expect("a rank has a part")
    }

    /// The first part that it holds: the whole model where ranks do not share one.
    #[must_use]
    pub fn stage(&self) -> &Stage {
        &self.first().stage
    }

    /// The parameters of its first part.
    #[must_use]
    pub fn params(&self) -> &Tensor {
        &self.first().params
    }

    /// The gradients of its first part in the last step: of all replicas where the method averages them, else
    /// of its own.
    #[must_use]
    pub fn grads(&self) -> &Tensor {
        &self.first().grads
    }

    /// What its gradients are multiplied with where products round them.
    #[must_use]
    pub const fn loss_scale(&self) -> &LossScale {
        &self.scale
    }

    /// The transport's clock when the last step's microbatches began to pass here, and when all had: what the
    /// simulator predicts. What ranks agree on afterwards is not in it.
    #[must_use]
    pub const fn last_pass(&self) -> (Nanos, Nanos) {
        self.pass
    }

    /// Where the time of the last step went.
    #[must_use]
    pub const fn last_spent(&self) -> Spent {
        self.executor.spent
    }

    /// Hash of the parameters of its first part, padding left out: equal on all replicas whenever they are
    /// the same.
    pub fn hash(&self) -> Result<blake3::Hash> {
        hash(self.stage(), self.params())
    }

    /// One optimizer step; where parts do not wait for each other, their updates.
    ///
    /// With a flush, a step whose gradients overflow in f16 is computed again with a smaller loss scale, and
    /// one that fails anywhere before all ranks agreed leaves parameters, moments and residuals as they were.
    ///
    /// Errors: [`Error::StepNotFinite`] where the gradients are not finite in three tries, on all ranks
    /// that vote.
    pub fn step(&mut self, stop: bool) -> Result<StepDone> {
        let (begun, computes) = (self.comm().now(), !self.unmet);
        self.executor.spent = Spent::default();
        let done = self.try_step(stop)?;
        let Executor { comm, spent, .. } = &mut self.executor;
        add_since(begun, comm, &mut spent.took);
        if let Some(speed) = self.speed.as_mut().filter(|_| computes) {
            let (microbatches, (from, to)) = (self.schedule.microbatches(), self.pass);
            speed.step(microbatches, to.saturating_sub(from), spent.took, done.synced == Synced::Yes);
        }
        Ok(done)
    }

    fn try_step(&mut self, stop: bool) -> Result<StepDone> {
        let mut skipped = 0;
        self.tries = 0;
        self.undecided.begin();
        if self.unmet {
            // The local step counts already; only its meeting failed, among other replicas.
            let begun = self.executor.comm.now();
            let done = self.meet_now(stop)?;
            let Executor { comm, spent, .. } = &mut self.executor;
            add_since(begun, comm, &mut spent.communicate);
            return self.compared(done);
        }
        self.reach(Moment::Begun, self.step + 1)?;
        if !self.local.takes(self.replica, self.step + 1) {
            return self.pass_over(stop);
        }
        let vote = loop {
            let vote = self.pass(stop)?;
            self.reach(Moment::Agreed, self.step + 1)?;
            if self.each_step {
                self.suffer(FaultyValue::Reduced, self.step + 1)?;
            }
            if self.schedule.updates() != Updates::Flush {
                break vote;
            }
            match self.prepare(&vote) {
                Ok(prepared) => {
                    self.reach(Moment::Prepared, self.step + 1)?;
                    for part in self.executor.parts.values_mut() {
                        part.commit(prepared, None)?;
                    }
                    break vote;
                }
                // The same on all ranks that voted, and there it never happened.
                Err(error @ OptimError::NotFinite { .. }) => {
                    self.executor.parts.values_mut().for_each(Part::rollback);
                    self.executor.boundaries.rollback();
                    skipped += 1;
                    if !self.scale.overflowed() {
                        self.tries += 1;
                    }
                    if self.tries == TRIES {
                        return Err(self.not_finite(error)?);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        };
        self.executor.boundaries.commit();
        self.scale.taken();
        self.step += 1;
        self.half_done = false;
        self.undecided.committed(vote.squares, vote.wish.copies);
        self.tell_speeds(&vote.speeds);
        self.reach(Moment::Committed, self.step)?;
        self.suffer(FaultyValue::Parameters, self.step)?;
        self.suffer(FaultyValue::Moments, self.step)?;
        let done = if self.each_step {
            self.agreed(&vote)
        } else {
            self.local_step(vote.loss, stop || vote.wish.stop)?
        };
        self.compared(StepDone { skipped, ..done })
    }

    /// A step in which only faster replicas train: this one may still meet them.
    fn pass_over(&mut self, stop: bool) -> Result<StepDone> {
        self.step += 1;
        self.half_done = false;
        let done = self.local_step(0.0, stop)?;
        self.compared(done)
    }

    /// Ends a step: where replicas are the same now, their copies are compared.
    fn compared(&mut self, mut done: StepDone) -> Result<StepDone> {
        if done.synced == Synced::Yes {
            let begun = self.executor.comm.now();
            done.drift = self.compare()?;
            let Executor { comm, spent, .. } = &mut self.executor;
            add_since(begun, comm, &mut spent.communicate);
        }
        self.reach(Moment::Met, self.step)?;
        Ok(done)
    }

    /// Fails where a test wants it.
    fn reach(&self, moment: Moment, step: u64) -> Result<()> {
        let rank = self.comm().rank().0;
        self.failure.map_or(Ok(()), |failure| failure.reach(rank, step, moment))
    }

    /// Changes the bit that a test wants changed here.
    fn suffer(&mut self, value: FaultyValue, step: u64) -> Result<()> {
        let rank = self.comm().rank().0;
        match self.fault.filter(|fault| fault.is_in(rank, step, value)) {
            None => Ok(()),
            Some(fault) => self.executor.parts.values_mut().try_for_each(|part| part.suffer(fault)),
        }
    }

    /// What all replicas together did, which are the same after each step.
    fn agreed(&self, vote: &Vote) -> StepDone {
        StepDone {
            step: self.step,
            loss: vote.loss,
            losses: vec![vote.loss],
            synced: Synced::Yes,
            stop: vote.wish.stop,
            change: vote.wish.change,
            drift: None,
            skipped: 0,
        }
    }

    /// What a step needs before any element moves.
    fn prepare(&self, vote: &Vote) -> Result<Prepared, OptimError> {
        Prepared::with_norm(match vote.squares {
            Some(squares) => squares.sqrt(),
            None => farflung_optim::global_norm(&self.first().grads)?,
        })
    }

    /// Compares what several ranks hold, and makes it equal, where that is due.
    fn compare(&mut self) -> Result<Option<Drift>> {
        let Executor { comm, parts, placement, tied, .. } = &mut self.executor;
        let Some(mut comparison) = self.resync.after_step(self.step, comm) else { return Ok(None) };
        for (number, part) in by_number(parts, placement) {
            let all = 0..part.stage.layout().len();
            if let Some(holders) = self.holders.get(&number).filter(|_| !all.is_empty()) {
                let apart = part.sync.as_ref().is_some_and(|sync| sync.is_apart());
                let common = part.sync.as_mut().and_then(|sync| sync.common_mut());
                if let Some(same) = common.or((!apart).then_some(&mut part.params)) {
                    comparison.mend(holders, same, all)?;
                }
            }
        }
        // The table is the same in all pipelines now, and its two users in each may differ: on one rank they
        // take the same updates on the same device.
        if let Tied::Across(Across { group, stage, .. }) = tied {
            let part = parts.get_mut(stage).expect("it is this rank's user of the table");
            let table = part.table();
            comparison.mend(group, &mut part.params, table)?;
        }
        let found = comparison.done()?;
        if found.distance > 0.0 {
            for part in parts.values_mut() {
                if let Some(sync) = part.sync.as_mut().filter(|sync| !sync.is_apart()) {
                    sync.moved(&part.params)?;
                }
            }
        }
        Ok(Some(found))
    }

    /// A step's microbatches, forward and back, and what ranks then tell each other.
    fn pass(&mut self, stop: bool) -> Result<Vote> {
        for part in self.executor.parts.values_mut() {
            part.stage.set_gradient_scale(self.scale.get());
        }
        let taken = |step| self.local.taken(self.replica, step);
        let taken = taken(self.step) - taken(self.base.step);
        let first = self.base.microbatches + taken * self.all_microbatches + self.first_microbatch;
        self.executor.begin(Pass::Training { first }, self.schedule.microbatches());
        // Without a flush there are updates within the pass, which only a return to the mark takes back.
        self.half_done = self.schedule.updates() != Updates::Flush;
        let armed = self.armed();
        let begun = self.executor.comm.now();
        let (schedule, position) = (&self.schedule.schedule, self.position);
        match self.schedule.arrivals {
            Some(rule) => Follower::new(schedule, position, rule)?.run(&mut self.executor)?,
            None => run(schedule, position, &mut self.executor)?,
        }
        self.pass = (begun, self.executor.comm.now());
        self.executor.sent()?;
        let Executor { comm, spent, .. } = &mut self.executor;
        add_since(self.pass.1, comm, &mut spent.communicate);
        // What failed on the device shows here, before anything is agreed on.
        self.executor.device.fence()?;
        let loss = self.own_loss()?;
        // The last moment at which this rank alone can drop the step: once it votes, others may commit it.
        if self.executor.interrupt.is_raised() {
            return Err(TensorError::Interrupted.into());
        }
        drop(armed);
        if self.tries > 0 {
            self.told.sound = self.is_sound(loss);
        }
        let begun = self.executor.comm.now();
        let vote = self.reduced(loss, stop);
        let Executor { comm, spent, .. } = &mut self.executor;
        add_since(begun, comm, &mut spent.communicate);
        vote
    }

    /// Averages and the vote, behind the pass.
    fn reduced(&mut self, loss: f64, stop: bool) -> Result<Vote> {
        // One part knows the norm of all gradients: its ranks need not wait for them to tell of their losses.
        let early = (self.schedule.placement().depth() == 1).then(|| self.start_vote(loss, stop, &[]));
        if self.schedule.updates() == Updates::Flush {
            let Executor { parts, placement, tied, .. } = &mut self.executor;
            if self.each_step {
                by_number(parts, placement).into_iter().try_for_each(|(_, part)| part.finish_reduce())?;
                tied.finish(parts, placement)?;
            } else {
                // The table's gradients of one replica met before any mean.
                tied.finish(parts, placement)?;
                by_number(parts, placement).into_iter().try_for_each(|(_, part)| part.finish_reduce())?;
                tied.take_first(parts, placement, Part::averaged_gradients)?;
            }
            parts.values_mut().try_for_each(Part::contribute_alone)?;
        }
        self.executor.parts.values_mut().try_for_each(|part| part.catch_up(None))?;
        if let Some(vote) = early {
            return vote.wait();
        }
        let voting = self.start_vote(loss, stop, &self.squares()?);
        // From here on others may commit the step, whether or not this rank hears of it.
        self.undecided.voted();
        let vote = voting.wait()?;
        self.undecided.begin();
        Ok(vote)
    }

    /// Whether the loss and the gradients of this rank are finite, before they are averaged.
    fn is_sound(&self, loss: f64) -> bool {
        let finite = |part: &Part| farflung_optim::global_norm(&part.grads).is_ok_and(f64::is_finite);
        loss.is_finite() && self.executor.parts.values().all(finite)
    }

    /// Why a step was given up: all that voted on it tell whether their own gradients are finite.
    fn not_finite(&self, cause: OptimError) -> Result<Error> {
        let told = self.voters.all_gather_bytes(vec![u8::from(self.told.sound)])?;
        let first = if self.each_step { 0 } else { self.executor.first };
        let ranks = (first..).zip(&told).filter(|(_, told)| told.as_slice() != [1]);
        let ranks = ranks.map(|(rank, _)| Rank(rank)).collect();
        Ok(Error::StepNotFinite { step: self.step + 1, tries: self.tries, ranks, cause: Box::new(cause) })
    }

    /// Mean loss of this replica's last pass, where this rank has the model's last part; else 0.
    fn own_loss(&mut self) -> Result<f64> {
        let (sum, tokens) = self.executor.total_loss()?;
        if tokens == 0 {
            return Ok(0.0);
        }
        // Two copies of the model each see some of the microbatches.
        let all = f64::from(self.schedule.microbatches())
            * (self.executor.sampler.shard().batch * self.executor.sampler.context()) as f64;
        Ok(sum / all)
    }

    /// Squares of the gradients by part of the model, where they are this rank's to tell; else 0.
    fn squares(&self) -> Result<Vec<f64>> {
        let Executor { parts, placement, .. } = &self.executor;
        let depth = placement.depth();
        let mut squares = vec![0.0; depth as usize];
        for (&stage, part) in parts {
            // Each part counts once, and the table that two parts hold with the first.
            if (self.replica == 0 || !self.each_step) && stage.0 < depth {
                let len = part.grads.shape().len();
                let start = if placement.is_last(stage) { part.stage.layout().params()[1].start } else { 0 };
                let square = if len == 0 { 0.0 } else { sum_of_squares(&part.grads, start..len)? };
                squares[placement.part(stage) as usize] = square;
            }
        }
        Ok(squares)
    }

    /// Mean loss of the held-out batches in nats, shared out among the replicas; all must call it.
    pub fn evaluate(&mut self) -> Result<f64> {
        self.with_common(Self::evaluate_common)
    }

    fn evaluate_common(&mut self) -> Result<f64> {
        let microbatches = self.evaluation.order().microbatches();
        let armed = self.armed();
        self.executor.begin(Pass::Evaluation, microbatches);
        run(&self.evaluation, self.position, &mut self.executor)?;
        self.executor.sent()?;
        let (sum, tokens) = self.executor.total_loss()?;
        drop(armed);
        let mut sums = [sum, tokens as f64];
        self.executor.comm.all_reduce(&mut sums, farflung_comm::ReduceOp::Sum)?;
        Ok(sums[0] / sums[1])
    }
}

/// The tensors of a stage's flat buffer.
pub(super) fn named(
    stage: &Stage,
    flat: &Tensor,
    name: impl Fn(&str) -> String,
) -> Result<Vec<super::checkpoint::Named>> {
    let all = flat.to_vec::<f32>()?;
    let tensor = |p: &Param| super::checkpoint::Named {
        name: name(&p.name),
        shape: p.shape.dims().to_vec(),
        values: all[p.range()].to_vec(),
    };
    Ok(stage.layout().params().iter().map(tensor).collect())
}

/// Hash of a stage's parameters, padding left out.
pub(super) fn hash(stage: &Stage, params: &Tensor) -> Result<blake3::Hash> {
    let all = params.to_vec::<f32>()?;
    let elements: Vec<f32> = stage.layout().params().iter().flat_map(|p| &all[p.range()]).copied().collect();
    Ok(super::fingerprint::digest(&elements))
}

/// A rank's parts with their numbers, in the order in which all ranks meet over them: two copies of the model
/// have their stages in opposite orders, and would wait for each other.
fn by_number<'a>(parts: &'a mut BTreeMap<StageId, Part>, placement: &Placement) -> Vec<(u32, &'a mut Part)> {
    let mut parts: Vec<_> = parts.iter_mut().map(|(&stage, part)| (placement.part(stage), part)).collect();
    parts.sort_by_key(|(number, _)| *number);
    parts
}
