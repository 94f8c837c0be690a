//! The machines of a job and the links between them, in the form of a topology file. Converts between text and
//! data; opens no file.

pub(crate) mod links;
mod parse;
pub(crate) mod quantity;

use std::fmt;

use farflung_base::{AccessLink, Bandwidth, Bytes, Link, Nanos, ParseUnitError, Rank, Topology};

use crate::{ModelShape, ParallelError};
use quantity::MemoryText;
pub use quantity::{Power, Price, TensorEfficiency};

/// Parses an amount of memory in the form used by topology files: `8GB`, `512MiB`.
///
/// Errors: [`ParseUnitError`] if the number or the unit is invalid.
///
/// ```
/// let bytes = farflung_parallel::cluster::read_memory("80GB")?;
/// assert_eq!(bytes.0, 80_000_000_000);
/// # Ok::<(), farflung_base::ParseUnitError>(())
/// ```
pub fn read_memory(text: &str) -> Result<Bytes, ParseUnitError> {
    text.parse().map(|MemoryText(bytes)| bytes)
}

/// Sustained training speed of a device, not the peak of its data sheet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speed {
    /// Floating-point operations per second.
    Flops(u64),
    /// Tokens per second of the given model, forward and backward.
    TokensPerSecond(u64),
}

impl Speed {
    /// Returns the time for the forward and backward of `tokens`, rounded up to a nanosecond.
    #[must_use]
    pub fn time(self, tokens: u64, shape: &ModelShape) -> Nanos {
        let (work, rate) = match self {
            Self::Flops(rate) => (u128::from(tokens) * u128::from(shape.flops_per_token), rate),
            Self::TokensPerSecond(rate) => (u128::from(tokens), rate),
        };
        if rate == 0 {
            return Nanos::MAX;
        }
        let ns = work.saturating_mul(1_000_000_000).div_ceil(u128::from(rate));
        Nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

/// One machine, or several equal ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Name, unique among devices and regions.
    pub name: String,
    /// Number of machines; each is a rank.
    pub count: u32,
    /// Speed of each machine.
    pub speed: Speed,
    /// Memory of each machine, if known.
    pub memory: Option<Bytes>,
    /// Price of each machine per hour.
    pub price: Option<Price>,
    /// Power that each machine draws while it trains.
    pub power: Option<Power>,
    /// Region of the machines.
    pub region: Option<String>,
    /// Uplink of each machine, shared by everything that it sends. `None`: only its links limit it.
    pub up: Option<Bandwidth>,
    /// Downlink of each machine, shared by everything that it receives. `None`: only its links limit it.
    pub down: Option<Bandwidth>,
    /// Percentage of the speed that remains with several tensor ranks, if measured.
    pub tensor_efficiency: TensorEfficiency,
}

/// A group of devices that are near each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Name, unique among devices and regions.
    pub name: String,
    /// Link between two devices of the region for which no closer link is given.
    pub inside: Option<Link>,
    /// Uplink shared by everything that its devices send out of the region. `None`: no limit.
    pub up: Option<Bandwidth>,
    /// Downlink shared by everything that its devices receive from outside. `None`: no limit.
    pub down: Option<Bandwidth>,
}

/// A link, the same in both directions, between two devices, two regions, or a device and a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Between {
    /// Names of the two ends. If both are the same device, the link joins the instances of that device.
    pub ends: [String; 2],
    /// The link between the ends.
    pub link: Link,
}

/// Devices, regions and links. Ranks follow the order of the devices; instances of one device are adjacent.
///
/// The link of two ranks is the closest one given: between the two devices, else between one device and the
/// region of the other, else between the two regions (or inside their common region), else the default.
///
/// ```
/// use farflung_base::{Nanos, Rank};
/// use farflung_parallel::Cluster;
///
/// let cluster: Cluster = r#"
///     default = "20mbit,25ms"
///     [[device]]
///     name = "home"
///     count = 3
///     tokens_per_second = 4000
/// "#.parse()?;
/// assert_eq!(cluster.topology()?.link(Rank(0), Rank(2)).latency, Nanos::from_millis(25));
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cluster {
    /// Link of pairs for which no other link is given.
    pub default: Option<Link>,
    /// The regions.
    pub regions: Vec<Region>,
    /// The devices, in rank order.
    pub devices: Vec<Machine>,
    /// Explicit links: every link except the default and those inside regions.
    pub links: Vec<Between>,
}

impl Cluster {
    /// Maximum number of ranks of [`Cluster::topology`], which stores a link per pair, and therefore of a run.
    pub const MAX_RANKS: u64 = 2048;

    /// Maximum number of machines to plan for. [`planner::regional`](crate::planner::regional) does not need
    /// [`Cluster::topology`].
    pub const MAX_MACHINES: u64 = 65_536;

