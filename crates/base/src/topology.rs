//! Who is linked to whom, at what latency and bandwidth. Plain data: planners price it, the simulated transport obeys it.

use std::fmt;
use std::str::FromStr;

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
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Topology {
    size: usize,
    links: Vec<Link>,
    ports: Vec<Port>,
}

impl Topology {
    /// `size` ranks behind equal access links: each rank's uplink and downlink has `link`'s bandwidth, each pair its latency.
    #[must_use]
    pub fn uniform(size: usize, link: Link) -> Self {
        let port = Port { up: link.bandwidth, down: link.bandwidth };
        Self { size, links: vec![link; size * size], ports: vec![port; size] }
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
        if from == to { Link::FREE } else { self.links[from.index() * self.size + to.index()] }
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

    /// Sets one direction of a pair.
    pub fn set_link(&mut self, from: Rank, to: Rank, link: Link) {
        self.links[from.index() * self.size + to.index()] = link;
    }

    /// Sets a rank's access link.
    pub fn set_port(&mut self, rank: Rank, port: Port) {
        self.ports[rank.index()] = port;
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
    fn the_narrowest_part_sets_the_rate() {
        let mut t = Topology::uniform(3, "1gbit,1ms".parse().unwrap());
        t.set_port(Rank(1), Port { up: Bandwidth(5), down: Bandwidth(7) });
        assert_eq!(t.rate(Rank(1), Rank(0)), Bandwidth(5));
        assert_eq!(t.rate(Rank(0), Rank(1)), Bandwidth(7));
        assert_eq!(t.rate(Rank(0), Rank(2)), Bandwidth(1_000_000_000));
        assert_eq!(t.rate(Rank(1), Rank(1)), Bandwidth::UNLIMITED);
    }
}
