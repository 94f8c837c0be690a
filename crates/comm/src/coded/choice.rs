//! Which coded all-reduce: the programs by the names of [`Algorithm`], and the choice among them by what they cost on declared
//! links, with the codec's largest payloads.

use std::sync::Arc;

use farflung_base::{Algorithm, Nanos, Rank, Topology};

use super::{coded_exchange, coded_exchange_of, coded_ring, two_level};
use crate::CommError;
use crate::algorithm::{regions, shares_on};
use crate::cost::cost_coded;
use crate::steps::Program;

/// Values of a chunk at least: smaller ones are not worth messages of their own.
const LEAST_CHUNK: usize = 16 * 1024;

/// The most bytes that a codec makes of so many values.
type Payload<'a> = &'a dyn Fn(usize) -> usize;

/// The programs of coded all-reduces, and the choice among them by price.
///
/// | algorithm | coded form |
/// |-|-|
/// | `direct` | [`coded_exchange`]: a scatter-gather with equal shards |
/// | `butterfly` | [`coded_exchange_of`]: a scatter-gather with shards weighted by access links |
/// | `hierarchical` | [`two_level`]: plain inside a region, coded between [regions] |
/// | `ring` | [`coded_ring`]: encoded anew at each hop |
/// | `auto` | the cheapest of the first three; ties go to the one named first. Never the ring, which loses at each hop. |
pub trait CodedAllReduce: Sized {
    /// The algorithm that this means for a buffer of `len` values; never `Auto`.
    ///
    /// # Errors
    /// [`CommError::NoCodedForm`] for an algorithm that has none.
    fn resolve_coded(self, len: usize, payload: Payload<'_>, topology: &Topology) -> Result<Self, CommError>;

    /// One rank's program for a buffer of `len` values.
    ///
    /// # Errors
    /// As [`CodedAllReduce::resolve_coded`].
    fn coded_program(
        self,
        rank: Rank,
        len: usize,
        payload: Payload<'_>,
        topology: &Topology,
    ) -> Result<Program, CommError>;

    /// What it takes from a common start until the last rank is done.
    ///
    /// # Errors
    /// As [`CodedAllReduce::resolve_coded`].
    fn coded_cost(self, len: usize, payload: Payload<'_>, topology: &Topology) -> Result<Nanos, CommError>;
}

impl CodedAllReduce for Algorithm {
    fn resolve_coded(self, len: usize, payload: Payload<'_>, topology: &Topology) -> Result<Self, CommError> {
        match self {
            Self::Auto => {
                let price = |form: &Self| cheapest(*form, len, payload, topology).1;
                let once = Self::CODED.into_iter().filter(|form| *form != Self::Ring);
                Ok(once.min_by_key(price).expect("there are coded forms"))
            }
            form if Self::CODED.contains(&form) => Ok(form),
            algorithm => Err(CommError::NoCodedForm { algorithm }),
        }
    }

    fn coded_program(
        self,
        rank: Rank,
        len: usize,
        payload: Payload<'_>,
        topology: &Topology,
    ) -> Result<Program, CommError> {
        let form = self.resolve_coded(len, payload, topology)?;
        let mut ways = ways(form, len, topology);
        if ways.len() == 1 {
            // A single way is not priced.
            return Ok(ways.remove(0)(rank));
        }
        Ok(cheapest(form, len, payload, topology).0(rank))
    }

    fn coded_cost(self, len: usize, payload: Payload<'_>, topology: &Topology) -> Result<Nanos, CommError> {
        Ok(cheapest(self.resolve_coded(len, payload, topology)?, len, payload, topology).1)
    }
}

/// One way to run a form: each rank's program.
type Way = Box<dyn Fn(Rank) -> Program>;

/// The cheapest way to run a form, and what it takes; of equally cheap ones the first.
fn cheapest(form: Algorithm, len: usize, payload: Payload<'_>, topology: &Topology) -> (Way, Nanos) {
    let price = |way: Way| {
        let all: Vec<Program> = (0..topology.size() as u32).map(|rank| way(Rank(rank))).collect();
        let cost = cost_coded(&all, len, payload, topology);
        (way, cost)
    };
    let priced = ways(form, len, topology).into_iter().map(price);
    priced.min_by_key(|(_, cost)| *cost).expect("every form has a way")
}

/// The ways to run a form: it may go in chunks.
fn ways(form: Algorithm, len: usize, topology: &Topology) -> Vec<Way> {
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
            let regions = regions(topology);
            vec![Box::new(move |rank| two_level(rank, &regions))]
        }
        Algorithm::Ring => vec![Box::new(move |rank| coded_ring(rank, n))],
        _ => vec![Box::new(move |rank| coded_exchange(rank, n))],
    }
}
