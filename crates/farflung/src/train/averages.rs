//! How averages go over the links: the form in which a codec's bytes are reduced, chosen by price and written
//! into the plan.

use farflung_base::{Algorithm, Nanos, Rank, Topology};
use farflung_comm::{CodedAllReduce as _, CodedBuffer, Communicator};
use farflung_compress::{AverageSpec, CodecSpec};
use farflung_optim::AverageConfig;
use farflung_optim::sync::SyncMethod;
use farflung_parallel::pipeline::{Placement, StageCost};
use farflung_parallel::plan::NO_CODEC;
use farflung_parallel::{Cluster, Level, ParallelError, Plan};
use farflung_tensor::Device;
use farflung_zoo::{GptConfig, Stage};

use super::links;
use crate::{Error, Result, TrainConfig};

/// Why an algorithm cannot average by a level's codec; `None` if it can.
pub(super) fn refusal(level: &Level) -> Option<String> {
    let known = level.algorithm == Algorithm::Auto || Algorithm::CODED.contains(&level.algorithm);
    if !packs(level) {
        return None;
    }
    if known && level.algorithm != Algorithm::Auto && !forms(level).contains(&level.algorithm) {
        let names: Vec<_> = forms(level).into_iter().map(Algorithm::name).collect();
        let why = "each rank gathers momentum of its own values before they are added to others'";
        return Some(format!("{} or auto with codec {}: {why}", names.join(", "), level.codec));
    }
    if known {
        return None;
    }
    let names = Algorithm::CODED.map(Algorithm::name).join(", ");
    Some(format!("one of {names}, auto with codec {}: no other sums what is packed", level.codec))
}

/// Whether a level's values travel as a codec's bytes: what a protocol exchanges is summed plainly.
pub(super) fn packs(level: &Level) -> bool {
    level.codec != NO_CODEC && !matches!(level.codec.parse(), Ok(AverageSpec::Protocol(_)))
}

/// How the few numbers are summed that no codec packs: as what it packs, or by a ring where that has no region
/// and no weights.
pub(super) fn plain_algorithm(level: &Level) -> Algorithm {
    match level.algorithm {
        Algorithm::AllGather => Algorithm::Ring,
        Algorithm::Direct if packs(level) => Algorithm::Ring,
        algorithm => algorithm,
    }
}

/// How a level averages, but for the seed.
///
/// Errors: a codec's name that nobody has.
pub(super) fn config_of(level: &Level) -> Result<AverageConfig> {
    Ok(AverageConfig {
        codec: level.codec.parse()?,
        bucket_bytes: usize::try_from(level.bucket_bytes).unwrap_or(usize::MAX),
        overlap: level.overlap,
        algorithm: level.algorithm,
        ..AverageConfig::default()
    })
}

/// The forms in which a level's codec averages.
fn forms(level: &Level) -> Vec<Algorithm> {
    let corrected = level.codec.parse().is_ok_and(|codec: CodecSpec| codec.momentum().is_some());
    let alone =
        |form: &Algorithm| matches!(form, Algorithm::Direct | Algorithm::Butterfly | Algorithm::AllGather);
    Algorithm::CODED.into_iter().filter(|form| !corrected || alone(form)).collect()
}

/// Whether a plan averages gradients at each step, so that replicas are always the same.
pub(super) fn each_step(plan: &Plan) -> bool {
    SyncMethod::by_name(&plan.outermost().method).is_none_or(|method| method.each_step)
}

/// Whether what a plan's replicas send travels while they compute the next steps.
pub(super) fn overlaps(plan: &Plan) -> bool {
    SyncMethod::by_name(&plan.outermost().method).is_some_and(|method| method.overlaps)
}

/// The ranks that hold a part of the model, in order: of all replicas, and of all copies of the model.
pub(super) fn holders(plan: &Plan, placement: &Placement, part: u32) -> Vec<Rank> {
    let of_pipeline = placement.holders(part);
    let of_replica = |replica: u32| {
        let first = replica * placement.ranks();
        of_pipeline.iter().map(move |rank| Rank(first + rank.0))
    };
    (0..plan.replicas()).flat_map(of_replica).collect()
}

