//! The messages and collectives of a plan's step, with the bytes that each sends, derived from the step lists
//! that `farflung-comm` runs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use farflung_base::{Axis, Bytes, Operation, Rank, StageId, Topology};
use farflung_comm::{
    AllReduce as _, CodedAllReduce as _, CodedBuffer, all_to_all_operation, message_operation, operation,
    operation_coded, owners_operation, scatter_to_owners,
};
use farflung_optim::{ApartHolders, AverageConfig, ShardGroups};
use farflung_parallel::pipeline::{Content, Message};
use farflung_parallel::step::Vote;
use farflung_parallel::{Coordinates, Recompute};
use farflung_tensor::Device;
use farflung_zoo::layer::LayerUnits;
use farflung_zoo::{Exchange, ModelSpec};

use super::layer_exchanges::{LayerExchange, LayerExchanges, LayerTurn};
use crate::Result;
use crate::train::apart::{self, ApartParams};
use crate::train::averages;
use crate::train::bind::ReplicaSchedule;
use crate::train::bound_plan::BoundPlan;
use crate::train::boundary;
use crate::train::costs::Machines;
use crate::train::division::Division;
use crate::train::tied::TiedGroup;
use crate::train::trainer::stage_of;
use crate::train::zero::{self, WindowOperations};

/// Identifies an operation of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// A message between two stages of a pipeline, which begins at a rank.
    Message(Rank, Message),
    /// An exchange of the average of a part's bucket, in an update.
    Bucket { part: u32, tensor: u32, update: u32, bucket: BucketKey, exchange: usize },
    /// An exchange between the ranks that divide layers, of which `first` is the first one, in a pass of a
    /// microbatch.
    Layer { first: Rank, stage: StageId, microbatch: u32, slice: u16, pass: LayerPass, exchange: usize },
    /// A window of the sum of a range of a microbatch's gradients into the shards of a part, among ranks with
    /// this number along the tensor axis: what a group adds up, by its number, or what owners get from groups.
    Gradients { stage: StageId, tensor: u32, microbatch: u32, range: usize, window: usize, hop: GradientHop },
    /// The gather of a unit of a part's weights, the one of this number in a step, among ranks with this number
    /// along the tensor axis.
    Weights { stage: StageId, tensor: u32, unit: usize, number: u32, way: WeightWay },
    /// A window of the gather of a part's shards, among ranks with this number along the tensor axis.
    Shards { part: u32, tensor: u32, window: usize },
    /// The sum of the gradients of the token table of a pipeline, which begins at a rank.
    Table { first: Rank, round: u32 },
    /// The copy of the averaged token table from a pipeline's first stage to its last.
    TakenTable { first: Rank },
    /// A vote of a replica's ranks, or of all ranks.
    Vote(Vote, Option<u32>),
    /// The vote on whether replicas can synchronise.
    Refusals,
}

/// A part of the way of weights to those that need them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WeightWay {
    /// From all owners: to all ranks, or to some of each group.
    FromOwners,
    /// From those to the others of a group.
    PassedOn(usize),
    /// From a group that has them once more.
    InGroup(usize),
}

/// A part of the way of gradients to their owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GradientHop {
    /// To those that add up: of a group, or, without groups, the owners.
    Start(usize),
    PassOn,
}

/// Identifies a bucket of a part's average.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BucketKey {
    /// Its holders, if not all holders of the part hold it.
    apart: Option<ApartKey>,
    /// Its number among those of these holders.
    index: usize,
}

/// Identifies the holders of parameters that only some replicas hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ApartKey {
    /// The kind of parameters: its number in the list of those of the part.
    kind: usize,
    /// The share of the first replica that holds them.
    share: u32,
    /// Whether all ranks along the tensor axis hold them.
    along_tensor: bool,
}

/// A pass in which layers exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LayerPass {
    Forward,
    Recompute,
    Input,
    Weight,
    /// A whole backward pass, before this range of gradients is final.
    Backward(usize),
}

