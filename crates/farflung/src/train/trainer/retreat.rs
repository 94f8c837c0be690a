//! Handling of a stop within a step: the step in flight is dropped, or committed if another rank has committed
//! it. The ranks that answer then form a new communicator.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::{MemoryByKind, Nanos, Rank, StageId};
use farflung_comm::ReduceOp;
use farflung_optim::Average;
use farflung_parallel::Plan;
use farflung_parallel::pipeline::Updates;
use farflung_tensor::{Device, Tensor};

use super::undecided::Committed;
use super::{Trainer, by_number};
use crate::train::executor::{Executor, Pass};
use crate::train::exit_listener::{ExitNotice, start_to_tell};
use crate::train::job::Job;
use crate::train::part::{Part, copy};
use crate::train::pieces::{FlatState, StateKind};
use crate::train::run_state::OptimizerCounters;
use crate::train::stop_in_step::missing;
use crate::train::zero;
use crate::{Error, Result};

/// Copy of a rank's state at the last step after which all replicas were equal.
#[derive(Debug)]
pub(super) struct RollbackPoint {
    step: u64,
    scale: Vec<f32>,
    parts: BTreeMap<StageId, PartSnapshot>,
    /// The host's memory, if the copies are there.
    host: Option<Device>,
}

impl RollbackPoint {
    /// Returns the number of steps after which the state was copied.
    pub(super) const fn step(&self) -> u64 {
        self.step
    }

    /// Returns the bytes of copies in the host's memory. The part's device counts the others.
    pub(super) fn held_on_host(&self) -> MemoryByKind {
        self.host.as_ref().map_or_else(MemoryByKind::default, Device::in_use_by_kind)
    }

    /// Returns the optimizer's counters.
    pub(super) fn counters(&self) -> OptimizerCounters {
        let updates = self.parts.values().map(|part| part.updates).max().unwrap_or(0);
        OptimizerCounters { updates, scale: self.scale.clone() }
    }

    /// Returns a state of a part; `None` if it is not among the copies.
    pub(super) fn state(&self, stage: StageId, kind: &StateKind) -> Option<&Tensor> {
        self.parts.get(&stage)?.states.get(kind)
    }
}

/// Copy of the state of one part.
#[derive(Debug)]
struct PartSnapshot {
    updates: u64,
    /// The optimizer's states, and the parameters unless the method of synchronisation keeps them itself.
    states: BTreeMap<StateKind, Tensor>,
    /// Number of rounds and the codec state of the average of gradients. `None` for other averages: they change
    /// only when replicas meet, and need no copy.
    gradients: Option<(u64, BTreeMap<String, Vec<f32>>)>,
}

impl PartSnapshot {
    /// Copies the state of a part: to `host` if it is given (for copies that are rare), else on the part's
    /// device (for copies at each step).
    fn new(part: &Part, each_step: bool, host: Option<&Device>) -> Result<Self> {
        let keeps = agreed(part).is_none();
        let is_kept = |state: &FlatState<'_>| match state.kind {
            StateKind::Parameters => keeps,
            StateKind::Optimizer(_) => true,
            _ => false,
        };
        let kept = |state: FlatState<'_>| {
            // State on disk is refused where a rank returns to an earlier step.
            let values = state.values.tensor()?;
            let place = |host: &Device| host.counting_for(state.kind.memory_kind());
            let copied = host.map(place).map_or_else(
                || copy(values),
                |host| Ok(host.tensor(&values.to_vec::<f32>()?, values.shape())?),
            );
            Some(copied.map(|copied| (state.kind, copied)))
        };
        let states = part.states(each_step).into_iter().filter(is_kept).filter_map(kept);
        let states = states.collect::<Result<_>>()?;
        let average = part.sync.as_ref().filter(|sync| each_step || sync.averages_gradients());
        let average = average.map(|sync| sync.average());
        let saved =
            |average: &Average| Ok::<_, Error>((average.round(), average.save("")?.into_iter().collect()));
        let gradients = average.map(saved).transpose()?;
        Ok(Self { updates: part.chain.step(), states, gradients })
    }

    fn restore(self, part: &mut Part) -> Result<()> {
        let Self { updates, states, gradients } = self;
        if let (Some((rounds, saved)), Some(sync)) = (gradients, &mut part.sync) {
            let get = |name: &str| saved.get(name).map(Vec::as_slice);
            sync.average_mut().restore("", rounds, get)?;
        }
        if let Some(params) = states.get(&StateKind::Parameters).or_else(|| agreed(part)) {
            let values = params.to_vec::<f32>()?;
            part.params.write(&values)?;
            part.params_changed();
        }
        let values = states.into_iter().map(|(kind, state)| Ok((kind, state.to_vec::<f32>()?)));
        let values = values.collect::<Result<BTreeMap<_, _>>>()?;
        let get = |name: &str| values.get(&StateKind::Optimizer(name.to_owned())).map(Vec::as_slice);
        Ok(part.chain.restore(updates, get)?)
    }
}

