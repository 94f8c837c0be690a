//! Prices the list of a rank's step: computations become times, and messages, averages and votes become
//! operations on the links that ranks share. Nothing is computed or sent.

mod divided;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use farflung_base::{Axis, Nanos, Rank, StageId};
use farflung_optim::{ReductionOrder, Shards};
use farflung_parallel::pipeline::{
    Action, ComputeKind, Lowered, LoweredKind, Message, Op, Placement, StageCost,
};
use farflung_parallel::script::ScriptOp;
use farflung_parallel::step::{Moment, RankStep, StepOp, Vote};

use divided::{ComingUnit, LeavingWindow};

use super::layer_exchanges::LayerTurn;
use super::operations::{BucketFacts, Key, LayerPass, Operations, PartFacts};
use crate::Result;
use crate::train::bind::ReplicaSchedule;
use crate::train::executor::share;
use crate::train::fetch_order::FetchOrder;

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

/// Progress of a part's average.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Average {
    #[default]
    NotStarted,
    /// Its buckets leave during the next backward pass.
    Open,
    Started,
}

/// State of a part on this rank.
#[derive(Debug, Default)]
struct PartState {
    average: Average,
    /// Number of updates whose averages have been waited for.
    updates: u32,
    /// The windows in which its gradients leave for their owners.
    order: ReductionOrder,
    leaving: Vec<LeavingWindow>,
    /// The units of its weights that the rank has or gathers, and the operations that gather them.
    fetches: FetchOrder,
    coming: Vec<ComingUnit>,
    gathered: u32,
    /// The first elements of the units that the rank's group has once more.
    filled: BTreeSet<usize>,
    /// Numbers of the operations that sum the token table's gradients, for updates that wait for them.
    due: VecDeque<usize>,
}

/// Prices the steps of one rank.
pub(super) struct Pricing<'a, 'b, 'o> {
    schedule: &'a ReplicaSchedule,
    list: RankStep,
    operations: &'b mut Operations<'o>,
    rank: Rank,
    /// The first rank of its pipeline.
    first: Rank,
    replica: u32,
    /// Times by stage and slice.
    costs: Vec<StageCost>,
    parts: BTreeMap<StageId, PartState>,
    /// Whether gradients are averaged in each step.
    each_step: bool,
    /// Whether the other stage with the token table is on another rank.
    table: Option<StageId>,
    rounds: u32,
    begun_table: Option<usize>,
    votes: BTreeMap<Vote, usize>,
    ops: Vec<ScriptOp>,
    marks: Marks,
    step: u32,
}

impl<'a, 'b, 'o> Pricing<'a, 'b, 'o> {
    pub(super) fn new(
        schedule: &'a ReplicaSchedule,
        rank: Rank,
        operations: &'b mut Operations<'o>,
    ) -> Result<Self> {
        let (placement, plan) = (schedule.placement(), operations.plan);
        let (at, first) = (plan.at(rank), plan.group(rank, Axis::Pipeline)[0]);
        let position = Rank(at.pipeline);
        Ok(Self {
            list: schedule.step(position, operations.plan)?,
            costs: schedule.cost.by_slice(schedule.schedule.order())?,
            parts: BTreeMap::new(),
            each_step: operations.plan.averages_each_step(),
            table: placement.end_of(position).filter(|_| schedule.is_tied_across()),
            rounds: 0,
            begun_table: None,
            votes: BTreeMap::new(),
            ops: Vec::new(),
            marks: Marks::default(),
            step: 0,
            schedule,
            operations,
            rank,
            first,
            replica: at.data,
        })
    }

    pub(super) fn done(self) -> (Vec<ScriptOp>, Marks) {
        (self.ops, self.marks)
    }

