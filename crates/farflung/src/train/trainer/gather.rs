//! Gathers the model that a replica trains on one rank, from the parts of the first replica that trains it, or
//! of those that divide its experts, and of all ranks that divide the width of layers.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Rank, StageId};
use farflung_parallel::{Coordinates, Plan};
use farflung_tensor::Tensor;
use farflung_zoo::{Cut, Stage, TensorKind, TensorSpec};

use super::Trainer;
use crate::floats::{floats, le_bytes};
use crate::train::divided_weights::elements_of_microbatch;
use crate::train::executor::Executor;
use crate::train::part::Part;
use crate::{Error, Result};

/// Tag of the message with the first gathered part; those of later parts count down from it. Far from the tags
/// of messages between stages.
const GATHERED: u32 = u32::MAX;

/// The ranks whose parts are gathered to the model that a replica trains.
#[derive(Debug, Clone)]
pub(super) struct Givers {
    /// The replicas that together hold the model.
    pub(super) replicas: Range<u32>,
    /// The rank that has it then.
    pub(super) to: Rank,
    /// The other ranks that train it.
    pub(super) others: Vec<Rank>,
    /// The rank that has the model of each path; empty if all replicas train one model.
    pub(super) of_paths: Vec<Rank>,
    /// The plan, if these replicas each have a shard of the model.
    pub(super) shards: Option<Plan>,
}

impl Givers {
    pub(super) fn of(plan: &Plan, replica: u32) -> Self {
        let replicas = plan.holders_of_model(replica);
        let to = plan.pipeline_of(replicas.start)[0];
        let several = plan.paths() > 1;
        let of_paths =
            (0..plan.paths()).filter(|_| several).map(|path| plan.first_ranks_of_path(path)[0]).collect();
        let trains = |rank: &Rank| plan.holders_of_model(plan.at(*rank).data) == replicas && *rank != to;
        let shards = plan.divides_weights().then(|| plan.clone());
        Self { of_paths, shards, others: (0..plan.ranks()).map(Rank).filter(trains).collect(), replicas, to }
    }
}

impl Trainer {
    /// Returns all of the model's parameters on rank 0, gathered from the ranks of the first replica, and
    /// `None` on other ranks; where replicas train paths, those of each path on the first rank of its first
    /// replica. A collective: all ranks must call it.
    pub fn gather_params(&mut self) -> Result<Option<Tensor>> {
        self.gather(Part::whole_params)
    }

    /// Returns all of the model's gradients of the last step on rank 0, in the layout of the whole model, and
    /// `None` on other ranks: averaged over replicas if the method averages gradients, else those of the first
    /// replica. A collective: all ranks must call it.
    pub fn gather_grads(&mut self) -> Result<Option<Tensor>> {
        self.gather(Part::whole_grads)
    }

    /// Returns the number of elements of divided weights that the rank gathers for a microbatch.
    pub(in crate::train) fn gathered_elements(&self) -> u64 {
        let depth = self.executor.placement.depth();
        let parts = self.executor.parts.values().filter(|part| part.weights.is_some());
        parts.map(|part| elements_of_microbatch(&part.stage, part.recompute, depth)).sum()
    }

    /// Gathers one flat buffer of each part, as `whole` returns it. No rank returns before all are gathered.
    fn gather(&self, whole: impl Fn(&Part) -> Result<Tensor>) -> Result<Option<Tensor>> {
        let Executor { parts, placement, .. } = &self.executor;
        let mut order: Vec<_> = parts.iter().collect();
        order.sort_by_key(|(stage, _)| placement.part(**stage));
        let gathered = order.into_iter().map(|(&stage, part)| Ok((stage, whole(part)?)));
        let model = self.put_together(&gathered.collect::<Result<_>>()?)?;
        self.executor.comm.barrier()?;
        Ok(model)
    }

    fn put_together(&self, of_parts: &BTreeMap<StageId, Tensor>) -> Result<Option<Tensor>> {
        let Executor { comm, placement, device, .. } = &self.executor;
        let Givers { replicas, to, .. } = self.givers.clone();
        if !replicas.contains(&self.replica) {
            return Ok(None);
        }
        let stages = (0..placement.depth()).map(StageId);
        if comm.rank() != to {
            for stage in stages.filter(|stage| of_parts.contains_key(stage)) {
                let values = of_parts[&stage].to_vec::<f32>()?;
                comm.start_send(to, GATHERED - stage.0, le_bytes(&values)).wait()?;
            }
            return Ok(None);
        }
        let spec = self.stage().spec().clone();
        let whole = Stage::whole(&spec, device)?;
        let mut all = vec![0.0; whole.layout().len()];
        for stage in stages {
            let layers = self.schedule.layers[stage.index()].clone();
            for holder in self.division.holders(replicas.clone(), placement.rank(stage)) {
                let rank = self.division.rank(holder)?;
                let there = self.division.counted_stage((&spec, layers.clone()), holder, device)?;
                let values = if let Some(own) = of_parts.get(&stage).filter(|_| rank == to) {
                    own.to_vec::<f32>()?
                } else {
                    let bytes = comm.recv(rank, GATHERED - stage.0)?;
                    floats(&bytes, there.layout().len()).ok_or_else(|| Error::Message {
                        message: format!("part {stage} of the model"),
                        problem: "does not have the length of its parameters",
                    })?
                };
                for (param, spec) in there.tensors().filter(|(_, spec)| gives(spec, holder, &replicas)) {
                    let to = &whole.layout().params()[whole.layout().find(&param.name)?];
                    let target = &mut all[to.range()];
                    let share = self.division.width_of(holder)?;
                    spec.cut.put(&spec.shape, &share, &values[param.range()], target);
                }
            }
        }
        Ok(Some(device.tensor(&all, all.len())?))
    }
}

/// Returns whether a tensor of the model that some replicas hold together is taken from the one at `holder`:
/// from the first of them if all have it, whole or in pieces, and an expert from the replica that has it.
pub(super) fn gives(spec: &TensorSpec, holder: Coordinates, replicas: &Range<u32>) -> bool {
    let is_own = holder.data == replicas.start || spec.kind == TensorKind::Expert;
    is_own && (holder.tensor == 0 || spec.cut != Cut::Whole)
}
