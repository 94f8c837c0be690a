//! A local search that is not from the paper: it swaps pairs of devices, computes the exact cost of each swap,
//! and starts from many layouts.

use std::collections::BTreeMap;

use super::layout::Layout;
use super::{Found, PairCosts, grouping};
use crate::ParallelError;
use crate::planner::path::shortest_path;
use crate::seeded_rng::SeededRng;

/// Number of random swaps that are applied to the best layout to get the start of a new descent.
const KICKS: usize = 2;

/// Number of layouts kept for a ranking by simulation, including the best one.
const KEPT: usize = 8;

/// Maximum ratio of examined layouts to layouts whose cost may be computed. It ends the search when the costs
/// of all layouts are already known.
const AGAIN: u64 = 20;

/// Iterated local search over swaps of two devices of different groups (Lourenço, Martin and Stützle 2003).
///
/// The starts are structured layouts: runs of neighbours as groups, as pipelines, and as pieces of pipelines,
/// in the order of device numbers and of nearest neighbours. A descent tries all swaps in random order and
/// takes each swap that does not cost more, until none gains. The first two descents start from the best two of
/// the structured layouts. After that, one descent in three starts from a random layout and two from the best
/// layout so far after two random swaps.
///
/// Layouts with equal total costs are compared by the length of a path over mean hops, because the total
/// depends only on the slowest hop of each boundary. A layout that a descent meets again is not counted again.
/// All arithmetic is on integers, so a seed gives the same result on every machine.
///
/// Errors: [`ParallelError::Plan`] for no evaluations.
pub fn local_search(costs: &PairCosts, evaluations: u64, seed: u64) -> Result<Found, ParallelError> {
    if evaluations == 0 {
        return Err(super::no_evaluations());
    }
    let draw = SeededRng::new(seed, 2);
    let mut search =
        Search { costs, evaluations, spent: 0, looked: 0, draw, priced: BTreeMap::new(), kept: Vec::new() };
    let mut starts = Vec::new();
    for groups in grouping::structured(costs) {
        if search.is_spent() {
            break;
        }
        starts.push(search.price(State::new(groups, costs)));
    }
    starts.sort_by_key(State::key);
    starts.dedup_by_key(|state| state.key());
    starts.truncate(2);
    // With one group, or one device per group, all layouts differ only in the order, which is already
    // optimised.
    if costs.groups() > 1 && costs.size() > 1 {
        let mut run = 0;
        while !search.is_spent() {
            let state = match starts.get(run) {
                Some(start) => start.clone(),
                None if run.is_multiple_of(3) => search.random(),
                None => search.kicked(),
            };
            search.descend(state);
            run += 1;
        }
    }
    let evaluations = search.spent;
    let mut layouts: Vec<Layout> =
        search.kept.into_iter().map(|(_, groups)| Layout::of(groups, costs)).collect();
    let layout = layouts.remove(0);
    Ok(Found { layout, runners_up: layouts, evaluations, is_optimal: false })
}

/// Sort key of a layout: the total cost, then the length of the shortest path over mean hops.
type Key = (u64, u64);

/// A swap of two devices.
#[derive(Clone, Copy)]
struct Swap {
    groups: [usize; 2],
    places: [usize; 2],
}

struct Search<'a> {
    costs: &'a PairCosts,
    /// Maximum number of layouts whose cost may be computed.
    evaluations: u64,
    /// Number of layouts whose cost was computed.
    spent: u64,
    /// Number of layouts examined, whether their cost was already known or not.
    looked: u64,
    draw: SeededRng,
    /// Known keys by layout. A layout is given by the group of each device; groups are numbered by their first
    /// device.
    priced: BTreeMap<Vec<u16>, Key>,
    /// The best layouts, best first, each with a different total.
    kept: Vec<(Key, Vec<Vec<usize>>)>,
}

