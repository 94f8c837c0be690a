//! Machines by site: the regions that a file names, or those found by clustering its links.

use farflung_base::{Bandwidth, Bytes, Link, Nanos, Port, Rank};

use crate::cluster::links::DeviceLinks;
use crate::{Cluster, ParallelError};

/// Machines that are near each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The region's name, or `site-0` and so on where clustering found it.
    pub name: String,
    /// Its machines, instances of one entry together.
    pub machines: Vec<Rank>,
    /// The line that all share for what leaves and enters.
    pub line: Port,
}

/// The machines of a cluster by site, and the links between their kinds: no entry for each pair of ranks.
#[derive(Debug, Clone)]
pub struct Sites {
    /// The sites; every machine is in one.
    pub all: Vec<Site>,
    links: DeviceLinks,
    ports: Vec<Port>,
    kinds: Vec<usize>,
    site_of: Vec<usize>,
}

/// How much longer the next link of the tree must take, for clustering to cut there.
const GAP: u64 = 2;

impl Sites {
    /// The regions that `cluster` names, each device outside them a site of its own. Where it names none,
    /// single linkage over what `bytes` take from one device entry to another: the links of the least spanning
    /// tree in order, cut at the largest ratio between two that follow each other, if that is 2 or more; else
    /// one site.
    ///
    /// Errors: as [`Cluster::check`]; [`ParallelError::MissingLink`] for a pair that nothing joins.
    pub fn of(cluster: &Cluster, bytes: Bytes) -> Result<Self, ParallelError> {
        let links = cluster.device_links()?;
        let limit = |rate: Option<Bandwidth>| rate.unwrap_or(Bandwidth::UNLIMITED);
        let ports =
            cluster.devices.iter().map(|d| Port { up: limit(d.up), down: limit(d.down) }).collect::<Vec<_>>();
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
                Port { up: limit(region.and_then(|r| r.up)), down: limit(region.and_then(|r| r.down)) };
            let machines =
                (0..).map(Rank).zip(&sites.kinds).filter(|(_, kind)| of_kind[**kind] == site).map(|(r, _)| r);
            sites.all.push(Site { name, machines: machines.collect(), line });
        }
        sites.site_of = sites.kinds.iter().map(|&kind| of_kind[kind]).collect();
        Ok(sites)
    }

    /// All machines.
    #[must_use]
    pub fn size(&self) -> usize {
        self.kinds.len()
    }

    /// The site of a machine.
    #[must_use]
    pub fn site(&self, rank: Rank) -> usize {
        self.site_of[rank.index()]
    }

    /// The entry of a machine in [`Cluster::devices`].
    #[must_use]
    pub fn kind(&self, rank: Rank) -> usize {
        self.kinds[rank.index()]
    }

    /// The access link of a kind.
    #[must_use]
    pub fn port(&self, kind: usize) -> Port {
        self.ports[kind]
    }

    /// From one machine to another, no faster than their access links. Shared lines are not in it.
    #[must_use]
    pub fn link(&self, from: Rank, to: Rank) -> Link {
        self.kind_link(self.kind(from), self.kind(to))
    }

    /// [`Sites::link`] between machines of two kinds, or two of one.
    #[must_use]
    pub fn kind_link(&self, from: usize, to: usize) -> Link {
        let link = self.links.link(from, to);
        Link { bandwidth: link.bandwidth.min(self.ports[from].up).min(self.ports[to].down), ..link }
    }

    /// Time of `bytes` between two sites, the mean of both directions, by the first machine of each.
    #[must_use]
    pub fn apart(&self, a: usize, b: usize, bytes: Bytes) -> Nanos {
        let (a, b) = (self.all[a].machines[0], self.all[b].machines[0]);
        self.kinds_apart(self.kind(a), self.kind(b), bytes)
    }

    fn kinds_apart(&self, a: usize, b: usize, bytes: Bytes) -> Nanos {
        let (there, back) = (self.kind_link(a, b).time(bytes), self.kind_link(b, a).time(bytes));
        Nanos(u64::midpoint(there.0, back.0))
    }

    /// Single linkage over device entries: the cluster of each.
    fn clusters(&self, bytes: Bytes) -> Vec<usize> {
        let count = self.ports.len();
        // Prim's algorithm: from each entry outside the tree, its nearest inside.
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
        // What instances of one entry take is the scale where each edge is between sites.
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

    /// The longest time between two instances of one entry.
    fn inside(&self, bytes: Bytes) -> u64 {
        let several = self.kinds.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        several.map(|kind| self.kinds_apart(kind, kind, bytes).0).max().unwrap_or(u64::MAX)
    }
}

/// The region of each device entry, those outside regions behind them.
fn named(cluster: &Cluster) -> Vec<usize> {
    let mut numbers: Vec<String> = Vec::new();
    let mut of = Vec::new();
    for device in &cluster.devices {
        // No device has the name of a region.
        let name = device.region.clone().unwrap_or_else(|| device.name.clone());
        let at = numbers.iter().position(|known| *known == name).unwrap_or_else(|| {
            numbers.push(name);
            numbers.len() - 1
        });
        of.push(at);
    }
    of
}
