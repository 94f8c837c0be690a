//! Small random instances of the planners' problems, and all divisions of each.

use std::ops::Range;

use farflung::base::{Bandwidth, Bytes, Link, Nanos, Philox, Rank, Topology};
use farflung::parallel::planner::alpa::{AlpaSize, Submesh, SubmeshStage};
use farflung::parallel::planner::dapple::{
    DappleSize, DevicePolicy, HopTime, PhaseCost, PhaseCosts, PlacedStage,
};
use farflung::parallel::planner::galvatron::StrategyCost;
use farflung::parallel::planner::operators::{
    MemoryLimit, Operator, OperatorEdge, OperatorGraph, OperatorStrategy,
};
use farflung::parallel::planner::pipedream::{LinkLevel, ProfiledLayer};
use farflung::parallel::planner::piper::{PiperSize, ShapeLoad, StageLoad, StageShape};
use farflung::parallel::planner::uneven::{Chain, ChainLayer, ChainMachine, ChainStage};

/// Random numbers, drawn one after the other.
pub(super) struct Draw {
    philox: Philox,
    at: u64,
}

impl Draw {
    pub(super) const fn new(seed: u64) -> Self {
        Self { philox: Philox::new(seed, 0), at: 0 }
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.at += 1;
        self.philox.below(self.at, bound)
    }

    /// Returns `size` values in `0..100`.
    pub(super) fn table(&mut self, size: usize) -> Vec<u64> {
        (0..size).map(|_| self.below(100)).collect()
    }
}

pub(super) fn chain(draw: &mut Draw) -> Chain {
    let (layers, machines) = (1 + draw.below(6), 1 + draw.below(4) as usize);
    let layer = |draw: &mut Draw| ChainLayer {
        operations: 1_000_000 * (1 + draw.below(9)),
        state: Bytes(1 + draw.below(5)),
        activations: Bytes(draw.below(4)),
        output: Bytes(1000 * (1 + draw.below(20))),
    };
    let machine = |draw: &mut Draw| ChainMachine {
        flops: 1_000_000_000 * (1 + draw.below(4)),
        memory: (draw.below(4) > 0).then(|| Bytes(3 + draw.below(20))),
    };
    let mut links = Topology::uniform(machines, Link::FREE);
    for (a, b) in (0..machines).flat_map(|a| (0..machines).map(move |b| (a, b))) {
        let bandwidth = Bandwidth(10_000_000 * (1 + draw.below(20)));
        let latency = Nanos::from_micros(draw.below(3000));
        links.set_link(Rank(a as u32), Rank(b as u32), Link { bandwidth, latency });
    }
    Chain {
        layers: (0..layers).map(|_| layer(draw)).collect(),
        machines: (0..machines).map(|_| machine(draw)).collect(),
        links,
        microbatches: 1 + draw.below(8) as u32,
    }
}

/// Returns all lists of stages for the layers from `first` on, on machines from `machine` on.
pub(super) fn chain_stages(chain: &Chain, first: usize, machine: usize) -> Vec<Vec<ChainStage>> {
    if first == chain.layers.len() {
        return vec![Vec::new()];
    }
    let mut found = Vec::new();
    for on in machine..chain.machines.len() {
        for end in first + 1..=chain.layers.len() {
            for rest in chain_stages(chain, end, on + 1) {
                let mut stages = vec![ChainStage { layers: first..end, machine: on }];
                stages.extend(rest);
                found.push(stages);
            }
        }
    }
    found
}

pub(super) fn alpa_size(draw: &mut Draw) -> AlpaSize {
    AlpaSize {
        layers: 1 + draw.below(5) as usize,
        nodes: 1 + draw.below(2) as u32,
        devices: 1 << draw.below(3),
        microbatches: 1 + draw.below(6) as u32,
    }
}

/// Returns an arbitrary function of a stage. Some stages do not fit.
pub(super) fn stage_time(table: &[u64]) -> impl Fn(Range<usize>, Submesh, usize) -> Option<Nanos> {
    move |layers, mesh, stages| {
        let at = layers.start * 641 + layers.end * 97 + mesh.size() as usize * 13 + mesh.nodes as usize;
        let value = table[at % table.len()];
        (value * 3 > stages as u64 * 20).then_some(Nanos(value * layers.len() as u64 + 1))
    }
}

