//! What it costs that two devices average a stage, or are neighbours in a pipeline.

use farflung_base::{Bandwidth, Bytes, Link, Nanos, Rank, Topology};

use crate::planner::matching::{Matching, bottleneck_matching};
use crate::{Mesh, ParallelError};

/// What the tasks of a layout exchange in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Gradients of a stage: what the devices of a group average. The paper's `c_dp`.
    pub gradients: Bytes,
    /// Activations that a device passes to the next stage, over all its microbatches. The paper's `c_pp`.
    pub activations: Bytes,
}

impl Workload {
    /// The published scheduler's: GPT-3 XL on 8 stages and 8 replicas, a batch of a million tokens.
    ///
    /// Gradients are 3 layers of 1.3 billion / 24 parameters in f32; activations 61 sequences of 2,024 by 2,048
    /// values (not 2,048 by 2,048) in f16, in units of 2^30 bytes that links then take for 10^9. Both as
    /// published.
    pub const PUBLISHED: Self = Self { gradients: Bytes(650_000_000), activations: Bytes(471_249_223) };

    /// The same for a model of so many layers instead of 24: gradients grow with them.
    #[must_use]
    pub const fn with_layers(self, layers: u32) -> Self {
        Self { gradients: Bytes(self.gradients.0 * layers as u64 / 24), ..self }
    }
}

/// The costs of all pairs of devices, for groups of one size. Directions of a link are averaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairCosts {
    groups: usize,
    /// Devices of a group.
    size: usize,
    /// By pair: the links, averaged over both directions.
    links: Vec<Link>,
    /// By pair: `2 (latency + gradients / (size * bandwidth))` in nanoseconds.
    average: Vec<u64>,
    /// By pair: `latency + activations / bandwidth` in nanoseconds.
    hop: Vec<u64>,
}

/// The longest that a pair may take: sums over all pairs of the largest network then fit in 64 bits.
const LONGEST: u64 = 1 << 42;

impl PairCosts {
    /// The costs on the devices of `topology`, in `groups` groups.
    ///
    /// Errors: [`ParallelError::Plan`] if there is no group or the devices are not a multiple of the groups;
    /// [`ParallelError::UnusableLink`] for a pair that has no bandwidth, or takes over an hour.
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

    /// Number of devices.
    #[must_use]
    pub const fn devices(&self) -> usize {
        self.groups * self.size
    }

    /// Number of groups: the stages.
    #[must_use]
    pub const fn groups(&self) -> usize {
        self.groups
    }

    /// Devices of each group: the replicas.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The link of two devices, averaged over both directions.
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

    /// DATAP-COST of a group: each device exchanges its shard with all others in turn; the slowest decides.
    pub(super) fn of_group(&self, group: &[usize]) -> u64 {
        let of = |&device: &usize| group.iter().map(|&other| self.average(device, other)).sum();
        group.iter().map(of).max().unwrap_or_default()
    }

    /// The boundary between two groups: the bottleneck matching of their devices.
    pub(super) fn of_boundary(&self, from: &[usize], to: &[usize]) -> Matching {
        let row = |&a: &usize| to.iter().map(move |&b| self.hop(a, b));
        let costs: Vec<u64> = from.iter().flat_map(row).collect();
        bottleneck_matching(&costs, self.size)
    }

    /// The mean hop between two groups if each device had its nearest neighbour: at most that of any matching.
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
    // A pair that is joined in one direction alone is of no use: training sends both ways.
    let dead = there.0 == 0 || back.0 == 0;
    let bandwidth = Bandwidth(if dead { 0 } else { middle(there.0, back.0) });
    Link { bandwidth, latency }
}

/// Time for one of `shares` equal parts of `bytes`, to the nearest nanosecond; none over a dead link.
fn transfer(link: Link, bytes: Bytes, shares: u64) -> Option<u64> {
    if link.bandwidth == Bandwidth::UNLIMITED {
        return Some(link.latency.0);
    }
    let rate = u128::from(link.bandwidth.0) * u128::from(shares);
    let work = u128::from(bytes.0) * 8_000_000_000;
    let time = (work + rate / 2).checked_div(rate)?;
    u64::try_from(time).ok()?.checked_add(link.latency.0).filter(|&time| time <= LONGEST)
}

/// Whether `groups` divide the devices `0..count`: each device once, groups of equal size.
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
