//! Plans that fit only if replicas divide the optimizer's state, or gradients and weights too.

use farflung_base::{Bytes, Rank};
use farflung_parallel::{Level, Plan};

use super::candidate::rank_memory;
use super::plan_request::PlanRequest;
use super::ranking::too_small;
use crate::train::memory::planned_memory;
use crate::{Result, StepMemory};

/// The unit of weights that follow memory.
const WHOLE: f64 = 1000.0;

/// A plan that fits, and what was done to it in words.
pub(super) struct Fitting {
    pub(super) plan: Plan,
    pub(super) how: &'static str,
}

impl PlanRequest<'_> {
    /// Returns the plan if each machine has the memory for it, by a rough estimate. Unless all have plenty,
    /// also with the optimizer's state divided among the replicas, if each has what is counted then: equally,
    /// or by memory. If that is not enough, with gradients divided, too, or with weights as well.
    pub(super) fn fitting(&self, plan: &Plan) -> Result<Vec<Fitting>> {
        let mut all = Vec::new();
        if self.fits(plan, 1) {
            all.push(Fitting { plan: plan.clone(), how: "" });
        }
        if self.fits(plan, 2) {
            return Ok(all);
        }
        for zero in [1, 2, 3] {
            if let Some(fitting) = self.at_stage(plan, zero)? {
                all.push(fitting);
                break;
            }
        }
        Ok(all)
    }

    /// Returns the plan at a stage of ZeRO, if each machine has the memory for it.
    fn at_stage(&self, plan: &Plan, zero: u32) -> Result<Option<Fitting>> {
        let mut equal = Plan { zero, ..plan.clone() };
        // Gradients go to their owners, whatever the algorithm: one plan for all.
        equal.levels.iter_mut().for_each(|level| level.algorithm = Level::unless_told(&level.codec));
        if equal.check().is_err() {
            return Ok(None);
        }
        let held = planned_memory(&equal, self.model, self.cluster)?;
        let [equally, by_memory] = match zero {
            1 => [", state divided", ", state divided by memory"],
            2 => [", state and gradients divided", ", state and gradients divided by memory"],
            _ => [", state, gradients and weights divided", ", all divided by memory"],
        };
        if too_small(&equal, &held, self.cluster).is_none() {
            return Ok(Some(Fitting { plan: equal, how: equally }));
        }
        let zero_weights = self.weights_by_memory(&equal, &held)?;
        let plan = zero_weights.map(|zero_weights| Plan { zero_weights, ..equal });
        Ok(plan.map(|plan| Fitting { plan, how: by_memory }))
    }

    /// Returns weights by the part of the state that the machines of each replica have memory for, where ranks
    /// hold this much with equal shares. `None` if one lacks memory for the rest, or all together for the
    /// state.
    fn weights_by_memory(&self, plan: &Plan, held: &[StepMemory]) -> Result<Option<Vec<u32>>> {
        let replicas = plan.replicas() as usize;
        // What ranks hold while another replica has all of the state.
        let without = |owner: usize| {
            let zero_weights = (0..replicas).map(|replica| u32::from(replica == owner)).collect();
            planned_memory(&Plan { zero_weights, ..plan.clone() }, self.model, self.cluster)
        };
        let without = [without(0)?, without(1)?];
        let mut room = vec![1.0_f64; replicas];
        for (rank, held) in (0..).map(Rank).zip(held) {
            let Some(has) = self.memory(&plan.machines[rank.index()]) else { continue };
            let replica = plan.at(rank).data as usize;
            let least = without[usize::from(replica == 0)][rank.index()].total();
            let Some(left) = has.0.checked_sub(least.0) else { return Ok(None) };
            let all = held.total().0.saturating_sub(least.0).max(1) as f64 * replicas as f64;
            room[replica] = room[replica].min(left as f64 / all);
        }
        let weights: Vec<u32> = room.into_iter().map(|room| (WHOLE * room) as u32).collect();
        let all = weights.iter().map(|&weight| f64::from(weight)).sum::<f64>();
        Ok((all >= WHOLE).then_some(weights))
    }

    /// Returns the memory of a machine of the file.
    fn memory(&self, name: &str) -> Option<Bytes> {
        let at = self.cluster.rank_names().iter().position(|known| known == name)?;
        self.cluster.ranks().nth(at)?.memory
    }

    /// Returns whether each machine has memory for its part `times` times.
    fn fits(&self, plan: &Plan, times: u64) -> bool {
        let needs = rank_memory(plan, self.model);
        let fits = |(name, needs): (&String, Bytes)| {
            self.memory(name).is_none_or(|has| needs.0.saturating_mul(times) <= has.0)
        };
        plan.machines.iter().zip(needs).all(fits)
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::Bytes;
    use farflung_parallel::Cluster;
    use farflung_zoo::{ModelSpec, gpt2};

    use super::super::{Wanted, auto};
    use crate::train::{PipelineSizes, planned_memory};

    /// Returns a model that is larger than the windows in which replicas send each other shards.
    fn model() -> ModelSpec {
        gpt2(4, 4, 512, 32, 256).unwrap()
    }

    /// Returns the fastest plan of replicas on two machines with these bytes of memory.
    fn found(memory: [u64; 2]) -> Option<farflung_parallel::Plan> {
        let model = model();
        let machine = |(name, bytes): (&str, u64)| {
            format!("[[device]]\nname = \"{name}\"\nflops = \"100 GFLOPS\"\nmemory = \"{bytes}B\"\n")
        };
        let file: String = ["a", "b"].into_iter().zip(memory).map(machine).collect();
        let cluster: Cluster = format!("default = \"10gbit,10us\"\n{file}").parse().unwrap();
        let sizes = PipelineSizes { batch: 1, microbatches: 2 };
        let wanted = Wanted { only: Some(super::super::PlanKind::Data), keep: 1, each_kind: false };
        let plan = auto("wide", &model, &cluster, sizes, wanted).ok()?.candidates.swap_remove(0).plan;
        let held = planned_memory(&plan, &model, &cluster).unwrap();
        let fits = plan
            .machines
            .iter()
            .zip(held)
            .all(|(name, held)| held.total() <= Bytes(memory[usize::from(name == "b")]));
        assert!(fits, "{plan}");
        Some(plan)
    }

    #[test]
    fn replicas_divide_the_state_where_memory_says_so() {
        let parameters = model().parameters();
        // The rest is that of gradients' buckets, messages and activations.
        let (plenty, rest) = (1 << 30, 12 * parameters + (20 << 20));
        assert_eq!(found([plenty, plenty]).unwrap().zero, 0);
        // Both have memory for weights, gradients, activations and half of the state, not for all of it.
        let halves = 8 * parameters + rest;
        let whole = found([halves + 8 * parameters, halves + 8 * parameters]).unwrap();
        assert_eq!(whole.zero, 0, "{whole}");
        let least = (0..40)
            .map(|step| rest - step * rest / 40)
            .find(|&rest| found([8 * parameters + rest; 2]).is_none_or(|plan| plan.zero > 0));
        let least = 8 * parameters + least.unwrap();
        let divided = found([least, least]).unwrap();
        assert_eq!((divided.zero, divided.zero_weights.len()), (1, 0), "{divided}");
        // One has memory for little of it.
        let uneven = found([least - 5 * parameters, plenty]).unwrap();
        assert_eq!(uneven.zero, 1);
        let small = uneven.machines.iter().position(|name| name == "a").unwrap();
        assert!(uneven.zero_weights[small] < uneven.zero_weights[1 - small] / 2, "{uneven}");
        // Both have memory for half of the gradients.
        let fewer = found([least - 4 * parameters, least - 4 * parameters]).unwrap();
        assert_eq!((fewer.zero, fewer.zero_weights.len()), (2, 0), "{fewer}");
        assert!(found([parameters, parameters]).is_none());
    }
}
