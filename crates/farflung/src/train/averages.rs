//! Decides how averages are sent over the links: chooses the algorithm of a coded average by its predicted time
//! and writes it into the plan.

use farflung_base::{Algorithm, Nanos, Rank, Topology};
use farflung_comm::{CodedAllReduce as _, CodedBuffer, Communicator};
use farflung_compress::{AverageSpec, CodecSpec};
use farflung_optim::AverageConfig;
use farflung_optim::sync::SyncMethod;
use farflung_parallel::pipeline::{Placement, StageCost};
use farflung_parallel::plan::NO_CODEC;
use farflung_parallel::{Cluster, Coordinates, Level, ParallelError, Plan};
use farflung_tensor::Device;
use farflung_zoo::{ModelSpec, Stage};

use super::links;
use crate::{Error, Result, TrainConfig};

/// Returns why an algorithm cannot average with a level's codec; `None` if it can.
pub(super) fn refusal(level: &Level) -> Option<String> {
    let known = level.algorithm == Algorithm::Auto || Algorithm::CODED.contains(&level.algorithm);
    if !packs(level) {
        return None;
    }
    if known && level.algorithm != Algorithm::Auto && !forms(level).contains(&level.algorithm) {
        let names: Vec<_> = forms(level).into_iter().map(Algorithm::name).collect();
        let why = "each rank accumulates the momentum of its own values before they are summed";
        return Some(format!("{} or auto with codec {}: {why}", names.join(", "), level.codec));
    }
    if known {
        return None;
    }
    let names = Algorithm::CODED.map(Algorithm::name).join(", ");
    Some(format!("one of {names}, auto with codec {}: no other algorithm sums encoded values", level.codec))
}

/// Returns whether a level's values are sent as a codec's bytes. The exchanges of a protocol are summed
/// uncompressed.
pub(super) fn packs(level: &Level) -> bool {
    level.codec != NO_CODEC && !matches!(level.codec.parse(), Ok(AverageSpec::Protocol(_)))
}

/// Returns the algorithm for values that no codec encodes, such as votes: a ring in place of all-gather, and in
/// place of direct if the level has a codec; else the level's own algorithm.
pub(super) fn plain_algorithm(level: &Level) -> Algorithm {
    match level.algorithm {
        Algorithm::AllGather => Algorithm::Ring,
        Algorithm::Direct if packs(level) => Algorithm::Ring,
        algorithm => algorithm,
    }
}

/// Returns the settings for the averages of a level; the seed is left at its default.
///
/// Errors: an unknown codec.
pub(super) fn config_of(level: &Level) -> Result<AverageConfig> {
    Ok(AverageConfig {
        codec: level.codec.parse()?,
        bucket_bytes: usize::try_from(level.bucket_bytes).unwrap_or(usize::MAX),
        overlap: level.overlap,
        algorithm: level.algorithm,
        ..AverageConfig::default()
    })
}

/// Returns the algorithms with which a level's codec can average.
fn forms(level: &Level) -> Vec<Algorithm> {
    let corrected = level.codec.parse().is_ok_and(|codec: CodecSpec| codec.momentum().is_some());
    let alone =
        |form: &Algorithm| matches!(form, Algorithm::Direct | Algorithm::Butterfly | Algorithm::AllGather);
    Algorithm::CODED.into_iter().filter(|form| !corrected || alone(form)).collect()
}

/// Returns whether a plan averages gradients at each step, so that replicas always have the same parameters.
pub(super) fn each_step(plan: &Plan) -> bool {
    SyncMethod::by_name(&plan.outermost().method).is_none_or(|method| method.each_step)
}

/// Returns whether replicas' messages are in flight while they compute the next steps.
pub(super) fn overlaps(plan: &Plan) -> bool {
    SyncMethod::by_name(&plan.outermost().method).is_some_and(|method| method.overlaps)
}

/// Returns the ranks that hold a part of the model, in order, over all replicas and all copies in each replica.
pub(super) fn holders(plan: &Plan, placement: &Placement, part: u32) -> Vec<Rank> {
    let of_pipeline = placement.holders(part);
    let of_replica = |data: u32| {
        let at = move |position: &Rank| Coordinates { data, pipeline: position.0, ..Coordinates::default() };
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
pub(super) fn coded_price(plan: &Plan, values: usize, holders: &Topology) -> Result<Nanos> {
    let level = plan.outermost();
    let codec = level.codec.parse::<CodecSpec>()?.build();
    let payload = |values: usize| codec.max_payload(values);
    let regions = regions(plan);
    let buffer =
        CodedBuffer { len: values, payload: &payload, topology: holders, regions: regions.as_deref() };
    Ok(level.algorithm.coded_cost(&buffer)?)
}

/// Replaces `auto`, in a plan that averages with a codec, by the algorithm with the smallest sum of times over
/// all buckets of all parts. The ring is not considered, since it encodes again at each hop. A payload whose
/// size depends on the values is assumed to have its largest size.
///
/// Errors: as [`Plan::order_with`]; a topology file that lacks one of the plan's machines.
pub(super) fn resolve(
    plan: &mut Plan,
    model: &ModelSpec,
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
        let stage = Stage::new(model, layers, &device)?;
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

/// Checks each level of a plan with [`refusal`].
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
