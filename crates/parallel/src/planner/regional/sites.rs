//! Groups machines into sites: the regions named in the topology file, or clusters of its links.

use farflung_base::{AccessLink, Bandwidth, Bytes, Link, Nanos, Rank};

use crate::cluster::links::DeviceLinks;
use crate::{Cluster, ParallelError};

/// Machines that are near each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Name of the region, or `site-0` and so on if the site was found by clustering.
    pub name: String,
    /// Machines of the site; instances of one device entry are adjacent.
    pub machines: Vec<Rank>,
    /// Line shared by everything that leaves and enters the site.
    pub line: AccessLink,
}

/// Machines of a cluster by site, and the links between device entries. Stores no entry per pair of ranks.
#[derive(Debug, Clone)]
pub struct Sites {
    /// All sites; every machine is in exactly one.
    pub all: Vec<Site>,
    links: DeviceLinks,
    ports: Vec<AccessLink>,
    kinds: Vec<usize>,
    site_of: Vec<usize>,
}

/// Smallest ratio between consecutive links of the spanning tree at which clustering may cut.
const GAP: u64 = 2;

impl Sites {
    /// Finds the sites: the regions named in `cluster`; each device entry outside them is a site of its own.
    ///
    /// If no regions are named, clusters the device entries by single linkage over the time of `bytes` between
    /// them: sorts the links of the minimum spanning tree and cuts at the largest ratio between consecutive
    /// ones, if it is 2 or more. Otherwise, each entry is a site if even the nearest two entries are at least
    /// twice as far apart as any two instances of one entry. Otherwise, all machines are one site.
    ///
    /// Errors: as [`Cluster::check`]; [`ParallelError::MissingLink`] for a pair without a link.
    pub fn of(cluster: &Cluster, bytes: Bytes) -> Result<Self, ParallelError> {
        let links = cluster.device_links()?;
        let limit = |rate: Option<Bandwidth>| rate.unwrap_or(Bandwidth::UNLIMITED);
        let ports = cluster
            .devices
            .iter()
            .map(|d| AccessLink { up: limit(d.up), down: limit(d.down) })
            .collect::<Vec<_>>();
        let kinds: Vec<usize> =
            (0..).zip(&cluster.devices).flat_map(|(at, d)| (0..d.count).map(move |_| at)).collect();
        let mut sites = Self { all: Vec::new(), links, ports, kinds, site_of: Vec::new() };
        let of_kind = if cluster.regions.is_empty() { sites.clusters(bytes) } else { named(cluster) };
        let count = of_kind.iter().max().map_or(0, |&most| most + 1);
        for site in 0..count {
            let first = of_kind.iter().position(|&of| of == site).unwrap_or(0);
            let region = cluster.devices[first].region.as_deref();
            let region = cluster.regions.iter().find(|r| Some(r.name.as_str()) == region);
            let name = match region {
                Some(region) => region.name.clone(),
                None if cluster.regions.is_empty() => format!("site-{site}"),
                None => cluster.devices[first].name.clone(),
            };
            let line =
                AccessLink { up: limit(region.and_then(|r| r.up)), down: limit(region.and_then(|r| r.down)) };
            let machines =
                (0..).map(Rank).zip(&sites.kinds).filter(|(_, kind)| of_kind[**kind] == site).map(|(r, _)| r);
            sites.all.push(Site { name, machines: machines.collect(), line });
        }
        sites.site_of = sites.kinds.iter().map(|&kind| of_kind[kind]).collect();
        Ok(sites)
    }

    /// Returns the number of machines.
    #[must_use]
    pub fn size(&self) -> usize {
        self.kinds.len()
    }

    /// Returns the index of a machine's site.
    #[must_use]
    pub fn site(&self, rank: Rank) -> usize {
        self.site_of[rank.index()]
    }

    /// Returns the index of a machine's entry in [`Cluster::devices`].
    #[must_use]
    pub fn kind(&self, rank: Rank) -> usize {
        self.kinds[rank.index()]
    }

    /// Returns the access link of a device entry.
    #[must_use]
    pub fn access_link(&self, kind: usize) -> AccessLink {
        self.ports[kind]
    }

