//! Computes how much memory a plan needs on its machines, and which layers are recomputed if activations do not
//! fit.

use farflung_base::Bytes;
use farflung_parallel::{Cluster, ParallelError, Plan, Recompute};
use farflung_zoo::ModelSpec;

use super::activations::{PerToken, bytes, repeated, within_budget};
use crate::Result;

/// A plan that fits into its machines' memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// The plan, with recomputation if memory requires it.
    pub plan: Plan,
    /// Memory that each machine needs: its state, and the activations of a microbatch.
    pub needs: Bytes,
    /// Number of forward passes of layers that run again for each microbatch.
    pub repeated: usize,
}

/// Budgets are multiples of this many bytes, so that a plan's text is short.
const GRAIN: u64 = 100_000;

/// Decides what a plan of replicas recomputes: nothing if each machine of the file has memory for `state` and
/// all activations of a microbatch; else the fastest choice that fits into the smallest memory.
///
/// A machine without a memory size in the file is assumed to have enough.
///
/// Errors: [`ParallelError::Memory`] with the smallest machine, if it is too small for every choice.
pub fn fit(mut plan: Plan, model: &ModelSpec, cluster: &Cluster, state: Bytes) -> Result<Fit> {
    let (each, batch) = (PerToken::of(model), plan.batch as usize);
    let size = |values: u128| bytes(values, model.context, batch);
    // Memory for any choice of kept activations: the head's tensors, and the temporary tensors of a running
    // block.
    let running = size(each.logits + each.head + each.while_back + 2 * each.hidden);
    let rest = Bytes(state.0.saturating_add(running.0));
    let all = size(model.layers() as u128 * each.block);
    let names = cluster.rank_names();
    let machines = names.iter().zip(cluster.ranks()).filter(|(name, _)| plan.machines.contains(name));
    let known = machines.filter_map(|(name, device)| Some((name, device.memory?)));
    let Some((device, has)) = known.min_by_key(|(_, memory)| *memory) else {
        return Ok(Fit { plan, needs: Bytes(rest.0.saturating_add(all.0)), repeated: 0 });
    };
    let free = has.0.saturating_sub(rest.0);
    if all.0 <= free {
        return Ok(Fit { plan, needs: Bytes(rest.0.saturating_add(all.0)), repeated: 0 });
    }
    // While a block is recomputed, all of its tensors are in memory, for any choice of kept activations.
    let once = size(each.block).0;
    let budget = free.saturating_sub(once) / GRAIN * GRAIN;
    for part in &mut plan.parts {
        (part.recompute, part.offload) = (Recompute::Within(Bytes(budget)), 0);
    }
    let layers = plan.parts[0].layers.len();
    let least = Bytes(rest.0.saturating_add(2 * once).saturating_add(2 * size(each.hidden).0));
    let refused = || ParallelError::Memory { device: device.clone(), needs: least, has };
    if budget == 0 {
        return Err(refused().into());
    }
    let planned = within_budget(&plan.parts[0], (model, plan.context), batch).map_err(|_| refused())?;
    let repeated = planned.map_or(0, |plan| repeated(&plan, layers));
    Ok(Fit { plan, needs: Bytes(rest.0.saturating_add(once).saturating_add(budget)), repeated })
}

#[cfg(test)]
mod tests {
    use farflung_base::{ContextCut, Precision};
    use farflung_parallel::{Level, Part, Pipeline, PlannedModel, Speed};

    use super::*;

    #[test]
    fn the_least_memory_decides_what_runs_again() {
        let model = ModelSpec::preset("gpt2").unwrap();
        let mut cluster = Cluster::uniform(2, Speed::Flops(1_000_000_000), "lan".parse().unwrap());
        let plan = Plan {
            model: PlannedModel { name: "gpt2".to_owned(), layers: 12, parameters: model.parameters() },
            mesh: Plan::mesh_of(2, 1).unwrap(),
            tensor_weights: Vec::new(),
            context: ContextCut::default(),
            sequence_parallel: false,
            zero: 0,
            zero_weights: Vec::new(),
            zero_tensors: false,
            zero_codec: farflung_parallel::plan::NO_CODEC.to_owned(),
            zero_groups: Vec::new(),
            machines: cluster.rank_names(),
            precision: Precision::F32,
            batch: 1,
            microbatches: vec![1, 1],
            experts: Vec::new(),
            expert_codec: farflung_parallel::plan::NO_CODEC.to_owned(),
            paths: Vec::new(),
            parts: vec![Part { layers: 0..12, recompute: Recompute::None, offload: 0 }],
            pipeline: Pipeline::default(),
            boundaries: Vec::new(),
            levels: vec![Level::default()],
        };
        let state = Bytes(16 * model.parameters());
        let mut with = |memory: Option<u64>| {
            cluster.devices[0].memory = memory.map(Bytes);
            fit(plan.clone(), &model, &cluster, state)
        };
        let free = with(None).unwrap();
        assert_eq!((&free.plan, free.repeated), (&plan, 0));
        // If everything fits to the byte, everything is kept.
        assert_eq!(with(Some(free.needs.0)).unwrap(), free);
        let mut before = 0;
        for less in [100_000_000, 250_000_000, 400_000_000] {
            let memory = free.needs.0 - less;
            let Fit { plan, needs, repeated } = with(Some(memory)).unwrap();
            assert!(matches!(plan.parts[0].recompute, Recompute::Within(_)), "{plan}");
            assert!(
                needs.0 <= memory && needs.0 + 2 * GRAIN > memory && repeated > before,
                "{needs} {repeated}"
            );
            plan.check().unwrap();
            before = repeated;
        }
        let refused = with(Some(state.0)).unwrap_err().to_string();
        assert!(refused.contains("`worker.0` has 1.99 GB, but a replica needs"), "{refused}");
    }
}