/// Returns all lists of stages for the layers from `first` on that use exactly `devices` devices.
pub(super) fn mesh_stages(
    size: &AlpaSize,
    meshes: &[Submesh],
    first: usize,
    devices: u32,
) -> Vec<Vec<SubmeshStage>> {
    if first == size.layers {
        return if devices == 0 { vec![Vec::new()] } else { Vec::new() };
    }
    let mut found = Vec::new();
    for &mesh in meshes.iter().filter(|mesh| mesh.size() <= devices) {
        for end in first + 1..=size.layers {
            for rest in mesh_stages(size, meshes, end, devices - mesh.size()) {
                let mut stages = vec![SubmeshStage { layers: first..end, mesh }];
                stages.extend(rest);
                found.push(stages);
            }
        }
    }
    found
}

/// Returns Alpa's latency, `sum(t) + (microbatches - 1) max(t)`, or `None` if a stage does not fit.
pub(super) fn mesh_price(
    size: &AlpaSize,
    time: &dyn Fn(Range<usize>, Submesh, usize) -> Option<Nanos>,
    stages: &[SubmeshStage],
) -> Option<u64> {
    let times = stages.iter().enumerate();
    let times = times.map(|(at, stage)| time(stage.layers.clone(), stage.mesh, stages.len() - at));
    let times: Option<Vec<u64>> = times.map(|time| time.map(|time| time.0)).collect();
    let times = times?;
    Some(times.iter().sum::<u64>() + (u64::from(size.microbatches) - 1) * times.iter().max()?)
}

pub(super) fn profiled(draw: &mut Draw) -> (Vec<ProfiledLayer>, Vec<LinkLevel>) {
    let layers = (0..=draw.below(5)).map(|_| ProfiledLayer {
        time: Nanos(1000 * (1 + draw.below(20))),
        weights: Bytes(draw.below(40)),
        output: Bytes(draw.below(60)),
    });
    let layers = layers.collect();
    let levels = (0..=draw.below(2)).map(|_| LinkLevel {
        bandwidth: Bandwidth(20_000_000 * (1 + draw.below(10))),
        units: 1 + draw.below(4) as u32,
    });
    (layers, levels.collect())
}

/// Returns the least period over all lists of stages on each level.
pub(super) fn least_period(layers: &[ProfiledLayer], levels: &[LinkLevel]) -> u64 {
    let Some((level, below)) = levels.split_last() else {
        return layers.iter().map(|layer| layer.time.0).sum();
    };
    on_units(layers, *level, below, level.units)
}

/// Returns the least period on `units` units. The first stage takes some layers and units, the other stages
/// take the rest; all units are used.
fn on_units(layers: &[ProfiledLayer], level: LinkLevel, below: &[LinkLevel], units: u32) -> u64 {
    let stage = |layers: &[ProfiledLayer], units: u32| {
        let weights: u64 = layers.iter().map(|layer| layer.weights.0).sum();
        let exchanged = level.bandwidth.transfer(Bytes(2 * u64::from(units - 1) * weights)).0;
        least_period(layers, below).max(exchanged).div_ceil(u64::from(units))
    };
    let mut best = stage(layers, units);
    for end in 1..layers.len() {
        let boundary = level.bandwidth.transfer(Bytes(2 * layers[end - 1].output.0)).0;
        for first in 1..units {
            let rest = on_units(&layers[end..], level, below, units - first);
            best = best.min(stage(&layers[..end], first).max(boundary).max(rest));
        }
    }
    best
}

pub(super) fn piper_size(draw: &mut Draw) -> PiperSize {
    let shape = |draw: &mut Draw| StageShape {
        tensor: 1 << draw.below(2),
        data: 1 + draw.below(2) as u32,
        recompute: draw.below(2) == 0,
    };
    PiperSize {
        layers: 1 + draw.below(4) as usize,
        devices: 1 + draw.below(5) as u32,
        memory: Bytes(10 + draw.below(40)),
        shapes: (0..3).map(|_| shape(draw)).collect(),
    }
}

