//! Describes a model and the machines of a topology file as a fleet of identical machines, for plans under
//! churn.

use farflung_base::{Bytes, Link, Rank};
use farflung_parallel::churn::Fleet;
use farflung_parallel::planner::uneven::ChainMachine;
use farflung_parallel::{Cluster, ParallelError};
use farflung_zoo::ModelSpec;

use super::chain::{PipelineSizes, layers, machines};
use crate::Result;

/// Returns the fleet of a cluster's machines: all as slow as the slowest, with the memory of the smallest,
/// joined by the link that takes longest for a microbatch's hidden states.
///
/// Errors: those of [`Cluster::topology`]; [`ParallelError::NoDevices`].
pub fn fleet(model: &ModelSpec, cluster: &Cluster, sizes: PipelineSizes) -> Result<Fleet> {
    let topology = cluster.topology()?;
    let layers = layers(model, sizes.batch);
    let all = machines(model, cluster);
    let flops = all.iter().map(|machine| machine.flops).min().ok_or(ParallelError::NoDevices)?;
    let machine = ChainMachine { flops, memory: all.iter().filter_map(|machine| machine.memory).min() };
    let hidden = layers.first().map_or(Bytes(0), |layer| layer.output);
    let ranks = || (0..topology.size() as u32).map(Rank);
    let pairs = ranks().flat_map(|a| ranks().filter(move |b| a != *b).map(move |b| (a, b)));
    let link = |(a, b)| Link { bandwidth: topology.rate(a, b), latency: topology.link(a, b).latency };
    let link = pairs.map(link).max_by_key(|link| link.time(hidden)).unwrap_or(Link::FREE);
    let tied = Bytes(model.shared_table_bytes());
    Ok(Fleet { layers, machine, link, tied, microbatches: sizes.microbatches })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fleet_is_its_slowest_machine_and_link() {
        let cluster: Cluster = r#"
default = "1gbit,1ms"
[[device]]
name = "fast"
flops = "40 TFLOPS"
memory = "24GB"
[[device]]
name = "slow"
flops = "10 TFLOPS"
memory = "80GB"
up = "20mbit"
"#
        .parse()
        .unwrap();
        let model = ModelSpec::preset("gpt2").unwrap();
        let fleet = fleet(&model, &cluster, PipelineSizes { batch: 1, microbatches: 8 }).unwrap();
        assert_eq!(
            (fleet.machine.flops, fleet.machine.memory),
            (10_000_000_000_000, Some(Bytes(24_000_000_000)))
        );
        assert_eq!(fleet.link.bandwidth.0, 20_000_000);
        assert_eq!(fleet.layers.len(), 12);
    }
}
