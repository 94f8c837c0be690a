//! A worker that computes and sends nothing: it records the ops of a rank in a step, in the same order as
//! `executor.rs`, `part.rs`, `tied.rs` and `trainer.rs` run them.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use farflung_base::{Nanos, Rank, StageId};
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::{
    Action, ComputeKind, LoweredKind, Message, Placement, StageCost, TiedWeights, Updates, Worker,
};
use farflung_parallel::script::ScriptOp;

use super::operations::{Key, Operations};
use crate::train::bind::{ReplicaSchedule, last_backwards};
use crate::{Error, Result};

/// Positions in a rank's list of ops.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Number of ops until the end of the first pass.
    pub(super) passed: usize,
    /// Number of ops until the end of each step.
    pub(super) steps: Vec<usize>,
    /// The ops of each action of the schedule.
    pub(super) worked: Vec<Worked>,
}

/// An action of the schedule and its ops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Worked {
    pub(super) action: Action,
    /// Range of indices in the list of ops.
    pub(super) ops: Range<usize>,
}

/// State of a part on this rank.
#[derive(Debug, Default)]
struct PartState {
    /// Whether the averages of the next update have been started.
    reducing: bool,
    /// Number of updates whose averages have been waited for.
    updates: u32,
    /// Number of updates applied.
    version: u32,
    /// Numbers of the operations that sum the token table's gradients, for updates that wait for them.
    due: VecDeque<usize>,
}

/// Records the ops of one rank: computations, starts of operations, and waits.
pub(super) struct Recorder<'a, 'b, 'o> {
    schedule: &'a ReplicaSchedule,
    operations: &'b mut Operations<'o>,
    replica: u32,
    /// Times by stage and slice.
    costs: Vec<StageCost>,
    parts: BTreeMap<StageId, PartState>,
    /// The microbatch whose backward pass is the last of a step, by stage.
    last: BTreeMap<StageId, u32>,
    each_step: bool,
    /// This rank's stage with the token table, if the other stage with it is on another rank.
    table: Option<StageId>,
    rounds: u32,
    begun_table: Option<usize>,
    ops: Vec<ScriptOp>,
    marks: Marks,
    step: u32,
}

impl<'a, 'b, 'o> Recorder<'a, 'b, 'o> {
    pub(super) fn new(
        schedule: &'a ReplicaSchedule,
        replica: u32,
        position: Rank,
        operations: &'b mut Operations<'o>,
    ) -> Result<Self> {
        let placement = schedule.placement();
        let user = |stage: &StageId| placement.is_first(*stage) || placement.is_last(*stage);
        let table = placement.homes_of(position).find(user).filter(|_| schedule.tie() == TiedWeights::Across);
        Ok(Self {
            costs: schedule.cost.by_slice(schedule.schedule.order())?,
            parts: placement.homes_of(position).map(|stage| (stage, PartState::default())).collect(),
            last: last_backwards(schedule, position),
            each_step: operations.plan.averages_each_step(),
            table,
            rounds: 0,
            begun_table: None,
            ops: Vec::new(),
            marks: Marks::default(),
            step: 0,
            schedule,
            operations,
            replica,
        })
    }

    pub(super) fn done(self) -> (Vec<ScriptOp>, Marks) {
        (self.ops, self.marks)
    }

    /// Starts a step with an empty pipeline.
    pub(super) fn begin_step(&mut self, step: u32) {
        self.step = step;
        self.parts.values_mut().for_each(|part| *part = PartState::default());
        (self.rounds, self.begun_table) = (0, None);
    }

    /// Ends a step.
    pub(super) fn end_step(&mut self) {
        self.marks.steps.push(self.ops.len());
    }

    /// Records that the processor is busy.
    pub(super) fn compute(&mut self, time: Nanos) {
        self.ops.push(ScriptOp::Compute(time));
    }

