//! Who is linked to whom, at what latency and bandwidth. Plain data: planners price it, the simulated transport obeys it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::{Bandwidth, Bytes, Nanos, ParseUnitError, Rank};

/// One direction of a link between two ranks: the alpha and beta of the alpha-beta model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Link {
    /// Bits per second.
    pub bandwidth: Bandwidth,
    /// One-way latency.
    pub latency: Nanos,
}

/// What a rank has in common for all its links: a home's uplink and downlink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Port {
    /// Shared by everything the rank sends.
    pub up: Bandwidth,
    /// Shared by everything the rank receives.
    pub down: Bandwidth,
}

/// Why a link such as `100mbit,20ms` could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParseLinkError {
    /// Not of the form `BANDWIDTH,LATENCY` or a known name.
    Form(String),
    /// One of the two parts is not a quantity.
    Unit(ParseUnitError),
    /// A link of no bandwidth would never deliver anything.
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
    /// No delay and no limit: one process, or a machine's own memory.
    pub const FREE: Self = Self { bandwidth: Bandwidth::UNLIMITED, latency: Nanos::ZERO };

    /// Links that have a name, with bits per second and latency in microseconds.
    pub const NAMED: [(&'static str, u64, u64); 5] = [
        ("home", 20_000_000, 25_000),
        ("office", 100_000_000, 10_000),
        ("cloud", 1_000_000_000, 5_000),
        ("lan", 1_000_000_000, 200),
        ("datacenter", 100_000_000_000, 10),
    ];

    /// Time from the start of sending to the last byte's arrival on an idle link.
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

    /// Reads `100mbit,20ms`, or a name of [`Link::NAMED`].
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

/// The links of a whole job: one [`Link`] per ordered pair of ranks and one [`Port`] per rank.
///
/// A transfer from `i` to `j` runs at the least of the pair's bandwidth, `i`'s free uplink and `j`'s free downlink.
///
/// Clones share the table of links, and equal links need none.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "Tables", try_from = "Tables"))]
pub struct Topology {
    size: usize,
    links: Links,
    ports: Arc<Vec<Port>>,
}

/// The links between different ranks.
#[derive(Debug, Clone)]
enum Links {
    Equal(Link),
    /// By sender and receiver.
    Each(Arc<Vec<Link>>),
}

impl PartialEq for Topology {
    fn eq(&self, other: &Self) -> bool {
        let same_links = || match (&self.links, &other.links) {
            (Links::Equal(a), Links::Equal(b)) => a == b || self.size < 2,
            _ => self.pairs().all(|(from, to)| self.link(from, to) == other.link(from, to)),
        };
        self.size == other.size && self.ports == other.ports && same_links()
    }
}

impl Eq for Topology {}

impl Topology {
    /// `size` ranks behind equal access links: each rank's uplink and downlink has `link`'s bandwidth, each pair its latency.
    #[must_use]
    pub fn uniform(size: usize, link: Link) -> Self {
        let port = Port { up: link.bandwidth, down: link.bandwidth };
        Self { size, links: Links::Equal(link), ports: Arc::new(vec![port; size]) }
    }

    /// The links and ports of these ranks alone: the first of them is rank 0 of the result.
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
        let ports = Arc::new(ranks.iter().map(|&rank| self.port(rank)).collect());
        Self { size: ranks.len(), links, ports }
    }

    /// All pairs of different ranks.
    fn pairs(&self) -> impl Iterator<Item = (Rank, Rank)> + use<> {
        let ranks = 0..self.size as u32;
        let row = move |from| ranks.clone().map(move |to| (Rank(from), Rank(to)));
        (0..self.size as u32).flat_map(row).filter(|(from, to)| from != to)
    }

    /// Number of ranks.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The link from one rank to another; a rank reaches itself for free.
    ///
    /// # Panics
    /// If a rank is not below [`Topology::size`].
    #[must_use]
    pub fn link(&self, from: Rank, to: Rank) -> Link {
        assert!(from.index() < self.size && to.index() < self.size, "{from} to {to} of {}", self.size);
        match &self.links {
            _ if from == to => Link::FREE,
            Links::Equal(link) => *link,
            Links::Each(links) => links[from.index() * self.size + to.index()],
        }
    }

    /// The access link that all of a rank's transfers share.
    ///
    /// # Panics
    /// If `rank` is not below [`Topology::size`].
    #[must_use]
    pub fn port(&self, rank: Rank) -> Port {
        self.ports[rank.index()]
    }

    /// The rate at which one transfer runs when nothing else uses either end.
    #[must_use]
    pub fn rate(&self, from: Rank, to: Rank) -> Bandwidth {
        if from == to {
            return Bandwidth::UNLIMITED;
        }
        self.link(from, to).bandwidth.min(self.port(from).up).min(self.port(to).down)
    }

    /// Sets one direction of a pair. A rank reaches itself for free, whatever is set.
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
    pub fn set_port(&mut self, rank: Rank, port: Port) {
        Arc::make_mut(&mut self.ports)[rank.index()] = port;
    }
}

/// A topology as it is written: links by sender and receiver, those of a rank to itself included.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
struct Tables {
    size: usize,
    links: Vec<Link>,
    ports: Vec<Port>,
}

#[cfg(feature = "serde")]
impl From<Topology> for Tables {
    fn from(topology: Topology) -> Self {
        let ranks = || (0..topology.size as u32).map(Rank);
        let links = ranks().flat_map(|from| ranks().map(move |to| (from, to)));
        let links = links.map(|(from, to)| topology.link(from, to)).collect();
        Self { size: topology.size, links, ports: topology.ports.to_vec() }
    }
}

#[cfg(feature = "serde")]
impl TryFrom<Tables> for Topology {
    type Error = String;

    fn try_from(Tables { size, links, ports }: Tables) -> Result<Self, String> {
        if size.checked_mul(size) != Some(links.len()) || ports.len() != size {
            let (links, ports) = (links.len(), ports.len());
            return Err(format!("a topology of {size} ranks with {links} links and {ports} ports"));
        }
        Ok(Self { size, links: Links::Each(Arc::new(links)), ports: Arc::new(ports) })
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
        table.set_port(Rank(1), Port { up: Bandwidth(1), down: Bandwidth(2) });
        assert_ne!(table, equal);
        assert_eq!(table.among(&[Rank(1)]).port(Rank(0)).down, Bandwidth(2));
    }

    #[test]
    fn the_narrowest_part_sets_the_rate() {
        let mut t = Topology::uniform(3, "1gbit,1ms".parse().unwrap());
        t.set_port(Rank(1), Port { up: Bandwidth(5), down: Bandwidth(7) });
        assert_eq!(t.rate(Rank(1), Rank(0)), Bandwidth(5));
        assert_eq!(t.rate(Rank(0), Rank(1)), Bandwidth(7));
        assert_eq!(t.rate(Rank(0), Rank(2)), Bandwidth(1_000_000_000));
        assert_eq!(t.rate(Rank(1), Rank(1)), Bandwidth::UNLIMITED);
    }
}
