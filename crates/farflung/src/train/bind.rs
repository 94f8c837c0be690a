//! Derives a replica's step from the plan: the order of work of its ranks, lowered, with predicted times. A
//! pure function of the job, so that every rank derives the same. It uses no tensors.

use std::ops::Range;

use farflung_base::{Axis, Link, Nanos, Rank, StageId};
use farflung_parallel::pipeline::{
    Action, ArrivalRule, Boundary, ComputeOrder, Content, Lowering, Op, PipelineCost, Placement, ResumedStep,
    Schedule, SliceShare, StageCost, TiedWeights, Updates,
};
use farflung_parallel::step::{NormVote, RankStep, ReplicaSteps, StepSettings};
use farflung_parallel::{Part, ScheduleSource};
use farflung_zoo::ModelSpec;
use farflung_zoo::spec::HeadSpec;

use super::bound_plan::BoundPlan;
use super::boundary;
use super::costs::{Machines, Work};
use super::division::Division;
use super::job::Job;
use crate::{Error, Result};

/// The schedule with which one replica executes the plan's step, with predicted times.
#[derive(Debug, Clone)]
pub struct ReplicaSchedule {
    /// The schedule's name; `own` for a schedule file of the user.
    pub name: String,
    /// The work of a step.
    pub schedule: Schedule,
    /// The rule by which ranks choose their next action among those whose messages have arrived, if the
    /// schedule is such a rule; `schedule` is then a prediction.
    pub arrivals: Option<ArrivalRule>,
    /// The layers of each part of the model.
    pub layers: Vec<Range<usize>>,
    /// The positions of each slice of a sequence's tokens; a single slice if microbatches are not sliced.
    pub slices: Vec<Range<usize>>,
    /// Predicted times of parts and links on this replica's machines.
    pub cost: PipelineCost,
    /// Which ranks add up the gradients of the token table.
    tie: TiedWeights,
    /// Whether a pipeline may apply a step before the others have their averages.
    early_vote: bool,
}

impl ReplicaSchedule {
    /// Makes the schedule of a replica of a job.
    ///
    /// Errors: [`Error::Setting`] if the plan's schedule does not support these costs; [`Error::Parallel`] for
    /// a memory budget into which a part does not fit.
    pub fn new(job: &Job, replica: u32) -> Result<Self> {
        Self::of_rest(job, replica, None)
    }

    /// Makes the schedule as [`ReplicaSchedule::new`] does. If a part of a step is done, makes that of its
    /// rest; stages are then pools.
    ///
    /// Errors: as [`ReplicaSchedule::new`].
    pub(super) fn of_rest(job: &Job, replica: u32, step: Option<&ResumedStep>) -> Result<Self> {
        let schedule = Self::make((&job.plan, step), &job.model, &job.machines()?, replica)?;
        Ok(Self { early_vote: !job.elastic && !job.late_vote, ..schedule })
    }

    /// Makes the schedule of a replica of a plan, for a model on given machines.
    ///
    /// Errors: as [`ReplicaSchedule::new`].
    pub fn of(plan: &BoundPlan, model: &ModelSpec, machines: &Machines, replica: u32) -> Result<Self> {
        Self::make((plan, None), model, machines, replica)
    }

    /// Returns which ranks add up the gradients of the token table, which a tied head uses as the embedding
    /// does.
    #[must_use]
    pub const fn tie(&self) -> TiedWeights {
        self.tie
    }

    /// Returns whether the token table is shared by stages on different ranks.
    pub(super) fn is_tied_across(&self) -> bool {
        self.tie == TiedWeights::Across
    }

