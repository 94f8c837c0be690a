//! Coded all-reduces: their programs by the names of [`Algorithm`], and the choice among them by cost on
//! declared links, with the codec's largest payloads.

use std::sync::Arc;

use farflung_base::{Algorithm, Nanos, Rank, Topology};

use super::{coded_all_gather, coded_exchange, coded_exchange_of, coded_ring, two_level};
use crate::CommError;
use crate::algorithm::{regions, shares_on};
use crate::cost::cost_coded;
use crate::steps::Program;

/// Minimum mean number of values in a block, if shards are cut into several chunks. A smaller block costs more
/// for its extra message than it saves.
const LEAST_CHUNK: usize = 16 * 1024;

/// Description of a buffer to be reduced through a codec, and of the links.
#[derive(Clone, Copy)]
pub struct CodedBuffer<'a> {
    /// Number of values in the buffer.
    pub len: usize,
    /// Returns the maximum size in bytes of this number of encoded values.
    pub payload: &'a dyn Fn(usize) -> usize,
    /// The links between the ranks.
    pub topology: &'a Topology,
    /// Regions of the two-level form. If `None`, [`regions`] derives them from the links.
    pub regions: Option<&'a [Vec<Rank>]>,
}

impl std::fmt::Debug for CodedBuffer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranks = self.topology.size();
        f.debug_struct("CodedBuffer").field("len", &self.len).field("ranks", &ranks).finish_non_exhaustive()
    }
}

/// Programs of coded all-reduces, and the choice of the one with the least predicted time.
///
/// | algorithm | coded form |
/// |-|-|
/// | `direct` | [`coded_exchange`]: a scatter-gather with equal shards |
/// | `butterfly` | [`coded_exchange_of`]: scatter-gather, shards weighted by access links, perhaps in chunks |
/// | `hierarchical` | [`two_level`]: plain inside a region, coded between regions |
/// | `ring` | [`coded_ring`]: partial sums are encoded again at each hop |
/// | `all-gather` | [`coded_all_gather`]: each rank sends its encoded buffer to all, and adds up all buffers |
/// | `auto` | the cheapest except the ring, which loses values at each hop; ties go to the one named first |
pub trait CodedAllReduce: Sized {
    /// Returns the algorithm to use: itself, or for `Auto` the cheapest; never `Auto`.
    ///
    /// # Errors
    /// [`CommError::NoCodedForm`] if the algorithm has no coded form.
    fn resolve_coded(self, buffer: &CodedBuffer<'_>) -> Result<Self, CommError>;

    /// Returns one rank's program.
    ///
    /// # Errors
    /// The same as for [`CodedAllReduce::resolve_coded`].
    fn coded_program(self, rank: Rank, buffer: &CodedBuffer<'_>) -> Result<Program, CommError>;

    /// Returns the program of each rank.
    ///
    /// # Errors
    /// The same as for [`CodedAllReduce::resolve_coded`].
    fn coded_programs(self, buffer: &CodedBuffer<'_>) -> Result<Vec<Program>, CommError>;

    /// Returns the predicted time of the all-reduce: all ranks start at the same time, payloads have their
    /// maximum size, and the time ends when the last rank is done.
    ///
    /// # Errors
    /// The same as for [`CodedAllReduce::resolve_coded`].
    fn coded_cost(self, buffer: &CodedBuffer<'_>) -> Result<Nanos, CommError>;
}

impl CodedAllReduce for Algorithm {
    fn resolve_coded(self, buffer: &CodedBuffer<'_>) -> Result<Self, CommError> {
        match self {
            Self::Auto => {
                let price = |form: &Self| cheapest(*form, buffer).1;
                let once = Self::CODED.into_iter().filter(|form| *form != Self::Ring);
                Ok(once.min_by_key(price).expect("at least one algorithm besides the ring has a coded form"))
            }
            form if Self::CODED.contains(&form) => Ok(form),
            algorithm => Err(CommError::NoCodedForm { algorithm }),
        }
    }

    fn coded_program(self, rank: Rank, buffer: &CodedBuffer<'_>) -> Result<Program, CommError> {
        Ok(cheapest_variant(self.resolve_coded(buffer)?, buffer)(rank))
    }

    fn coded_programs(self, buffer: &CodedBuffer<'_>) -> Result<Vec<Program>, CommError> {
        let way = cheapest_variant(self.resolve_coded(buffer)?, buffer);
        Ok((0..buffer.topology.size() as u32).map(|rank| way(Rank(rank))).collect())
    }

    fn coded_cost(self, buffer: &CodedBuffer<'_>) -> Result<Nanos, CommError> {
        Ok(cheapest(self.resolve_coded(buffer)?, buffer).1)
    }
}

/// A variant of a coded form: returns the program of each rank.
type ProgramFn = Box<dyn Fn(Rank) -> Program>;

/// Returns the variant of a form with the least cost. If there is only one variant, its cost is not computed.
fn cheapest_variant(form: Algorithm, buffer: &CodedBuffer<'_>) -> ProgramFn {
    let mut ways = variants(form, buffer);
    if ways.len() == 1 { ways.remove(0) } else { cheapest(form, buffer).0 }
}

/// Returns the variant of a form with the least cost (the first one on a tie), and that cost.
fn cheapest(form: Algorithm, buffer: &CodedBuffer<'_>) -> (ProgramFn, Nanos) {
    let CodedBuffer { len, payload, topology, .. } = *buffer;
    let price = |way: ProgramFn| {
        let all: Vec<Program> = (0..topology.size() as u32).map(|rank| way(Rank(rank))).collect();
        let cost = cost_coded(&all, len, payload, topology);
        (way, cost)
    };
    let priced = variants(form, buffer).into_iter().map(price);
    priced.min_by_key(|(_, cost)| *cost).expect("each form has at least one way to run")
}

/// Returns the variants of a form: they differ in the number of chunks.
fn variants(form: Algorithm, buffer: &CodedBuffer<'_>) -> Vec<ProgramFn> {
    let CodedBuffer { len, topology, .. } = *buffer;
    let n = topology.size();
    match form {
        Algorithm::Butterfly => {
            let counts: Arc<[usize]> = shares_on(len, topology).into();
            let worth = |&chunks: &usize| chunks == 1 || len / (n * chunks) >= LEAST_CHUNK;
            let chunked = |chunks| -> ProgramFn {
                let counts = Arc::clone(&counts);
                Box::new(move |rank| coded_exchange_of(rank, &counts, chunks))
            };
            [1, 4, 16].into_iter().filter(worth).map(chunked).collect()
        }
        Algorithm::Hierarchical => {
            let regions = buffer.regions.map_or_else(|| regions(topology), <[_]>::to_vec);
            vec![Box::new(move |rank| two_level(rank, &regions))]
        }
        Algorithm::Ring => vec![Box::new(move |rank| coded_ring(rank, n))],
        Algorithm::AllGather => vec![Box::new(move |rank| coded_all_gather(rank, n))],
        _ => vec![Box::new(move |rank| coded_exchange(rank, n))],
    }
}
