//! The links of a job: latency and bandwidth between ranks. Plain data, used by planners to compute costs and
//! by the simulated transport to delay messages.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::{Bandwidth, Bytes, Nanos, ParseUnitError, Rank};

/// One direction of a link between two ranks, with the alpha (latency) and beta (bandwidth) of the alpha-beta
/// model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Link {
    /// Rate in bits per second.
    pub bandwidth: Bandwidth,
    /// One-way latency.
    pub latency: Nanos,
}

/// The access link of a rank, shared by all its transfers: for example a home's uplink and downlink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct AccessLink {
    /// Bandwidth shared by everything that the rank sends.
    pub up: Bandwidth,
    /// Bandwidth shared by everything that the rank receives.
    pub down: Bandwidth,
}

/// Error of parsing a link such as `100mbit,20ms`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParseLinkError {
    /// The text is neither `BANDWIDTH,LATENCY` nor a known name.
    Form(String),
    /// The bandwidth or the latency could not be parsed.
    Unit(ParseUnitError),
    /// The bandwidth is zero, so the link would never deliver anything.
    Dead(String),
}

impl fmt::Display for ParseLinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Form(text) => write!(
                f,
                "link `{text}` is neither BANDWIDTH,LATENCY (such as `100mbit,20ms`) nor one of {}",
                Link::NAMED.map(|(name, ..)| name).join(", ")
            ),
            Self::Unit(e) => write!(f, "link: {e}"),
            Self::Dead(text) => write!(f, "link `{text}` has no bandwidth"),
        }
    }
}

impl std::error::Error for ParseLinkError {}

impl Link {
    /// A link without delay or limit, used within one process or one machine's memory.
    pub const FREE: Self = Self { bandwidth: Bandwidth::UNLIMITED, latency: Nanos::ZERO };

    /// The named links: name, bits per second, latency in microseconds.
    pub const NAMED: [(&'static str, u64, u64); 5] = [
        ("home", 20_000_000, 25_000),
        ("office", 100_000_000, 10_000),
        ("cloud", 1_000_000_000, 5_000),
        ("lan", 1_000_000_000, 200),
        ("datacenter", 100_000_000_000, 10),
    ];

    /// Returns the time from the start of sending until the last byte arrives, on an idle link.
    #[must_use]
    pub fn time(&self, bytes: Bytes) -> Nanos {
        self.latency.saturating_add(self.bandwidth.transfer(bytes))
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.bandwidth, self.latency)
    }
}

impl FromStr for Link {
    type Err = ParseLinkError;

    /// Parses `100mbit,20ms`, or a name of [`Link::NAMED`].
    fn from_str(text: &str) -> Result<Self, ParseLinkError> {
        if let Some(&(_, bits, us)) = Self::NAMED.iter().find(|(name, ..)| *name == text.trim()) {
            return Ok(Self { bandwidth: Bandwidth(bits), latency: Nanos::from_micros(us) });
        }
        let (bandwidth, latency) =
            text.split_once(',').ok_or_else(|| ParseLinkError::Form(text.to_owned()))?;
        let link = Self {
            bandwidth: bandwidth.parse().map_err(ParseLinkError::Unit)?,
            latency: latency.parse().map_err(ParseLinkError::Unit)?,
        };
        if link.bandwidth.0 == 0 { Err(ParseLinkError::Dead(text.to_owned())) } else { Ok(link) }
    }
}

/// The links of a whole job: one [`Link`] per ordered pair of ranks, one [`AccessLink`] per rank, and one more
/// per region whose ranks share an access link.
///
/// A transfer from `i` to `j` uses `i`'s uplink, the pair's link and `j`'s downlink. If it leaves `i`'s region,
/// it also uses that region's uplink; if it enters `j`'s region, it also uses that region's downlink. Alone on
/// these links, it runs at the lowest of their rates.
///
/// Clones share the tables. As long as all links are those of [`Topology::uniform`], one [`Link`] is stored
/// instead of a table.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "Tables", try_from = "Tables"))]
pub struct Topology {
    size: usize,
    links: Links,
    ports: Arc<Vec<AccessLink>>,
    region_links: Arc<RegionLinks>,
}

/// Access links that the ranks of a region share.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct RegionLinks {
    /// Region of each rank; empty if there are no regions.
    of: Vec<Option<usize>>,
    /// Access link of each region.
    ports: Vec<AccessLink>,
}