    fn make(
        (plan, resumed): (&BoundPlan, Option<&ResumedStep>),
        model: &ModelSpec,
        machines: &Machines,
        replica: u32,
    ) -> Result<Self> {
        let count = plan.microbatches[replica as usize];
        let pipeline = plan.pipeline_of(replica);
        let works = Work::of_each(model, plan)?;
        let work = &works[0];
        let Machines { topology, rates } = machines;
        let link = |from: Rank, to: Rank| {
            let (from, to) = (pipeline[from.index()], pipeline[to.index()]);
            Link { bandwidth: topology.rate(from, to), latency: topology.link(from, to).latency }
        };
        // Schedules depend only on the links between neighbours; with pools, on all links that microbatches may
        // cross.
        let links: Vec<Link> = match plan.pools() {
            Some(pools) => pools.neighbours().map(|(from, to)| link(from, to)).collect(),
            None => (1..plan.stages()).map(|r| link(Rank(r - 1), Rank(r))).collect(),
        };
        // The order of work is made as if all boundaries had the time of the slowest link, with messages of the
        // size that the first boundary has forward.
        let slices = positions(&plan.pipeline.slices, model.context);
        let own = Division::of(plan).positions(0, &slices)?;
        let crossing = |boundary: usize, content| boundary::bytes(plan, boundary, content, &own, model);
        let bytes = if links.is_empty() { work.hidden_bytes() } else { crossing(0, Content::Activation)? };
        let hop = links.iter().map(|link| link.time(bytes)).max().unwrap_or_default();
        // Costs do not affect where a part is placed, but its placement affects its cost: first place the parts
        // with equal rates.
        let cost_at = |part: &Part, position: Rank| {
            let ranks = plan.group(pipeline[position.index()], Axis::Tensor);
            slowest(part, ranks.into_iter().map(|rank| rates[rank.index()]).zip(&works))
        };
        let equal: Vec<_> = plan.parts.iter().map(|part| cost_at(part, Rank(0))).collect::<Result<_>>()?;
        let order_with = |cost: &[StageCost]| match (resumed, plan.pools()) {
            (Some(step), Some(pools)) => step.order(pools, cost, hop, plan.pipeline.memory),
            _ => plan.order_with(count, cost, hop),
        };
        let placement = order_with(&equal).map_err(Error::schedule)?.placement().clone();
        let depth = placement.depth();
        let priced = |part: &Part, position: Rank| {
            let cost = cost_at(part, position)?;
            let within = part.recompute.is_within_backward(depth);
            Ok::<_, Error>(if within { recomputed_within(cost) } else { cost })
        };
        let of_part = |(part, number): (&Part, u32)| {
            let copies = 0..placement.copies();
            let holders = copies.map(|copy| placement.rank(StageId(copy * placement.depth() + number)));
            holders
                .map(|position| priced(part, position))
                .try_fold(StageCost::default(), |most, cost| Ok::<_, Error>(larger(most, cost?)))
        };
        let stages: Vec<_> = plan.parts.iter().zip(0..).map(of_part).collect::<Result<_>>()?;
        let own_cost = |stage: StageId, placement: &Placement| {
            priced(&plan.parts[placement.part(stage) as usize], placement.rank(stage))
        };
        let order = order_with(&stages).map_err(Error::schedule)?;
        let arrivals = match plan.pipeline.schedule {
            ScheduleSource::Named(method) => method.arrivals(&plan.settings(count, &stages, hop)),
            ScheduleSource::Text(_) | ScheduleSource::Pools(_) => None,
        };
        // Ranks of a pool keep their own costs, since the order assigns each action to one of them.
        let stages = if placement.is_pooled() {
            let all = (0..placement.stages()).map(StageId);
            all.map(|stage| own_cost(stage, &placement)).collect::<Result<_>>()?
        } else {
            stages
        };
        let between = |part: u32| {
            let link = link(placement.rank(StageId(part)), placement.rank(StageId(part + 1)));
            let forward = crossing(part as usize, Content::Activation)?;
            Ok(Boundary { link, forward, backward: crossing(part as usize, Content::Gradient)? })
        };
        let boundaries = (0..placement.depth() - 1).map(between).collect::<Result<_>>()?;
        let share = |slice: &Range<usize>| SliceShare {
            tokens: slice.len() as u64,
            time: work.slice_flops(&(0..model.layers() as u32), slice) as u64,
        };
        let shares = slices.iter().map(share).collect();
        let cost = PipelineCost { stages, boundaries, slices: shares, overlap_percent: 0 };
        let order = match arrivals {
            Some(rule) => rule.order_at(&order, &cost).map_err(Error::schedule)?,
            None => order,
        };
        let part_of = |stage| &plan.parts[placement.part(stage) as usize];
        let order = order.with_recompute_of(|stage| part_of(stage).recompute.is_scheduled(depth));
        // A head of its own shares nothing with the embedding.
        let tie = match model.head {
            HeadSpec::Tied => order.placement().tie(),
            HeadSpec::Own | HeadSpec::OwnWithBias => TiedWeights::Whole,
        };
        let lowering = Lowering {
            replicas: has_holders(plan) && plan.averages_each_step(),
            tied: tie == TiedWeights::Across,
            ..Lowering::default()
        };
        let schedule = Schedule::new(order, &lowering).map_err(Error::schedule)?;
        let layers = plan.parts.iter().map(|p| p.layers.start as usize..p.layers.end as usize).collect();
        let name = plan.pipeline.schedule.to_string();
        Ok(Self { name, schedule, arrivals, layers, slices, cost, tie, early_vote: true })
    }

