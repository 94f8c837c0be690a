//! Layouts: groups of sites, the pipelines of each group, and the layers of the stages.

use std::ops::Range;

use farflung_base::{Axis, Bytes, Rank};

use super::{Direction, RegionalChain, Sites};
use crate::mesh::{Mesh, whole_pipelines};
use crate::planner::path::shortest_path;

/// Pipelines and stages whose time was not computed yet.
pub(super) struct Layout {
    pub(super) groups: Vec<Vec<usize>>,
    pub(super) direction: Direction,
    pub(super) pipelines: Vec<Vec<Rank>>,
    pub(super) stages: Vec<Range<usize>>,
}

/// Returns all groupings, from each site alone to all sites together. Each step joins the two nearest groups.
/// Sites of a group are in the order of the shortest path over them.
pub(super) fn groupings(sites: &Sites, bytes: Bytes) -> Vec<Vec<Vec<usize>>> {
    let count = sites.all.len();
    let mut groups: Vec<Vec<usize>> = (0..count).map(|site| vec![site]).collect();
    let mut all = vec![groups.clone()];
    while groups.len() > 1 {
        let apart = |a: &[usize], b: &[usize]| {
            let pairs = a.iter().flat_map(|&x| b.iter().map(move |&y| sites.apart(x, y, bytes)));
            pairs.min().unwrap_or_default()
        };
        let pairs = (0..groups.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
        let Some((a, b)) = pairs.min_by_key(|&(a, b)| (apart(&groups[a], &groups[b]), a, b)) else { break };
        let joined = groups.remove(b);
        groups[a].extend(joined);
        groups[a] = path(sites, &groups[a], bytes);
        all.push(groups.clone());
    }
    all
}

/// Returns the sites in the order of the shortest path over them.
fn path(sites: &Sites, group: &[usize], bytes: Bytes) -> Vec<usize> {
    let hops: Vec<u64> = group
        .iter()
        .flat_map(|&a| group.iter().map(move |&b| if a == b { 0 } else { sites.apart(a, b, bytes).0 }))
        .collect();
    shortest_path(&hops, group.len()).nodes.into_iter().map(|at| group[at]).collect()
}

/// Builds the pipelines of each group and divides the layers. `None` if no pipeline fits.
pub(super) fn layout(
    chain: &RegionalChain,
    sites: &Sites,
    groups: &[Vec<usize>],
    direction: Direction,
    stages: usize,
) -> Option<Layout> {
    let mut pipelines = Vec::new();
    for group in groups {
        let machines: Vec<Rank> =
            group.iter().flat_map(|&site| sites.all[site].machines.iter().copied()).collect();
        let rows = whole_pipelines(machines.len(), stages);
        if rows == 0 {
            continue;
        }
        let (rows, stages) = ((Axis::Data, rows as u32), (Axis::Pipeline, stages as u32));
        let mesh = match direction {
            Direction::Along => Mesh::new(&[rows, stages]),
            Direction::Across => Mesh::new(&[stages, rows]),
        };
        let row = |row: Vec<Rank>| row.into_iter().map(|rank| machines[rank.index()]).collect::<Vec<_>>();
        pipelines.extend(mesh.ok()?.groups(Axis::Pipeline).into_iter().map(row));
    }
    // Every pipeline needs at least one microbatch.
    pipelines.truncate(chain.microbatches as usize);
    if pipelines.is_empty() {
        return None;
    }
    let stages = divide(chain, &pipelines, stages)?;
    Some(Layout { groups: groups.to_vec(), direction, pipelines, stages })
}

/// The slowest speed and the smallest memory among the machines of one stage.
struct Column {
    flops: u64,
    memory: Option<Bytes>,
}

/// Returns the division whose slowest stage is fastest, by bisection on its time. Each stage takes as many
/// layers as the time and its memory allow.
fn divide(chain: &RegionalChain, pipelines: &[Vec<Rank>], stages: usize) -> Option<Vec<Range<usize>>> {
    let columns: Vec<Column> = (0..stages)
        .map(|stage| {
            let machines = || pipelines.iter().map(|row| &chain.machines[row[stage].index()]);
            Column {
                flops: machines().map(|machine| machine.flops).min().unwrap_or(1),
                memory: machines().filter_map(|machine| machine.memory).min(),
            }
        })
        .collect();
    // Number of microbatches of a pipeline if all pipelines had equal shares.
    let each = (chain.microbatches as usize).div_ceil(pipelines.len());
    let all: u128 = chain.layers.iter().map(|layer| u128::from(layer.operations)).sum();
    let slowest = columns.iter().map(|column| column.flops).min().unwrap_or(1);
    let (mut low, mut high) = (0, all * 1_000_000_000 / u128::from(slowest) + 1);
    let mut best = within(chain, &columns, each, high)?;
    while low + 1 < high {
        let middle = u128::midpoint(low, high);
        match within(chain, &columns, each, middle) {
            Some(found) => (best, high) = (found, middle),
            None => low = middle,
        }
    }
    Some(best)
}

/// Returns stages with at least one layer each, none of which takes longer than `most` nanoseconds.
fn within(chain: &RegionalChain, columns: &[Column], each: usize, most: u128) -> Option<Vec<Range<usize>>> {
    let count = chain.layers.len();
    let mut stages = Vec::with_capacity(columns.len());
    let mut start = 0;
    for (at, column) in columns.iter().enumerate() {
        let behind = columns.len() - at - 1;
        let in_flight = each.min(behind + 1) as u64;
        let (mut operations, mut held, mut end) = (0_u128, 0_u64, start);
        while end + behind < count {
            let layer = &chain.layers[end];
            operations += u128::from(layer.operations);
            held = held
                .saturating_add(layer.state.0)
                .saturating_add(layer.activations.0.saturating_mul(in_flight));
            let is_late = operations * 1_000_000_000 / u128::from(column.flops) > most;
            if is_late || column.memory.is_some_and(|memory| held > memory.0) {
                break;
            }
            end += 1;
        }
        if end == start {
            return None;
        }
        stages.push(start..end);
        start = end;
    }
    (start == count).then_some(stages)
}
