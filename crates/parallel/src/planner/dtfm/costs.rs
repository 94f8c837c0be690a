//! Costs of pairs of devices: for averaging a stage together, and for being neighbours in a pipeline.

use farflung_base::{Bandwidth, Bytes, Link, Nanos, Rank, Topology};

use crate::planner::matching::{Matching, bottleneck_matching};
use crate::{Mesh, ParallelError};

/// Bytes that the tasks of a layout exchange in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Bytes of a stage's gradients, which the devices of a group average. `c_dp` in the paper.
    pub gradients: Bytes,
    /// Bytes of the activations that a device sends to the next stage, over all its microbatches. `c_pp` in the
    /// paper.
    pub activations: Bytes,
}

impl Workload {
    /// The workload of the published scheduler: GPT-3 XL on 8 stages and 8 replicas, a batch of a million
    /// tokens.
    ///
    /// Gradients are 3 layers of 1.3 billion / 24 parameters in f32. Activations are 61.04 sequences of 2,024
    /// by 2,048 values (not 2,048 by 2,048) in f16; the publication counts them in units of 2^30 bytes and its
    /// links in units of 10^9. Both values are as published.
    pub const PUBLISHED: Self = Self { gradients: Bytes(650_000_000), activations: Bytes(471_249_223) };

    /// Returns the workload for a model of `layers` layers instead of 24. Gradients are proportional to the
    /// layers.
    #[must_use]
    pub const fn with_layers(self, layers: u32) -> Self {
        Self { gradients: Bytes(self.gradients.0 * layers as u64 / 24), ..self }
    }
}

/// Costs of all pairs of devices, for groups of one size. The two directions of a link are averaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairCosts {
    groups: usize,
    /// Number of devices in a group.
    size: usize,
    /// Link of each pair, averaged over both directions.
    links: Vec<Link>,
    /// Cost of averaging for each pair: `2 (latency + gradients / (size * bandwidth))` in nanoseconds.
    average: Vec<u64>,
    /// Cost of a hop for each pair: `latency + activations / bandwidth` in nanoseconds.
    hop: Vec<u64>,
}

/// Maximum time of a pair in nanoseconds (73 minutes). It ensures that the sums in a layout's cost, which have
/// at most `2 * Mesh::MAX_RANKS` pairs, fit in 64 bits.
const LONGEST: u64 = 1 << 42;

impl PairCosts {
    /// Computes the costs on the devices of `topology`, in `groups` groups.
    ///
    /// Errors: [`ParallelError::Plan`] if there is no group or the number of devices is not a multiple of it;
    /// [`ParallelError::UnusableLink`] for a pair without bandwidth, or that takes longer than 73 minutes.
    pub fn new(topology: &Topology, groups: u32, workload: Workload) -> Result<Self, ParallelError> {
        let devices = topology.size();
        let groups = groups as usize;
        if groups == 0 || devices == 0 || !devices.is_multiple_of(groups) {
            return Err(ParallelError::Plan {
                field: "stages".to_owned(),
                value: groups.to_string(),
                expected: format!("a divisor of the {devices} devices"),
            });
        }
        let size = devices / groups;
        let ranks = || (0..devices as u32).map(Rank);
        let pairs: Vec<(Rank, Rank)> = ranks().flat_map(|a| ranks().map(move |b| (a, b))).collect();
        let links: Vec<Link> = pairs.iter().map(|&(a, b)| averaged(topology, a, b)).collect();
        let cost = |bytes: Bytes, share: usize, factor: u64| {
            let costs = pairs.iter().zip(&links).map(|(&(a, b), link)| {
                let time = (a == b).then_some(0).or_else(|| transfer(*link, bytes, share as u64));
                let within = time.map(|time| time * factor).filter(|&time| time <= LONGEST);
                within.ok_or(ParallelError::UnusableLink { from: a, to: b, bandwidth: link.bandwidth, bytes })
            });
            costs.collect::<Result<Vec<u64>, _>>()
        };
        let average = cost(workload.gradients, size, 2)?;
        let hop = cost(workload.activations, 1, 1)?;
        Ok(Self { groups, size, links, average, hop })
    }

    /// Returns the number of devices.
    #[must_use]
    pub const fn devices(&self) -> usize {
        self.groups * self.size
    }