/// Returns the parameters of a part on which all replicas last agreed, if its method keeps them.
pub(super) fn agreed(part: &Part) -> Option<&Tensor> {
    part.sync.as_ref().and_then(|sync| sync.agreed())
}

impl Trainer {
    /// Records the current state, to which a stop within a later step returns. Called when all replicas are
    /// equal. Does nothing if replicas stay equal after each step and no step changes parameters before its
    /// commit.
    pub(in crate::train) fn set_rollback_point(&mut self) -> Result<()> {
        let parts = &self.executor.parts;
        let within = self.schedule.updates() != Updates::Flush;
        let apart = !self.each_step && parts.values().any(|part| part.sync.is_some());
        if !within && !apart {
            return Ok(());
        }
        let host = if apart { Some(Device::cpu(1)?) } else { None };
        let marked = |(&stage, part): (&StageId, &Part)| {
            Ok((stage, PartSnapshot::new(part, self.each_step, host.as_ref())?))
        };
        let parts = parts.iter().map(marked).collect::<Result<_>>()?;
        self.mark = Some(RollbackPoint { step: self.step, scale: self.scale.save().to_vec(), parts, host });
        Ok(())
    }

    /// Returns to the last step after which all replicas were equal, and drops the step in flight. A step that
    /// others may have committed is dropped, too.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn back_to_common(&mut self) -> Result<()> {
        if self.undecided.is_open() {
            self.resolve_vote(self.committed())?;
        }
        self.drop_step();
        self.restore_rollback_point()
    }

    fn restore_rollback_point(&mut self) -> Result<()> {
        let half_done = std::mem::take(&mut self.half_done);
        let gone_on = |mark: &RollbackPoint| half_done || mark.step != self.step;
        let Some(mut mark) = self.mark.take().filter(gone_on) else { return Ok(()) };
        for (stage, part) in &mut self.executor.parts {
            mark.parts.remove(stage).expect("a rank's parts do not change").restore(part)?;
        }
        self.scale.restore(&mark.scale);
        self.step = mark.step;
        self.window.clear();
        Ok(())
    }

    /// Drops the step in flight and forms a new communicator of the ranks that answer within `answer`.
    /// Afterwards this trainer works only with those at the same step, and can only save its state. Returns the
    /// ranks that do not answer or are at another step.
    ///
    /// A collective of all ranks that still run. They must have called [`Trainer::set_rollback_point`] after
    /// the steps on which they agreed.
    pub(in crate::train) fn retreat(&mut self, job: &Job, answer: Nanos) -> Result<Vec<Rank>> {
        let world = self.members.len();
        if world > 1 {
            // Other ranks may still commit a step that this rank has committed: they need frames that it sends.
            self.stop.wait_until_step_cancelled();
        }
        self.voting = None;
        // If this rank has voted but does not have the result, the ranks that have the result decide below.
        let open = self.each_step && self.undecided.is_open();
        if !open {
            self.drop_in_flight()?;
        }
        if world == 1 {
            return Ok(Vec::new());
        }
        let comm = self.stop.with_stop(self.executor.comm.clone()).with_deadline(answer);
        // Ranks of the same process share the stop request and need no message.
        let telling = if job.processes > 1 { start_to_tell(&comm, &ExitNotice::Stopped) } else { Vec::new() };
        let comm = comm.shrink()?;
        drop(telling);
        let own = StopPosition { rank: self.rank(), open, committed: self.committed() };
        let told = comm.all_gather_bytes(own.to_bytes())?;
        let mut standing: Vec<_> = told.iter().filter_map(|bytes| StopPosition::of_bytes(bytes)).collect();
        settle(&mut standing, |rank| job.plan.at(rank).data);
        let newest = standing.iter().map(|other| other.committed).max_by_key(|committed| committed.step);
        let newest = newest.unwrap_or(own.committed);
        if open {
            let settled = standing.iter().find(|other| other.rank == own.rank);
            if settled.is_some_and(|settled| settled.committed.step > own.committed.step) {
                self.resolve_vote(newest)?;
                self.set_rollback_point()?;
            }
            self.drop_in_flight()?;
        }
        let newest = newest.step;
        // Some ranks may have committed a step whose vote never arrives at others, because it passed through a
        // rank that no longer answers. Ranks at different steps are separated, and each group saves its state.
        let behind = u32::try_from(newest - self.step.min(newest)).unwrap_or(u32::MAX);
        let comm = comm.split(behind, self.rank().0)?;
        self.members = standing
            .iter()
            .filter(|other| other.committed.step == self.step)
            .map(|other| other.rank)
            .collect();
        self.executor.comm = comm.with_deadline(job.config.deadline);
        self.gather_shards(&job.plan)?;
        Ok(missing(world, &self.members))
    }

    /// Gathers the shards of the last step if the stop has interrupted that on some rank. Without all holders
    /// of this rank's parts, they stay as they are, and cannot be saved. A collective.
    fn gather_shards(&mut self, plan: &Plan) -> Result<()> {
        let Executor { comm, parts, placement, .. } = &mut self.executor;
        if !plan.divides_state() {
            return Ok(());
        }
        let mut stale = [u64::from(parts.values().any(|part| part.stale))];
        comm.all_reduce(&mut stale, ReduceOp::Max)?;
        if stale == [0] {
            return Ok(());
        }
        let own = plan.at(self.members[comm.rank().index()]);
        let holders = comm.split(zero::group_of(plan, own), own.data)?;
        for (_, part) in by_number(parts, placement) {
            part.shards = part.shards.as_ref().and_then(|shards| shards.among(holders.clone()));
            if part.shards.is_some() {
                part.gather_parameters()?;
            }
        }
        Ok(())
    }

    /// Drops the rest of the step in flight. Returns to the rollback point if this rank has trained since.
    fn drop_in_flight(&mut self) -> Result<()> {
        self.executor.begin(Pass::Evaluation, 0);
        self.executor.tied.give_up();
        self.executor.boundaries.rollback();
        for part in self.executor.parts.values_mut() {
            if let Some(sync) = &mut part.sync {
                sync.drop_in_flight();
            }
            part.rollback();
        }
        self.restore_rollback_point()
    }
}