impl BucketKey {
    /// Returns the number along the tensor axis by which the bucket is told from those of other ranks there.
    pub(super) fn tensor_of(&self, own: u32) -> u32 {
        if self.apart.is_some_and(|apart| apart.along_tensor) { 0 } else { own }
    }
}

impl LayerPass {
    fn of(self, exchanges: &LayerExchanges) -> &[LayerExchange] {
        match self {
            Self::Forward | Self::Recompute => &exchanges.forward,
            Self::Input => &exchanges.input,
            Self::Weight => &exchanges.weight,
            Self::Backward(range) => exchanges.backward.get(range).map_or(&[], Vec::as_slice),
        }
    }
}

/// A bucket of a part's average.
#[derive(Debug, Clone)]
pub(super) struct BucketFacts {
    pub(super) key: BucketKey,
    /// The operation for each exchange; none if one rank alone holds the bucket.
    pub(super) exchanges: Vec<Operation>,
    /// The range after which it is final.
    pub(super) ready_after: usize,
}

/// A part of the model as one of the ranks that divide its layers has it, with the averages among its holders.
pub(super) struct PartFacts {
    /// Elements of its flat buffer, padding included, and of the ranges that its backward pass makes final, in
    /// order.
    pub(super) elements: u64,
    pub(super) ranges: Vec<u64>,
    pub(super) buckets: Vec<BucketFacts>,
    /// If holders keep shards of the gradients: the windows in which those of each range reach them. There are
    /// no buckets then.
    pub(super) reductions: Vec<Vec<WindowOperations>>,
    /// The number of the group of each replica, if holders are in groups.
    pub(super) groups: Option<ShardGroups>,
    /// The windows in which holders send each other the shards that they have updated.
    pub(super) gathers: Vec<Operation>,
    /// How passes get the weights, if holders keep shards of them.
    pub(super) weights: Option<WeightFacts>,
    /// Bytes of the gradient of a token table that the last part has too, by replica if each has a shard.
    shared_table: Vec<u64>,
    layers: LayerExchanges,
}

/// The units of a part's weights, which passes gather.
#[derive(Debug)]
pub(super) struct WeightFacts {
    /// In the order in which their gradients are final.
    pub(super) units: Vec<Range<usize>>,
    /// The gather of each.
    gathers: Vec<Operation>,
    /// By group, how each is passed on there, and the gather of each that the group has once more.
    passed_on: Vec<Vec<Operation>>,
    in_groups: Vec<Vec<Operation>>,
    /// What the layers of each pass read.
    pub(super) forward: Vec<LayerUnits>,
    pub(super) recompute: Vec<LayerUnits>,
    pub(super) backward: Vec<LayerUnits>,
}

impl WeightFacts {
    /// Returns those of a part among the ranks `all`; `None` if each has all weights.
    fn of(
        (plan, model): (&BoundPlan, &ModelSpec),
        schedule: &ReplicaSchedule,
        (part, at): (usize, Coordinates),
        all: &[Rank],
    ) -> Result<Option<Self>> {
        if !plan.divides_weights() {
            return Ok(None);
        }
        let counted = (&Device::cpu(1)?, Arc::new(Division::of(plan).counted(at)?) as Arc<dyn Exchange>);
        let stage = stage_of(plan, (model, at), schedule, part, counted)?;
        let Some(shards) = zero::shards(plan, &stage)? else { return Ok(None) };
        let units = stage.backward_ranges();
        let forward = stage.forward_units();
        let recompute = match plan.parts[part].recompute {
            Recompute::Layers(layers) => stage.recompute_units(layers as usize),
            _ => forward.clone(),
        };
        let codec = plan.zero_codecs().weights;
        let (groups, mut in_groups) = (zero::groups(plan), Vec::new());
        let mut gathers = Vec::new();
        let mut passed_on = vec![Vec::new(); plan.zero_groups.len()];
        for unit in &units {
            let Some(groups) = &groups else {
                gathers.push(zero::weights(&shards, unit, codec).among(all));
                continue;
            };
            let [between, inside] = zero::weights_by_groups(&shards, groups, unit, codec);
            gathers.extend(between.into_iter().map(|op| op.among(all)));
            passed_on.iter_mut().zip(inside).for_each(|(of_group, op)| of_group.push(op.among(all)));
        }
        for members in &plan.zero_groups {
            let of_member = Coordinates { data: members[0], ..at };
            let Some(shards) = zero::shards_in_group(plan, &stage, of_member)? else { break };
            let ranks: Vec<Rank> = members.iter().map(|&member| all[member as usize]).collect();
            in_groups
                .push(units.iter().map(|unit| zero::weights(&shards, unit, None).among(&ranks)).collect());
        }
        Ok(Some(Self {
            gathers,
            passed_on,
            in_groups,
            forward,
            recompute,
            backward: stage.backward_units(),
            units,
        }))
    }
}

