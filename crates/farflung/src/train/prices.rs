//! What collectives take on declared links, as `farflung-comm` prices them: for planners, and for the simulator of a
//! pipeline's step.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use farflung_base::{Algorithm, Bytes, Link, Nanos, Rank, StageId, Topology};
use farflung_comm::{AllReduce as _, CodedAllReduce as _, CodedBuffer, cost};
use farflung_compress::CodecSpec;
use farflung_parallel::Codec;
use farflung_parallel::pipeline::{CollectivePrices, Placement, Tie};
use farflung_tensor::Device;
use farflung_zoo::Stage;

use super::averages;
use super::job::Job;
use crate::Result;

/// A codec as planners see it. What it sends depends on the values; here it is the most that it may.
#[must_use]
pub fn planned_codec(codec: CodecSpec) -> Codec {
    if codec == CodecSpec::default() {
        return Codec::F32;
    }
    let block = 4096;
    let block_bytes = codec.build().max_payload(block) as u64;
    Codec { name: codec.to_string().into(), block: block as u64, block_bytes }
}

/// Ranks up to which all algorithms are priced; among more only those of few messages.
const MOST_RANKS: usize = 64;

/// Prices of averages over all ranks of some links, for planners.
///
/// A codec is taken to send what [`Codec::bytes`] says. Each price is worked out once.
#[derive(Debug)]
pub struct AveragePrices {
    topology: Topology,
    known: Mutex<BTreeMap<(Algorithm, String, u64), Option<Nanos>>>,
}

impl AveragePrices {
    /// On these links.
    #[must_use]
    pub const fn new(topology: Topology) -> Self {
        Self { topology, known: Mutex::new(BTreeMap::new()) }
    }

    /// The time of an average of so many values; `None` for an algorithm that has no form for the codec, or loses at each
    /// hop, or has too many messages among so many ranks.
    #[must_use]
    pub fn of(&self, algorithm: Algorithm, codec: &Codec, values: u64) -> Option<Nanos> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (algorithm, codec.name.to_string(), values);
        *known.entry(key).or_insert_with(|| self.price(algorithm, codec, values))
    }

    fn price(&self, algorithm: Algorithm, codec: &Codec, values: u64) -> Option<Nanos> {
        let topology = &self.topology;
        let len = usize::try_from(values).ok()?;
        if *codec != Codec::F32 {
            let payload = |values: usize| codec.bytes(values as u64).0 as usize;
            let buffer = CodedBuffer { len, payload: &payload, topology, regions: None };
            let form = Some(algorithm).filter(|form| *form != Algorithm::Ring);
            return form?.coded_cost(&buffer).ok();
        }
        let few = [
            Algorithm::Ring,
            Algorithm::RecursiveDoubling,
            Algorithm::HalvingDoubling,
            Algorithm::DoubleTree,
        ];
        if topology.size() > MOST_RANKS && !few.contains(&algorithm) {
            return None;
        }
        let bytes = codec.bytes(values);
        Some(cost(&algorithm.programs(len, bytes, topology), bytes, topology))
    }
}

/// Prices of averaging each part over all that hold it, and of the exchange of the token table's gradients.
///
/// The slowest of the groups that do the same counts. A codec is taken to send the most that it may.
pub(super) fn collective_prices(
    job: &Job,
    placement: &Placement,
    topology: &Topology,
) -> Result<CollectivePrices> {
    let (ranks, replicas) = (placement.ranks(), job.plan.replicas());
    let rank = |replica: u32, stage: u32| Rank(replica * ranks + placement.rank(StageId(stage)).0);
    let mut reduce = Vec::new();
    if placement.depth() > 1 && job.averages_each_step() && (replicas > 1 || placement.copies() > 1) {
        let (device, coded) = (Device::cpu(1)?, job.codec()? != CodecSpec::default());
        for (part, planned) in (0..).zip(&job.plan.parts) {
            let layers = planned.layers.start as usize..planned.layers.end as usize;
            let stages = (0..placement.copies()).map(|copy| copy * placement.depth() + part);
            let mut holders: Vec<Rank> =
                stages.flat_map(|stage| (0..replicas).map(move |replica| rank(replica, stage))).collect();
            holders.sort_unstable();
            let values = Stage::new(job.model, layers, &device)?.layout().count();
            let among = topology.among(&holders);
            reduce.push(match values {
                0 => Nanos::ZERO,
                _ if coded => averages::coded_price(&job.plan, values, &among)?,
                _ => {
                    let bytes = Bytes((values * size_of::<f32>()) as u64);
                    let programs = job.plan.outermost().algorithm.programs(values, bytes, &among);
                    cost(&programs, bytes, &among)
                }
            });
        }
    }
    let mut tied = Nanos::ZERO;
    if placement.tie() == Tie::Across {
        let table = Bytes((job.model.vocab * job.model.dim * size_of::<f32>()) as u64);
        for replica in 0..replicas {
            let (a, b) = (rank(replica, 0), rank(replica, placement.depth() - 1));
            for (from, to) in [(a, b), (b, a)] {
                let link = Link { bandwidth: topology.rate(from, to), ..topology.link(from, to) };
                tied = tied.max(link.time(table));
            }
        }
    }
    Ok(CollectivePrices { reduce, tied, gather: Vec::new() })
}

#[cfg(test)]
mod tests {
    use farflung_base::{Bandwidth, Port};

    use super::*;

    #[test]
    fn planners_see_the_price_of_what_runs_and_the_lines_of_regions() {
        let mut topology = Topology::uniform(4, "1gbit,1ms".parse().unwrap());
        let ring = |topology: &Topology| {
            AveragePrices::new(topology.clone())
                .of(Algorithm::HalvingDoubling, &Codec::F32, 1_000_000)
                .unwrap()
        };
        // Four latencies, and 1.5 times 4 MB at 1 Gbit/s.
        assert!((ring(&topology).as_secs_f64() - 0.052).abs() < 0.001);
        for region in [[Rank(0), Rank(1)], [Rank(2), Rank(3)]] {
            topology.set_region(&region, Port { up: Bandwidth(10_000_000), down: Bandwidth(10_000_000) });
        }
        // Halves of 2 MB go both ways over each line of 10 Mbit/s, twice, from two ranks.
        assert!(ring(&topology) > Nanos::from_millis(3_000));
        let prices = AveragePrices::new(topology);
        let coded = |form| prices.of(form, &Codec::INT8, 1_000_000);
        assert!(coded(Algorithm::Hierarchical) < coded(Algorithm::Direct));
        assert_eq!((coded(Algorithm::Ring), coded(Algorithm::Moshpit)), (None, None));
    }
}