    fn placement(&self) -> &'a Placement {
        self.schedule.placement()
    }

    fn number(&mut self, key: Key) -> Result<usize> {
        self.operations.number(self.step, key, self.schedule)
    }

    fn begin(&mut self, key: Key) -> Result<usize> {
        let number = self.number(key)?;
        self.ops.push(ScriptOp::Begin(number));
        Ok(number)
    }

    fn complete(&mut self, number: usize) {
        self.ops.push(ScriptOp::Await(number));
    }

    fn state(&mut self, stage: StageId) -> &mut PartState {
        let home = self.placement().storage_stage(stage);
        self.parts.get_mut(&home).expect("the schedule gives a rank its own stages")
    }

    fn cost(&self, action: Action) -> StageCost {
        self.costs[action.stage.index() * self.schedule.slices.len() + usize::from(action.slice)]
    }

    /// Applies the updates that wait for the token table, up to this version; all of them without one.
    fn catch_up(&mut self, stage: StageId, version: Option<u32>) {
        while version.is_none_or(|version| self.state(stage).version < version) {
            let Some(number) = self.state(stage).due.pop_front() else { break };
            self.complete(number);
            self.state(stage).version += 1;
        }
    }

    /// Records a whole backward pass. If one part is the whole model and averages overlap with it, the step's
    /// last backward pass starts the average of each bucket when the bucket is final.
    fn whole_backward(&mut self, action: Action) -> Result<()> {
        let (stage, cost) = (action.stage, self.cost(action));
        if self.placement().depth() > 1 {
            self.compute(cost.backward());
            return Ok(());
        }
        let recompute = self.operations.plan.parts[0].recompute;
        let again = if recompute == Recompute::None { Nanos::ZERO } else { cost.recompute };
        let took = cost.backward().saturating_add(again);
        let leaves = self.each_step && self.last.get(&stage) == Some(&action.microbatch);
        let leaves = leaves && self.operations.plan.outermost().overlap;
        let facts = &self.operations.parts[0];
        let shares: Vec<u64> = facts.ranges.iter().map(|len| took.0 * len / facts.elements).collect();
        let ready: Vec<usize> = if leaves { facts.ready_after.clone() } else { Vec::new() };
        let buckets = self.operations.parts[0].buckets.len();
        for (range, share) in shares.into_iter().enumerate() {
            self.compute(Nanos(share));
            for bucket in (0..buckets).filter(|&bucket| ready.get(bucket) == Some(&range)) {
                self.begin(Key::Bucket { part: 0, update: 0, bucket, exchange: 0 })?;
            }
        }
        self.state(stage).reducing = leaves;
        Ok(())
    }

    fn bucket(&mut self, stage: StageId, bucket: usize, exchange: usize) -> Key {
        let update = self.state(stage).updates;
        Key::Bucket { part: self.placement().part(stage), update, bucket, exchange }
    }

    fn buckets(&self, stage: StageId) -> usize {
        self.operations.parts[self.placement().part(stage) as usize].buckets.len()
    }

    /// Starts all averages of a part.
    fn begin_averages(&mut self, stage: StageId) -> Result<()> {
        for bucket in 0..self.buckets(stage) {
            let key = self.bucket(stage, bucket, 0);
            self.begin(key)?;
        }
        self.state(stage).reducing = true;
        Ok(())
    }

    /// Waits for all averages of a part.
    fn finish_averages(&mut self, stage: StageId) -> Result<()> {
        if !self.state(stage).reducing {
            self.begin_averages(stage)?;
        }
        let part = self.placement().part(stage) as usize;
        let exchanges: Vec<usize> = self.operations.parts[part].buckets.iter().map(Vec::len).collect();
        // Averages of several exchanges continue in the order of buckets, as in `Average`.
        for exchange in 0..exchanges.iter().copied().max().unwrap_or(0) {
            for bucket in (0..exchanges.len()).filter(|&bucket| exchange < exchanges[bucket]) {
                let key = self.bucket(stage, bucket, exchange);
                let number = self.number(key)?;
                self.complete(number);
                if exchange + 1 < exchanges[bucket] {
                    let next = self.bucket(stage, bucket, exchange + 1);
                    self.begin(next)?;
                }
            }
        }
        let state = self.state(stage);
        (state.reducing, state.updates) = (false, state.updates + 1);
        Ok(())
    }

    /// Starts the sum of the table's gradients, unless it was started already; returns the operation's number.
    fn begin_table(&mut self) -> Result<usize> {
        if let Some(begun) = self.begun_table.take() {
            return Ok(begun);
        }
        let key = Key::Table { replica: self.replica, round: self.rounds };
        self.rounds += 1;
        self.begin(key)
    }

    /// Records an update of a part that does not wait for other parts.
    fn update(&mut self, stage: StageId) -> Result<()> {
        if self.each_step {
            self.finish_averages(stage)?;
        }
        if self.table == Some(stage) {
            let number = self.begin_table()?;
            self.state(stage).due.push_back(number);
        } else {
            self.state(stage).version += 1;
        }
        Ok(())
    }

    /// Returns this rank's stages in the order in which all ranks communicate over them.
    fn by_part(&self) -> Vec<StageId> {
        let mut stages: Vec<StageId> = self.parts.keys().copied().collect();
        stages.sort_by_key(|&stage| self.placement().part(stage));
        stages
    }

    /// Records the averages and votes after the last microbatch, as in `Trainer::pass`.
    pub(super) fn after_pass(&mut self) -> Result<()> {
        if self.step == 0 {
            self.marks.passed = self.ops.len();
        }
        let vote = Key::Vote((!self.each_step).then_some(self.replica));
        let early = if self.placement().depth() == 1 { Some(self.begin(vote)?) } else { None };
        if self.schedule.updates() == Updates::Flush {
            for stage in self.by_part() {
                if self.each_step {
                    self.finish_averages(stage)?;
                }
            }
            if self.table.is_some() {
                let number = self.begin_table()?;
                self.complete(number);
            }
        }
        for stage in self.by_part() {
            self.catch_up(stage, None);
        }
        let vote = match early {
            Some(number) => number,
            None => self.begin(vote)?,
        };
        self.complete(vote);
        Ok(())
    }

    /// Records the synchronisation of replicas after local steps, as in `Trainer::local_step`.
    pub(super) fn meet(&mut self) -> Result<()> {
        let window = self.begin(Key::Window)?;
        for stage in self.by_part() {
            self.begin_averages(stage)?;
            self.finish_averages(stage)?;
        }
        if let Some(stage) = self.table.filter(|&stage| self.buckets(stage) > 0) {
            // The rank with the first stage sends its average of the table; the one with the last stage
            // receives it.
            let number = self.begin(Key::TakenTable { replica: self.replica })?;
            if !self.placement().is_first(stage) {
                self.complete(number);
            }
        }
        if self.placement().depth() > 1 {
            let refusals = self.begin(Key::Refusals)?;
            self.complete(refusals);
        }
        self.complete(window);
        Ok(())
    }
}