impl PartFacts {
    fn new(
        (plan, model): (&BoundPlan, &ModelSpec),
        (schedule, topology): (&ReplicaSchedule, &Topology),
        (part, at): (u32, Coordinates),
    ) -> Result<Self> {
        let (layers, device) = (schedule.layers[part as usize].clone(), Device::cpu(1)?);
        let divided = Division::of(plan);
        let stage = divided.counted_stage((model, layers), at, &device)?;
        let apart = ApartParams::of(plan, &stage, at.data);
        let shards = zero::shards(plan, &stage)?;
        let cut = AverageConfig { apart: apart::ranges(&apart), ..plan.outermost().averages() };
        let all = averages::holders(plan, schedule.placement(), (part, at.tensor));
        let of_apart: Vec<Vec<Rank>> = apart.iter().map(|apart| apart.holders(plan, &all)).collect();
        let sizes: Vec<Vec<usize>> = match cut.exchanges(stage.layout()) {
            Some(exchanges) => exchanges,
            None => cut.buckets(stage.layout()).into_iter().map(|len| vec![len]).collect(),
        };
        let ranges = stage.backward_ranges();
        let ready_after = cut.ready_after(stage.layout(), &ranges);
        let (mut buckets, mut counts) = (Vec::new(), vec![0; 1 + apart.len()]);
        let ranges_of = cut.bucket_ranges(stage.layout());
        for (((sizes, kind), ready_after), ranges) in
            sizes.iter().zip(cut.apart_buckets(stage.layout())).zip(ready_after).zip(ranges_of)
        {
            let holders = kind.map_or(&all, |kind| &of_apart[kind]);
            let among = topology.among(holders);
            let sizes = sizes.iter().filter(|_| holders.len() > 1);
            let exchange = |&len: &usize| Ok(average(plan, (len, kind.is_some()), &among)?.among(holders));
            let exchanges = match &shards {
                Some(shards) if kind.is_none() => {
                    let counts = shards.counts(&ranges);
                    vec![owners_operation(scatter_to_owners, &counts, size_of::<f32>()).among(holders)]
                }
                _ => sizes.map(exchange).collect::<Result<_>>()?,
            };
            let count = &mut counts[kind.map_or(0, |kind| 1 + kind)];
            let of = |kind: usize| {
                let ApartParams { replicas, along_tensor, .. } = &apart[kind];
                ApartKey { kind, share: plan.share(replicas[0]), along_tensor: *along_tensor }
            };
            let key = BucketKey { apart: kind.map(of), index: *count };
            *count += 1;
            buckets.push(BucketFacts { key, exchanges, ready_after });
        }
        let among = |windows: Vec<Operation>| windows.into_iter().map(|op| op.among(&all)).collect();
        let divided = shards.as_ref().filter(|_| plan.divides_gradients());
        let of_range = |range| {
            let windows = divided.map(|shards| zero::reductions(plan, shards, range))?;
            Some(windows.into_iter().map(|window| window.among(&all)).collect())
        };
        if divided.is_some() {
            buckets.clear();
        }
        Ok(Self {
            elements: stage.layout().len() as u64,
            buckets,
            reductions: ranges.iter().filter_map(of_range).collect(),
            groups: zero::groups(plan),
            gathers: among(shards.iter().flat_map(|shards| zero::gathers(plan, shards)).collect()),
            weights: WeightFacts::of((plan, model), schedule, (part as usize, at), &all)?,
            ranges: ranges.iter().map(|range| range.len() as u64).collect(),
            shared_table: match (divided, stage.shared_table()) {
                (Some(shards), Some(table)) => {
                    let of = |len: usize| (len * size_of::<f32>()) as u64;
                    shards.within(&table).lengths().into_iter().map(of).collect()
                }
                _ => vec![stage.shared_table_bytes()],
            },
            layers: LayerExchanges::of(plan, model, schedule, (part as usize, at))?,
        })
    }
}

