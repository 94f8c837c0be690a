//! Groups in their order, matched into pipelines, with their cost.

use farflung_base::{Nanos, Rank};

use super::costs::{PairCosts, check};
use crate::ParallelError;
use crate::planner::path::shortest_path;

/// The cost of a layout by DT-FM's model: a step's communication, none of which hides behind another or behind
/// computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutCost {
    /// DATAP-COST: of the slowest group.
    pub data_parallel: Nanos,
    /// PIPELINEP-COST: all boundaries once. A step passes them twice, forward and backward.
    pub pipeline: Nanos,
}

impl LayoutCost {
    /// COMM-COST.
    #[must_use]
    pub const fn total(&self) -> Nanos {
        Nanos(self.data_parallel.0 + 2 * self.pipeline.0)
    }
}

/// A placement of all tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Layout {
    /// The devices of each group, sorted; the groups by their first device.
    pub groups: Vec<Vec<Rank>>,
    /// The group that holds each stage.
    pub order: Vec<usize>,
    /// The devices of each pipeline, by stage.
    pub pipelines: Vec<Vec<Rank>>,
    /// What it costs.
    pub cost: LayoutCost,
}

impl Layout {
    /// The best order and matching of these groups.
    ///
    /// Exact for up to [`EXACT_NODES`](crate::planner::path::EXACT_NODES) groups; beyond, the order is a
    /// heuristic's.
    ///
    /// Errors: [`ParallelError::Plan`] if `groups` do not divide the devices of `costs` equally.
    pub fn of_groups(groups: &[Vec<Rank>], costs: &PairCosts) -> Result<Self, ParallelError> {
        check(groups, costs)?;
        let indices = |group: &Vec<Rank>| group.iter().map(|rank| rank.index()).collect();
        Ok(Self::of(groups.iter().map(indices).collect(), costs))
    }

    pub(super) fn of(mut groups: Vec<Vec<usize>>, costs: &PairCosts) -> Self {
        for group in &mut groups {
            group.sort_unstable();
        }
        groups.sort_unstable();
        let n = groups.len();
        let mut boundaries = vec![0; n * n];
        for (a, b) in (0..n).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let cost = costs.of_boundary(&groups[a], &groups[b]).costliest;
            boundaries[a * n + b] = cost;
            boundaries[b * n + a] = cost;
        }
        let path = shortest_path(&boundaries, n);
        let mut pipelines: Vec<Vec<usize>> =
            groups[path.nodes[0]].iter().map(|&device| vec![device]).collect();
        for pair in path.nodes.windows(2) {
            let (from, to) = (&groups[pair[0]], &groups[pair[1]]);
            let matching = costs.of_boundary(from, to);
            for pipeline in &mut pipelines {
                let row = from.binary_search(&pipeline[pipeline.len() - 1]).expect("it is of this group");
                pipeline.push(to[matching.column[row]]);
            }
        }
        let data_parallel = groups.iter().map(|group| costs.of_group(group)).max().unwrap_or_default();
        let cost = LayoutCost { data_parallel: Nanos(data_parallel), pipeline: Nanos(path.length) };
        Self { groups: ranks(groups), order: path.nodes, pipelines: ranks(pipelines), cost }
    }

    /// These pipelines as they are: nothing is reordered or matched. How Megatron would lay out ranks, or
    /// chance.
    ///
    /// Errors: [`ParallelError::Plan`] if the pipelines are not of one length for each of the groups, or do not
    /// have each device once.
    pub fn as_given(pipelines: &[Vec<Rank>], costs: &PairCosts) -> Result<Self, ParallelError> {
        let stage = |s: usize| pipelines.iter().filter_map(|pipeline| pipeline.get(s).copied()).collect();
        let groups: Vec<Vec<Rank>> = (0..costs.groups()).map(stage).collect();
        check(&groups, costs)?;
        let boundary = |s: usize| {
            pipelines.iter().map(|pipeline| costs.hop(pipeline[s].index(), pipeline[s + 1].index())).max()
        };
        let pipeline = (0..costs.groups() - 1).filter_map(boundary).sum();
        let indices = |group: &Vec<Rank>| group.iter().map(|rank| rank.index()).collect::<Vec<_>>();
        let data_parallel = groups.iter().map(|group| costs.of_group(&indices(group))).max();
        let cost =
            LayoutCost { data_parallel: Nanos(data_parallel.unwrap_or_default()), pipeline: Nanos(pipeline) };
        Ok(Self { order: (0..groups.len()).collect(), groups, pipelines: pipelines.to_vec(), cost })
    }

    /// The device of each rank, where ranks count pipeline by pipeline, as a [`Plan`](crate::Plan) has them.
    #[must_use]
    pub fn devices(&self) -> Vec<Rank> {
        self.pipelines.concat()
    }
}

fn ranks(lists: Vec<Vec<usize>>) -> Vec<Vec<Rank>> {
    lists.into_iter().map(|list| list.into_iter().map(|i| Rank(i as u32)).collect()).collect()
}