/// The regions of the two-level form as ranks of the holders of a part, one for each replica.
pub(super) fn regions(plan: &Plan) -> Option<Vec<Vec<Rank>>> {
    let ranks = |group: &Vec<u32>| group.iter().copied().map(Rank).collect();
    Some(plan.regions()?.iter().map(ranks).collect())
}

/// The communicator of a part's holders with the plan's regions, where it names them.
pub(super) fn in_regions(holders: Communicator, plan: &Plan) -> Result<Communicator> {
    Ok(match regions(plan) {
        Some(regions) => holders.with_regions(regions)?,
        None => holders,
    })
}

/// What a coded average of so many values takes among `holders`, at most.
pub(super) fn coded_price(plan: &Plan, values: usize, holders: &Topology) -> Result<Nanos> {
    let level = plan.outermost();
    let codec = level.codec.parse::<CodecSpec>()?.build();
    let payload = |values: usize| codec.max_payload(values);
    let regions = regions(plan);
    let buffer =
        CodedBuffer { len: values, payload: &payload, topology: holders, regions: regions.as_deref() };
    Ok(level.algorithm.coded_cost(&buffer)?)
}

/// Puts the cheapest form in the place of `auto` in a plan that averages through a codec: the least sum over
/// all buckets of all parts. A payload that depends on the values is taken to be the largest.
///
/// Errors: as [`Plan::order_with`]; a topology file that lacks one of the plan's machines.
pub(super) fn resolve(
    plan: &mut Plan,
    model: &GptConfig,
    config: &TrainConfig,
    cluster: Option<&Cluster>,
) -> Result<()> {
    let level = plan.outermost();
    if !packs(level) || level.algorithm != Algorithm::Auto {
        return Ok(());
    }
    let topology = links::of_plan(config, plan, cluster)?;
    let order = plan.order_with(plan.microbatches[0], &[StageCost::UNIT], Nanos::ZERO);
    let placement = order.map_err(Error::schedule)?.placement().clone();
    let cut = config_of(level)?;
    let device = Device::cpu(1)?;
    let mut buckets = Vec::new();
    for (part, planned) in (0..).zip(&plan.parts) {
        let layers = planned.layers.start as usize..planned.layers.end as usize;
        let among = topology.among(&holders(plan, &placement, part));
        let stage = Stage::new(*model, layers, &device)?;
        buckets.extend(cut.buckets(stage.layout()).into_iter().map(|len| (len, among.clone())));
    }
    let mut cheapest: Option<(Nanos, Algorithm)> = None;
    for form in forms(plan.outermost()).into_iter().filter(|form| *form != Algorithm::Ring) {
        let last = plan.levels.len() - 1;
        plan.levels[last].algorithm = form;
        let mut price = Nanos::ZERO;
        for (len, among) in &buckets {
            price = price.saturating_add(coded_price(plan, *len, among)?);
        }
        if cheapest.is_none_or(|(least, _)| price < least) {
            cheapest = Some((price, form));
        }
    }
    let last = plan.levels.len() - 1;
    plan.levels[last].algorithm = cheapest.map_or(Algorithm::Direct, |(_, form)| form);
    Ok(())
}

/// [`refusal`] of each level of a plan.
///
/// Errors: [`ParallelError::Plan`] with the field.
pub(super) fn check(plan: &Plan) -> Result<()> {
    let refused = plan.levels.iter().enumerate().find_map(|(i, level)| Some((i, level, refusal(level)?)));
    let Some((i, level, expected)) = refused else { return Ok(()) };
    let (field, value) = (format!("level[{i}].algorithm"), level.algorithm.to_string());
    Err(ParallelError::Plan { field, value, expected }.into())
}

#[cfg(test)]
mod tests;
