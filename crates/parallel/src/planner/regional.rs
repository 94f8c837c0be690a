//! Pipelines side by side over thousands of machines in regions, priced by closed forms.
//!
//! The layouts are DT-FM's two extremes and what lies between: sites are joined into groups, the nearest first
//! (single linkage), and each group has pipelines of its own, whose stages follow the shortest path over its
//! sites. With one group for each site averages cross the long links; with one group of all, hidden states do.

mod all_reduce;
mod bound;
mod layouts;
mod price;
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

/// What is to be planned.
#[derive(Debug, Clone)]
pub struct RegionalChain {
    /// The layers, first to last.
    pub layers: Vec<ChainLayer>,
    /// The operations of each layer's forward, at most all of the layer's.
    pub forward: Vec<u64>,
    /// By rank.
    pub machines: Vec<ChainMachine>,
    /// Gradients that are averaged, by layer.
    pub gradients: Vec<Bytes>,
    /// What the first and the last stage of a pipeline tell each other after its microbatches: tied weights.
    pub tied: Bytes,
    /// Microbatches of a step, over all pipelines.
    pub microbatches: u32,
}

/// How sites become pipelines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// A pipeline passes all sites of its group: a stage's replicas are near each other.
    Across,
    /// A pipeline fills up one site before the next: its stages are near each other.
    Along,
}

/// A plan and its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct RegionalPlan {
    /// Groups of sites, each in the order of its pipelines.
    pub groups: Vec<Vec<usize>>,
    /// How the machines of a group are taken.
    pub direction: Direction,
    /// The machines of each pipeline, stage by stage. Machines that are not named do nothing.
    pub pipelines: Vec<Vec<Rank>>,
    /// The layers of each stage, of every pipeline.
    pub stages: Vec<Range<usize>>,
    /// By pipeline.
    pub microbatches: Vec<u32>,
    /// How gradients are averaged.
    pub algorithm: Algorithm,
    /// What a step takes.
    pub time: RegionalTime,
}

/// What a step takes, one part after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegionalTime {
    /// The slowest pipeline.
    pub pipelines: Nanos,
    /// Tied weights.
    pub tied: Nanos,
    /// The slowest stage's average.
    pub averages: Nanos,
}

impl RegionalTime {
    /// All of it.
    #[must_use]
    pub const fn step(&self) -> Nanos {
        self.pipelines.saturating_add(self.tied).saturating_add(self.averages)
    }
}

/// What was found.
#[derive(Debug, Clone)]
#[must_use]
pub struct Regional {
    /// The best plans, of different groups, directions or numbers of stages, the fastest first; at least one.
    pub plans: Vec<RegionalPlan>,
    /// What no plan of contiguous stages beats ([`lower_bound`]).
    pub bound: Nanos,
    /// Layouts that were priced.
    pub priced: usize,
}

/// Plans whose pipelines are simulated event by event under 1F1B, once closed forms have ranked all.
pub const FINALISTS: usize = 8;

/// The fastest of all groupings, both directions and every number of stages.
///
/// Layers are divided so that the slowest stage is as fast as it can be, under memory as 1F1B needs it, by the
/// slowest machine of each column. Microbatches follow speed. All layouts are ranked by `sum(t) + 2 sum(hops) +
/// (m - 1) max(t, hop)`, tied weights and the closed forms of averages; the pipelines of the first
/// [`FINALISTS`] are then simulated. Pipelines that cross the same shared line at once have equal parts of it.
///
/// Errors: those of [`Sites::of`]; an empty chain; [`ParallelError::TooSmall`] where no layout holds the
/// layers; [`ParallelError::PerRank`] if `chain.machines` are not those of the cluster.
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
                found.push(price::priced(chain, &sites, layout));
                // Few are kept: thousands of plans of thousands of machines are large.
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
        plan.time.pipelines = price::simulated(chain, &sites, plan)?;
    }
    keep(&mut found, FINALISTS);
    let bound = lower_bound(&chain.layers, &chain.machines, chain.microbatches);
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
