//! Ranks many plans by simulation. A plan is not simulated if its averages, busiest processor or busiest link
//! alone take too long for it to be among the fastest, and a simulation stops once it is too late.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use farflung_base::{Bandwidth, Bytes, Nanos, Rank};
use farflung_parallel::{Axis, Cluster, ParallelError, Plan};
use farflung_zoo::ModelSpec;

use super::candidate::{Candidate, Draft, PlanKind};
use super::side_by_side::side_by_side;
use crate::train::Prediction;
use crate::train::activations::profile;
use crate::train::chain::layer_parameters;
use crate::train::costs::Machines;
use crate::train::memory::planned_memory;
use crate::{Result, StepMemory};

/// The plans that a search returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The only kind of plan to consider; `None` considers all.
    pub only: Option<PlanKind>,
    /// Number of fastest plans to return. The fastest baseline is returned in addition.
    pub keep: usize,
    /// Whether to also return the fastest plan and the fastest baseline of each kind.
    pub each_kind: bool,
}

/// Plans that fit, the fastest first.
#[derive(Debug, Clone)]
pub struct Ranking {
    /// The requested plans.
    pub candidates: Vec<Candidate>,
    /// Number of plans that were compared. Those not in `candidates` are slower, or do not fit.
    pub compared: usize,
}

/// Returns the fastest plans that fit into the memory of each machine.
///
/// Errors: that of the fastest plan, if none fits; those of [`Prediction::on`] and [`planned_memory`].
pub(super) fn ranked(
    drafts: Vec<Draft>,
    model: &ModelSpec,
    cluster: &Cluster,
    wanted: Wanted,
) -> Result<Ranking> {
    let drafts = different(drafts, model, cluster)?;
    let mut order: Vec<(Nanos, usize)> = Vec::new();
    for (at, draft) in drafts.iter().enumerate() {
        order.push((averages_at_least(&draft.plan, model, cluster)?, at));
    }
    order.sort_unstable();
    let best = Mutex::new(Best { wanted, all: Vec::new(), of_kind: BTreeMap::new() });
    let limit_of = |draft: &Draft| best.lock().unwrap_or_else(PoisonError::into_inner).limit(draft);
    let found = side_by_side(&order, |&(least, at)| {
        let draft = &drafts[at];
        let limit = limit_of(draft);
        if least > limit {
            return Ok(Outcome::Slower);
        }
        let Some(predicted) = Prediction::within(&draft.plan, model, cluster, limit)? else {
            return Ok(Outcome::Slower);
        };
        let held = planned_memory(&draft.plan, model, cluster)?;
        let step = predicted.step();
        if let Some(error) = too_small(&draft.plan, &held, cluster) {
            return Ok(Outcome::TooLarge(step, at, error));
        }
        best.lock().unwrap_or_else(PoisonError::into_inner).add(draft, step);
        let Draft { kind, what, plan, is_baseline } = draft.clone();
        let (bubble, compute) = (predicted.bubble, predicted.compute);
        let candidate = Candidate { kind, what, plan, step, bubble, compute, held, is_baseline };
        Ok(Outcome::Fits(at, Box::new(candidate)))
    })?;
    let (mut fitting, mut too_large) = (Vec::new(), Vec::new());
    for outcome in found {
        match outcome {
            Outcome::Fits(at, candidate) if candidate.step <= limit_of(&drafts[at]) => {
                fitting.push((candidate.step, at, candidate));
            }
            Outcome::Fits(..) | Outcome::Slower => {}
            Outcome::TooLarge(step, at, error) => too_large.push((step, at, error)),
        }
    }
    fitting.sort_by_key(|&(step, at, _)| (step, at));
    if fitting.is_empty() {
        let fastest = too_large.into_iter().min_by_key(|&(step, at, _)| (step, at));
        return Err(fastest.map_or(ParallelError::NoDevices, |(_, _, error)| error).into());
    }
    let candidates = fitting.into_iter().map(|(_, _, candidate)| *candidate).collect();
    Ok(Ranking { candidates, compared: drafts.len() })
}

/// Result of simulating a plan.
enum Outcome {
    Fits(usize, Box<Candidate>),
    Slower,
    TooLarge(Nanos, usize, ParallelError),
}

/// Step times of the fastest plans so far.
struct Best {
    wanted: Wanted,
    /// Sorted, the shortest first.
    all: Vec<Nanos>,
    of_kind: BTreeMap<(Option<PlanKind>, bool), Nanos>,
}

impl Best {
    /// Returns the longest step time with which a plan can still be among the fastest.
    fn limit(&self, draft: &Draft) -> Nanos {
        let of_all = self.all.get(self.wanted.keep.max(1) - 1).copied().unwrap_or(Nanos::MAX);
        let of_kind = match self.kind(draft) {
            Some(kind) => self.of_kind.get(&kind).copied().unwrap_or(Nanos::MAX),
            None => Nanos::ZERO,
        };
        of_all.max(of_kind)
    }

    fn add(&mut self, draft: &Draft, step: Nanos) {
        self.all.insert(self.all.partition_point(|&other| other <= step), step);
        self.all.truncate(self.wanted.keep.max(1));
        if let Some(kind) = self.kind(draft) {
            let of_kind = self.of_kind.entry(kind).or_insert(step);
            *of_kind = step.min(*of_kind);
        }
    }

    /// Returns the key of the plan's kind in `of_kind`; `None` if the fastest plan of this kind is not
    /// requested.
    fn kind(&self, draft: &Draft) -> Option<(Option<PlanKind>, bool)> {
        let each = self.wanted.each_kind;
        (each || draft.is_baseline).then_some((Some(draft.kind).filter(|_| each), draft.is_baseline))
    }
}

