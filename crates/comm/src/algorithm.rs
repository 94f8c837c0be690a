//! All-reduce algorithms: their programs by name, and the choice among them by cost on declared links.

use std::sync::Arc;

use farflung_base::{Algorithm, Bandwidth, Bytes, Nanos, Rank, Topology};

use crate::FRAME_BYTES;
use crate::butterfly::{butterfly, direct, shares};
use crate::cost::cost;
use crate::doubling::{halving_doubling, recursive_doubling};
use crate::grouped::{hierarchical, moshpit, square};
use crate::inbox::WINDOW;
use crate::ring::{bidirectional_ring, everyone, pipelined_ring, ring};
use crate::steps::Program;
use crate::tree::double_tree;

/// Minimum size in bytes of one rank's block of a chunk, if a buffer is cut into several chunks. A smaller one
/// costs more for its extra message than it saves.
const LEAST_CHUNK: u64 = 16 * 1024;

/// Maximum block of a pipelined ring in bytes, unless that takes more than [`MOST_CHUNKS`]. It is a little less
/// than a frame, so that a block with its header fits in four segments of a loopback interface (65483 bytes
/// each) instead of five.
const PASSED: usize = FRAME_BYTES - 512;

/// Narrow window of a pipelined ring: so few chunks are in flight at the same time that their data stays in the
/// cache. This matters only on very fast links. The alternative is the wider window of [`AHEAD`].
const PACED: usize = 8;

/// Approximate number of frames that a rank of a pipelined ring may send, with the wider window, before the
/// next rank has read them.
const AHEAD: usize = 4 * WINDOW;

/// Maximum number of chunks of a pipelined ring; with more, computing the cost would take too long.
const MOST_CHUNKS: usize = 256;

/// Programs of an all-reduce algorithm, and the choice of the algorithm with the least predicted time.
pub trait AllReduce {
    /// Returns the algorithm to use for a buffer of `bytes` on `topology`: itself, or for `Auto` the cheapest;
    /// never `Auto`.
    #[must_use]
    fn resolve(self, bytes: Bytes, topology: &Topology) -> Algorithm;

    /// Returns one rank's program for equal links, in one chunk. `Auto` and `AllGather` give the ring.
    #[must_use]
    fn program(self, rank: Rank, size: usize) -> Program;

    /// Returns all ranks' programs for a buffer of `len` elements and `bytes` bytes in all, with the regions
    /// and bandwidths of `topology`, and in the cheapest number of chunks.
    #[must_use]
    fn programs(self, len: usize, bytes: Bytes, topology: &Topology) -> Vec<Program>
    where
        Self: Sized,
    {
        self.programs_in(len, bytes, topology, None)
    }

    /// Returns [`AllReduce::programs`] with the given regions, or if `None` with regions derived from the
    /// links.
    #[must_use]
    fn programs_in(
        self,
        len: usize,
        bytes: Bytes,
        topology: &Topology,
        regions: Option<&[Vec<Rank>]>,
    ) -> Vec<Program>;
}

impl AllReduce for Algorithm {
    fn resolve(self, bytes: Bytes, topology: &Topology) -> Self {
        if self != Self::Auto {
            return self;
        }
        let price = |algorithm: &Self| {
            variant_cost(&cheapest(*algorithm, bytes.0 as usize, bytes, topology, None), bytes, topology)
        };
        Self::ALL.into_iter().min_by_key(price).unwrap_or_default()
    }

    fn program(self, rank: Rank, size: usize) -> Program {
        match self {
            // `AllGather` has only a coded form; uncoded values use the ring.
            Self::Ring | Self::AllGather | Self::Auto => ring(rank, size),
            Self::BidirectionalRing => bidirectional_ring(rank, size),
            Self::RecursiveDoubling => recursive_doubling(rank, size),
            Self::HalvingDoubling => halving_doubling(rank, size),
            Self::DoubleTree => double_tree(rank, size, 1),
            Self::Hierarchical => hierarchical(rank, &[everyone(size)], 1),
            Self::Direct | Self::Butterfly => direct(rank, size, 1),
            Self::Moshpit => moshpit(rank, &square(size)),
        }
    }