    /// Maximum number of device entries. Planners store a link per pair of entries.
    pub const MAX_DEVICES: usize = 4096;

    /// Returns `count` equal devices on equal access links, like [`Topology::uniform`].
    #[must_use]
    pub fn uniform(count: u32, speed: Speed, link: Link) -> Self {
        let access = Some(link.bandwidth);
        let name = "worker".to_owned();
        let device = Machine {
            name,
            count,
            speed,
            memory: None,
            price: None,
            power: None,
            region: None,
            up: access,
            down: access,
            tensor_efficiency: TensorEfficiency::default(),
        };
        Self { default: Some(link), devices: vec![device], ..Self::default() }
    }

    /// Returns the device of each rank.
    pub fn ranks(&self) -> impl Iterator<Item = &Machine> {
        self.devices.iter().flat_map(|device| (0..device.count).map(move |_| device))
    }

    /// Returns the name of each rank: the device's name, followed by `.0`, `.1` and so on if the device has
    /// several instances.
    #[must_use]
    pub fn rank_names(&self) -> Vec<String> {
        let names = |d: &Machine| match d.count {
            1 => vec![d.name.clone()],
            n => (0..n).map(|i| format!("{}.{i}", d.name)).collect(),
        };
        self.devices.iter().flat_map(names).collect()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.devices.iter().map(|d| u64::from(d.count)).sum()
    }

    /// Checks everything except that each pair of devices has a link. An error about an entry names it.
    ///
    /// Errors: empty, invalid, duplicate or unknown names; zero counts, speeds, access links or lines of
    /// regions; no devices or too many.
    pub fn check(&self) -> Result<(), ParallelError> {
        if self.size() > Self::MAX_MACHINES {
            return Err(ParallelError::TooManyRanks { ranks: self.size(), limit: Self::MAX_MACHINES });
        }
        if self.devices.len() > Self::MAX_DEVICES {
            let (found, limit) = (self.devices.len() as u128, Self::MAX_DEVICES);
            return Err(ParallelError::TooMany { what: "entries of devices", found, limit });
        }
        if self.devices.is_empty() {
            return Err(ParallelError::NoDevices);
        }
        let mut names: Vec<&str> = Vec::new();
        for region in &self.regions {
            check_name(&mut names, &region.name)?;
            region.check()?;
        }
        for device in &self.devices {
            check_name(&mut names, &device.name)?;
            self.check_device(device)?;
        }
        for (i, link) in self.links.iter().enumerate() {
            self.check_link(link, &self.links[..i])?;
        }
        Ok(())
    }

    fn check_device(&self, device: &Machine) -> Result<(), ParallelError> {
        let zero = |field| Err(ParallelError::Zero { of: format!("device `{}`", device.name), field });
        match device {
            Machine { count: 0, .. } => zero("count"),
            Machine { speed: Speed::Flops(0), .. } => zero("flops"),
            Machine { speed: Speed::TokensPerSecond(0), .. } => zero("tokens_per_second"),
            Machine { up: Some(Bandwidth(0)), .. } => zero("up"),
            Machine { down: Some(Bandwidth(0)), .. } => zero("down"),
            Machine { region: Some(name), .. } if !self.regions.iter().any(|r| r.name == *name) => {
                let known = self.regions.iter().map(|r| r.name.clone()).collect();
                Err(ParallelError::UnknownName { kind: "region", name: name.clone(), known })
            }
            _ => Ok(()),
        }
    }

    fn check_link(&self, link: &Between, before: &[Between]) -> Result<(), ParallelError> {
        let names = || self.regions.iter().map(|r| &r.name).chain(self.devices.iter().map(|d| &d.name));
        for end in &link.ends {
            if !names().any(|name| name == end) {
                let known = names().cloned().collect();
                return Err(ParallelError::UnknownName {
                    kind: "device or region",
                    name: end.clone(),
                    known,
                });
            }
        }
        let [a, b] = &link.ends;
        let inside = self.regions.iter().any(|r| a == b && r.name == *a && r.inside.is_some());
        if inside || before.iter().any(|other| other.joins(a, b)) {
            return Err(ParallelError::Duplicate { name: format!("{a} - {b}") });
        }
        Ok(())
    }

    /// Checks everything, including that each pair of devices has a link, and returns the links between device
    /// entries.
    ///
    /// Errors: as [`Cluster::check`], and [`ParallelError::MissingLink`].
    pub(crate) fn device_links(&self) -> Result<links::DeviceLinks, ParallelError> {
        self.check()?;
        links::DeviceLinks::of(self)
    }