/// The operations of some steps, each made when a rank first refers to it.
pub(super) struct Operations<'a> {
    pub(super) plan: &'a BoundPlan,
    model: &'a ModelSpec,
    topology: &'a Topology,
    /// By the replica's share ([`Plan::share`](farflung_parallel::Plan::share)), by the number along the tensor
    /// axis, and by part.
    parts: Vec<Vec<Vec<PartFacts>>>,
    /// Numbers of operations by step and key.
    numbers: BTreeMap<(u32, Key), usize>,
    made: Vec<Operation>,
}

impl<'a> Operations<'a> {
    pub(super) fn new(
        plan: &'a BoundPlan,
        model: &'a ModelSpec,
        machines: &'a Machines,
        schedule: &ReplicaSchedule,
    ) -> Result<Self> {
        let topology = &machines.topology;
        let facts = |at: Coordinates| {
            let all = 0..schedule.layers.len() as u32;
            let of = |part| PartFacts::new((plan, model), (schedule, topology), (part, at));
            all.map(of).collect::<Result<_>>()
        };
        let of_share = |data| {
            let at = |tensor| Coordinates { data, tensor, ..Coordinates::default() };
            (0..plan.tensor_ranks()).map(|tensor| facts(at(tensor))).collect::<Result<_>>()
        };
        let parts = (0..plan.shares()).map(of_share).collect::<Result<_>>()?;
        Ok(Self { plan, model, topology, parts, numbers: BTreeMap::new(), made: Vec::new() })
    }

    /// Clears all operations, before steps are recorded.
    pub(super) fn begin(&mut self) {
        self.numbers.clear();
        self.made.clear();
    }

    /// Returns all operations that were made, and clears them.
    pub(super) fn take(&mut self) -> Vec<Operation> {
        self.numbers.clear();
        std::mem::take(&mut self.made)
    }

    /// Returns the number of an operation, the same for every rank that takes part; makes the operation if
    /// necessary.
    pub(super) fn number(&mut self, step: u32, key: Key, schedule: &ReplicaSchedule) -> Result<usize> {
        if let Some(&number) = self.numbers.get(&(step, key)) {
            return Ok(number);
        }
        let made = self.make(key, schedule)?;
        self.made.push(made);
        self.numbers.insert((step, key), self.made.len() - 1);
        Ok(self.made.len() - 1)
    }