/// The links between different ranks.
#[derive(Debug, Clone)]
enum Links {
    Equal(Link),
    /// Indexed by `sender * size + receiver`.
    Each(Arc<Vec<Link>>),
}

impl PartialEq for Topology {
    fn eq(&self, other: &Self) -> bool {
        let same_links = || match (&self.links, &other.links) {
            (Links::Equal(a), Links::Equal(b)) => a == b || self.size < 2,
            _ => self.pairs().all(|(from, to)| self.link(from, to) == other.link(from, to)),
        };
        self.size == other.size && self.ports == other.ports && self.same_region_links(other) && same_links()
    }
}

impl Eq for Topology {}

impl Topology {
    /// Creates `size` ranks behind equal access links: each rank's uplink and downlink has `link`'s bandwidth,
    /// and each pair has its bandwidth and latency.
    #[must_use]
    pub fn uniform(size: usize, link: Link) -> Self {
        let port = AccessLink { up: link.bandwidth, down: link.bandwidth };
        Self {
            size,
            links: Links::Equal(link),
            ports: Arc::new(vec![port; size]),
            region_links: Arc::default(),
        }
    }

    /// Returns the topology of these ranks only. `ranks[0]` becomes rank 0 of the result.
    ///
    /// # Panics
    /// If a rank is not below [`Topology::size`].
    #[must_use]
    pub fn among(&self, ranks: &[Rank]) -> Self {
        let links = match &self.links {
            Links::Equal(link) => Links::Equal(*link),
            Links::Each(_) => {
                let row = |&from: &Rank| ranks.iter().map(move |&to| self.link(from, to));
                Links::Each(Arc::new(ranks.iter().flat_map(row).collect()))
            }
        };
        let ports = Arc::new(ranks.iter().map(|&rank| self.access_link(rank)).collect());
        let of = if self.region_links.of.is_empty() {
            Vec::new()
        } else {
            ranks.iter().map(|&rank| self.region(rank)).collect()
        };
        let lines = Arc::new(RegionLinks { of, ports: self.region_links.ports.clone() });
        Self { size: ranks.len(), links, ports, region_links: lines }
    }

    /// Returns whether both topologies have the same regions with equal access links. The numbering of the
    /// regions may differ.
    fn same_region_links(&self, other: &Self) -> bool {
        let port =
            |topology: &Self, rank| topology.region(rank).map(|region| topology.region_access_link(region));
        let ranks = || (0..self.size as u32).map(Rank);
        ranks().all(|rank| port(self, rank) == port(other, rank))
            && self.pairs().all(|(a, b)| self.leaves_region(a, b) == other.leaves_region(a, b))
    }