pub(super) fn shape_load(table: &[u64]) -> impl Fn(Range<usize>, StageShape) -> StageLoad {
    move |layers, shape| {
        let at =
            layers.start * 31 + layers.end * 7 + shape.devices() as usize * 3 + usize::from(shape.recompute);
        let value = |more: usize| table[(at + more) % table.len()];
        StageLoad { time: Nanos(1 + value(0)), fixed: Bytes(value(101) / 4), each: Bytes(value(211) / 8) }
    }
}

/// Returns the period and the number of stages of all lists that fit in memory.
pub(super) fn shape_periods(
    size: &PiperSize,
    load: ShapeLoad<'_>,
    first: usize,
    devices: u32,
) -> Vec<(u64, usize)> {
    if first == size.layers {
        return vec![(0, 0)];
    }
    let mut found = Vec::new();
    for &shape in size.shapes.iter().filter(|shape| shape.devices() <= devices) {
        for end in first + 1..=size.layers {
            for (rest, stages) in shape_periods(size, load, end, devices - shape.devices()) {
                let stage = load(first..end, shape);
                if stage.fixed.0 + stage.each.0 * (stages as u64 + 1) <= size.memory.0 {
                    found.push((stage.time.0.max(rest), stages + 1));
                }
            }
        }
    }
    found
}

/// Layers with the costs of their strategies.
pub(super) struct Strategies {
    pub(super) costs: Vec<Vec<StrategyCost>>,
    /// Time of a change from one strategy to another.
    pub(super) changes: Vec<Vec<Nanos>>,
    pub(super) memory: Bytes,
}

pub(super) fn strategies(draw: &mut Draw) -> Strategies {
    let (layers, count) = (1 + draw.below(5), 1 + draw.below(3));
    let mut cost = || StrategyCost { time: Nanos(1 + draw.below(30)), memory: Bytes(draw.below(10)) };
    let costs = (0..layers).map(|_| (0..count).map(|_| cost()).collect()).collect();
    let mut change = |a, b| Nanos(if a == b { 0 } else { draw.below(12) });
    let changes = (0..count).map(|a| (0..count).map(|b| change(a, b)).collect()).collect();
    Strategies { costs, changes, memory: Bytes(draw.below(30)) }
}

/// Returns the least time over all choices that fit in memory, after a layer with the strategy `last`.
pub(super) fn least_time(
    costs: &[Vec<StrategyCost>],
    changes: &[Vec<Nanos>],
    memory: u64,
    last: Option<usize>,
) -> Option<u64> {
    let Some((layer, rest)) = costs.split_first() else { return Some(0) };
    let times = layer.iter().enumerate().filter_map(|(strategy, cost)| {
        let left = memory.checked_sub(cost.memory.0)?;
        let change = last.map_or(0, |last| changes[last][strategy].0);
        Some(cost.time.0 + change + least_time(rest, changes, left, Some(strategy))?)
    });
    times.min()
}

pub(super) fn dapple_size(draw: &mut Draw) -> DappleSize {
    DappleSize {
        layers: 1 + draw.below(4) as usize,
        machines: 1 + draw.below(2) as u32,
        devices: 1 + draw.below(2) as u32,
        microbatches: 1 + draw.below(6) as u32,
        replicas: (1..=1 + draw.below(4) as u32).collect(),
    }
}

fn value(table: &[u64], layers: &Range<usize>, devices: &[u32], more: usize) -> u64 {
    let devices = devices.iter().fold(0, |sum, &device| sum * 5 + device as usize + 1);
    table[(layers.start * 101 + layers.end * 17 + devices * 7 + more) % table.len()]
}

/// Returns an arbitrary function of a stage. Some stages do not fit.
pub(super) fn phase_cost(table: &[u64]) -> impl Fn(Range<usize>, &[u32]) -> Option<PhaseCost> {
    move |layers, devices| {
        let value = |more| value(table, &layers, devices, more);
        (value(0) > 15).then(|| PhaseCost {
            forward: Nanos(value(1)),
            backward: Nanos(value(2)),
            all_reduce: Nanos(4 * value(3)),
        })
    }
}

pub(super) fn hop_time(table: &[u64]) -> impl Fn(usize, &[u32], &[u32]) -> Nanos {
    move |layer, from, to| Nanos(value(table, &(layer..layer), from, 3 * to.len()) / 3)
}