    /// Starts a step with an empty pipeline.
    pub(super) fn begin_step(&mut self, step: u32) {
        self.step = step;
        self.parts.clear();
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

    /// Prices the list of a moment.
    pub(super) fn run(&mut self, moment: Moment) -> Result<()> {
        for op in self.list.at(moment).to_vec() {
            self.price(op)?;
        }
        if moment == Moment::Pass && self.step == 0 {
            self.marks.passed = self.ops.len();
        }
        Ok(())
    }

    fn price(&mut self, op: StepOp) -> Result<()> {
        match op {
            StepOp::Pass(Lowered::Compute(op)) => self.actions(op)?,
            StepOp::Pass(entry @ Lowered::Move { kind, stage, .. }) => {
                match (entry.message(self.placement()), kind) {
                    (Some((_, message)), _) => drop(self.begin(Key::Message(self.first, message))?),
                    (None, LoweredKind::Reduce) => self.begin_averages(stage)?,
                    (None, LoweredKind::ReduceTied) => {
                        let begun = self.begin_table()?;
                        self.begun_table = Some(begun);
                    }
                    // Gathers, frees and moves of activations take part in no plan.
                    (None, _) => {}
                }
            }
            StepOp::OpenReduce(stage) => self.state(stage).average = Average::Open,
            // Methods whose replicas take local steps average gradients in few steps, which are not priced.
            StepOp::FinishReduce(stage) if self.each_step => self.finish_averages(stage)?,
            StepOp::Exchange(stage) => {
                self.begin_averages(stage)?;
                self.finish_averages(stage)?;
            }
            StepOp::FinishTied if self.table.is_some() => {
                let number = self.begin_table()?;
                self.complete(number);
            }
            StepOp::Defer { stage, .. } => {
                let number = self.begin_table()?;
                self.state(stage).due.push_back(number);
            }
            StepOp::CatchUp(stage) => {
                if let Some(number) = self.state(stage).due.pop_front() {
                    self.complete(number);
                }
            }
            StepOp::StartVote(vote) => {
                let number = self.begin(Key::Vote(vote, self.voters(vote)))?;
                self.votes.insert(vote, number);
            }
            StepOp::FinishVote(vote) => {
                if let Some(number) = self.votes.remove(&vote) {
                    self.complete(number);
                }
            }
            StepOp::GatherParameters(stage) => self.gather_shards(stage)?,
            StepOp::TakeExchanged => self.take_exchanged()?,
            StepOp::Agree => {
                let refusals = self.begin(Key::Refusals)?;
                self.complete(refusals);
            }
            // They take no time, or are assumed to have arrived in time.
            StepOp::FinishReduce(_)
            | StepOp::FinishTied
            | StepOp::TakeTied
            | StepOp::Contribute(_)
            | StepOp::Update { .. }
            | StepOp::Prepare(_)
            | StepOp::Apply(_)
            | StepOp::Mix(_)
            | StepOp::Depart(_) => {}
        }
        Ok(())
    }

    /// Returns the replica whose ranks take a vote; `None` if all ranks take it.
    fn voters(&self, vote: Vote) -> Option<u32> {
        let all = match vote {
            Vote::Window => true,
            Vote::Norm => false,
            Vote::Whole | Vote::Losses => self.each_step,
        };
        (!all).then_some(self.replica)
    }

    /// Prices computations: waits for what they need from other ranks, then computes.
    fn actions(&mut self, op: Op) -> Result<()> {
        let placement = self.placement();
        let crossing = |message: &Message| message.wire(placement).is_some();
        for action in op.actions() {
            if let Some(message) = Message::taken_by(action, placement).filter(crossing) {
                let number = self.number(Key::Message(self.first, message))?;
                self.complete(number);
            }
        }
        for action in op.actions() {
            let (cost, before) = (self.cost(action), self.ops.len());
            match action.kind {
                ComputeKind::Backward if self.schedule.slices.len() == 1 => {
                    self.backward(action, cost.backward(), true)?;
                }
                ComputeKind::Backward => {
                    self.pass(action, ComputeKind::BackwardInput, cost.input)?;
                    self.exchange_layers(action, LayerPass::Input)?;
                    self.backward(action, cost.weight, false)?;
                }
                ComputeKind::BackwardWeight => self.backward(action, cost.weight, false)?,
                kind => {
                    self.pass(action, kind, cost.time(kind))?;
                    let pass = match kind {
                        ComputeKind::Forward => Some(LayerPass::Forward),
                        ComputeKind::Recompute => Some(LayerPass::Recompute),
                        ComputeKind::BackwardInput => Some(LayerPass::Input),
                        _ => None,
                    };
                    pass.map_or(Ok(()), |pass| self.exchange_layers(action, pass))?;
                }
            }
            self.marks.worked.push(Worked { action, ops: before..self.ops.len() });
        }
        Ok(())
    }

    /// Prices the backward pass of a part's weights, or the `whole` one. If the average is open, each bucket
    /// leaves when it is final.
    fn backward(&mut self, action: Action, took: Nanos, whole: bool) -> Result<()> {
        let stage = action.stage;
        let ranges = self.facts(stage).ranges.len();
        let divided = !self.facts(stage).reductions.is_empty();
        if self.state(stage).average != Average::Open && !divided {
            self.compute(took);
            if !whole {
                return self.exchange_layers(action, LayerPass::Weight);
            }
            return (0..=ranges)
                .try_for_each(|range| self.exchange_layers(action, LayerPass::Backward(range)));
        }
        let facts = self.facts(stage);
        let shares: Vec<Nanos> = facts.ranges.iter().map(|&len| share(took, len, facts.elements)).collect();
        let ready_after: Vec<usize> = facts.buckets.iter().map(|bucket| bucket.ready_after).collect();
        let weights = facts.weights.as_ref().filter(|_| whole);
        let units = weights.map_or_else(Vec::new, |weights| weights.units.clone());
        let layers = weights.map_or_else(Vec::new, |weights| weights.backward.clone());
        self.state(stage).fetches.begin(layers.clone());
        let mut layers = layers.into_iter();
        for (range, share) in shares.into_iter().enumerate() {
            // Recomputations read other layers before their own. The embeddings' gradients need no weights.
            for layer in layers.by_ref() {
                self.fetch(stage, &layer)?;
                if layer.first() == units.get(range) {
                    break;
                }
            }
            if whole {
                self.exchange_layers(action, LayerPass::Backward(range))?;
            }
            self.compute(share);
            for bucket in (0..ready_after.len()).filter(|&bucket| ready_after[bucket] == range) {
                self.begin_bucket(stage, bucket, 0)?;
            }
            if divided {
                self.scatter(action, range)?;
            }
        }
        if whole {
            self.exchange_layers(action, LayerPass::Backward(ranges))?;
        }
        self.state(stage).average = Average::Started;
        Ok(())
    }

    /// Prices the exchanges of layers in a pass. The rank waits for each, or, of those along a ring, where it
    /// needs what arrives.
    fn exchange_layers(&mut self, action: Action, pass: LayerPass) -> Result<()> {
        let Action { stage, microbatch, slice, .. } = action;
        let part = self.placement().part(stage);
        let mut numbers = Vec::new();
        for (exchange, turn) in self.operations.layer_turns(part, self.rank, pass).into_iter().enumerate() {
            let key = |first| Key::Layer { first, stage, microbatch, slice, pass, exchange };
            numbers.push(match turn {
                LayerTurn::Begin(first) => self.begin(key(first))?,
                LayerTurn::Whole(first) => {
                    let number = self.begin(key(first))?;
                    self.complete(number);
                    number
                }
                LayerTurn::Await(index) => {
                    let number = numbers[index];
                    self.complete(number);
                    number
                }
            });
        }
        Ok(())
    }

    /// Prices the copy of the averaged token table: the rank with the first stage sends it, the one with the
    /// last stage receives it.
    fn take_exchanged(&mut self) -> Result<()> {
        if let Some(stage) =
            self.table.filter(|&stage| self.buckets(stage).iter().any(|bucket| !bucket.exchanges.is_empty()))
        {
            let number = self.begin(Key::TakenTable { first: self.first })?;
            if !self.placement().is_first(stage) {
                self.complete(number);
            }
        }
        Ok(())
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
        let in_groups = self.group(stage).is_some();
        let ahead = self.operations.plan.outermost().overlap;
        let new = || PartState {
            order: ReductionOrder::new(in_groups),
            fetches: FetchOrder::new(ahead),
            ..PartState::default()
        };
        self.parts.entry(self.placement().storage_stage(stage)).or_insert_with(new)
    }

    fn cost(&self, action: Action) -> StageCost {
        self.costs[action.stage.index() * self.schedule.slices.len() + usize::from(action.slice)]
    }

    /// Returns a part as this rank has it.
    fn facts(&self, stage: StageId) -> &PartFacts {
        self.operations.part(self.placement().part(stage), self.rank)
    }

    fn buckets(&self, stage: StageId) -> &[BucketFacts] {
        &self.facts(stage).buckets
    }

    /// Returns an exchange of a bucket; `None` if one rank alone holds it.
    fn bucket(&mut self, stage: StageId, bucket: usize, exchange: usize) -> Option<Key> {
        let update = self.state(stage).updates;
        let BucketFacts { key, exchanges, .. } = &self.buckets(stage)[bucket];
        let part = self.placement().part(stage);
        let tensor = key.tensor_of(self.operations.plan.at(self.rank).tensor);
        let key = Key::Bucket { part, tensor, update, bucket: *key, exchange };
        (exchange < exchanges.len()).then_some(key)
    }

    fn begin_bucket(&mut self, stage: StageId, bucket: usize, exchange: usize) -> Result<()> {
        match self.bucket(stage, bucket, exchange) {
            Some(key) => self.begin(key).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Starts all averages of a part, unless they were started.
    fn begin_averages(&mut self, stage: StageId) -> Result<()> {
        if self.state(stage).average == Average::Started {
            return Ok(());
        }
        for bucket in 0..self.buckets(stage).len() {
            self.begin_bucket(stage, bucket, 0)?;
        }
        self.state(stage).average = Average::Started;
        Ok(())
    }

    /// Waits for all averages of a part.
    fn finish_averages(&mut self, stage: StageId) -> Result<()> {
        self.begin_averages(stage)?;
        self.finish_reductions(stage)?;
        let exchanges: Vec<usize> = self.buckets(stage).iter().map(|bucket| bucket.exchanges.len()).collect();
        // Averages of several exchanges continue in the order of buckets, as in `Average`.
        for exchange in 0..exchanges.iter().copied().max().unwrap_or(0) {
            for bucket in (0..exchanges.len()).filter(|&bucket| exchange < exchanges[bucket]) {
                if let Some(key) = self.bucket(stage, bucket, exchange) {
                    let number = self.number(key)?;
                    self.complete(number);
                }
                self.begin_bucket(stage, bucket, exchange + 1)?;
            }
        }
        let state = self.state(stage);
        (state.average, state.updates) = (Average::NotStarted, state.updates + 1);
        Ok(())
    }

    /// Prices the gather of what the holders of a part have updated, in its windows.
    fn gather_shards(&mut self, stage: StageId) -> Result<()> {
        let part = self.placement().part(stage);
        let tensor = self.operations.plan.at(self.rank).tensor;
        let windows = self.facts(stage).gathers.len();
        let mut begun = VecDeque::new();
        for window in 0..windows {
            if begun.len() == Shards::IN_FLIGHT {
                begun.pop_front().into_iter().for_each(|number| self.complete(number));
            }
            begun.push_back(self.begin(Key::Shards { part, tensor, window })?);
        }
        for number in begun {
            self.complete(number);
        }
        Ok(())
    }

    /// Starts the sum of the table's gradients, unless it was started already; returns the operation's number.
    fn begin_table(&mut self) -> Result<usize> {
        if let Some(begun) = self.begun_table.take() {
            return Ok(begun);
        }
        let key = Key::Table { first: self.first, round: self.rounds };
        self.rounds += 1;
        self.begin(key)
    }
}
