//! The groups of replicas that divide weights once more, as settings describe them.

use farflung_base::Rank;
use farflung_parallel::Cluster;

use super::links;
use crate::config::zero::ZeroWithin;
use crate::{Error, Result, TrainConfig};

/// Returns the groups of replicas that divide weights once more; none if there would be one group.
pub(super) fn zero_groups(
    config: &TrainConfig,
    (world, cluster): (usize, Option<&Cluster>),
    replicas: u32,
) -> Result<Vec<Vec<u32>>> {
    let all: Vec<u32> = (0..replicas).collect();
    let groups: Vec<Vec<u32>> = match config.zero_within {
        _ if !config.divides_weights() => Vec::new(),
        ZeroWithin::No => Vec::new(),
        ZeroWithin::Neighbours(n) => all.chunks(n as usize).map(<[u32]>::to_vec).collect(),
        ZeroWithin::Region => {
            let topology = links::declared(&config.run_settings(), world, cluster)?;
            let each = world as u32 / replicas.max(1);
            let first: Vec<Rank> = all.iter().map(|replica| Rank(replica * each)).collect();
            let regions = farflung_comm::regions(&topology.among(&first));
            let replicas = |region: &Vec<Rank>| region.iter().map(|rank| rank.0).collect();
            let groups: Vec<Vec<u32>> = regions.iter().map(replicas).collect();
            if groups.len() == 1 || groups.iter().any(|group| group.len() == 1) {
                let expected = "regions of at least two replicas each, with slower links between them \
                                (`topology`), or a number of neighbours";
                let (field, value) = ("zero-within", "region".to_owned());
                return Err(Error::Setting { field, value, expected: expected.to_owned() });
            }
            groups
        }
    };
    Ok(if groups.len() > 1 { groups } else { Vec::new() })
}
