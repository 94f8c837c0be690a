//! Decides how averages are sent over the links: chooses the algorithm of a coded average by its predicted time
//! and writes it into the plan.

use farflung_base::{Algorithm, Nanos, Rank, Topology};
use farflung_comm::{CodedAllReduce as _, CodedBuffer, Communicator};
use farflung_optim::ApartHolders;
use farflung_parallel::pipeline::{Placement, StageCost};
use farflung_parallel::{Cluster, Coordinates, Plan};
use farflung_tensor::Device;
use farflung_zoo::ModelSpec;

use super::apart::{self, ApartParams};
use super::bound_plan::{BoundLevel, BoundPlan};
use super::division::Division;
use super::links;
use crate::{Error, Result, RunSettings};

/// Returns the ranks with number `tensor` along the tensor axis that hold a part of the model, in order, over
/// all replicas and all copies in each replica.
pub(super) fn holders(plan: &Plan, placement: &Placement, (part, tensor): (u32, u32)) -> Vec<Rank> {
    let of_pipeline = placement.holders(part);
    let of_replica = |data: u32| {
        let at = move |position: &Rank| Coordinates {
            data,
            pipeline: position.0,
            tensor,
            ..Coordinates::default()
        };
        of_pipeline.iter().map(move |position| plan.rank(at(position)))
    };
    (0..plan.replicas()).flat_map(of_replica).collect()
}

/// Returns the regions for two-level averages, as ranks among the holders of a part (one holder per replica).
pub(super) fn regions(plan: &Plan) -> Option<Vec<Vec<Rank>>> {
    let ranks = |group: &Vec<u32>| group.iter().copied().map(Rank).collect();
    Some(plan.regions()?.iter().map(ranks).collect())
}

/// Returns the communicator of a part's holders with the plan's regions, if the plan has any.
pub(super) fn in_regions(holders: Communicator, plan: &Plan) -> Result<Communicator> {
    Ok(match regions(plan) {
        Some(regions) => holders.with_regions(regions)?,
        None => holders,
    })
}

/// Returns the upper bound of the predicted time of a coded average of `values` values among `holders`.
fn coded_price(
    level: &BoundLevel,
    regions: Option<&[Vec<Rank>]>,
    values: usize,
    holders: &Topology,
) -> Result<Nanos> {
    let codec = level.codec.codec().unwrap_or_default().build();
    let payload = |values: usize| codec.max_payload(values);
    let buffer = CodedBuffer { len: values, payload: &payload, topology: holders, regions };
    Ok(level.algorithm.coded_cost(&buffer)?)
}

/// Replaces `auto`, in a plan that averages with a codec, by the algorithm with the smallest sum of times over
/// all buckets of all parts. The ring is not considered, since it encodes again at each hop. A payload whose
/// size depends on the values is assumed to have its largest size.
///
/// Errors: as [`Plan::order_with`]; a topology file that lacks one of the plan's machines.
pub(super) fn resolve(
    plan: BoundPlan,
    model: &ModelSpec,
    config: &RunSettings,
    cluster: Option<&Cluster>,
) -> Result<BoundPlan> {
    let level = plan.outermost();
    if !level.packs() || level.algorithm != Algorithm::Auto {
        return Ok(plan);
    }
    let topology = links::of_plan(config, &plan, cluster)?;
    let order = plan.order_with(plan.microbatches[0], &[StageCost::UNIT], Nanos::ZERO);
    let placement = order.map_err(Error::schedule)?.placement().clone();
    let (mut cut, divided) = (level.averages(), Division::of(&plan));
    let device = Device::cpu(1)?;
    let mut buckets = Vec::new();
    for (part, planned) in (0..).zip(&plan.parts) {
        let layers = planned.layers.start as usize..planned.layers.end as usize;
        let all = holders(&plan, &placement, (part, 0));
        let stage = divided.counted_stage((model, layers), Coordinates::default(), &device)?;
        let apart = ApartParams::of(&plan, &stage, 0);
        cut.apart = apart::ranges(&apart);
        let among: Vec<Topology> =
            apart.iter().map(|apart| topology.among(&apart.holders(&plan, &all))).collect();
        let all = topology.among(&all);
        for (len, kind) in cut.buckets(stage.layout()).into_iter().zip(cut.apart_buckets(stage.layout())) {
            // A single holder sends nothing.
            let among = kind.map_or(&all, |kind| &among[kind]);
            if among.size() > 1 {
                buckets.push((len, among.clone(), kind.is_some()));
            }
        }
    }
    let (mut cheapest, regions): (Option<(Nanos, Algorithm)>, _) = (None, regions(&plan));
    for form in level.forms().into_iter().filter(|form| *form != Algorithm::Ring) {
        let [all, of_some] = [form, ApartHolders::algorithm(form)].map(|form| level.with_algorithm(form));
        let mut total = Nanos::ZERO;
        for (len, among, apart) in &buckets {
            let (level, regions) = if *apart { (&of_some, None) } else { (&all, regions.as_deref()) };
            total = total.saturating_add(coded_price(level, regions, *len, among)?);
        }
        if cheapest.is_none_or(|(least, _)| total < least) {
            cheapest = Some((total, form));
        }
    }
    let algorithm = cheapest.map_or(Algorithm::Direct, |(_, form)| form);
    plan.changed(|plan| {
        plan.levels.iter_mut().last().expect("a checked plan has a level").algorithm = algorithm;
    })
}

#[cfg(test)]
mod tests;
