//! One rank of a run: the parts of the model that the plan assigns to it, and a training step.
//!
//! A step: **pass** (the schedule: forward, backward, send, receive; gradients are sent as they become final),
//! **reduce** (wait for the averages), **agree** (votes: on losses, with the same result on all ranks that take
//! the step together; in a pipeline also on the norm), **prepare** (the global norm; nothing has changed yet),
//! **commit** (parameters, moments, residuals, counters), **after** (between steps: the method of
//! synchronisation, comparison of copies on unlike devices). With a flush, a failure or overflow before the
//! commit changes nothing. Without a flush, updates happen within the pass.
//!
//! Where gradients are averaged at each step, all copies of a part on several ranks get the same updates. So do
//! the two copies of the token table in a pipeline. If their devices round differently, copies are compared
//! between steps, when the pipeline is empty and each copy has one version.

mod agree;
mod build;
mod carry;
mod copies;
mod counted_memory;
mod ending;
mod gather;
mod gathered_weights;
mod give_state;
mod synchronise;
mod token_weights;
mod progress;
mod replayed_parts;
mod residuals_to_come;
mod replica_samples;
mod resume;
mod retreat;
mod speed;
mod state;
mod stored_states;
mod step_done;
mod take_state;
#[cfg(test)]
mod tests;
mod undecided;
mod verify;

use std::collections::BTreeMap;
use std::sync::Arc;

use farflung_base::{Nanos, Rank, StageId};
use farflung_comm::Communicator;
use farflung_optim::{LossScale, OptimError, Prepared};
use farflung_parallel::pipeline::{Placement, Schedule, Updates, run};
use farflung_parallel::plan::Measured;
use farflung_parallel::step::{self, RankStep, StepOp, StepWorker as _};
use farflung_tensor::{Device, Tensor, TensorError};
use farflung_zoo::Stage;

use super::apart::HeldApart;
use super::bind::ReplicaSchedule;
use super::disk_state::StepRecords;
use super::division::Division;
use super::executor::{Counts, Executor, LossSum, Pass};
use super::fault::{Failure, Fault, FaultyValue, Moment};
use super::part::Part;
use super::resync::Resync;
use super::spent::{Spent, add_since};
use super::step_tokens::no_targets;
use crate::signals::Armed;
use crate::{Error, OverRanks, Result, Stop};
use agree::{Request, StepRequests, SyncVote, Vote, Voters, Voting};
pub(super) use build::{BuiltChain, chain, divided_weights, stage_of};
pub(super) use carry::check_pipelines;
pub(super) use ending::Ending;
use gather::Givers;
pub(super) use gathered_weights::IncomingWeights;
pub(super) use give_state::StateBytes;
pub(super) use progress::Progress;
pub(super) use replayed_parts::ReplayedParts;
pub(super) use replica_samples::ReplicaSamples;
use resume::KeptWork;
use retreat::RollbackPoint;
use speed::Speedometer;
pub use step_done::{StepDone, Synced};
use token_weights::TokenWeights;
pub(super) use undecided::Committed;
use undecided::Undecided;
pub use verify::Thoroughness;

