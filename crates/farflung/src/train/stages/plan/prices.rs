//! What the collectives of a pipeline's step take on the declared links: the prices that the schedule's simulator asks for.

use std::ops::Range;

use farflung_base::{Bytes, Link, Nanos, Rank, StageId, Topology};
use farflung_comm::{AllReduce as _, cost};
use farflung_parallel::pipeline::{CollectivePrices, Placement};
use farflung_tensor::Device;
use farflung_zoo::Stage;

use super::Tie;
use crate::Result;
use crate::train::job::Job;
use crate::train::report::planned_codec;

/// Prices of averaging each part over all that hold it, and of the exchange of the token table's gradients.
///
/// The slowest of the groups that do the same counts. A codec is taken to send the most that it may.
pub(super) fn collective_prices(
    job: &Job,
    placement: &Placement,
    layers: &[Range<usize>],
    topology: &Topology,
) -> Result<CollectivePrices> {
    let (ranks, replicas) = (placement.ranks(), job.replicas() as u32);
    let rank = |replica: u32, stage: u32| Rank(replica * ranks + placement.rank(StageId(stage)).0);
    let mut reduce = Vec::new();
    if replicas > 1 || placement.copies() > 1 {
        let (device, codec) = (Device::cpu(1)?, planned_codec(job.config.codec));
        for (part, layers) in (0..).zip(layers) {
            let stages = (0..placement.copies()).map(|copy| copy * placement.depth() + part);
            let mut holders: Vec<Rank> =
                stages.flat_map(|stage| (0..replicas).map(move |replica| rank(replica, stage))).collect();
            holders.sort_unstable();
            let values = Stage::new(job.model, layers.clone(), &device)?.layout().count();
            let (bytes, among) = (codec.bytes(values as u64), among(topology, &holders));
            let programs = job.config.algorithm.programs(values, bytes, &among);
            reduce.push(if values == 0 { Nanos::ZERO } else { cost(&programs, bytes, &among) });
        }
    }
    let mut tied = Nanos::ZERO;
    if Tie::of(placement) == Tie::Across {
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

/// The part of a topology that joins some ranks, in their order.
fn among(topology: &Topology, ranks: &[Rank]) -> Topology {
    let mut part = Topology::uniform(ranks.len(), Link::FREE);
    for (i, &a) in (0..).map(Rank).zip(ranks) {
        part.set_port(i, topology.port(a));
        for (j, &b) in (0..).map(Rank).zip(ranks) {
            part.set_link(i, j, topology.link(a, b));
        }
    }
    part
}