    /// Returns the link of every pair of ranks, the access link of every rank, and the shared lines of regions.
    ///
    /// Errors: as [`Cluster::check`]; [`ParallelError::MissingLink`] for a pair without a link;
    /// [`ParallelError::TooManyRanks`] above [`Cluster::MAX_RANKS`].
    pub fn topology(&self) -> Result<Topology, ParallelError> {
        let links = self.device_links()?;
        if self.size() > Self::MAX_RANKS {
            return Err(ParallelError::TooManyRanks { ranks: self.size(), limit: Self::MAX_RANKS });
        }
        let entries = || (0..).zip(&self.devices).flat_map(|(at, d)| (0..d.count).map(move |_| at));
        let mut topology = Topology::uniform(self.size() as usize, self.default.unwrap_or(Link::FREE));
        for (from, a) in (0..).map(Rank).zip(entries()) {
            let device = &self.devices[a];
            let limit = |rate: Option<Bandwidth>| rate.unwrap_or(Bandwidth::UNLIMITED);
            topology.set_access_link(from, AccessLink { up: limit(device.up), down: limit(device.down) });
            for (to, b) in (0..).map(Rank).zip(entries()).filter(|(to, _)| *to != from) {
                topology.set_link(from, to, links.link(a, b));
            }
        }
        for region in self.regions.iter().filter(|region| region.up.or(region.down).is_some()) {
            let inside = |(_, device): &(u32, &Machine)| device.region.as_deref() == Some(&region.name);
            let ranks: Vec<Rank> =
                (0..).zip(self.ranks()).filter(inside).map(|(rank, _)| Rank(rank)).collect();
            let limit = |rate: Option<Bandwidth>| rate.unwrap_or(Bandwidth::UNLIMITED);
            topology.set_region(&ranks, AccessLink { up: limit(region.up), down: limit(region.down) });
        }
        Ok(topology)
    }
}

impl Region {
    /// Checks that the region's shared line can carry data.
    fn check(&self) -> Result<(), ParallelError> {
        let zero = |field| Err(ParallelError::Zero { of: format!("region `{}`", self.name), field });
        match self {
            Self { up: Some(Bandwidth(0)), .. } => zero("up"),
            Self { down: Some(Bandwidth(0)), .. } => zero("down"),
            _ => Ok(()),
        }
    }
}

impl Between {
    fn joins(&self, a: &str, b: &str) -> bool {
        let [x, y] = &self.ends;
        (x == a && y == b) || (x == b && y == a)
    }
}

fn check_name<'a>(names: &mut Vec<&'a str>, name: &'a str) -> Result<(), ParallelError> {
    if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c)) {
        return Err(ParallelError::BadName { name: name.to_owned() });
    }
    if names.contains(&name) {
        return Err(ParallelError::Duplicate { name: name.to_owned() });
    }
    names.push(name);
    Ok(())
}

impl fmt::Display for Cluster {
    /// Prints the topology file that parses back to this value. Every quantity is exact.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use quantity::{bandwidth, bytes, flops, link};
        if let Some(default) = self.default {
            writeln!(f, "default = \"{}\"", link(default))?;
        }
        for region in &self.regions {
            writeln!(f, "\n[[region]]\nname = \"{}\"", region.name)?;
            if let Some(inside) = region.inside {
                writeln!(f, "inside = \"{}\"", link(inside))?;
            }
            for (key, rate) in [("up", region.up), ("down", region.down)] {
                if let Some(rate) = rate {
                    writeln!(f, "{key} = \"{}\"", bandwidth(rate))?;
                }
            }
        }
        for device in &self.devices {
            writeln!(f, "\n[[device]]\nname = \"{}\"", device.name)?;
            if device.count != 1 {
                writeln!(f, "count = {}", device.count)?;
            }
            match device.speed {
                Speed::Flops(rate) => writeln!(f, "flops = \"{}\"", flops(rate))?,
                Speed::TokensPerSecond(rate) => writeln!(f, "tokens_per_second = {rate}")?,
            }
            if let Some(memory) = device.memory {
                writeln!(f, "memory = \"{}\"", bytes(memory))?;
            }
            if let Some(price) = device.price {
                writeln!(f, "price = \"{price}\"")?;
            }
            if let Some(power) = device.power {
                writeln!(f, "power = \"{power}\"")?;
            }
            if !device.tensor_efficiency.percents().is_empty() {
                writeln!(f, "tensor_efficiency = {:?}", device.tensor_efficiency.percents())?;
            }
            if let Some(region) = &device.region {
                writeln!(f, "region = \"{region}\"")?;
            }
            for (key, rate) in [("up", device.up), ("down", device.down)] {
                if let Some(rate) = rate {
                    writeln!(f, "{key} = \"{}\"", bandwidth(rate))?;
                }
            }
        }
        for between in &self.links {
            let [a, b] = &between.ends;
            writeln!(f, "\n[[link]]\nbetween = [\"{a}\", \"{b}\"]\nlink = \"{}\"", link(between.link))?;
        }
        Ok(())
    }
}