impl Worker for Recorder<'_, '_, '_> {
    type Data = ();
    type Pending = usize;
    type Error = Error;

    fn compute(&mut self, action: Action, _: Option<()>) -> Result<Option<()>> {
        let (cost, stage) = (self.cost(action), action.stage);
        let before = self.ops.len();
        match action.kind {
            ComputeKind::Forward => {
                let (part, depth) = (self.placement().part(stage), self.placement().depth());
                self.catch_up(stage, Some(self.schedule.updates().version(part, depth, action.microbatch)));
                self.compute(cost.forward);
            }
            ComputeKind::Backward if self.schedule.slices.len() == 1 => self.whole_backward(action)?,
            // With a flush, all parts are updated together after all ranks have agreed.
            ComputeKind::Step if self.schedule.updates() == Updates::Flush => {}
            ComputeKind::Step => self.update(stage)?,
            kind => self.compute(cost.time(kind)),
        }
        self.marks.worked.push(Worked { action, ops: before..self.ops.len() });
        Ok(Some(()))
    }

    fn send(&mut self, _: Rank, message: Message, (): ()) -> Result<()> {
        self.begin(Key::Message(self.replica, message)).map(drop)
    }

    fn receive(&mut self, _: Rank, message: Message) -> Result<usize> {
        self.begin(Key::Message(self.replica, message))
    }

    fn wait(&mut self, number: usize) -> Result<()> {
        self.complete(number);
        Ok(())
    }

    fn start_transfer(&mut self, kind: LoweredKind, stage: StageId, _: u32, _: u16) -> Result<()> {
        match kind {
            LoweredKind::Reduce => {
                let leaves = self.each_step && self.operations.plan.outermost().overlap;
                if leaves && !self.state(stage).reducing {
                    self.begin_averages(stage)?;
                }
            }
            LoweredKind::ReduceTied => {
                let alone = self.operations.plan.replicas() == 1 && !self.placement().is_pooled();
                let early = alone || !self.each_step;
                if early && self.table.is_some() {
                    let begun = self.begin_table()?;
                    self.begun_table = Some(begun);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn restore_output(&mut self, message: Message) -> Result<()> {
        Err(Error::Message { message: message.to_string(), problem: "was not kept" })
    }
}
