//! DT-FM's evolutionary search (GCMA), following its published scheduler, but with seeded randomness.

use super::layout::Layout;
use super::{Found, PairCosts};
use crate::ParallelError;
use crate::seeded_rng::SeededRng;

/// Number of initial layouts.
const POPULATION: u64 = 100;

/// Number of devices whose group a child takes from its first parent.
const CROSSED: usize = 5;

/// Group of each device.
type Labels = Vec<usize>;

/// A member of the population.
struct Member {
    labels: Labels,
    total: u64,
}

/// Runs the paper's search. It starts with 100 random layouts. Each further layout is a child of two random
/// parents, improved by a local search that uses gains, not costs. It ends when the cost of `evaluations`
/// layouts has been computed (100 + 4,900 in the paper).
///
/// A child takes the groups of five random devices from its first parent and all others from its second.
/// Devices in groups that are too large move to the first group that is too small. A child that is worse than
/// its worse parent is added to the population; otherwise it replaces that parent. Source: Yuan et al. 2022,
/// section 3.3 and `scheduler/`. Differs: seeded (the published code sets no seed).
///
/// Errors: [`ParallelError::Plan`] for no evaluations.
pub fn evolution(costs: &PairCosts, evaluations: u64, seed: u64) -> Result<Found, ParallelError> {
    if evaluations == 0 {
        return Err(super::no_evaluations());
    }
    let mut draw = SeededRng::new(seed, 1);
    let mut population: Vec<Member> = Vec::new();
    for _ in 0..evaluations.min(POPULATION) {
        let mut labels: Labels = (0..costs.devices()).map(|device| device / costs.size()).collect();
        draw.shuffle(&mut labels);
        population.push(Member { total: total(&labels, costs), labels });
    }
    for _ in POPULATION..evaluations {
        let first = draw.below(population.len());
        let second = draw.below(population.len());
        let mut labels = crossover(&population[first].labels, &population[second].labels, costs, &mut draw);
        local_search(&mut labels, costs);
        let child = Member { total: total(&labels, costs), labels };
        let worse = if population[first].total > population[second].total { first } else { second };
        if child.total > population[worse].total {
            population.push(child);
        } else {
            population[worse] = child;
        }
    }
    let best = population.iter().min_by_key(|member| member.total).expect("there is a population");
    let layout = Layout::of(groups(&best.labels, costs), costs);
    Ok(Found { layout, runners_up: Vec::new(), evaluations, is_optimal: false })
}

fn groups(labels: &[usize], costs: &PairCosts) -> Vec<Vec<usize>> {
    let mut groups = vec![Vec::with_capacity(costs.size()); costs.groups()];
    labels.iter().enumerate().for_each(|(device, &group)| groups[group].push(device));
    groups
}

fn total(labels: &[usize], costs: &PairCosts) -> u64 {
    Layout::of(groups(labels, costs), costs).cost.total().0
}

fn crossover(first: &[usize], second: &[usize], costs: &PairCosts, draw: &mut SeededRng) -> Labels {
    let mut labels = second.to_vec();
    for _ in 0..CROSSED {
        let device = draw.below(labels.len());
        labels[device] = first[device];
    }
    let mut sizes = vec![0; costs.groups()];
    for &group in &labels {
        sizes[group] += 1;
    }
    for label in &mut labels {
        if sizes[*label] <= costs.size() {
            continue;
        }
        let Some(small) = sizes.iter().position(|&size| size < costs.size()) else { break };
        sizes[*label] -= 1;
        sizes[small] += 1;
        *label = small;
    }
    labels
}

/// Moves devices between groups in cycles, so that group sizes stay equal. Keeps the moves with the largest sum
/// of gains.
///
/// The value of a device to its own group is the cost of its fastest link there: averages are limited by the
/// slowest link, so a fast link inside a group is wasted. The gain of moving to another group is the mean cost
/// of the device's links there minus this value.
fn local_search(labels: &mut Labels, costs: &PairCosts) {
    let mut locked = vec![false; labels.len()];
    let (mut gained, mut best) = (0_i128, 0_i128);
    let mut best_labels = labels.clone();
    for _ in 0..costs.groups() {
        let Some(gain) = cycle(labels, &mut locked, costs) else { break };
        gained += gain;
        if gained > best {
            best = gained;
            best_labels.clone_from(labels);
        }
    }
    *labels = best_labels;
}

/// A device that would leave its group, and its new group.
#[derive(Clone, Copy)]
struct Move {
    device: usize,
    to: usize,
    gain: i128,
}

/// Moves several devices in a cycle, each to the group of the next. Returns the sum of the gains, or `None` if
/// no device can move.
fn cycle(labels: &mut Labels, locked: &mut [bool], costs: &PairCosts) -> Option<i128> {
    let members = groups(labels, costs);
    let mut gains = vec![0; labels.len() * costs.groups()];
    let mut moves: Vec<Option<Move>> = vec![None; costs.groups()];
    for (own, group) in members.iter().enumerate() {
        let mut least = i128::MAX;
        for &device in group.iter().filter(|&&device| !locked[device]) {
            let mates = group.iter().filter(|&&mate| mate != device);
            let fastest = mates.map(|&mate| costs.average(device, mate)).min().unwrap_or_default();
            let fastest = i128::from(fastest);
            for (to, others) in members.iter().enumerate().filter(|(to, _)| *to != own) {
                let sum: i128 = others.iter().map(|&other| i128::from(costs.average(device, other))).sum();
                gains[device * costs.groups() + to] = sum / others.len() as i128 - fastest;
            }
            if fastest < least {
                least = fastest;
                let of = |to: &usize| gains[device * costs.groups() + to];
                let to = (0..costs.groups()).filter(|&to| to != own).max_by_key(of);
                moves[own] = to.map(|to| Move { device, to, gain: of(&to) });
            }
        }
    }
    let start =
        (0..costs.groups()).filter(|&g| moves[g].is_some()).max_by_key(|&g| moves[g].map(|m| m.gain))?;
    let mut chain: Vec<usize> = Vec::new();
    let mut visited = vec![false; costs.groups()];
    let (mut sum, mut best, mut length) = (0, i128::MIN, 0);
    let mut group = start;
    while let Some(Move { device, to, gain }) = moves[group].filter(|_| !visited[group]) {
        visited[group] = true;
        chain.push(device);
        // The chain of moves could end here: this device would move to the group that the first device has
        // left.
        if group != start {
            let closed = sum + gains[device * costs.groups() + start];
            if closed > best {
                (best, length) = (closed, chain.len());
            }
        }
        sum += gain;
        group = to;
    }
    if length == 0 {
        return None;
    }
    // Each device moves to the group of the next one; the last moves to the group of the first.
    let homes: Vec<usize> = chain[..length].iter().map(|&device| labels[device]).collect();
    for (at, &device) in chain[..length].iter().enumerate() {
        labels[device] = homes[(at + 1) % length];
        locked[device] = true;
    }
    Some(best)
}