    /// Returns the number of groups, which is the number of stages.
    #[must_use]
    pub const fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the number of devices in each group, which is the number of replicas.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Returns the link of two devices, averaged over both directions.
    #[must_use]
    pub fn link(&self, a: Rank, b: Rank) -> Link {
        self.links[a.index() * self.devices() + b.index()]
    }

    pub(super) fn average(&self, a: usize, b: usize) -> u64 {
        self.average[a * self.devices() + b]
    }

    pub(super) fn hop(&self, a: usize, b: usize) -> u64 {
        self.hop[a * self.devices() + b]
    }

    /// Returns the DATAP-COST of a group, the time to average its gradients: each device exchanges its shard
    /// with all others in turn, and the slowest device determines the time.
    pub(super) fn of_group(&self, group: &[usize]) -> u64 {
        let of = |&device: &usize| group.iter().map(|&other| self.average(device, other)).sum();
        group.iter().map(of).max().unwrap_or_default()
    }

    /// Returns the bottleneck matching of the devices of two groups.
    pub(super) fn of_boundary(&self, from: &[usize], to: &[usize]) -> Matching {
        let row = |&a: &usize| to.iter().map(move |&b| self.hop(a, b));
        let costs: Vec<u64> = from.iter().flat_map(row).collect();
        bottleneck_matching(&costs, self.size)
    }

    /// Returns the mean hop between two groups if each device had its nearest neighbour. It is a lower bound
    /// for any matching.
    pub(super) fn near(&self, a: &[usize], b: &[usize]) -> u64 {
        let sum = |a: &[usize], b: &[usize]| -> u64 {
            a.iter().filter_map(|&from| b.iter().map(|&to| self.hop(from, to)).min()).sum()
        };
        sum(a, b).max(sum(b, a)) / self.size as u64
    }
}

fn averaged(topology: &Topology, a: Rank, b: Rank) -> Link {
    let middle = |x: u64, y: u64| u64::midpoint(x, y);
    let latency = Nanos(middle(topology.link(a, b).latency.0, topology.link(b, a).latency.0));
    let (there, back) = (topology.rate(a, b), topology.rate(b, a));
    // A link that works in one direction only cannot be used, because training sends data in both directions.
    let dead = there.0 == 0 || back.0 == 0;
    let bandwidth = Bandwidth(if dead { 0 } else { middle(there.0, back.0) });
    Link { bandwidth, latency }
}

/// Returns the time for one of `shares` equal parts of `bytes`, to the nearest nanosecond. `None` without
/// bandwidth or above the maximum.
fn transfer(link: Link, bytes: Bytes, shares: u64) -> Option<u64> {
    if link.bandwidth == Bandwidth::UNLIMITED {
        return Some(link.latency.0);
    }
    let rate = u128::from(link.bandwidth.0) * u128::from(shares);
    let work = u128::from(bytes.0) * 8_000_000_000;
    let time = (work + rate / 2).checked_div(rate)?;
    u64::try_from(time).ok()?.checked_add(link.latency.0).filter(|&time| time <= LONGEST)
}

/// Checks that `groups` divide all devices: each device once, groups of equal size.
///
/// Errors: [`ParallelError::Plan`].
pub(super) fn check(groups: &[Vec<Rank>], costs: &PairCosts) -> Result<(), ParallelError> {
    let wrong = |value: String, expected: String| {
        Err(ParallelError::Plan { field: "groups".to_owned(), value, expected })
    };
    if groups.len() != costs.groups || groups.iter().any(|group| group.len() != costs.size) {
        let sizes: Vec<usize> = groups.iter().map(Vec::len).collect();
        return wrong(format!("of sizes {sizes:?}"), format!("{} of size {}", costs.groups, costs.size));
    }
    let mut seen = vec![false; costs.devices()];
    for rank in groups.iter().flatten() {
        match seen.get_mut(rank.index()) {
            Some(seen) if !*seen => *seen = true,
            _ => {
                return wrong(
                    format!("with device {}", rank.0),
                    "each device of the network once".to_owned(),
                );
            }
        }
    }
    Ok(())
}

const _: () =
    assert!(LONGEST.checked_mul(2 * Mesh::MAX_RANKS as u64).is_some(), "sums of pairs fit in 64 bits");