    fn make(&self, key: Key, schedule: &ReplicaSchedule) -> Result<Operation> {
        let depth = schedule.placement().depth();
        Ok(match key {
            Key::Message(first, message) => {
                let tensor = self.plan.at(first).tensor;
                let slices = Division::of(self.plan).positions(tensor, &schedule.slices)?;
                let slice = &slices[usize::from(message.slice)..=usize::from(message.slice)];
                let part = schedule.placement().part(message.from);
                let boundary = if message.content == Content::Activation { part } else { part - 1 };
                let bytes =
                    boundary::bytes(self.plan, boundary as usize, message.content, slice, self.model)?;
                let rank = |stage| self.rank(schedule, first, stage);
                message_operation(rank(message.from), rank(message.to()), bytes)
            }
            Key::Bucket { part, tensor, bucket, exchange, .. } => {
                let share = bucket.apart.map_or(0, |apart| apart.share as usize);
                let parts = &self.parts[share][tensor as usize];
                let mut buckets = parts[part as usize].buckets.iter();
                let found = buckets.find(|facts| facts.key == bucket);
                found.expect("a bucket of the part").exchanges[exchange].clone()
            }
            Key::Gradients { stage, tensor, range, window, hop, .. } => {
                let part = schedule.placement().part(stage) as usize;
                let window = &self.parts[0][tensor as usize][part].reductions[range][window];
                match hop {
                    GradientHop::Start(group) => window.starts[group].clone(),
                    GradientHop::PassOn => window.passes_on.clone().unwrap_or_default(),
                }
            }
            Key::Weights { stage, tensor, unit, way, .. } => {
                let part = schedule.placement().part(stage) as usize;
                let weights = self.parts[0][tensor as usize][part].weights.as_ref();
                let weights = weights.expect("the part's weights are divided");
                let all = match way {
                    WeightWay::FromOwners => &weights.gathers,
                    WeightWay::PassedOn(group) => &weights.passed_on[group],
                    WeightWay::InGroup(group) => &weights.in_groups[group],
                };
                all[unit].clone()
            }
            Key::Shards { part, tensor, window } => {
                self.parts[0][tensor as usize][part as usize].gathers[window].clone()
            }
            Key::Layer { first, stage, pass, exchange, .. } => {
                let part = schedule.placement().part(stage);
                let slices = schedule.slices.len() as u64;
                let own = |rank: Rank| &pass.of(&self.part(part, rank).layers)[exchange];
                let ranks = self.plan.group(first, own(first).axis());
                match own(first) {
                    LayerExchange::Arrived(_) => Operation::default(),
                    LayerExchange::Gather(_) | LayerExchange::Scatter(_) => {
                        own(first).in_ring().among(&ranks)
                    }
                    LayerExchange::Sum(values) => {
                        let bytes = (values * size_of::<f32>()) as u64 / slices;
                        self.sum(*values, Bytes(bytes), &self.topology.among(&ranks)).among(&ranks)
                    }
                    LayerExchange::Tokens(_) => {
                        let bytes = |from: usize, to: usize| match own(ranks[from]) {
                            LayerExchange::Tokens(bytes) => Bytes(bytes[to] / slices),
                            _ => Bytes(0),
                        };
                        all_to_all_operation(ranks.len(), bytes).among(&ranks)
                    }
                    LayerExchange::ByHeads(values) => {
                        let count = ranks.len();
                        let bytes = Bytes((values * size_of::<f32>() / count) as u64);
                        all_to_all_operation(count, |_, _| bytes).among(&ranks)
                    }
                    LayerExchange::PassOn(values) => {
                        let next = ranks.iter().copied().cycle().skip(1);
                        let ways = ranks.iter().copied().zip(next);
                        messages(ways, Bytes((values * size_of::<f32>()) as u64))
                    }
                }
            }
            Key::Table { first, .. } => self.table(first, false, schedule),
            Key::TakenTable { first } => self.table(first, true, schedule),
            Key::Vote(vote, voters) => {
                let numbers = match vote {
                    Vote::Whole => 2 + depth as usize,
                    // In pipelines also the number of the attempt.
                    Vote::Losses => 2 + usize::from(depth > 1),
                    Vote::Norm => depth as usize,
                    Vote::Window => self.plan.outermost().every as usize + 1,
                };
                match voters {
                    Some(replica) => {
                        let ranks = self.plan.ranks_of(replica);
                        self.vote(numbers, &self.topology.among(&ranks)).among(&ranks)
                    }
                    None => self.vote(numbers, self.topology),
                }
            }
            Key::Refusals => self.vote(1, self.topology),
        })
    }

