//! What the collectives of a pipeline's step take on the declared links: the prices that the schedule's simulator asks for.

use farflung_base::{Bytes, Link, Nanos, Rank, StageId, Topology};
use farflung_comm::{AllReduce as _, cost};
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
