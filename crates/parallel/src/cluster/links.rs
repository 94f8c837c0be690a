//! The link between every two device entries. A topology is built from these, which are fewer than the pairs of
//! ranks.

use std::collections::BTreeMap;

use farflung_base::Link;

use super::{Cluster, Machine};
use crate::ParallelError;

/// Links between entries of [`Cluster::devices`], by sender and receiver.
#[derive(Debug, Clone)]
pub(crate) struct DeviceLinks {
    count: usize,
    links: Vec<Option<Link>>,
}

impl DeviceLinks {
    /// Finds the link of every pair of entries.
    ///
    /// Errors: [`ParallelError::MissingLink`] for a pair of ranks without a link.
    pub(crate) fn of(cluster: &Cluster) -> Result<Self, ParallelError> {
        let given: BTreeMap<(&str, &str), Link> = cluster
            .links
            .iter()
            .flat_map(|between| {
                let [a, b] = &between.ends;
                [((a.as_str(), b.as_str()), between.link), ((b.as_str(), a.as_str()), between.link)]
            })
            .collect();
        let count = cluster.devices.len();
        let mut links = Vec::with_capacity(count * count);
        for (i, a) in cluster.devices.iter().enumerate() {
            for (j, b) in cluster.devices.iter().enumerate() {
                let link = closest(cluster, &given, a, b);
                let has_pair = i != j || a.count > 1;
                if link.is_none() && has_pair {
                    return Err(missing(a, b, i == j));
                }
                links.push(link);
            }
        }
        Ok(Self { count, links })
    }

    /// Returns the link between two entries, or between two instances of the same entry.
    pub(crate) fn link(&self, a: usize, b: usize) -> Link {
        self.links[a * self.count + b].unwrap_or(Link::FREE)
    }
}

/// Returns the closest link between two devices, in the order that [`Cluster`] documents.
fn closest(
    cluster: &Cluster,
    given: &BTreeMap<(&str, &str), Link>,
    a: &Machine,
    b: &Machine,
) -> Option<Link> {
    let (ra, rb) = (a.region.as_deref(), b.region.as_deref());
    let of = |x: &str, y: &str| given.get(&(x, y)).copied();
    let inside = |region: &str| cluster.regions.iter().find(|r| r.name == region)?.inside;
    of(&a.name, &b.name)
        .or_else(|| of(&a.name, rb?))
        .or_else(|| of(ra?, &b.name))
        .or_else(|| of(ra?, rb?))
        .or_else(|| if ra == rb { inside(ra?) } else { None })
        .or(cluster.default)
}

fn missing(a: &Machine, b: &Machine, is_same: bool) -> ParallelError {
    let name = |machine: &Machine, at: u32| match machine.count {
        1 => machine.name.clone(),
        _ => format!("{}.{at}", machine.name),
    };
    ParallelError::MissingLink { from: name(a, 0), to: name(b, u32::from(is_same)) }
}
