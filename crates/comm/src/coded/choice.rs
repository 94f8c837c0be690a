//! Which coded all-reduce: the programs by the names of [`Algorithm`], and the choice among them by what they
//! cost on declared links, with the codec's largest payloads.

use std::sync::Arc;

use farflung_base::{Algorithm, Nanos, Rank, Topology};

use super::{coded_all_gather, coded_exchange, coded_exchange_of, coded_ring, two_level};
use crate::CommError;
use crate::algorithm::{regions, shares_on};
use crate::cost::cost_coded;
use crate::steps::Program;

/// Values of a chunk at least: smaller ones are not worth messages of their own.
const LEAST_CHUNK: usize = 16 * 1024;

/// A buffer to be reduced through a codec, and the links to do so.
#[derive(Clone, Copy)]
pub struct CodedBuffer<'a> {
    /// Its values.
    pub len: usize,
    /// The most bytes that the codec makes of so many values.
    pub payload: &'a dyn Fn(usize) -> usize,
    /// The links between the ranks.
    pub topology: &'a Topology,
    /// The regions of the two-level form; `None`: those that the links show, [`regions`].
    pub regions: Option<&'a [Vec<Rank>]>,
}

impl std::fmt::Debug for CodedBuffer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranks = self.topology.size();
        f.debug_struct("CodedBuffer").field("len", &self.len).field("ranks", &ranks).finish_non_exhaustive()
    }
}

/// The programs of coded all-reduces, and the choice among them by price.
///
/// | algorithm | coded form |
/// |-|-|
/// | `direct` | [`coded_exchange`]: a scatter-gather with equal shards |
/// | `butterfly` | [`coded_exchange_of`]: scatter-gather, shards weighted by access links, perhaps in chunks |
/// | `hierarchical` | [`two_level`]: plain inside a region, coded between regions |
/// | `ring` | [`coded_ring`]: encoded anew at each hop |
/// | `all-gather` | [`coded_all_gather`]: every rank's encoded buffer goes to all, which add them up |
/// | `auto` | the cheapest, the ring aside, which loses at each hop; ties go to the one named first |
pub trait CodedAllReduce: Sized {
    /// The algorithm that this means; never `Auto`.
    ///
    /// # Errors
    /// [`CommError::NoCodedForm`] for an algorithm that has none.
    fn resolve_coded(self, buffer: &CodedBuffer<'_>) -> Result<Self, CommError>;

    /// One rank's program.
    ///
    /// # Errors
    /// As [`CodedAllReduce::resolve_coded`].
    fn coded_program(self, rank: Rank, buffer: &CodedBuffer<'_>) -> Result<Program, CommError>;

    /// All ranks' programs.
    ///
    /// # Errors
    /// As [`CodedAllReduce::resolve_coded`].
    fn coded_programs(self, buffer: &CodedBuffer<'_>) -> Result<Vec<Program>, CommError>;

    /// What it takes from a common start until the last rank is done, with the codec's largest payloads.
    ///
    /// # Errors
    /// As [`CodedAllReduce::resolve_coded`].
    fn coded_cost(self, buffer: &CodedBuffer<'_>) -> Result<Nanos, CommError>;
}

impl CodedAllReduce for Algorithm {
    fn resolve_coded(self, buffer: &CodedBuffer<'_>) -> Result<Self, CommError> {
        match self {
            Self::Auto => {
                let price = |form: &Self| cheapest(*form, buffer).1;
                let once = Self::CODED.into_iter().filter(|form| *form != Self::Ring);
                Ok(once.min_by_key(price).expect("there are coded forms"))
            }
            form if Self::CODED.contains(&form) => Ok(form),
            algorithm => Err(CommError::NoCodedForm { algorithm }),
        }
    }

    fn coded_program(self, rank: Rank, buffer: &CodedBuffer<'_>) -> Result<Program, CommError> {
        Ok(chosen(self.resolve_coded(buffer)?, buffer)(rank))
    }

    fn coded_programs(self, buffer: &CodedBuffer<'_>) -> Result<Vec<Program>, CommError> {
        let way = chosen(self.resolve_coded(buffer)?, buffer);
        Ok((0..buffer.topology.size() as u32).map(|rank| way(Rank(rank))).collect())
    }

    fn coded_cost(self, buffer: &CodedBuffer<'_>) -> Result<Nanos, CommError> {
        Ok(cheapest(self.resolve_coded(buffer)?, buffer).1)
    }
}

/// One way to run a form: each rank's program.
type Way = Box<dyn Fn(Rank) -> Program>;

/// The cheapest way to run a form. A single way is not priced.
fn chosen(form: Algorithm, buffer: &CodedBuffer<'_>) -> Way {
    let mut ways = ways(form, buffer);
    if ways.len() == 1 { ways.remove(0) } else { cheapest(form, buffer).0 }
}

/// The cheapest way to run a form, and what it takes; of equally cheap ones the first.
fn cheapest(form: Algorithm, buffer: &CodedBuffer<'_>) -> (Way, Nanos) {
    let CodedBuffer { len, payload, topology, .. } = *buffer;
    let price = |way: Way| {
        let all: Vec<Program> = (0..topology.size() as u32).map(|rank| way(Rank(rank))).collect();
        let cost = cost_coded(&all, len, payload, topology);
        (way, cost)
    };
    let priced = ways(form, buffer).into_iter().map(price);
    priced.min_by_key(|(_, cost)| *cost).expect("every form has a way")
}

/// The ways to run a form: it may go in chunks.
fn ways(form: Algorithm, buffer: &CodedBuffer<'_>) -> Vec<Way> {
    let CodedBuffer { len, topology, .. } = *buffer;
    let n = topology.size();
    match form {
        Algorithm::Butterfly => {
            let counts: Arc<[usize]> = shares_on(len, topology).into();
            let worth = |&chunks: &usize| chunks == 1 || len / (n * chunks) >= LEAST_CHUNK;
            let chunked = |chunks| -> Way {
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