    /// Returns all ordered pairs of different ranks.
    fn pairs(&self) -> impl Iterator<Item = (Rank, Rank)> + use<> {
        let ranks = 0..self.size as u32;
        let row = move |from| ranks.clone().map(move |to| (Rank(from), Rank(to)));
        (0..self.size as u32).flat_map(row).filter(|(from, to)| from != to)
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Returns the link from one rank to another. The link of a rank to itself is [`Link::FREE`].
    ///
    /// # Panics
    /// If a rank is not below [`Topology::size`].
    #[must_use]
    pub fn link(&self, from: Rank, to: Rank) -> Link {
        assert!(
            from.index() < self.size && to.index() < self.size,
            "no link from {from} to {to}: the topology has {} ranks",
            self.size
        );
        match &self.links {
            _ if from == to => Link::FREE,
            Links::Equal(link) => *link,
            Links::Each(links) => links[from.index() * self.size + to.index()],
        }
    }

    /// Returns the access link of a rank, which all its transfers share.
    ///
    /// # Panics
    /// If `rank` is not below [`Topology::size`].
    #[must_use]
    pub fn access_link(&self, rank: Rank) -> AccessLink {
        self.ports[rank.index()]
    }

    /// Returns the number of the rank's region; `None` if it is in no region.
    #[must_use]
    pub fn region(&self, rank: Rank) -> Option<usize> {
        self.region_links.of.get(rank.index()).copied().flatten()
    }

    /// Returns the number of regions. The ranks of a region share an access link.
    #[must_use]
    pub fn regions(&self) -> usize {
        self.region_links.ports.len()
    }

    /// Returns the access link that the ranks of a region share. Transfers from them to ranks outside share
    /// `up`; transfers from outside share `down`.
    ///
    /// # Panics
    /// If `region` is not below [`Topology::regions`].
    #[must_use]
    pub fn region_access_link(&self, region: usize) -> AccessLink {
        self.region_links.ports[region]
    }

    /// Returns whether a transfer passes the access link of a region, that is, whether the two ranks are not in
    /// the same region and at least one of them is in a region.
    #[must_use]
    pub fn leaves_region(&self, from: Rank, to: Rank) -> bool {
        let (from, to) = (self.region(from), self.region(to));
        from != to
    }

    /// Returns the bandwidth of one transfer without the limits of the two ranks' access links: the minimum of
    /// the pair's link and the access links of the regions on the way.
    #[must_use]
    pub fn bandwidth_between(&self, from: Rank, to: Rank) -> Bandwidth {
        let mut least = self.link(from, to).bandwidth;
        if self.leaves_region(from, to) {
            let (out, into) = (self.region(from), self.region(to));
            least = out.map_or(least, |region| least.min(self.region_access_link(region).up));
            least = into.map_or(least, |region| least.min(self.region_access_link(region).down));
        }
        least
    }

    /// Returns the rate of one transfer if no other transfer uses the links on its way.
    #[must_use]
    pub fn rate(&self, from: Rank, to: Rank) -> Bandwidth {
        if from == to {
            return Bandwidth::UNLIMITED;
        }
        self.bandwidth_between(from, to).min(self.access_link(from).up).min(self.access_link(to).down)
    }

    /// Sets the link of one direction of a pair. The link of a rank to itself stays [`Link::FREE`].
    ///
    /// # Panics
    /// If a rank is not below [`Topology::size`].
    pub fn set_link(&mut self, from: Rank, to: Rank, link: Link) {
        if self.link(from, to) == link || from == to {
            return;
        }
        let at = from.index() * self.size + to.index();
        if let Links::Equal(others) = self.links {
            self.links = Links::Each(Arc::new(vec![others; self.size * self.size]));
        }
        if let Links::Each(links) = &mut self.links {
            Arc::make_mut(links)[at] = link;
        }
    }

    /// Sets a rank's access link.
    ///
    /// # Panics
    /// If `rank` is not below [`Topology::size`].
    pub fn set_access_link(&mut self, rank: Rank, port: AccessLink) {
        Arc::make_mut(&mut self.ports)[rank.index()] = port;
    }

    /// Makes these ranks a region: they share one access link to all other ranks. They leave their previous
    /// regions.
    ///
    /// # Panics
    /// If a rank is not below [`Topology::size`].
    pub fn set_region(&mut self, ranks: &[Rank], port: AccessLink) {
        let lines = Arc::make_mut(&mut self.region_links);
        lines.of.resize(self.size, None);
        for rank in ranks {
            lines.of[rank.index()] = Some(lines.ports.len());
        }
        lines.ports.push(port);
    }
}

/// Serialized form of a topology. Links are indexed by sender and receiver and include those of a rank to
/// itself.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
struct Tables {
    size: usize,
    links: Vec<Link>,
    ports: Vec<AccessLink>,
    /// Region of each rank, empty if there are no regions.
    regions: Vec<Option<usize>>,
    /// Access link of each region.
    lines: Vec<AccessLink>,
}

#[cfg(feature = "serde")]
impl From<Topology> for Tables {
    fn from(topology: Topology) -> Self {
        let ranks = || (0..topology.size as u32).map(Rank);
        let links = ranks().flat_map(|from| ranks().map(move |to| (from, to)));
        let links = links.map(|(from, to)| topology.link(from, to)).collect();
        let RegionLinks { of, ports } = (*topology.region_links).clone();
        Self { size: topology.size, links, ports: topology.ports.to_vec(), regions: of, lines: ports }
    }
}

#[cfg(feature = "serde")]
impl TryFrom<Tables> for Topology {
    type Error = String;