    /// Returns the link from one machine to another, limited by their access links but not by shared lines.
    #[must_use]
    pub fn link(&self, from: Rank, to: Rank) -> Link {
        self.kind_link(self.kind(from), self.kind(to))
    }

    /// Returns [`Sites::link`] between machines of two device entries, or between two of one entry.
    #[must_use]
    pub fn kind_link(&self, from: usize, to: usize) -> Link {
        let link = self.links.link(from, to);
        Link { bandwidth: link.bandwidth.min(self.ports[from].up).min(self.ports[to].down), ..link }
    }

    /// Returns the time of `bytes` between two sites, averaged over both directions, for the first machine of
    /// each.
    #[must_use]
    pub fn apart(&self, a: usize, b: usize, bytes: Bytes) -> Nanos {
        let (a, b) = (self.all[a].machines[0], self.all[b].machines[0]);
        self.kinds_apart(self.kind(a), self.kind(b), bytes)
    }

    fn kinds_apart(&self, a: usize, b: usize, bytes: Bytes) -> Nanos {
        let (there, back) = (self.kind_link(a, b).time(bytes), self.kind_link(b, a).time(bytes));
        Nanos(u64::midpoint(there.0, back.0))
    }

    /// Clusters device entries by single linkage. Returns the cluster of each.
    fn clusters(&self, bytes: Bytes) -> Vec<usize> {
        let count = self.ports.len();
        // Prim's algorithm. For each entry outside the tree, keeps the nearest entry inside.
        let mut nearest: Vec<(u64, usize)> =
            (0..count).map(|at| (self.kinds_apart(0, at, bytes).0, 0)).collect();
        let mut outside: Vec<usize> = (1..count).collect();
        let mut edges: Vec<(u64, usize, usize)> = Vec::new();
        while let Some(at) = (0..outside.len()).min_by_key(|&at| (nearest[outside[at]].0, outside[at])) {
            let next = outside.swap_remove(at);
            edges.push((nearest[next].0, nearest[next].1, next));
            for &other in &outside {
                let time = self.kinds_apart(next, other, bytes).0;
                nearest[other] = nearest[other].min((time, next));
            }
        }
        edges.sort_unstable();
        let ratio = |at: &usize| u128::from(edges[at + 1].0) * 1000 / u128::from(edges[*at].0.max(1));
        // If every edge is between sites, the time between instances of one entry is the scale to compare with.
        let cut = (0..edges.len().saturating_sub(1))
            .filter(|&at| edges[at + 1].0 / GAP >= edges[at].0)
            .max_by_key(|at| (ratio(at), std::cmp::Reverse(*at)));
        let many = self.kinds.len() > count;
        let kept = match (cut, many) {
            (Some(at), _) => &edges[..=at],
            (None, true) if edges.first().is_some_and(|edge| edge.0 / GAP >= self.inside(bytes)) => {
                &edges[..0]
            }
            (None, _) => &edges[..],
        };
        let mut of: Vec<usize> = (0..count).collect();
        for &(_, a, b) in kept {
            let (keep, drop) = (of[a].min(of[b]), of[a].max(of[b]));
            of.iter_mut().filter(|of| **of == drop).for_each(|of| *of = keep);
        }
        let mut numbers: Vec<usize> = of.clone();
        numbers.sort_unstable();
        numbers.dedup();
        of.iter().map(|of| numbers.binary_search(of).unwrap_or(0)).collect()
    }

    /// Returns the longest time between two instances of one entry.
    fn inside(&self, bytes: Bytes) -> u64 {
        let several = self.kinds.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        several.map(|kind| self.kinds_apart(kind, kind, bytes).0).max().unwrap_or(u64::MAX)
    }
}

/// Returns the region of each device entry as a number. Each entry outside regions has a number of its own.
fn named(cluster: &Cluster) -> Vec<usize> {
    let mut numbers: Vec<String> = Vec::new();
    let mut of = Vec::new();
    for device in &cluster.devices {
        // Names of devices and regions are distinct.
        let name = device.region.clone().unwrap_or_else(|| device.name.clone());
        let at = numbers.iter().position(|known| *known == name).unwrap_or_else(|| {
            numbers.push(name);
            numbers.len() - 1
        });
        of.push(at);
    }
    of
}
