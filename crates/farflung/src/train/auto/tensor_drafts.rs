//! Drafts of plans in which machines near each other divide the width of layers.

use std::ops::Range;

use farflung_base::{Axis, Nanos, Rank};
use farflung_parallel::pipeline::Pools;
use farflung_parallel::plan::even_parts;
use farflung_parallel::planner::uneven::{ChainPlan, ChainStage};
use farflung_parallel::share::largest_remainder;
use farflung_parallel::{Mesh, Plan, whole_pipelines};
use farflung_zoo::AxisShare;

use super::candidate::{Draft, PlanKind};
use super::plan_request::PlanRequest;
use crate::Result;
use crate::train::chain::{machines, pipeline_plan};

/// Numbers of machines that are tried for each layer.
const RANKS: [u32; 3] = [2, 4, 8];

/// Most stages that are tried.
const STAGES: u32 = 8;

impl PlanRequest<'_> {
    /// Drafts plans whose layers are divided among machines that follow each other on the shortest path, with
    /// every number of stages that divides the number of such groups, equal layers, and shares of a layer by
    /// speed. Ranks divide sequences, too, or not.
    pub(super) fn tensor(&self, drafts: &mut Vec<Draft>) -> Result<()> {
        let orders = self.orders()?;
        let nearest = orders.get(1).map_or(&orders[0].1, |(_, nearest)| nearest);
        for ranks in RANKS {
            let count = whole_pipelines(nearest.len() as u32, ranks);
            let Ok(mesh) = Mesh::new(&[(Axis::Data, count), (Axis::Tensor, ranks)]) else { continue };
            let group = |places: Vec<Rank>| {
                let group: Vec<Rank> = places.into_iter().map(|place| nearest[place.index()]).collect();
                self.fastest_first(group)
            };
            let groups: Vec<Vec<Rank>> = mesh.groups(Axis::Tensor).into_iter().map(group).collect();
            let weights = self.weights(&groups);
            let most = STAGES.min(self.model.layers() as u32).min(count);
            for stages in (1..=most).filter(|&stages| count.is_multiple_of(stages)) {
                let Some(parts) = even_parts(self.model.layers() as u32, stages) else { continue };
                let stage = |(machine, layers): (usize, Range<u32>)| ChainStage {
                    layers: layers.start as usize..layers.end as usize,
                    machine,
                };
                let parts: Vec<ChainStage> = parts.into_iter().enumerate().map(stage).collect();
                self.divided("", &groups, &parts, &weights, drafts)?;
            }
        }
        Ok(())
    }

    /// Adds drafts of replicas with these stages, each on a group of machines: first those of the first
    /// replica.
    pub(super) fn divided(
        &self,
        by: &str,
        groups: &[Vec<Rank>],
        stages: &[ChainStage],
        weights: &[u32],
        drafts: &mut Vec<Draft>,
    ) -> Result<()> {
        let count = stages.len() as u32;
        let replicas = whole_pipelines(groups.len() as u32, count);
        let share = AxisShare::new(0, weights.to_vec())?;
        if self.sizes.microbatches < replicas || self.model.check_cut(&share).is_err() {
            return Ok(());
        }
        let planned = ChainPlan { stages: stages.to_vec(), time: Nanos::ZERO };
        let firsts: Vec<Rank> = groups.iter().map(|group| group[0]).collect();
        let mut plan = pipeline_plan(self.name, self.model, self.cluster, &firsts, &planned, self.sizes)?;
        let names = self.cluster.rank_names();
        let ranks = weights.len() as u32;
        plan.mesh = Plan::mesh_of(replicas, count)?.and(Axis::Tensor, ranks)?;
        plan.machines = groups.iter().flatten().map(|rank| names[rank.index()].clone()).collect();
        let equal = vec![1; replicas as usize];
        let shares = largest_remainder(u64::from(self.sizes.microbatches), &equal);
        plan.microbatches = shares.into_iter().map(|share| share as u32).collect();
        if weights.iter().any(|weight| *weight != weights[0]) {
            plan.tensor_weights = weights.to_vec();
        }
        for sequence_parallel in [false, true] {
            if sequence_parallel && self.model.mixtures().next().is_some() {
                continue;
            }
            plan.sequence_parallel = sequence_parallel;
            let layers = if sequence_parallel { "layers and sequences" } else { "layers" };
            let what = match (replicas, count) {
                (1, 1) => format!("{layers} over {ranks}{by}"),
                (1, _) => format!("pipeline of {count}, {layers} over {ranks}{by}"),
                (_, 1) => format!("{replicas} replicas, {layers} over {ranks}{by}"),
                _ => format!("{replicas} pipelines of {count}, {layers} over {ranks}{by}"),
            };
            self.schedules(PlanKind::Tensor, &what, &plan, drafts)?;
        }
        Ok(())
    }

    /// Returns a group's machines, the fastest first.
    fn fastest_first(&self, mut group: Vec<Rank>) -> Vec<Rank> {
        let speeds = machines(self.model, self.cluster);
        group.sort_by_key(|rank| std::cmp::Reverse(speeds[rank.index()].flops));
        group
    }

    /// Returns the shares of a layer of the machines of each group, by the slowest at each place.
    fn weights(&self, groups: &[Vec<Rank>]) -> Vec<u32> {
        let speeds = machines(self.model, self.cluster);
        let Some(first) = groups.first() else { return vec![1] };
        let slowest = |place: usize| {
            let of = groups.iter().map(|group| speeds[group[place].index()].flops as f64);
            of.fold(f64::INFINITY, f64::min)
        };
        Pools::whole_rates(&(0..first.len()).map(slowest).collect::<Vec<_>>())
    }
}
