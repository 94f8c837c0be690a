//! Layouts: groups in order, matched into pipelines, with their cost.

use farflung_base::{Nanos, Rank};

use super::costs::{PairCosts, check};
use crate::ParallelError;
use crate::planner::path::shortest_path;

/// Cost of a layout in DT-FM's model: the communication of a step, without any overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutCost {
    /// DATAP-COST: cost of the slowest group.
    pub data_parallel: Nanos,
    /// PIPELINEP-COST: all boundaries once. A step crosses them twice, forward and backward.
    pub pipeline: Nanos,
}

impl LayoutCost {
    /// Returns COMM-COST, the total.
    #[must_use]
    pub const fn total(&self) -> Nanos {
        Nanos(self.data_parallel.0 + 2 * self.pipeline.0)
    }
}

/// A placement of all tasks on devices.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Layout {
    /// Devices of each group, sorted; groups are sorted by their first device. In a layout made by
    /// [`Layout::as_given`], both are in the order of the given pipelines.
    pub groups: Vec<Vec<Rank>>,
    /// Index of the group that holds each stage.
    pub order: Vec<usize>,
    /// Devices of each pipeline, by stage.
    pub pipelines: Vec<Vec<Rank>>,
    /// Cost of the layout.
    pub cost: LayoutCost,
}

impl Layout {
    /// Finds the best order and matching of the given groups.
    ///
    /// Exact for up to [`EXACT_NODES`](crate::planner::path::EXACT_NODES) groups. With more, a heuristic
    /// determines the order.
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
                let row = from
                    .binary_search(&pipeline[pipeline.len() - 1])
                    .expect("the device belongs to this group");
                pipeline.push(to[matching.column[row]]);
            }
        }
        let data_parallel = groups.iter().map(|group| costs.of_group(group)).max().unwrap_or_default();
        let cost = LayoutCost { data_parallel: Nanos(data_parallel), pipeline: Nanos(path.length) };
        Self { groups: ranks(groups), order: path.nodes, pipelines: ranks(pipelines), cost }
    }

    /// Creates a layout from given pipelines, without reordering or matching; for example the layout of
    /// Megatron, or a random one.
    ///
    /// Errors: [`ParallelError::Plan`] if the pipelines do not have one device per group, or do not contain
    /// each device once.
    pub fn as_given(pipelines: &[Vec<Rank>], costs: &PairCosts) -> Result<Self, ParallelError> {
        if let Some(pipeline) = pipelines.iter().find(|pipeline| pipeline.len() != costs.groups()) {
            return Err(ParallelError::Plan {
                field: "pipelines".to_owned(),
                value: format!("one of {} devices", pipeline.len()),
                expected: format!("{} devices in each, one for each group", costs.groups()),
            });
        }
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

    /// Returns the device of each rank. Ranks are numbered pipeline by pipeline, as in a [`Plan`](crate::Plan).
    #[must_use]
    pub fn devices(&self) -> Vec<Rank> {
        self.pipelines.concat()
    }
}

fn ranks(lists: Vec<Vec<usize>>) -> Vec<Vec<Rank>> {
    lists.into_iter().map(|list| list.into_iter().map(|i| Rank(i as u32)).collect()).collect()
}
