//! Plans pipelines that train side by side on thousands of machines in regions. Times come from closed forms;
//! the pipelines of the best plans are then simulated.
//!
//! The layouts range between DT-FM's two extremes. Sites are joined into groups, the nearest first (single
//! linkage). Each group has its own pipelines, whose stages follow the shortest path over the group's sites. If
//! each site is its own group, averages cross the long links; if all sites are one group, hidden states do.

mod all_reduce;
mod bound;
mod layouts;
mod layout_time;
mod sites;
#[cfg(test)]
mod tests;

use std::ops::Range;

use farflung_base::{Algorithm, Bytes, Nanos, Rank};

use super::uneven::{ChainLayer, ChainMachine};
use crate::{Cluster, ParallelError};

pub use all_reduce::{CLOSED_FORMS, Exchange, direct_time, ring_time};
pub use bound::lower_bound;
pub use sites::{Site, Sites};

/// Input of the planner.
#[derive(Debug, Clone)]
pub struct RegionalChain {
    /// Layers, first to last.
    pub layers: Vec<ChainLayer>,
    /// Forward operations of each layer, at most the layer's total.
    pub forward: Vec<u64>,
    /// Machines, by rank.
    pub machines: Vec<ChainMachine>,
    /// Gradients that are averaged, by layer.
    pub gradients: Vec<Bytes>,
    /// Bytes that the first and the last stage of a pipeline exchange after its microbatches, for tied weights.
    pub tied: Bytes,
    /// Number of microbatches in a step, over all pipelines.
    pub microbatches: u32,
}

/// How the machines of a group of sites are assigned to pipelines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Each pipeline passes through all sites of its group. The replicas of a stage are near each other.
    Across,
    /// Each pipeline fills one site before it enters the next. The stages of a pipeline are near each other.
    Along,
}

/// A plan and its predicted time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct RegionalPlan {
    /// Groups of sites, each in the order in which its pipelines pass them.
    pub groups: Vec<Vec<usize>>,
    /// How the machines of a group are assigned.
    pub direction: Direction,
    /// Machines of each pipeline, by stage. All other machines are idle.
    pub pipelines: Vec<Vec<Rank>>,
    /// Layers of each stage, the same in every pipeline.
    pub stages: Vec<Range<usize>>,
    /// Number of microbatches of each pipeline.
    pub microbatches: Vec<u32>,
    /// Algorithm that averages gradients.
    pub algorithm: Algorithm,
    /// Predicted time of a step.
    pub time: RegionalTime,
}

/// Time of a step, in three consecutive parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegionalTime {
    /// Time of the slowest pipeline.
    pub pipelines: Nanos,
    /// Time to exchange the gradients of tied weights.
    pub tied: Nanos,
    /// Time to average the slowest stage.
    pub averages: Nanos,
}

impl RegionalTime {
    /// Returns the total time.
    #[must_use]
    pub const fn step(&self) -> Nanos {
        self.pipelines.saturating_add(self.tied).saturating_add(self.averages)
    }
}

/// Result of [`regional`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Regional {
    /// The best plans, the fastest first; at least one. They differ in groups, direction or number of stages.
    pub plans: Vec<RegionalPlan>,
    /// Lower bound on the time of any plan of contiguous stages, from [`lower_bound`].
    pub bound: Nanos,
    /// Number of layouts whose time was computed.
    pub priced: usize,
}

/// Number of plans whose pipelines are simulated event by event under 1F1B, after closed forms have ranked all
/// plans.
pub const FINALISTS: usize = 8;

/// Returns the fastest plans over all groupings, both directions and every number of stages.
///
/// Layers are divided so that the slowest stage is as fast as possible, within the memory that 1F1B needs, for
/// the slowest machine of each stage. Microbatches are divided by speed. All layouts are ranked by `sum(t) + 2
/// sum(hops) + (m - 1) max(t, hop)`, plus tied weights and the closed forms of averages. The pipelines of the
/// first [`FINALISTS`] are then simulated. Pipelines that use the same shared line at once get equal parts of
/// it.
///
/// Errors: those of [`Sites::of`]; [`ParallelError::Zero`] and [`ParallelError::PerStage`] for an invalid
/// chain; [`ParallelError::TooSmall`] if no layout holds the layers; [`ParallelError::PerRank`] if
/// `chain.machines` does not match the cluster.
pub fn regional(chain: &RegionalChain, cluster: &Cluster) -> Result<Regional, ParallelError> {
    let hidden = chain.layers.iter().map(|layer| layer.output).max().unwrap_or_default();
    let sites = Sites::of(cluster, hidden)?;
    check(chain, &sites)?;
    let mut found = Vec::new();
    let mut priced = 0;
    for groups in layouts::groupings(&sites, hidden) {
        let directions = if groups.iter().all(|group| group.len() == 1) {
            &[Direction::Along][..]
        } else {
            &[Direction::Along, Direction::Across][..]
        };
        for &direction in directions {
            for stages in 1..=chain.layers.len().min(sites.size()) {
                let Some(layout) = layouts::layout(chain, &sites, &groups, direction, stages) else {
                    continue;
                };
                priced += 1;
                found.push(layout_time::with_time(chain, &sites, layout));
                // Only a few plans are kept at a time, because each lists thousands of machines.
                if found.len() > 8 * FINALISTS {
                    keep(&mut found, FINALISTS);
                }
            }
        }
    }
    keep(&mut found, FINALISTS);
    if found.is_empty() {
        return Err(too_small(chain));
    }
    for plan in &mut found {
        plan.time.pipelines = layout_time::simulated(chain, &sites, plan)?;
    }
    keep(&mut found, FINALISTS);
    let bound = lower_bound(chain);
    Ok(Regional { plans: found, bound, priced })
}

fn keep(plans: &mut Vec<RegionalPlan>, count: usize) {
    plans.sort_by_key(|plan| plan.time.step());
    plans.truncate(count);
}

fn check(chain: &RegionalChain, sites: &Sites) -> Result<(), ParallelError> {
    let zero = |field| Err(ParallelError::Zero { of: "the chain".to_owned(), field });
    if chain.layers.is_empty() {
        return zero("layers");
    }
    if chain.microbatches == 0 {
        return zero("microbatches");
    }
    if chain.machines.iter().any(|machine| machine.flops == 0) {
        return zero("flops");
    }
    for (what, given) in [("gradients", chain.gradients.len()), ("forward", chain.forward.len())] {
        if given != chain.layers.len() {
            return Err(ParallelError::PerStage { what, given, stages: chain.layers.len() });
        }
    }
    if chain.forward.iter().zip(&chain.layers).any(|(&forward, layer)| forward > layer.operations) {
        return zero("backward operations");
    }
    if chain.machines.len() != sites.size() {
        let (given, ranks) = (chain.machines.len(), sites.size());
        return Err(ParallelError::PerRank { what: "chain.machines", given, ranks });
    }
    Ok(())
}

fn too_small(chain: &RegionalChain) -> ParallelError {
    let needs = chain
        .layers
        .iter()
        .fold(0_u64, |sum, layer| sum.saturating_add(layer.state.0).saturating_add(layer.activations.0));
    let has = chain.machines.iter().filter_map(|machine| machine.memory);
    ParallelError::TooSmall {
        layers: chain.layers.len(),
        machines: chain.machines.len(),
        needs: Bytes(needs),
        has: Bytes(has.fold(0, |sum: u64, memory| sum.saturating_add(memory.0))),
    }
}