/// One rank of a run.
#[derive(Debug)]
pub struct Trainer {
    schedule: ReplicaSchedule,
    /// The operations of this rank's step.
    list: RankStep,
    evaluation: Schedule,
    /// The rank in its pipeline, and the number of its replica.
    position: Rank,
    replica: u32,
    /// Its number along the tensor axis.
    tensor: u32,
    /// The microbatches of the data on which this replica trains.
    samples: ReplicaSamples,
    /// The factors of tokens' losses, if they change from step to step.
    token_weights: Option<TokenWeights>,
    /// Number of sequences of a step of the ranks that vote on its loss.
    sequences: u64,
    replicas: u32,
    /// Steps between two averages.
    every: u64,
    executor: Executor,
    /// The executor's device without its interrupt.
    plain: Device,
    /// The ranks that vote on each step.
    voters: Voters,
    /// The ranks of this rank's replica, if they alone vote on the norm of the gradients.
    norm_voters: Option<Communicator>,
    /// Whether replicas have the same parameters after each step.
    each_step: bool,
    /// Losses of this replica's local steps that no vote of all replicas has contained yet.
    window: Vec<f64>,
    /// A vote that was sent together with an average.
    voting: Option<Voting<SyncVote>>,
    /// Communicators of the holders of each part of this rank, by the part's number; empty if there is only one
    /// replica and one copy of the model, except in an elastic run with local steps.
    holders: BTreeMap<u32, Communicator>,
    /// What this rank holds of its parts, by their numbers, that not all of their holders have, or of which
    /// they have another copy.
    apart: BTreeMap<u32, HeldApart>,
    /// The ranks that hold the model which this replica trains.
    givers: Givers,
    division: Division,
    /// The exchange with the ranks that divide its layers.
    exchanges: Option<Arc<OverRanks>>,
    resync: Resync,
    /// Loss scale for products in 16 bits.
    scale: LossScale,
    step: u64,
    steps: u64,
    /// Number of updates of each part in a step.
    updates: u64,
    /// The transport's clock at the start and at the end of the last step's pass on this rank.
    pass: (Nanos, Nanos),
    /// A bit that a test flips.
    fault: Option<Fault>,
    failure: Option<Failure>,
    /// The stop request, which drops a step.
    stop: Stop,
    /// The job's ranks by their number in the communicator; after a retreat, those that are left.
    members: Vec<Rank>,
    /// The last state that all replicas had in common, if they train apart or are updated within a step.
    mark: Option<RollbackPoint>,
    /// Whether parameters may contain part of a step that is not done.
    half_done: bool,
    /// Number of attempts of the current step whose gradients were not finite and could not become finite by a
    /// smaller loss scale.
    tries: u32,
    told: Told,
    /// Whether the average of all replicas at the end of the last step failed: the next step does only that.
    unmet: bool,
    /// Measured step times, if shares depend on them.
    speed: Option<Speedometer>,
    /// The vote of the last step, and whether the outcome of the vote on the current step is unknown.
    undecided: Undecided,
    /// The record of the next step on disk; `None` before the first step.
    state_record: Option<Box<dyn StepRecords>>,
    /// What this rank has computed of the step that failed last, until a step begins.
    kept: Option<KeptWork>,
}

/// What this rank sends to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Told {
    /// Whether its own gradients were finite when a step was tried again.
    sound: bool,
    /// What it requests with its next vote.
    wished: StepRequests,
}

/// Number of attempts of a step whose gradients are not finite: after a transient fault, a later attempt
/// succeeds.
const TRIES: u32 = 3;

impl Trainer {
    /// Returns the number of steps done.
    #[must_use]
    pub const fn steps_done(&self) -> u64 {
        self.step
    }

    /// Returns its rank in the job, also once it has left ranks that do not answer.
    pub(super) fn rank(&self) -> Rank {
        self.executor.pipeline[self.position.index()]
    }

    /// Returns the measured step times of all replicas or ranks of pools, once all have sent them since the
    /// last call.
    pub(super) fn measured(&mut self) -> Option<Vec<Measured>> {
        let all = std::mem::take(&mut self.speed.as_mut()?.all);
        (!all.is_empty()).then_some(all)
    }

    /// Returns its replica's number.
    pub(super) const fn replica(&self) -> u32 {
        self.replica
    }

    /// Returns its number along the tensor axis.
    pub(super) const fn tensor(&self) -> u32 {
        self.tensor
    }

    /// Requests a change of members after the next step at which all replicas have the same parameters.
    pub(super) const fn ask_for_change(&mut self, asks: bool) {
        self.told.wished = self.told.wished.with(Request::Change, asks);
    }