/// Returns all lists of placed stages for the layers from `layer` on.
pub(super) fn placed_stages(size: &DappleSize, layer: usize, used: &[u32]) -> Vec<Vec<PlacedStage>> {
    if layer == size.layers {
        return vec![Vec::new()];
    }
    let mut found = Vec::new();
    for (&count, policy) in
        size.replicas.iter().flat_map(|count| DevicePolicy::ALL.map(|policy| (count, policy)))
    {
        let Some(devices) = policy.take(used, size.devices, count) else { continue };
        let mut more = used.to_vec();
        for device in &devices {
            more[(device / size.devices) as usize] += 1;
        }
        for end in layer + 1..=size.layers {
            for rest in placed_stages(size, end, &more) {
                let mut stages = vec![PlacedStage { layers: layer..end, devices: devices.clone() }];
                stages.extend(rest);
                found.push(stages);
            }
        }
    }
    found
}

/// Returns DAPPLE's latency: the longest sum of warm-up, steady phase and ending over all pivots and all
/// averages.
pub(super) fn phases_price(
    size: &DappleSize,
    cost: PhaseCosts<'_>,
    hop: HopTime<'_>,
    stages: &[PlacedStage],
) -> Option<u64> {
    let mut all: Vec<(u64, u64, Option<u64>)> = Vec::new();
    for (at, stage) in stages.iter().enumerate() {
        if let Some(before) = at.checked_sub(1) {
            let time = hop(stage.layers.start, &stages[before].devices, &stage.devices).0;
            all.push((time, time, None));
        }
        let PhaseCost { forward, backward, all_reduce } = cost(stage.layers.clone(), &stage.devices)?;
        all.push((forward.0, backward.0, Some(all_reduce.0)));
    }
    let mut longest = 0;
    for (pivot, &(forward, backward, _)) in all.iter().enumerate() {
        let warm_up: u64 = all[..=pivot].iter().map(|stage| stage.0).sum();
        let steady = (u64::from(size.microbatches) - 1) * (forward + backward);
        for first in 0..=pivot {
            let Some(average) = all[first].2 else { continue };
            let ending: u64 = all[first..=pivot].iter().map(|stage| stage.1).sum();
            longest = longest.max(warm_up + steady + ending + average);
        }
    }
    Some(longest)
}

/// Returns a graph of up to 6 operators with up to 4 strategies each, and up to 8 edges.
pub(super) fn operator_graph(draw: &mut Draw) -> OperatorGraph {
    let counts: Vec<u64> = (0..=draw.below(6)).map(|_| 1 + draw.below(4)).collect();
    let mut strategy = || OperatorStrategy {
        name: String::new(),
        cost: Nanos(draw.below(40)),
        weights: Bytes(draw.below(20)),
        activations: Bytes(draw.below(10)),
    };
    let mut operator =
        |&count: &u64| Operator { name: String::new(), strategies: (0..count).map(|_| strategy()).collect() };
    let operators: Vec<Operator> = counts.iter().map(&mut operator).collect();
    let mut edges = Vec::new();
    for _ in 0..draw.below(9) {
        let (from, to) = (draw.below(counts.len() as u64) as usize, draw.below(counts.len() as u64) as usize);
        let mut row = |_| (0..counts[to]).map(|_| Nanos(draw.below(60))).collect();
        let change = (0..counts[from]).map(&mut row).collect();
        edges.extend((from != to).then_some(OperatorEdge { from, to, change }));
    }
    OperatorGraph { operators, edges }
}

/// Returns the least cost over all combinations of strategies within a memory limit.
pub(super) fn least_cut(graph: &OperatorGraph, limit: &MemoryLimit) -> Option<u64> {
    let mut choices: Vec<Vec<usize>> = vec![Vec::new()];
    for operator in &graph.operators {
        let all = 0..operator.strategies.len();
        choices = choices
            .iter()
            .flat_map(|choice| all.clone().map(move |at| [choice.as_slice(), &[at]].concat()))
            .collect();
    }
    let fits = |choice: &&Vec<usize>| graph.memory(choice, limit).is_some_and(|taken| taken <= limit.bytes);
    choices.iter().filter(fits).map(|choice| graph.cost(choice).0).min()
}
