//! Plans for more machines than are practical to simulate: by region, with closed-form costs.

use farflung_base::{Bytes, Nanos, Rank};
use farflung_parallel::planner::regional::{RegionalChain, RegionalPlan, Sites, lower_bound, regional};
use farflung_parallel::planner::uneven::{ChainPlan, ChainStage};
use farflung_parallel::{Cluster, Level, Plan, Recompute};
use farflung_zoo::ModelSpec;

use crate::Result;
use crate::train::activations::{PerToken, bytes, profile};
use crate::train::chain::{PipelineSizes, layer_parameters, layers, machines, pipeline_plan};

/// Plans by region.
#[derive(Debug)]
pub struct ByRegion {
    /// The plans, the fastest first; at least one.
    pub plans: Vec<RegionalCandidate>,
    /// Lower bound of the step time of any plan with contiguous stages on these machines, for any links.
    pub bound: Nanos,
    /// Number of layouts that were evaluated.
    pub priced: usize,
    /// The sites of the machines.
    pub sites: Sites,
}

/// A plan by region.
#[derive(Debug, Clone)]
pub struct RegionalCandidate {
    /// The pipelines and their predicted time.
    pub found: RegionalPlan,
    /// Whether each layer keeps only its input for a microbatch, and is recomputed.
    pub is_recomputed: bool,
    /// Memory of the rank that holds the most.
    pub held: Bytes,
}

/// Plans several pipelines with [`regional`], once with all activations kept and once with full recomputation.
///
/// State is 16 bytes per parameter; values are sent and computed in f32, as in the trainer. A stage that
/// recomputes keeps the input of each of its layers, and all activations of one microbatch.
///
/// Errors: those of [`regional`], if neither fits.
pub fn by_region(model: &ModelSpec, cluster: &Cluster, sizes: PipelineSizes) -> Result<ByRegion> {
    let (mut plans, mut priced, mut refused) = (Vec::new(), 0, None);
    for is_recomputed in [false, true] {
        let chain = regional_chain(model, cluster, sizes, is_recomputed);
        match regional(&chain, cluster) {
            Ok(found) => {
                priced += found.priced;
                plans.extend(found.plans.into_iter().map(|found| RegionalCandidate {
                    held: peak_memory(&chain, &found),
                    found,
                    is_recomputed,
                }));
            }
            Err(error) => refused = Some(error),
        }
    }
    if let (true, Some(error)) = (plans.is_empty(), refused) {
        return Err(error.into());
    }
    plans.sort_by_key(|candidate| candidate.found.time.step());
    let chain = regional_chain(model, cluster, sizes, false);
    let bound = lower_bound(&chain);
    let sites = Sites::of(cluster, chain.layers[0].output)?;
    Ok(ByRegion { plans, bound, priced, sites })
}

fn regional_chain(
    model: &ModelSpec,
    cluster: &Cluster,
    sizes: PipelineSizes,
    is_recomputed: bool,
) -> RegionalChain {
    let mut layers = layers(model, sizes.batch);
    let forward: Vec<u64> = layers.iter().map(|layer| layer.operations / 3).collect();
    let gradients = layer_parameters(&profile(model)).map(|parameters| Bytes(4 * parameters)).collect();
    if is_recomputed {
        let input = bytes(PerToken::of(model).hidden, model.context, sizes.batch as usize);
        for (layer, &forward) in layers.iter_mut().zip(&forward) {
            layer.operations = layer.operations.saturating_add(forward);
            layer.state = Bytes(layer.state.0.saturating_add(layer.activations.0));
            layer.activations = input;
        }
    }
    RegionalChain {
        layers,
        forward,
        machines: machines(model, cluster),
        gradients,
        tied: Bytes(model.shared_table_bytes()),
        microbatches: sizes.microbatches,
    }
}

/// Returns the memory of the rank that holds the most, under 1F1B.
fn peak_memory(chain: &RegionalChain, plan: &RegionalPlan) -> Bytes {
    let most = plan.microbatches.iter().copied().max().unwrap_or(0) as usize;
    let stages = plan.stages.len();
    let of = |(at, layers): (usize, &std::ops::Range<usize>)| {
        let in_flight = most.min(stages - at) as u64;
        let each = chain.layers[layers.clone()]
            .iter()
            .map(|layer| layer.state.0.saturating_add(layer.activations.0.saturating_mul(in_flight)));
        each.fold(0, u64::saturating_add)
    };
    Bytes(plan.stages.iter().enumerate().map(of).max().unwrap_or(0))
}

impl RegionalCandidate {
    /// Converts the pipelines to a plan for the trainer.
    ///
    /// Errors: as [`Plan::check`].
    pub fn plan(
        &self,
        name: &str,
        model: &ModelSpec,
        cluster: &Cluster,
        sizes: PipelineSizes,
    ) -> Result<Plan> {
        let rows: &[Vec<Rank>] = &self.found.pipelines;
        let stages = self.found.stages.iter().enumerate();
        let stages = stages.map(|(machine, layers)| ChainStage { layers: layers.clone(), machine });
        let planned = ChainPlan { stages: stages.collect(), time: Nanos::ZERO };
        let mut plan = pipeline_plan(name, model, cluster, &rows[0], &planned, sizes)?;
        let names = cluster.rank_names();
        plan.mesh = Plan::mesh_of(rows.len() as u32, self.found.stages.len() as u32)?;
        plan.machines = rows.iter().flatten().map(|rank| names[rank.index()].clone()).collect();
        plan.microbatches.clone_from(&self.found.microbatches);
        plan.levels = vec![Level { algorithm: self.found.algorithm, ..Level::default() }];
        if self.is_recomputed {
            plan.parts.iter_mut().for_each(|part| part.recompute = Recompute::Full);
        }
        plan.check()?;
        Ok(plan)
    }
}