    /// Returns a guard during whose life a stop interrupts the rank's computation.
    pub(super) fn armed(&self) -> Armed {
        self.stop.arm(&self.executor.interrupt)
    }

    /// Returns its communicator with the other ranks.
    #[must_use]
    pub const fn comm(&self) -> &Communicator {
        &self.executor.comm
    }

    /// Returns the schedule of its replica's step.
    #[must_use]
    pub const fn schedule(&self) -> &ReplicaSchedule {
        &self.schedule
    }

    /// Returns the parts of the model that it holds, each with its parameters.
    pub fn parts(&self) -> impl Iterator<Item = (&Stage, &Tensor)> {
        self.executor.parts.values().map(|part| (&part.stage, &part.params))
    }

    fn first(&self) -> &Part {
        self.executor.parts.values().next().expect("a rank has a part")
    }

    /// Returns the first part that it holds: the whole model if there are no stages.
    #[must_use]
    pub fn stage(&self) -> &Stage {
        &self.first().stage
    }

    /// Returns the parameters of its first part.
    #[must_use]
    pub fn params(&self) -> &Tensor {
        &self.first().params
    }

    /// Returns the gradients of its first part in the last step: of all replicas if the method averages them,
    /// else its own. In steps in which an optimizer takes momentum in place of gradients, that momentum.
    #[must_use]
    pub fn grads(&self) -> &Tensor {
        &self.first().grads
    }

    /// Returns the loss scale.
    #[must_use]
    pub const fn loss_scale(&self) -> &LossScale {
        &self.scale
    }

    /// Returns the transport's clock at the start and at the end of the last step's pass: the time that the
    /// simulator predicts. The agreement after it is not included.
    #[must_use]
    pub const fn last_pass(&self) -> (Nanos, Nanos) {
        self.pass
    }
    /// Returns the learning rate of the last update of this rank's parameters; `None` before the first one.
    pub(super) fn last_rate(&self) -> Option<f64> {
        self.executor.parts.values().find_map(|part| part.chain.last_rate())
    }

    /// Returns how the time of the last step was spent.
    #[must_use]
    pub const fn last_spent(&self) -> Spent {
        self.executor.spent
    }

    /// Returns the hash of the parameters that it has of its first part: equal on all replicas whenever they
    /// have the same ones, unless each has a shard.
    pub fn hash(&self) -> Result<blake3::Hash> {
        super::fingerprint::of_params(self.stage(), self.params())
    }

    /// Trains one step: one update of the optimizer; without a flush, one or more updates of each part.
    ///
    /// With a flush, a step whose gradients overflow in f16 is computed again with a smaller loss scale, and a
    /// step that fails before all ranks agreed leaves parameters, moments and residuals unchanged.
    ///
    /// Errors: [`Error::StepNotFinite`] if the gradients are not finite in three attempts, on all ranks that
    /// vote.
    pub fn step(&mut self, stop: bool) -> Result<StepDone> {
        let (begun, computes) = (self.comm().now(), !self.unmet);
        self.executor.spent = Spent::default();
        let done = self.try_step(stop)?;
        let Executor { comm, spent, .. } = &mut self.executor;
        add_since(begun, comm, &mut spent.took);
        if computes {
            self.measure_step(done.synced == Synced::Yes);
        }
        Ok(done)
    }