    /// Returns the placement: the rank of each part.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        self.schedule.order().placement()
    }

    /// Returns the points of the schedule at which weights change.
    #[must_use]
    pub fn updates(&self) -> Updates {
        self.schedule.order().updates()
    }

    /// Returns the number of microbatches per step.
    #[must_use]
    pub fn microbatches(&self) -> u32 {
        self.schedule.order().microbatches()
    }

    /// Returns the number of microbatches whose gradients are in one update.
    #[must_use]
    pub fn per_update(&self) -> u32 {
        match self.updates() {
            Updates::Flush => self.microbatches(),
            Updates::Stashed { .. } => 1,
            Updates::TwoVersions { every } => every,
        }
    }

    /// Returns the number of updates of each part in a step.
    pub(super) fn updates_in_step(&self) -> u64 {
        match self.updates() {
            Updates::Flush => 1,
            _ => u64::from(self.microbatches() / self.per_update()),
        }
    }

    /// Returns whether a part itself keeps less than all activations in its forward pass, and recomputes within
    /// its backward pass. Otherwise the executor drops what computations of the schedule recompute.
    #[must_use]
    pub fn keeps_by_policy(&self, part: &Part) -> bool {
        let depth = self.placement().depth();
        depth == 1 || part.recompute.is_within_backward(depth)
    }

    /// Returns the predicted times of each slice of a microbatch on a stage.
    ///
    /// Errors: those of [`PipelineCost::by_slice`].
    pub(super) fn costs_of(&self, stage: StageId) -> Result<Vec<StageCost>> {
        let count = self.slices.len();
        Ok(self.cost.by_slice(self.schedule.order())?[stage.index() * count..][..count].to_vec())
    }

    /// Returns the operations of the step of the rank at a position of the pipeline.
    ///
    /// Errors: none for schedules of this type.
    pub fn step(&self, position: Rank, plan: &BoundPlan) -> Result<RankStep> {
        let settings = StepSettings {
            replicas: match (plan.averages_each_step(), has_holders(plan)) {
                (false, _) => ReplicaSteps::Apart,
                (true, false) => ReplicaSteps::Alone,
                (true, true) => ReplicaSteps::Together,
            },
            overlap: plan.outermost().overlap,
            tied: self.tie,
            by_arrivals: self.arrivals.is_some(),
            norm: match self.early_vote {
                _ if Division::of(plan).divides() || plan.divides_state() => NormVote::Divided,
                // A pass that is tried again is tried by all that take part in it.
                _ if plan.context.divides() => NormVote::All,
                true => NormVote::Pipeline,
                false => NormVote::All,
            },
            shards: plan.divides_state() && !plan.divides_weights(),
        };
        RankStep::new(&self.schedule, position, settings).map_err(Error::schedule)
    }

    /// Returns a schedule of forward passes only, on the same ranks: each stage runs all microbatches; several
    /// copies of the model take turns.
    ///
    /// Errors: those of [`ComputeOrder::new`], which do not occur for the placement of a method.
    pub(super) fn forwards(&self, microbatches: u32) -> Result<Schedule> {
        let placement = self.placement();
        let list = |rank| {
            let stages = placement.stages_of(rank);
            let op = |stage: StageId| {
                let copy = stage.0 / placement.depth();
                let mine = (0..microbatches).filter(move |m| m % placement.copies() == copy);
                mine.map(move |m| Action::forward(stage.0, m))
            };
            let mut actions: Vec<Action> = stages.flat_map(op).collect();
            if placement.is_pooled() {
                // A rank of a pool runs its microbatches in the order in which it receives them.
                actions.sort_by_key(|action| action.microbatch);
            }
            actions.into_iter().map(Op::Run).collect()
        };
        let lists = (0..placement.ranks()).map(Rank).map(list).collect();
        let order = ComputeOrder::new(placement.clone(), microbatches, 1, lists).map_err(Error::schedule)?;
        Schedule::new(order, &Lowering::default()).map_err(Error::schedule)
    }
}

/// Returns whether several ranks hold the same parameters: replicas, or the ranks along the tensor axis, of
/// tensors that they do not divide.
fn has_holders(plan: &BoundPlan) -> bool {
    plan.replicas() > 1 || plan.tensor_ranks() > 1
}

/// Returns the cost of a part for the slowest of the ranks that divide its layers, each with its rate.
fn slowest<'a>(part: &Part, ranks: impl Iterator<Item = (f64, &'a Work)>) -> Result<StageCost> {
    let mut ranks = ranks.map(|(rate, work)| work.stage_cost(part, rate));
    ranks.try_fold(StageCost::default(), |most, cost| Ok(larger(most, cost?)))
}

/// Returns the larger of each time of two costs.
fn larger(one: StageCost, other: StageCost) -> StageCost {
    StageCost {
        forward: one.forward.max(other.forward),
        input: one.input.max(other.input),
        weight: one.weight.max(other.weight),
        recompute: one.recompute.max(other.recompute),
        ..other
    }
}

/// Returns the cost of a part whose layers are recomputed within its backward pass.
fn recomputed_within(cost: StageCost) -> StageCost {
    StageCost { input: cost.input.saturating_add(cost.recompute), recompute: Nanos::ZERO, ..cost }
}

/// Returns the positions of slices with these lengths; one slice with all positions if there are none.
fn positions(lengths: &[u32], context: usize) -> Vec<Range<usize>> {
    if lengths.is_empty() {
        return std::iter::once(0..context).collect();
    }
    let mut end = 0;
    let slice = |&len: &u32| {
        let start = end;
        end += len as usize;
        start..end
    };
    lengths.iter().map(slice).collect()
}
