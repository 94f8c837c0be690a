//! The program of a rank for each collective: chosen by cost on the declared links, and cached by size.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use farflung_base::{Bytes, Rank, Topology};

use crate::Algorithm;
use crate::algorithm::{AllReduce, program_on};
use crate::all_to_all::{bruck_all_to_all, direct_all_to_all, pairwise_all_to_all};
use crate::butterfly::{direct_all_gather, direct_gather, direct_reduce_scatter};
use crate::cost::cost;
use crate::ordered::{
    ordered_direct, ordered_direct_reduce, ordered_reduce_scatter, ordered_tree_all_reduce,
    ordered_tree_reduce,
};
use crate::ring::{ring_all_gather, ring_reduce_scatter};
use crate::scan::{chain_exclusive_scan, chain_scan, doubling_exclusive_scan, doubling_scan};
use crate::steps::{Program, Step};
use crate::tree::{binomial_broadcast, binomial_reduce, chain_broadcast};

/// Maximum number of programs that are cached; when it is reached, the cache is emptied.
const REMEMBERED: usize = 256;

/// Minimum block of a chain in bytes. A smaller block costs more for its extra message than it saves.
const LEAST_BLOCK: u64 = 16 * 1024;

/// A collective whose program is cached. Most programs depend on the size and the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast(Rank),
    Reduce(Rank),
    AllToAll,
    Scan,
    ExclusiveScan,
    /// This kind and the following ones keep the order of ranks, for reductions that do not commute.
    OrderedAllReduce,
    OrderedReduceScatter,
    OrderedReduce(Rank),
}

/// A program, and the algorithm that it was made by if it is an all-reduce.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) program: Arc<Program>,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) passing: Arc<PassThrough>,
}

impl From<Program> for Plan {
    fn from(program: Program) -> Self {
        let lane = |steps: &Vec<Step>| {
            steps.iter().flat_map(|step| step.recvs.iter().map(|_| OnceLock::new())).collect()
        };
        let passing = Arc::new(PassThrough(program.lanes.iter().map(lane).collect()));
        Self { program: Arc::new(program), algorithm: None, passing }
    }
}

/// Cache that says for each receive of a program whether its result only passes through this rank: the next
/// step sends the result on, and the block is overwritten before it is used again. Computing this takes a
/// search of later steps, so the answer is kept for the next run of the program.
#[derive(Debug)]
pub(crate) struct PassThrough(Vec<Vec<OnceLock<bool>>>);

impl PassThrough {
    /// Returns the entry of a receive, which has this `number` among the receives of all steps of the lane. If
    /// it is not known yet, `find` computes it.
    pub(crate) fn of(&self, lane: usize, number: usize, find: impl FnOnce() -> bool) -> bool {
        *self.0[lane][number].get_or_init(find)
    }
}

/// The cached programs of one rank.
#[derive(Debug)]
pub(crate) struct Plans {
    rank: Rank,
    algorithm: Algorithm,
    topology: Topology,
    /// Regions of `hierarchical`; `None` to derive them from the links.
    regions: Option<Arc<[Vec<Rank>]>>,
    /// Programs by kind, number of elements and number of bytes.
    made: Mutex<BTreeMap<(Kind, usize, u64), Plan>>,
}

impl Plans {
    pub(crate) const fn new(rank: Rank, algorithm: Algorithm, topology: Topology) -> Self {
        Self { rank, algorithm, topology, regions: None, made: Mutex::new(BTreeMap::new()) }
    }

    /// Returns an empty cache for another algorithm, with the same links and regions.
    pub(crate) fn with_algorithm(&self, algorithm: Algorithm) -> Self {
        Self { regions: self.regions.clone(), ..Self::new(self.rank, algorithm, self.topology.clone()) }
    }

    /// Returns an empty cache for other links, with the same algorithm and regions.
    pub(crate) fn with_topology(&self, topology: Topology) -> Self {
        Self { regions: self.regions.clone(), ..Self::new(self.rank, self.algorithm, topology) }
    }

    /// Returns an empty cache for given regions, with the same algorithm and links.
    pub(crate) fn with_regions(&self, regions: Vec<Vec<Rank>>) -> Self {
        Self { regions: Some(regions.into()), ..Self::new(self.rank, self.algorithm, self.topology.clone()) }
    }

    pub(crate) fn regions(&self) -> Option<&[Vec<Rank>]> {
        self.regions.as_deref()
    }

    pub(crate) const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    pub(crate) const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns this rank's program for a buffer of `len` elements and `bytes` bytes in all.
    pub(crate) fn plan(&self, kind: Kind, len: usize, bytes: Bytes) -> Plan {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.len() >= REMEMBERED {
            made.clear();
        }
        made.entry((kind, len, bytes.0)).or_insert_with(|| self.make(kind, len, bytes)).clone()
    }

