//! Predicted times of averages on declared links, as computed by `farflung-comm`, for planners.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use farflung_base::{Algorithm, Nanos, Topology};
use farflung_comm::{AllReduce as _, CodedAllReduce as _, CodedBuffer, cost};
use farflung_compress::CodecSpec;
use farflung_parallel::Codec;

/// Describes a codec for planners, with the largest payload that it may send.
#[must_use]
pub fn planned_codec(codec: CodecSpec) -> Codec {
    if codec == CodecSpec::default() {
        return Codec::F32;
    }
    // A codec that selects few values has headers that are longer than what it sends of a block.
    let (block, few, many) = (4096, 32, 64);
    let built = codec.build();
    let [of_few, of_many] = [few, many].map(|blocks| built.max_payload(blocks * block) as u64);
    let block_bytes = of_many.saturating_sub(of_few).div_ceil((many - few) as u64);
    let header = of_many.saturating_sub(many as u64 * block_bytes);
    Codec { name: codec.to_string().into(), header, block: block as u64, block_bytes }
}

/// Number of ranks up to which all algorithms are priced without a codec; with more ranks, only those with few
/// messages.
const MOST_RANKS: usize = 64;

/// Predicted times of averages over all ranks of given links, for planners.
///
/// A codec is assumed to send as much as [`Codec::bytes`] says. Each time is computed once and cached.
#[derive(Debug)]
pub struct AveragePrices {
    topology: Topology,
    known: Mutex<BTreeMap<(Algorithm, String, u64), Option<Nanos>>>,
}

impl AveragePrices {
    /// Makes the table for these links.
    #[must_use]
    pub const fn new(topology: Topology) -> Self {
        Self { topology, known: Mutex::new(BTreeMap::new()) }
    }

    /// Returns the time of an average of `values` values; `None` for an algorithm that does not support the
    /// codec, that encodes again at each hop, or that needs too many messages with this many ranks.
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

#[cfg(test)]
mod tests {
    use farflung_base::{AccessLink, Bandwidth, Rank};

    use super::*;

    /// Of a million values, whose payload a planner asks for, it is off by less than a hundredth.
    #[test]
    fn the_size_that_planners_see_is_that_of_the_payload() {
        for codec in ["f16", "int8", "int4:128", "sign", "topk:0.01/f16", "rolling:10/topk:0.2/int4"] {
            let spec: CodecSpec = codec.parse().unwrap();
            for values in [40_000, 1_000_000] {
                let (seen, real) =
                    (planned_codec(spec).bytes(values).0, spec.build().max_payload(values as usize));
                let bound = if values < 100_000 { 0.12 } else { 0.01 };
                assert!((seen as f64 / real as f64 - 1.0).abs() < bound, "{codec} {values}: {seen} {real}");
            }
            assert_eq!(planned_codec(spec).bytes(0).0, 0);
        }
    }

    #[test]
    fn planners_see_the_price_of_what_runs_and_the_lines_of_regions() {
        let mut topology = Topology::uniform(4, "1gbit,1ms".parse().unwrap());
        let halving = |topology: &Topology| {
            AveragePrices::new(topology.clone())
                .of(Algorithm::HalvingDoubling, &Codec::F32, 1_000_000)
                .unwrap()
        };
        // The expected time is four latencies, and 1.5 times 4 MB at 1 Gbit/s.
        assert!((halving(&topology).as_secs_f64() - 0.052).abs() < 0.001);
        for region in [[Rank(0), Rank(1)], [Rank(2), Rank(3)]] {
            topology
                .set_region(&region, AccessLink { up: Bandwidth(10_000_000), down: Bandwidth(10_000_000) });
        }
        // Halves of 2 MB are sent in both directions over each line of 10 Mbit/s, twice, by two ranks.
        assert!(halving(&topology) > Nanos::from_millis(3_000));
        let prices = AveragePrices::new(topology);
        let coded = |form| prices.of(form, &Codec::INT8, 1_000_000);
        assert!(coded(Algorithm::Hierarchical) < coded(Algorithm::Direct));
        assert_eq!((coded(Algorithm::Ring), coded(Algorithm::Moshpit)), (None, None));
    }
}