/// Position of a rank that stops, as sent to the other ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct StopPosition {
    rank: Rank,
    /// Whether this rank has voted on the next step and has not received the result.
    open: bool,
    committed: Committed,
}

impl StopPosition {
    const BYTES: usize = 29;

    /// Returns whether the newest step that any rank has committed is the one on which this rank has voted. Its
    /// gradients are then averaged, and it can still commit that step.
    fn can_commit(&self, newest: Committed) -> bool {
        self.open && newest.step == self.committed.step + 1 && newest.squares.is_some()
    }

    fn to_bytes(self) -> Vec<u8> {
        let Committed { step, loss, squares } = self.committed;
        let mut bytes = self.rank.0.to_le_bytes().to_vec();
        bytes.push(u8::from(self.open));
        bytes.extend(step.to_le_bytes());
        bytes.extend(loss.to_le_bytes());
        bytes.extend(squares.unwrap_or(f64::NAN).to_le_bytes());
        bytes
    }

    /// Decodes the output of [`StopPosition::to_bytes`]. Returns `None` if the length is wrong.
    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (rank, rest) = bytes.split_first_chunk::<4>()?;
        let (open, rest) = rest.split_first()?;
        let (step, rest) = rest.split_first_chunk::<8>()?;
        let (loss, rest) = rest.split_first_chunk::<8>()?;
        let squares = f64::from_le_bytes(rest.try_into().ok()?);
        Some(Self {
            rank: Rank(u32::from_le_bytes(*rank)),
            open: *open == 1,
            committed: Committed {
                step: u64::from_le_bytes(*step),
                loss: f64::from_le_bytes(*loss),
                squares: squares.is_finite().then_some(squares),
            },
        })
    }
}