/// Returns a lower bound of a plan's step time: with any algorithm, each rank sends nearly all of its gradients
/// at least once, and not faster than its uplink or all of its links together.
fn averages_at_least(plan: &Plan, model: &ModelSpec, cluster: &Cluster) -> Result<Nanos> {
    let replicas = plan.replicas() as usize;
    // Of ranks that divide layers, one may have little of them.
    if replicas == 1 || plan.tensor_ranks() > 1 {
        return Ok(Nanos::ZERO);
    }
    let topology = Machines::of_plan(plan, model, cluster)?.topology;
    let layers: Vec<u64> = layer_parameters(&profile(model)).collect();
    let mut longest = Nanos::ZERO;
    for rank in (0..plan.ranks()).map(Rank) {
        let part = &plan.parts[plan.at(rank).pipeline as usize].layers;
        // A single part has a tied table once.
        let held: u64 = layers[part.start as usize..part.end as usize].iter().sum();
        let gradients = 4 * if plan.parts.len() == 1 { model.parameters() } else { held };
        let sends = Bytes(gradients / replicas as u64 * (replicas as u64 - 1));
        let others = plan.group(rank, Axis::Data).into_iter().filter(|&other| other != rank);
        let links = others.map(|other| topology.bandwidth_between(rank, other));
        let all = Bandwidth(links.map(|link| link.0).fold(0, u64::saturating_add));
        longest = longest.max(topology.access_link(rank).up.min(all).transfer(sends));
    }
    Ok(longest)
}

/// Removes plans that differ from an earlier one only in the names of equal machines.
fn different(drafts: Vec<Draft>, model: &ModelSpec, cluster: &Cluster) -> Result<Vec<Draft>> {
    let names = cluster.rank_names();
    let memory: BTreeMap<&str, Option<Bytes>> =
        names.iter().map(String::as_str).zip(cluster.ranks().map(|machine| machine.memory)).collect();
    let mut seen: Vec<(Plan, Machines, Vec<Option<Bytes>>)> = Vec::new();
    let mut all = Vec::new();
    for draft in drafts {
        let machines = Machines::of_plan(&draft.plan, model, cluster)?;
        let holds = draft.plan.machines.iter().map(|name| memory[name.as_str()]).collect();
        let nameless = Plan { machines: Vec::new(), ..draft.plan.clone() };
        let is = (nameless, machines, holds);
        if !seen.contains(&is) {
            seen.push(is);
            all.push(draft);
        }
    }
    Ok(all)
}

/// Returns the machine of a plan that lacks the most memory.
pub(super) fn too_small(plan: &Plan, held: &[StepMemory], cluster: &Cluster) -> Option<ParallelError> {
    let names = cluster.rank_names();
    let memory = |name: &str| names.iter().zip(cluster.ranks()).find(|(known, _)| *known == name)?.1.memory;
    plan.machines
        .iter()
        .zip(held)
        .filter_map(|(name, held)| Some((name, held.total(), memory(name)?)))
        .filter(|(_, needs, has)| needs > has)
        .max_by_key(|(_, needs, has)| needs.0 - has.0)
        .map(|(device, needs, has)| ParallelError::PartMemory { device: device.clone(), needs, has })
}

#[cfg(test)]
mod tests {
    use super::super::plan_request::PlanRequest;
    use super::*;
    use crate::train::PipelineSizes;

    const UNEVEN: &str = include_str!("../../../tests/uneven.toml");

    fn drafts(cluster: &Cluster, model: &ModelSpec) -> Vec<Draft> {
        let sizes = PipelineSizes { batch: 1, microbatches: 4 };
        let request = PlanRequest { name: "small", model, cluster, sizes };
        let mut drafts = Vec::new();
        request.pipelines(&mut drafts).unwrap();
        request.data(&mut drafts).unwrap();
        request.both(&mut drafts).unwrap();
        request.dapple(&mut drafts).unwrap();
        drafts
    }

    /// Each pair has a link of its own, so that ranks send faster than over any single link.
    const REGION: &str = r#"
[[region]]
name = "here"
inside = "1gbit,100us"

[[device]]
name = "machine"
count = 4
flops = "1 TFLOPS"
region = "here"
"#;

    #[test]
    fn what_is_left_out_is_slower_and_bounds_hold() {
        let model = ModelSpec::preset("nano").unwrap();
        for file in [UNEVEN, REGION] {
            let cluster: Cluster = file.parse().unwrap();
            let drafts = drafts(&cluster, &model);
            let mut steps = Vec::new();
            for Draft { plan, what, .. } in &different(drafts.clone(), &model, &cluster).unwrap() {
                let step = Prediction::on(plan, &model, &cluster).unwrap().step();
                let least = averages_at_least(plan, &model, &cluster).unwrap();
                let busiest = Prediction::at_least(plan, &model, &cluster).unwrap();
                assert!(least <= busiest && busiest <= step, "{what}: {least}, {busiest}, {step}");
                steps.push(step);
            }
            steps.sort_unstable();
            let wanted = Wanted { only: None, keep: 3, each_kind: false };
            let ranking = ranked(drafts, &model, &cluster, wanted).unwrap();
            assert_eq!(ranking.compared, steps.len());
            let found: Vec<Nanos> = ranking.candidates.iter().map(|candidate| candidate.step).collect();
            assert_eq!(found[..3], steps[..3]);
            assert!(ranking.candidates.iter().any(|candidate| candidate.is_baseline));
            assert!(found.len() < steps.len(), "{} of {}", found.len(), steps.len());
        }
    }
}