    fn programs_in(
        self,
        len: usize,
        bytes: Bytes,
        topology: &Topology,
        regions: Option<&[Vec<Rank>]>,
    ) -> Vec<Program> {
        all_ranks(&cheapest(self.resolve(bytes, topology), len, bytes, topology, regions), topology)
    }
}

/// Returns one rank's program of [`AllReduce::programs`]. The programs of other ranks are generated only if
/// they are needed to compare costs.
pub(crate) fn program_on(
    rank: Rank,
    algorithm: Algorithm,
    len: usize,
    bytes: Bytes,
    topology: &Topology,
    regions: Option<&[Vec<Rank>]>,
) -> Program {
    cheapest(algorithm.resolve(bytes, topology), len, bytes, topology, regions)(rank)
}

/// A variant of an algorithm: returns the program of each rank.
type ProgramFn<'a> = Box<dyn Fn(Rank) -> Program + 'a>;

fn boxed<'a>(program: impl Fn(Rank) -> Program + 'a) -> ProgramFn<'a> {
    Box::new(program)
}

fn all_ranks(way: &ProgramFn<'_>, topology: &Topology) -> Vec<Program> {
    (0..topology.size() as u32).map(|rank| way(Rank(rank))).collect()
}

fn variant_cost(way: &ProgramFn<'_>, bytes: Bytes, topology: &Topology) -> Nanos {
    cost(&all_ranks(way, topology), bytes, topology)
}

/// Returns the variant of `algorithm` with the least cost; the first one on a tie. If there is only one
/// variant, its cost is not computed.
fn cheapest<'a>(
    algorithm: Algorithm,
    len: usize,
    bytes: Bytes,
    topology: &'a Topology,
    given: Option<&[Vec<Rank>]>,
) -> ProgramFn<'a> {
    let mut ways = variants(algorithm, len, bytes, topology, given);
    if ways.len() == 1 {
        return ways.remove(0);
    }
    ways.into_iter()
        .min_by_key(|way| variant_cost(way, bytes, topology))
        .expect("each algorithm has at least one way to run")
}

/// Returns the variants of `algorithm`: they differ in the number of chunks, and in how many chunks run at a
/// time.
///
/// `given` are the regions. If `None`, they are derived from the links.
fn variants<'a>(
    algorithm: Algorithm,
    len: usize,
    bytes: Bytes,
    topology: &'a Topology,
    given: Option<&[Vec<Rank>]>,
) -> Vec<ProgramFn<'a>> {
    let n = topology.size();
    let counts = || {
        let worth = move |&chunks: &usize| chunks == 1 || bytes.0 / (n * chunks) as u64 >= LEAST_CHUNK;
        [1, 4, 16, 64].into_iter().filter(worth)
    };
    let paced = || counts().flat_map(|chunks| [(chunks, usize::MAX), (chunks, 4)]);
    match algorithm {
        Algorithm::Ring => {
            let chunks = (bytes.0 as usize).div_ceil(n * PASSED).clamp(1, MOST_CHUNKS);
            let mut windows = vec![PACED, PACED.max(AHEAD / n)];
            windows.dedup();
            if chunks <= PACED {
                // Both windows hold all chunks, so they would give the same program.
                windows.truncate(1);
            }
            let paced = |window| boxed(move |rank| pipelined_ring(rank, n, chunks).with_window(window));
            windows.into_iter().map(paced).collect()
        }
        Algorithm::DoubleTree => {
            counts().map(|chunks| boxed(move |rank| double_tree(rank, n, chunks))).collect()
        }
        Algorithm::Hierarchical => {
            let regions: Arc<[Vec<Rank>]> = given.map_or_else(|| regions(topology), <[_]>::to_vec).into();
            let chunked = |chunks| {
                let regions = Arc::clone(&regions);
                boxed(move |rank| hierarchical(rank, &regions, chunks))
            };
            counts().map(chunked).collect()
        }
        Algorithm::Direct => {
            let chunked = |(chunks, window)| boxed(move |rank| direct(rank, n, chunks).with_window(window));
            paced().map(chunked).collect()
        }
        Algorithm::Butterfly => {
            let shares: Arc<[usize]> = shares_on(len, topology).into();
            let chunked = |(chunks, window)| {
                let shares = Arc::clone(&shares);
                boxed(move |rank| butterfly(rank, &shares, chunks).with_window(window))
            };
            paced().map(chunked).collect()
        }
        _ => vec![boxed(move |rank| algorithm.program(rank, n))],
    }
}

