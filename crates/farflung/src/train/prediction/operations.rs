//! The messages and collectives of a plan's step, with the bytes that each sends, derived from the step lists
//! that `farflung-comm` runs.

use std::collections::BTreeMap;

use farflung_base::{Bytes, Operation, Rank, StageId, Topology};
use farflung_comm::{
    AllReduce as _, CodedAllReduce as _, CodedBuffer, message_operation, operation, operation_coded,
};
use farflung_parallel::Coordinates;
use farflung_parallel::pipeline::{Content, Message};
use farflung_parallel::step::Vote;
use farflung_tensor::Device;
use farflung_zoo::{ModelSpec, Stage};

use crate::Result;
use crate::train::averages;
use crate::train::bind::ReplicaSchedule;
use crate::train::bound_plan::BoundPlan;
use crate::train::boundary;
use crate::train::costs::Machines;
use crate::train::tied::TiedGroup;

/// Identifies an operation of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// A message between two stages of a replica.
    Message(u32, Message),
    /// An exchange of the average of a part's bucket, in an update.
    Bucket { part: u32, update: u32, bucket: usize, exchange: usize },
    /// The sum of the gradients of a replica's token table.
    Table { replica: u32, round: u32 },
    /// The copy of the averaged token table from its first stage to its last.
    TakenTable { replica: u32 },
    /// A vote of a replica's ranks, or of all ranks.
    Vote(Vote, Option<u32>),
    /// The vote on whether replicas can synchronise.
    Refusals,
}

/// A part of the model, with the averages among its holders.
pub(super) struct PartFacts {
    /// Elements of its flat buffer, padding included, and of the ranges that its backward pass makes final, in
    /// order.
    pub(super) elements: u64,
    pub(super) ranges: Vec<u64>,
    /// The operation for each exchange of each bucket's average; empty if one rank alone holds the part.
    pub(super) buckets: Vec<Vec<Operation>>,
    /// The range after which each bucket is final.
    pub(super) ready_after: Vec<usize>,
}

/// The operations of some steps, each made when a rank first refers to it.
pub(super) struct Operations<'a> {
    pub(super) plan: &'a BoundPlan,
    model: &'a ModelSpec,
    topology: &'a Topology,
    pub(super) parts: Vec<PartFacts>,
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
        let (placement, topology) = (schedule.placement(), &machines.topology);
        let (level, device) = (plan.outermost(), Device::cpu(1)?);
        let cut = level.averages();
        let mut parts = Vec::new();
        for (part, layers) in (0..).zip(&schedule.layers) {
            let stage = Stage::new(model, layers.clone(), &device)?;
            let holders = averages::holders(plan, placement, part);
            let among = topology.among(&holders);
            let lens: Vec<Vec<usize>> = match cut.exchanges(stage.layout()) {
                _ if holders.len() == 1 => Vec::new(),
                Some(exchanges) => exchanges,
                None => cut.buckets(stage.layout()).into_iter().map(|len| vec![len]).collect(),
            };
            let exchange = |&len: &usize| Ok(average(plan, len, &among)?.among(&holders));
            let bucket = |lens: &Vec<usize>| lens.iter().map(exchange).collect::<Result<_>>();
            let ranges = stage.backward_ranges();
            parts.push(PartFacts {
                elements: stage.layout().len() as u64,
                buckets: lens.iter().map(bucket).collect::<Result<_>>()?,
                ready_after: cut.ready_after(stage.layout(), &ranges),
                ranges: ranges.iter().map(|range| range.len() as u64).collect(),
            });
        }
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
            Key::Message(replica, message) => {
                let slices = &schedule.slices;
                let slice = &slices[usize::from(message.slice)..=usize::from(message.slice)];
                let part = schedule.placement().part(message.from);
                let boundary = if message.content == Content::Activation { part } else { part - 1 };
                let bytes =
                    boundary::bytes(self.plan, boundary as usize, message.content, slice, self.model)?;
                let rank = |stage| self.rank(schedule, replica, stage);
                message_operation(rank(message.from), rank(message.to()), bytes)
            }
            Key::Bucket { part, bucket, exchange, .. } => {
                self.parts[part as usize].buckets[bucket][exchange].clone()
            }
            Key::Table { replica, .. } | Key::TakenTable { replica } => {
                let pipeline = self.plan.pipeline_of(replica);
                let bytes = Bytes(self.model.shared_table_bytes());
                let mut ways: Vec<(Rank, Rank)> =
                    TiedGroup::of(schedule.placement()).into_iter().flat_map(|group| group.ways).collect();
                if let Key::TakenTable { .. } = key {
                    // The average of the first stage is used for both.
                    ways.retain(|(from, _)| schedule.placement().homes_of(*from).any(|s| s.0 % depth == 0));
                }
                messages(ways.into_iter().map(|(a, b)| (pipeline[a.index()], pipeline[b.index()])), bytes)
            }
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
                        let pipeline = self.plan.pipeline_of(replica);
                        self.sum(numbers, &self.topology.among(&pipeline)).among(&pipeline)
                    }
                    None => self.sum(numbers, self.topology),
                }
            }
            Key::Refusals => self.sum(1, self.topology),
        })
    }

    fn rank(&self, schedule: &ReplicaSchedule, replica: u32, stage: StageId) -> Rank {
        let position = schedule.placement().rank(stage).0;
        self.plan.rank(Coordinates { data: replica, pipeline: position, ..Coordinates::default() })
    }

    /// Returns an all-reduce of `numbers` f64 values.
    fn sum(&self, numbers: usize, topology: &Topology) -> Operation {
        let bytes = Bytes((numbers * size_of::<f64>()) as u64);
        let algorithm = self.plan.outermost().plain_algorithm();
        operation(&algorithm.programs(numbers, bytes, topology), bytes)
    }
}

/// Returns an exchange of `values` values of a bucket between all holders of a part.
fn average(plan: &BoundPlan, values: usize, holders: &Topology) -> Result<Operation> {
    let level = plan.outermost();
    let spec = level.codec;
    let regions = averages::regions(plan);
    let regions = regions.as_deref();
    let Some(codec) = spec.codec().filter(|_| !spec.is_plain()) else {
        let bytes = Bytes((values * size_of::<f32>()) as u64);
        let programs = level.plain_algorithm().programs_in(values, bytes, holders, regions);
        return Ok(operation(&programs, bytes));
    };
    let codec = codec.build();
    let payload = |values: usize| codec.max_payload(values);
    let buffer = CodedBuffer { len: values, payload: &payload, topology: holders, regions };
    Ok(operation_coded(&level.algorithm.coded_programs(&buffer)?, values, &payload))
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
