//! Divisions of devices into groups that need no search.

use farflung_base::Rank;

use super::PairCosts;
use crate::seeded_rng::SeededRng;

/// Groups devices with adjacent numbers: group `k` has devices `k * size` to `(k + 1) * size - 1`. Averages
/// stay inside a region if the topology file lists regions one after another.
#[must_use]
pub fn contiguous(costs: &PairCosts) -> Vec<Vec<Rank>> {
    in_order(&(0..costs.devices()).collect::<Vec<_>>(), costs.size())
}

/// Puts devices with adjacent numbers into the same pipeline: group `k` has devices `k`, `groups + k`,
/// `2 * groups + k` and so on. Pipelines stay inside a region; averages cross regions.
#[must_use]
pub fn transposed(costs: &PairCosts) -> Vec<Vec<Rank>> {
    strided(&(0..costs.devices()).collect::<Vec<_>>(), costs.groups())
}

/// Groups devices at random.
#[must_use]
pub fn random(costs: &PairCosts, seed: u64) -> Vec<Vec<Rank>> {
    let mut devices: Vec<usize> = (0..costs.devices()).collect();
    SeededRng::new(seed, 0).shuffle(&mut devices);
    in_order(&devices, costs.size())
}

fn in_order(devices: &[usize], size: usize) -> Vec<Vec<Rank>> {
    devices.chunks(size).map(|group| group.iter().map(|&i| Rank(i as u32)).collect()).collect()
}

fn strided(devices: &[usize], groups: usize) -> Vec<Vec<Rank>> {
    let group = |k| devices.iter().skip(k).step_by(groups).map(|&i| Rank(i as u32)).collect();
    (0..groups).map(group).collect()
}

/// Returns groupings in which runs of `d` nearby devices are pieces of a pipeline, for every divisor `d` of the
/// number of groups. `d` = 1 gives groups of neighbours; the largest `d` gives pipelines of neighbours.
///
/// Each is built in two orders: as devices are numbered, and with each device followed by its nearest
/// neighbour. The second order keeps regions together however the file lists them.
pub(super) fn structured(costs: &PairCosts) -> Vec<Vec<Vec<usize>>> {
    let near = nearest_neighbours(costs);
    let numbered: Vec<usize> = (0..costs.devices()).collect();
    let runs = || (1..=costs.groups()).filter(|&run| costs.groups().is_multiple_of(run));
    // The two extreme groupings come first, so that a search with few evaluations includes them.
    let of = |devices: &[usize], run: usize| -> Vec<Vec<usize>> {
        let strip = |strip: &[usize]| {
            (0..run).map(|k| strip.iter().skip(k).step_by(run).copied().collect()).collect()
        };
        devices.chunks(run * costs.size()).flat_map(|devices| -> Vec<Vec<usize>> { strip(devices) }).collect()
    };
    let mut runs: Vec<usize> = runs().collect();
    runs.sort_unstable_by_key(|&run| (run != 1 && run != costs.groups(), run));
    [&numbered, &near]
        .into_iter()
        .flat_map(|devices| runs.iter().map(|&run| of(devices, run)).collect::<Vec<_>>())
        .collect()
}

fn nearest_neighbours(costs: &PairCosts) -> Vec<usize> {
    let mut left: Vec<usize> = (1..costs.devices()).collect();
    let mut order = vec![0];
    let mut last = 0;
    while let Some(at) = (0..left.len()).min_by_key(|&at| costs.hop(last, left[at])) {
        last = left.remove(at);
        order.push(last);
    }
    order
}