    fn try_step(&mut self, stop: bool) -> Result<StepDone> {
        let mut skipped = 0;
        self.tries = 0;
        self.undecided.begin();
        self.kept = None;
        if self.unmet {
            // The local step is already counted; only the average of all replicas after it failed.
            let begun = self.executor.comm.now();
            let done = self.synchronise_now(stop)?;
            let Executor { comm, spent, .. } = &mut self.executor;
            add_since(begun, comm, &mut spent.communicate);
            return self.compared(done);
        }
        self.fail_if_due(Moment::Begun, self.step + 1)?;
        if !self.samples.takes(self.step + 1) {
            return self.pass_over(stop);
        }
        self.begin_states();
        let vote = loop {
            let vote = self.pass(stop)?;
            self.fail_if_due(Moment::Agreed, self.step + 1)?;
            if self.each_step {
                self.inject_fault(FaultyValue::Reduced, self.step + 1)?;
            }
            if self.schedule.updates() != Updates::Flush {
                break vote;
            }
            match self.prepare(&vote) {
                Ok(prepared) => {
                    self.fail_if_due(Moment::Prepared, self.step + 1)?;
                    self.executor.update_all(&self.list, prepared)?;
                    break vote;
                }
                // All ranks that voted get this error, and none of them commits the step. Those of other
                // pipelines have the same averages; if not, the next vote fails (`start_vote`).
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
        self.executor.kept.end();
        self.scale.taken();
        self.step += 1;
        self.half_done = false;
        self.undecided.committed(vote.loss, vote.squares, vote.requests);
        self.commit_states()?;
        self.tell_speeds(&vote.speeds);
        // The step is done: if a stop ends this, the ranks gather what they have updated before they save it.
        if let Err(error) = self.executor.gather_all(&self.list) {
            self.undecided.unrecorded();
            return Err(error);
        }
        self.fail_if_due(Moment::Committed, self.step)?;
        self.inject_fault(FaultyValue::Parameters, self.step)?;
        self.inject_fault(FaultyValue::Moments, self.step)?;
        let done = if self.each_step {
            self.agreed(&vote)
        } else {
            self.local_step(vote.loss, stop || vote.requests.has(Request::Stop))?
        };
        self.compared(StepDone { skipped, experts: vote.experts, ..done })
    }

    /// Counts a step that only faster replicas train; this replica may still meet them.
    fn pass_over(&mut self, stop: bool) -> Result<StepDone> {
        self.step += 1;
        self.half_done = false;
        let done = self.local_step(0.0, stop)?;
        self.compared(done)
    }

    /// Ends a step: if replicas have the same parameters now, their copies are compared.
    fn compared(&mut self, mut done: StepDone) -> Result<StepDone> {
        if done.synced == Synced::Yes {
            let begun = self.executor.comm.now();
            done.drift = self.compare()?;
            let Executor { comm, spent, .. } = &mut self.executor;
            add_since(begun, comm, &mut spent.communicate);
        }
        self.fail_if_due(Moment::Met, self.step)?;
        Ok(done)
    }

    /// Fails if a test injected a failure here.
    fn fail_if_due(&self, moment: Moment, step: u64) -> Result<()> {
        let rank = self.comm().rank().0;
        self.failure.map_or(Ok(()), |failure| failure.fail_if_due(rank, step, moment))
    }

    /// Flips the bit that a test requests here.
    fn inject_fault(&mut self, value: FaultyValue, step: u64) -> Result<()> {
        let rank = self.comm().rank().0;
        match self.fault.filter(|fault| fault.is_in(rank, step, value)) {
            None => Ok(()),
            Some(fault) => self.executor.parts.values_mut().try_for_each(|part| part.inject_fault(fault)),
        }
    }

    /// Returns the result of a step of all replicas together, for methods that average each step.
    fn agreed(&self, vote: &Vote) -> StepDone {
        let (stop, change) = (vote.requests.has(Request::Stop), vote.requests.has(Request::Change));
        StepDone { stop, change, ..StepDone::of_all(self.step, vote.loss) }
    }

    /// Returns what an update needs, before any element changes.
    fn prepare(&self, vote: &Vote) -> Result<Prepared, OptimError> {
        Prepared::with_norm(match vote.squares {
            Some(squares) => squares.sqrt(),
            None => farflung_optim::global_norm(&self.first().grads)?,
        })
    }

    /// Runs a step's microbatches forward and backward, then the averages and the vote.
    fn pass(&mut self, stop: bool) -> Result<Vote> {
        for part in self.executor.parts.values_mut() {
            part.stage.set_gradient_scale(self.scale.get());
            part.watch(self.tries > 0);
        }
        let first = self.samples.first(self.step);
        if let Some(weights) = &self.token_weights {
            self.executor.token_weights = weights.of_step(first)?;
        }
        if self.norm_voters.is_some() {
            // Other pipelines may take the step once they have this rank's gradients.
            self.wait_for_states()?;
        }
        self.executor.begin(Pass::Training { first }, self.schedule.microbatches());
        // Without a flush, updates happen within the pass, and only a return to the rollback point (`mark`)
        // undoes them.
        self.half_done = self.schedule.updates() != Updates::Flush;
        let armed = self.armed();
        let begun = self.executor.comm.now();
        let (schedule, position) = (&self.schedule.schedule, self.position);
        match self.schedule.arrivals {
            Some(rule) => self.list.by_arrivals(schedule, position, rule)?.run(&mut self.executor)?,
            None => self.list.run_pass(schedule, position, &mut self.executor)?,
        }
        self.pass = (begun, self.executor.comm.now());
        let waited = self.exchanges.as_ref().map_or(Nanos::ZERO, |exchanges| exchanges.take_waited());
        self.executor.spent.wait = self.executor.spent.wait.saturating_add(waited);
        self.executor.sent()?;
        let Executor { comm, spent, .. } = &mut self.executor;
        add_since(self.pass.1, comm, &mut spent.communicate);
        // Failures on the device are reported here, before anything is agreed on.
        self.executor.device.fence()?;
        let loss = self.own_loss()?;
        // The last moment at which this rank alone can drop the step: after its vote, others may commit it.
        if self.executor.interrupt.is_raised() {
            return Err(TensorError::Interrupted.into());
        }
        drop(armed);
        if self.tries > 0 {
            self.told.sound = self.is_sound(loss);
        }
        self.reduce(loss, stop)
    }

    /// Waits for the averages and the votes after the pass.
    fn reduce(&mut self, loss: f64, stop: bool) -> Result<Vote> {
        // Before this rank's vote: others may then overwrite the step before the last.
        if self.has_state_on_disk() {
            let begun = self.executor.comm.now();
            self.wait_for_states()?;
            let Executor { comm, spent, .. } = &mut self.executor;
            add_since(begun, comm, &mut spent.disk);
        }
        let (mut voting, mut norm_voting, mut found, mut norm) = (None, None, None, None);
        for op in self.list.at(step::Moment::Reduce).to_vec() {
            let begun = self.executor.comm.now();
            match op {
                StepOp::StartVote(vote) => {
                    // The vote after the averages: from here on other ranks may commit the step, whether or
                    // not this one receives the result.
                    let is_last = vote != step::Vote::Losses;
                    let squares = if is_last { self.squares(vote)? } else { Vec::new() };
                    if vote == step::Vote::Norm {
                        norm_voting = Some(self.start_norm_vote(squares));
                    } else {
                        voting = Some(self.start_vote(loss, stop, &squares)?);
                    }
                    if is_last {
                        self.undecided.voted();
                    }
                }
                StepOp::FinishVote(step::Vote::Norm) => {
                    norm = Some(norm_voting.take().expect("a step's votes pair").wait()?);
                }
                StepOp::FinishVote(_) => {
                    found = Some(voting.take().expect("a step's votes pair").wait()?);
                }
                op => {
                    self.executor.run_op(op)?;
                    continue;
                }
            }
            let Executor { comm, spent, .. } = &mut self.executor;
            add_since(begun, comm, &mut spent.communicate);
        }
        self.undecided.begin();
        let found = found.expect("every step ends with a vote");
        if !found.is_of_one_attempt {
            let message = format!("the vote on step {}", self.step + 1);
            return Err(Error::Message {
                message,
                problem: "has pipelines that repeat a step others have done",
            });
        }
        Ok(Vote { squares: norm.or(found.squares), ..found })
    }

    /// Returns the sums of squared gradients by part of the model; 0 for parts that other voters report.
    fn squares(&self, vote: step::Vote) -> Result<Vec<f64>> {
        let sharded = self.executor.parts.values().any(|part| part.shards.is_some());
        let first = vote == step::Vote::Norm || self.replica == 0 || !self.each_step || sharded;
        let has_others = self.division.divides_experts() && self.givers.replicas.contains(&self.replica);
        if !first && !has_others {
            return Ok(vec![0.0; self.executor.placement.depth() as usize]);
        }
        self.executor.squares(Counts { only_experts: !first, only_cut: self.tensor > 0 })
    }

    /// Returns whether the loss and the gradients of this rank are finite, before they are averaged.
    fn is_sound(&self, loss: f64) -> bool {
        loss.is_finite() && self.executor.parts.values().all(Part::is_sound)
    }

    /// Returns the error of a dropped step: all ranks that voted report whether their own gradients are finite.
    fn not_finite(&self, cause: OptimError) -> Result<Error> {
        let told = self.voters.comm.all_gather_bytes(vec![u8::from(self.told.sound)])?;
        let job_rank = |voter: usize| self.voters.ranks[voter];
        let ranks = told.iter().enumerate().filter(|(_, told)| told.as_slice() != [1]);
        let ranks = ranks.map(|(voter, _)| job_rank(voter)).collect();
        Ok(Error::StepNotFinite { step: self.step + 1, tries: self.tries, ranks, cause: Box::new(cause) })
    }

    /// Returns the mean loss of this replica's last pass, if this rank has the model's last part; else 0. If
    /// several ranks have it, each returns its share, and the shares add up to the mean.
    fn own_loss(&mut self) -> Result<f64> {
        let Some(LossSum { sum, .. }) = self.executor.total_loss()? else { return Ok(0.0) };
        // With two copies of the model, or in a pool, each rank has some of the microbatches.
        let all = self.executor.counted_in_step(self.schedule.microbatches())?;
        Ok(if all > 0.0 { sum / all } else { 0.0 })
    }

    /// Returns the mean loss of the held-out batches in nats per token. Each replica evaluates some of the
    /// batches. A collective: all ranks must call it.
    pub fn evaluate(&mut self) -> Result<f64> {
        self.with_common(Self::evaluate_common)
    }

    fn evaluate_common(&mut self) -> Result<f64> {
        let microbatches = self.evaluation.order().microbatches();
        let armed = self.armed();
        self.executor.begin(Pass::Evaluation, microbatches);
        run(&self.evaluation, self.position, &mut self.executor)?;
        self.executor.sent()?;
        let total = self.executor.total_loss()?;
        drop(armed);
        let total = total.filter(|_| self.tensor == 0);
        let mut sums = total.map_or([0.0; 2], |LossSum { sum, tokens }| [sum, tokens]);
        // One path may have all windows, while the others wait.
        let paths = self.givers.of_paths.len().max(1) as u64;
        let deadline = self.executor.comm.deadline().0.saturating_mul(paths);
        let patient = self.executor.comm.clone().with_deadline(Nanos(deadline));
        patient.all_reduce(&mut sums, farflung_comm::ReduceOp::Sum)?;
        if sums[1] == 0.0 {
            return Err(no_targets("the held-out text"));
        }
        Ok(sums[0] / sums[1])
    }
}

/// Returns a rank's parts by number, the order in which all ranks communicate over them: two copies of the
/// model have their stages in opposite orders, and would deadlock in the order of stages.
fn by_number<'a>(parts: &'a mut BTreeMap<StageId, Part>, placement: &Placement) -> Vec<(u32, &'a mut Part)> {
    let mut parts: Vec<_> = parts.iter_mut().map(|(&stage, part)| (placement.part(stage), part)).collect();
    parts.sort_by_key(|(number, _)| *number);
    parts
}