    fn make(&self, kind: Kind, len: usize, bytes: Bytes) -> Plan {
        let n = self.topology.size();
        let program = match kind {
            Kind::AllReduce => {
                let algorithm = self.algorithm.resolve(bytes, &self.topology);
                let regions = self.regions();
                let mut plan = Plan::from(match algorithm {
                    Algorithm::Ring
                    | Algorithm::DoubleTree
                    | Algorithm::Hierarchical
                    | Algorithm::Direct
                    | Algorithm::Butterfly => {
                        program_on(self.rank, algorithm, len, bytes, &self.topology, regions)
                    }
                    fixed => fixed.program(self.rank, n),
                });
                plan.algorithm = Some(algorithm);
                return plan;
            }
            Kind::ReduceScatter => self.by_cost(
                bytes,
                &[&|rank| ring_reduce_scatter(rank, n), &|rank| direct_reduce_scatter(rank, n)],
            ),
            Kind::AllGather => {
                self.by_cost(bytes, &[&|rank| ring_all_gather(rank, n), &|rank| direct_all_gather(rank, n)])
            }
            Kind::AllToAll => self.by_cost(
                bytes,
                &[&|rank| pairwise_all_to_all(rank, n), &|rank| direct_all_to_all(rank, n), &|rank| {
                    bruck_all_to_all(rank, n)
                }],
            ),
            Kind::Broadcast(root) => {
                self.by_chain(bytes, &|rank| binomial_broadcast(rank, n, root), &|rank, blocks| {
                    chain_broadcast(rank, n, root, blocks)
                })
            }
            Kind::Reduce(root) => {
                let scattered = |rank| ring_reduce_scatter(rank, n).then(direct_gather(rank, n, root));
                self.cheapest(bytes, &[&|rank| binomial_reduce(rank, n, root), &scattered])
            }
            Kind::Scan => self
                .by_chain(bytes, &|rank| doubling_scan(rank, n), &|rank, blocks| chain_scan(rank, n, blocks)),
            Kind::ExclusiveScan => {
                self.by_chain(bytes, &|rank| doubling_exclusive_scan(rank, n), &|rank, blocks| {
                    chain_exclusive_scan(rank, n, blocks)
                })
            }
            Kind::OrderedAllReduce => self.cheapest(
                bytes,
                &[&|rank| ordered_tree_all_reduce(rank, n), &|rank| ordered_direct(rank, n)],
            ),
            Kind::OrderedReduceScatter => ordered_reduce_scatter(self.rank, n),
            Kind::OrderedReduce(root) => self.cheapest(
                bytes,
                &[&|rank| ordered_tree_reduce(rank, n, root), &|rank| ordered_direct_reduce(rank, n, root)],
            ),
        };
        program.into()
    }

    /// Returns the cheapest of `small` and chains with several numbers of blocks.
    fn by_chain(
        &self,
        bytes: Bytes,
        small: &dyn Fn(Rank) -> Program,
        chain: &dyn Fn(Rank, usize) -> Program,
    ) -> Program {
        let chains = [4, 16, 64].map(|blocks| move |rank| chain(rank, blocks));
        let mut candidates: Vec<&dyn Fn(Rank) -> Program> = vec![small];
        let worth = |blocks: u64| bytes.0 / blocks >= LEAST_BLOCK;
        let chains = chains.iter().zip([4, 16, 64]).filter(|&(_, blocks)| worth(blocks));
        candidates.extend(chains.map(|(chain, _)| chain as &dyn Fn(Rank) -> Program));
        self.cheapest(bytes, &candidates)
    }

    /// Returns the first candidate, or the cheapest if the algorithm is `Auto`.
    fn by_cost(&self, bytes: Bytes, candidates: &[&dyn Fn(Rank) -> Program]) -> Program {
        let candidates = if self.algorithm == Algorithm::Auto { candidates } else { &candidates[..1] };
        self.cheapest(bytes, candidates)
    }

    fn cheapest(&self, bytes: Bytes, candidates: &[&dyn Fn(Rank) -> Program]) -> Program {
        if let [only] = candidates {
            return only(self.rank);
        }
        let all = |program: &dyn Fn(Rank) -> Program| -> Vec<Program> {
            (0..self.topology.size() as u32).map(|rank| program(Rank(rank))).collect()
        };
        let price = |program: &&&dyn Fn(Rank) -> Program| cost(&all(program), bytes, &self.topology);
        let best = candidates.iter().min_by_key(price).expect("the list of candidates is not empty");
        best(self.rank)
    }
}