/// Returns the [`shares`] of `len` elements by the ranks' access links. The access link that a region shares
/// counts as divided equally among its ranks.
pub(crate) fn shares_on(len: usize, topology: &Topology) -> Vec<usize> {
    let ranks = || (0..topology.size() as u32).map(Rank);
    let slower = |rank: Rank| {
        let port = topology.access_link(rank);
        let own = port.up.min(port.down);
        topology.region(rank).map_or(own, |region| {
            let (line, members) = (
                topology.region_access_link(region),
                ranks().filter(|&r| topology.region(r) == Some(region)),
            );
            own.min(Bandwidth(line.up.min(line.down).0 / members.count() as u64))
        })
    };
    let bandwidths: Vec<Bandwidth> = ranks().map(slower).collect();
    shares(len, &bandwidths, 0)
}

/// Groups the ranks into regions of ranks that are near each other, by latency and bandwidth.
///
/// A pair is near if both conditions hold. Latency: less than the geometric mean of the least and greatest
/// latency; applies only if the greatest is at least four times the least. Bandwidth
/// [between](Topology::bandwidth_between) the two, without their access links: more than the geometric mean of
/// the least and greatest; applies under the same rule. Ranks are in one region if a chain of near pairs
/// connects them.
#[must_use]
pub fn regions(topology: &Topology) -> Vec<Vec<Rank>> {
    let n = topology.size();
    let ranks = everyone(n);
    let pairs = || ranks.iter().flat_map(|&a| ranks.iter().filter(move |&&b| a < b).map(move |&b| (a, b)));
    let far = |(a, b)| topology.link(a, b).latency.max(topology.link(b, a).latency).0;
    let wide = |(a, b)| topology.bandwidth_between(a, b).min(topology.bandwidth_between(b, a)).0;
    let (near, broad) = (Spread::of(pairs().map(far)), Spread::of(pairs().map(wide)));
    let mut region: Vec<usize> = (0..n).collect();
    for (a, b) in pairs() {
        if near.is_low(far((a, b))) && broad.is_high(wide((a, b))) {
            let (from, to) =
                (region[a.index()].max(region[b.index()]), region[a.index()].min(region[b.index()]));
            region.iter_mut().filter(|r| **r == from).for_each(|r| *r = to);
        }
    }
    let members = |r: usize| ranks.iter().copied().filter(|rank| region[rank.index()] == r).collect();
    (0..n).map(members).filter(|group: &Vec<Rank>| !group.is_empty()).collect()
}

/// The least and the greatest of a set of figures.
#[derive(Debug, Clone, Copy)]
struct Spread {
    least: u128,
    greatest: u128,
}

impl Spread {
    fn of(figures: impl Iterator<Item = u64> + Clone) -> Self {
        let least = figures.clone().min().unwrap_or(0).into();
        Self { least, greatest: figures.max().unwrap_or(0).into() }
    }

    /// Returns whether the figures differ enough (by a factor of 4) to be divided into low and high ones.
    const fn divides(self) -> bool {
        self.greatest > 0 && self.greatest >= 4 * self.least
    }

    /// Returns whether a figure is below the geometric mean; true for all figures if they are not divided.
    fn is_low(self, figure: u64) -> bool {
        !self.divides() || u128::from(figure).pow(2) < self.least.max(1) * self.greatest
    }

    /// Returns whether a figure is above the geometric mean; true for all figures if they are not divided.
    fn is_high(self, figure: u64) -> bool {
        !self.divides() || u128::from(figure).pow(2) > self.least.max(1) * self.greatest
    }
}