    fn try_from(Tables { size, links, ports, regions, lines }: Tables) -> Result<Self, String> {
        if size.checked_mul(size) != Some(links.len()) || ports.len() != size {
            let (links, ports) = (links.len(), ports.len());
            return Err(format!(
                "a topology of {size} ranks has {links} links and {ports} ports, expected ranks x ranks \
                 links and a port for each rank"
            ));
        }
        if !regions.is_empty() && regions.len() != size {
            return Err(format!("a topology of {size} ranks gives the regions of {} ranks", regions.len()));
        }
        if let Some(region) = regions.iter().flatten().find(|region| **region >= lines.len()) {
            return Err(format!("a topology has {} regions, but a rank is in region {region}", lines.len()));
        }
        let lines = Arc::new(RegionLinks { of: regions, ports: lines });
        Ok(Self { size, links: Links::Each(Arc::new(links)), ports: Arc::new(ports), region_links: lines })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_links() {
        let link: Link = "100mbit,20ms".parse().unwrap();
        assert_eq!(link, Link { bandwidth: Bandwidth(100_000_000), latency: Nanos::from_millis(20) });
        assert_eq!(link.to_string(), "100mbit,20ms");
        assert_eq!("home".parse::<Link>().unwrap().latency, Nanos::from_millis(25));
        for bad in ["", "100mbit", "fast,20ms", "100mbit,20", "0bit,1ms", "100mbit,20ms,3"] {
            assert!(bad.parse::<Link>().is_err(), "{bad}");
        }
        let message = "1mbit;2ms".parse::<Link>().unwrap_err().to_string();
        assert!(message.contains("1mbit;2ms") && message.contains("home"), "{message}");
    }

    #[test]
    fn equal_links_are_those_of_a_table_and_clones_keep_theirs() {
        let link: Link = "1gbit,1ms".parse().unwrap();
        let far = Link { latency: Nanos::from_millis(9), ..link };
        let equal = Topology::uniform(3, link);
        let mut table = equal.clone();
        table.set_link(Rank(0), Rank(2), far);
        assert_ne!(table, equal);
        assert_eq!((table.link(Rank(0), Rank(2)), equal.link(Rank(0), Rank(2))), (far, link));
        assert_eq!([(0, 1), (2, 0), (1, 2)].map(|(a, b)| table.link(Rank(a), Rank(b))), [link; 3]);
        let turned = table.among(&[Rank(2), Rank(0)]);
        assert_eq!((turned.link(Rank(1), Rank(0)), turned.link(Rank(0), Rank(1))), (far, link));
        assert_eq!(equal.among(&[Rank(2), Rank(0)]), Topology::uniform(2, link));
        table.set_link(Rank(0), Rank(2), link);
        table.set_link(Rank(1), Rank(1), far);
        assert_eq!((&table, table.link(Rank(1), Rank(1))), (&equal, Link::FREE));
        table.set_access_link(Rank(1), AccessLink { up: Bandwidth(1), down: Bandwidth(2) });
        assert_ne!(table, equal);
        assert_eq!(table.among(&[Rank(1)]).access_link(Rank(0)).down, Bandwidth(2));
    }

    #[test]
    fn a_regions_line_is_between_its_ranks_and_all_others() {
        let mut t = Topology::uniform(4, "1gbit,1ms".parse().unwrap());
        assert!(!t.leaves_region(Rank(0), Rank(3)) && t.regions() == 0);
        let plain = t.clone();
        t.set_region(&[Rank(0), Rank(1)], AccessLink { up: Bandwidth(5), down: Bandwidth(7) });
        t.set_region(&[Rank(2)], AccessLink { up: Bandwidth(90), down: Bandwidth(3) });
        assert_ne!(t, plain);
        let rate = |a, b| t.rate(Rank(a), Rank(b)).0;
        assert_eq!([rate(0, 1), rate(0, 3), rate(3, 1), rate(0, 2), rate(2, 0)], [1_000_000_000, 5, 7, 3, 7]);
        let part = t.among(&[Rank(2), Rank(1), Rank(0)]);
        assert_eq!(part.region_access_link(part.region(Rank(0)).unwrap()).down, Bandwidth(3));
        assert!(part.leaves_region(Rank(0), Rank(2)) && !part.leaves_region(Rank(1), Rank(2)));
        // The order in which regions were added does not matter.
        let mut again = plain;
        again.set_region(&[Rank(2)], AccessLink { up: Bandwidth(90), down: Bandwidth(3) });
        again.set_region(&[Rank(0), Rank(1)], AccessLink { up: Bandwidth(5), down: Bandwidth(7) });
        assert_eq!(again, t);
    }

    #[test]
    fn the_narrowest_part_sets_the_rate() {
        let mut t = Topology::uniform(3, "1gbit,1ms".parse().unwrap());
        t.set_access_link(Rank(1), AccessLink { up: Bandwidth(5), down: Bandwidth(7) });
        assert_eq!(t.rate(Rank(1), Rank(0)), Bandwidth(5));
        assert_eq!(t.rate(Rank(0), Rank(1)), Bandwidth(7));
        assert_eq!(t.rate(Rank(0), Rank(2)), Bandwidth(1_000_000_000));
        assert_eq!(t.rate(Rank(1), Rank(1)), Bandwidth::UNLIMITED);
    }
}