    /// Returns the sum of the token table's gradients in a pipeline that begins at `first`, or the copy of the
    /// averaged table from its first stage if it is `taken`.
    fn table(&self, first: Rank, taken: bool, schedule: &ReplicaSchedule) -> Operation {
        let depth = schedule.placement().depth();
        let pipeline = self.plan.group(first, Axis::Pipeline);
        let tables = &self.part(0, first).shared_table;
        let own = tables.get(self.plan.at(first).data as usize).or(tables.first());
        let bytes = Bytes(own.copied().unwrap_or(0));
        let mut ways: Vec<(Rank, Rank)> =
            TiedGroup::of(schedule.placement()).into_iter().flat_map(|group| group.ways).collect();
        if taken {
            // The average of the first stage is used for both.
            ways.retain(|(from, _)| schedule.placement().homes_of(*from).any(|s| s.0 % depth == 0));
        }
        let ways = ways.into_iter().map(|(a, b)| (pipeline[a.index()], pipeline[b.index()]));
        let mut table = messages(ways, bytes);
        if bytes.0 == 0 {
            // Both have nothing of the table, and send no message.
            table.parts.values_mut().for_each(|part| part.lanes.clear());
        }
        table
    }

    /// Returns a part as a rank has it.
    pub(super) fn part(&self, part: u32, rank: Rank) -> &PartFacts {
        let at = self.plan.at(rank);
        &self.parts[self.plan.share(at.data) as usize][at.tensor as usize][part as usize]
    }

    /// Returns what a rank does for each exchange of its layers in a pass of a part.
    pub(super) fn layer_turns(&self, part: u32, rank: Rank, pass: LayerPass) -> Vec<LayerTurn> {
        let exchanges = pass.of(&self.part(part, rank).layers).iter();
        exchanges.map(|exchange| exchange.turn(|axis| self.plan.group(rank, axis))).collect()
    }

    /// Returns the rank of a stage in the pipeline that begins at `first`.
    fn rank(&self, schedule: &ReplicaSchedule, first: Rank, stage: StageId) -> Rank {
        let position = schedule.placement().rank(stage).0;
        self.plan.rank(Coordinates { pipeline: position, ..self.plan.at(first) })
    }

    /// Returns an all-reduce of `numbers` f64 values.
    fn vote(&self, numbers: usize, topology: &Topology) -> Operation {
        self.sum(numbers, Bytes((numbers * size_of::<f64>()) as u64), topology)
    }

    /// Returns an all-reduce of values of `bytes` bytes.
    fn sum(&self, values: usize, bytes: Bytes, topology: &Topology) -> Operation {
        let algorithm = self.plan.outermost().plain_algorithm();
        operation(&algorithm.programs(values, bytes, topology), bytes)
    }
}

/// Returns an exchange of `values` values of a bucket between its holders, which have no regions if they are
/// those of experts.
fn average(plan: &BoundPlan, (values, apart): (usize, bool), holders: &Topology) -> Result<Operation> {
    let level = plan.outermost();
    let spec = level.codec;
    let regions = averages::regions(plan);
    let regions = regions.as_deref().filter(|_| !apart);
    let Some(codec) = spec.codec().filter(|_| !spec.is_plain()) else {
        let bytes = Bytes((values * size_of::<f32>()) as u64);
        let programs = level.plain_algorithm().programs_in(values, bytes, holders, regions);
        return Ok(operation(&programs, bytes));
    };
    let codec = codec.build();
    let payload = |values: usize| codec.max_payload(values);
    let buffer = CodedBuffer { len: values, payload: &payload, topology: holders, regions };
    let algorithm = if apart { ApartHolders::algorithm(level.algorithm) } else { level.algorithm };
    Ok(operation_coded(&algorithm.coded_programs(&buffer)?, values, &payload))
}

/// Returns an operation of several messages of `bytes` bytes at once, each from one rank to another.
fn messages(ways: impl Iterator<Item = (Rank, Rank)>, bytes: Bytes) -> Operation {
    let mut ways = ways.map(|(from, to)| message_operation(from, to, bytes));
    let Some(mut all) = ways.next() else { return Operation::default() };
    for way in ways {
        for (rank, side) in way.parts {
            let Some(mine) = all.parts.get_mut(&rank) else {
                all.parts.insert(rank, side);
                continue;
            };
            for turn in side.lanes.into_iter().flatten() {
                mine.lanes[0][0].sends.extend(turn.sends);
                mine.lanes[0][0].receives.extend(turn.receives);
            }
        }
    }
    all
}