/// Moves ranks that have voted on the newest step that any rank has committed to that step: all ranks of a
/// pipeline that answer, or none. If no rank commits a step before all have voted, all can. With an early vote
/// ([`NormVote::Pipeline`](farflung_parallel::step::NormVote::Pipeline)), a pipeline may have
/// committed a step while a rank of another lacks an average: that pipeline stays whole at the step before.
fn settle(standing: &mut [StopPosition], pipeline_of: impl Fn(Rank) -> u32) {
    let newest = standing.iter().map(|other| other.committed).max_by_key(|committed| committed.step);
    let Some(newest) = newest else { return };
    let stays = |other: &&StopPosition| other.committed.step < newest.step && !other.can_commit(newest);
    let staying: BTreeSet<u32> = standing.iter().filter(stays).map(|other| pipeline_of(other.rank)).collect();
    for other in standing.iter_mut().filter(|other| !staying.contains(&pipeline_of(other.rank))) {
        if other.can_commit(newest) {
            *other = StopPosition { open: false, committed: newest, ..*other };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ranks_tell_is_read_again_and_other_lengths_are_not() {
        for (open, squares) in [(true, None), (false, Some(2.5))] {
            let committed = Committed { step: 1 << 40, loss: 5.25, squares };
            let told = StopPosition { rank: Rank(3), open, committed };
            assert_eq!(StopPosition::of_bytes(&told.to_bytes()), Some(told));
            assert_eq!(StopPosition::of_bytes(&told.to_bytes()[1..]), None);
        }
        assert_eq!(StopPosition::of_bytes(&[]), None);
    }

    #[test]
    fn an_open_vote_is_settled_by_the_step_that_it_was_about() {
        let committed = |step, squares| Committed { step, loss: 5.0, squares };
        let voted = StopPosition { rank: Rank(0), open: true, committed: committed(6, Some(1.0)) };
        for (newest, expected) in [
            (committed(7, Some(4.0)), 7),
            (committed(6, Some(1.0)), 6),
            (committed(8, Some(4.0)), 6),
            (committed(7, None), 6),
        ] {
            let told = StopPosition { rank: Rank(1), open: false, committed: newest };
            // In one pipeline, and in two.
            for pipeline_of in [|_| 0, |rank: Rank| rank.0] {
                let mut standing = [voted, told];
                settle(&mut standing, pipeline_of);
                assert_eq!(standing[0].committed.step, expected);
                let mut standing = [StopPosition { open: false, ..voted }, told];
                settle(&mut standing, pipeline_of);
                assert_eq!(standing[0].committed.step, 6);
            }
        }
    }

    #[test]
    fn a_pipeline_moves_to_the_newest_step_as_a_whole_or_not_at_all() {
        let at = |rank, open, step| StopPosition {
            rank: Rank(rank),
            open,
            committed: Committed { step, loss: 5.0, squares: Some(1.0) },
        };
        let settled = |mut standing: Vec<StopPosition>| {
            settle(&mut standing, |rank| rank.0 / 2);
            standing.into_iter().map(|other| other.committed.step).collect::<Vec<_>>()
        };
        let others = [at(2, false, 7), at(3, true, 6)];
        let with = |first, second| settled([vec![first, second], others.to_vec()].concat());
        assert_eq!(with(at(0, true, 6), at(1, true, 6)), [7, 7, 7, 7]);
        assert_eq!(with(at(0, true, 6), at(1, false, 7)), [7, 7, 7, 7]);
        // One has not voted: its average may be missing.
        assert_eq!(with(at(0, true, 6), at(1, false, 6)), [6, 6, 7, 7]);
        // One does not answer.
        assert_eq!(settled(vec![at(0, true, 6), others[0], others[1]]), [7, 7, 7]);
    }
}