impl Search<'_> {
    fn is_spent(&self) -> bool {
        self.spent >= self.evaluations || self.looked >= self.evaluations.saturating_mul(AGAIN)
    }

    /// Records a layout whose cost was just computed.
    fn price(&mut self, state: State) -> State {
        self.spent += 1;
        self.looked += 1;
        let key = state.key();
        let at = self.kept.partition_point(|(other, _)| other.0 < key.0);
        match self.kept.get_mut(at) {
            Some(same) if same.0.0 == key.0 && key.1 < same.0.1 => *same = (key, state.groups.clone()),
            Some(same) if same.0.0 == key.0 => {}
            _ if at < KEPT => {
                self.kept.insert(at, (key, state.groups.clone()));
                self.kept.truncate(KEPT);
            }
            _ => {}
        }
        self.priced.insert(labels(&state.groups, None, self.costs), key);
        state
    }

    fn random(&mut self) -> State {
        let mut devices: Vec<usize> = (0..self.costs.devices()).collect();
        self.draw.shuffle(&mut devices);
        let groups = devices.chunks(self.costs.size()).map(<[usize]>::to_vec).collect();
        self.price(State::new(groups, self.costs))
    }

    /// Returns the best layout so far with a few random swaps.
    fn kicked(&mut self) -> State {
        let mut groups = self.kept.first().map(|(_, groups)| groups.clone()).unwrap_or_default();
        let (count, size) = (self.costs.groups(), self.costs.size());
        for _ in 0..KICKS {
            let a = self.draw.below(count);
            let b = (a + 1 + self.draw.below(count - 1)) % count;
            let places = [self.draw.below(size), self.draw.below(size)];
            apply(&mut groups, Swap { groups: [a, b], places });
        }
        self.price(State::new(groups, self.costs))
    }

    /// Applies swaps until none gains.
    fn descend(&mut self, mut state: State) {
        let mut swaps = self.swaps();
        loop {
            let before = state.key();
            self.draw.shuffle(&mut swaps);
            for &swap in &swaps {
                if self.is_spent() {
                    return;
                }
                self.looked += 1;
                let known = self.priced.get(&labels(&state.groups, Some(swap), self.costs)).copied();
                if known.is_some_and(|known| known >= state.key()) {
                    continue;
                }
                let tried = state.swapped(swap, self.costs);
                let tried = if known.is_some() { tried } else { self.price(tried) };
                if tried.key() <= state.key() {
                    state = tried;
                }
            }
            if state.key() == before {
                return;
            }
        }
    }

    fn swaps(&self) -> Vec<Swap> {
        let (count, size) = (self.costs.groups(), self.costs.size());
        let pairs = (0..count).flat_map(|a| (0..a).map(move |b| [a, b]));
        let places = move || (0..size).flat_map(move |i| (0..size).map(move |j| [i, j]));
        pairs.flat_map(|groups| places().map(move |places| Swap { groups, places })).collect()
    }
}

fn apply(groups: &mut [Vec<usize>], swap: Swap) {
    let Swap { groups: [a, b], places: [i, j] } = swap;
    let device = groups[a][i];
    groups[a][i] = groups[b][j];
    groups[b][j] = device;
}

/// Returns the group of each device after `swap`. Groups are numbered by their first device.
fn labels(groups: &[Vec<usize>], swap: Option<Swap>, costs: &PairCosts) -> Vec<u16> {
    let mut of = vec![0_u16; costs.devices()];
    for (group, devices) in groups.iter().enumerate() {
        for &device in devices {
            of[device] = group as u16;
        }
    }
    if let Some(Swap { groups: [a, b], places: [i, j] }) = swap {
        of.swap(groups[a][i], groups[b][j]);
    }
    let mut number = vec![u16::MAX; groups.len()];
    let mut next = 0;
    for label in &mut of {
        let number = &mut number[usize::from(*label)];
        if *number == u16::MAX {
            *number = next;
            next += 1;
        }
        *label = *number;
    }
    of
}

/// A division into groups, and its costs.
#[derive(Clone)]
struct State {
    groups: Vec<Vec<usize>>,
    /// DATAP-COST of each group.
    average: Vec<u64>,
    /// Bottleneck cost of each pair of groups.
    boundaries: Vec<u64>,
    /// For each pair of groups, the mean hop if each device had its nearest neighbour.
    near: Vec<u64>,
    /// Length of the shortest path over `boundaries`.
    path: u64,
    /// Length of the shortest path over `near`.
    near_path: u64,
}

impl State {
    fn new(groups: Vec<Vec<usize>>, costs: &PairCosts) -> Self {
        let n = groups.len();
        let average = groups.iter().map(|group| costs.of_group(group)).collect();
        let (boundaries, near) = (vec![0; n * n], vec![0; n * n]);
        let mut state = Self { groups, average, boundaries, near, path: 0, near_path: 0 };
        (0..n).for_each(|group| state.price(group, costs));
        state.measure();
        state
    }

    fn measure(&mut self) {
        self.path = shortest_path(&self.boundaries, self.groups.len()).length;
        self.near_path = shortest_path(&self.near, self.groups.len()).length;
    }

    /// Computes the costs of a group's boundaries.
    fn price(&mut self, group: usize, costs: &PairCosts) {
        let n = self.groups.len();
        for other in (0..n).filter(|&other| other != group) {
            let cost = costs.of_boundary(&self.groups[group], &self.groups[other]).costliest;
            let near = costs.near(&self.groups[group], &self.groups[other]);
            for at in [group * n + other, other * n + group] {
                (self.boundaries[at], self.near[at]) = (cost, near);
            }
        }
    }

    fn swapped(&self, swap: Swap, costs: &PairCosts) -> Self {
        let mut next = self.clone();
        apply(&mut next.groups, swap);
        for group in swap.groups {
            next.average[group] = costs.of_group(&next.groups[group]);
            next.price(group, costs);
        }
        next.measure();
        next
    }

    fn key(&self) -> Key {
        let slowest = self.average.iter().max().copied().unwrap_or_default();
        (slowest + 2 * self.path, self.near_path)
    }
}
