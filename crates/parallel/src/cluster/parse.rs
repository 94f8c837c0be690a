//! Parses a topology file: TOML to a [`Cluster`]. Errors name their line, except those about the number of
//! devices.

use std::fmt::Display;
use std::ops::Range;
use std::str::FromStr;

use farflung_base::{Bandwidth, Link};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::quantity::{FlopsText, MemoryText, Power, Price, TensorEfficiency};
use super::{Between, Cluster, Machine, Region, Speed};
use crate::ParallelError;

/// A quantity written as text. Its parse errors carry the position in the file.
struct Text<T>(T);

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map(Self).map_err(D::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    default: Option<Text<Link>>,
    #[serde(default)]
    region: Vec<RegionEntry>,
    #[serde(default)]
    device: Vec<DeviceEntry>,
    #[serde(default)]
    link: Vec<LinkEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RegionEntry {
    name: Spanned<String>,
    inside: Option<Text<Link>>,
    up: Option<Text<Bandwidth>>,
    down: Option<Text<Bandwidth>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceEntry {
    name: Spanned<String>,
    count: Option<u32>,
    flops: Option<Text<FlopsText>>,
    tokens_per_second: Option<u64>,
    memory: Option<Text<MemoryText>>,
    price: Option<Text<Price>>,
    power: Option<Text<Power>>,
    region: Option<Spanned<String>>,
    up: Option<Text<Bandwidth>>,
    down: Option<Text<Bandwidth>>,
    #[serde(default)]
    tensor_efficiency: TensorEfficiency,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkEntry {
    between: Spanned<[String; 2]>,
    link: Text<Link>,
}

/// Returns the number of the line at a byte offset, from 1, and the line's text.
fn line(file: &str, offset: usize) -> (usize, String) {
    let offset = offset.min(file.len());
    let number = file.get(..offset).unwrap_or_default().matches('\n').count();
    (number + 1, file.lines().nth(number).unwrap_or_default().trim().to_owned())
}

fn at(file: &str, span: &Range<usize>, cause: ParallelError) -> ParallelError {
    let (line, text) = line(file, span.start);
    ParallelError::TopologyLine { line, text, cause: Box::new(cause) }
}

impl FromStr for Cluster {
    type Err = ParallelError;

    /// Parses a topology file (the README lists every key).
    ///
    /// Errors: text that is not TOML, unknown keys, quantities without a unit, and the errors of
    /// [`Cluster::check`] about one entry, each with its line; a pair of devices without a link, with both
    /// names and the line of the first; no devices or too many, without a line.
    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let file: File = toml::from_str(text).map_err(|error| {
            let (line, shown) = line(text, error.span().map_or(0, |span| span.start));
            ParallelError::TopologyFile { line, text: shown, problem: error.message().to_owned() }
        })?;
        let mut cluster = Self { default: file.default.map(|d| d.0), ..Self::default() };
        let mut names = Vec::new();
        for entry in &file.region {
            let name = entry.name.get_ref();
            super::check_name(&mut names, name).map_err(|e| at(text, &entry.name.span(), e))?;
            let inside = entry.inside.as_ref().map(|link| link.0);
            let rate = |text: &Option<Text<Bandwidth>>| text.as_ref().map(|rate| rate.0);
            let (up, down) = (rate(&entry.up), rate(&entry.down));
            let region = Region { name: name.clone(), inside, up, down };
            region.check().map_err(|e| at(text, &entry.name.span(), e))?;
            cluster.regions.push(region);
        }
        for entry in &file.device {
            let span = entry.name.span();
            super::check_name(&mut names, entry.name.get_ref()).map_err(|e| at(text, &span, e))?;
            let device = entry.device().map_err(|e| at(text, &span, e))?;
            cluster.check_device(&device).map_err(|error| match (&error, &entry.region) {
                (ParallelError::UnknownName { .. }, Some(region)) => at(text, &region.span(), error),
                _ => at(text, &span, error),
            })?;
            cluster.devices.push(device);
        }
        for entry in file.link {
            let span = entry.between.span();
            let link = Between { ends: entry.between.into_inner(), link: entry.link.0 };
            cluster.check_link(&link, &cluster.links).map_err(|e| at(text, &span, e))?;
            cluster.links.push(link);
        }
        cluster.device_links().map_err(|error| {
            let ParallelError::MissingLink { from, .. } = &error else { return error };
            // An instance's name is its entry's name, perhaps followed by `.` and a number.
            let named =
                |name: &str| from.strip_prefix(name).is_some_and(|at| at.is_empty() || at.starts_with('.'));
            let entry = file.device.iter().find(|entry| named(entry.name.get_ref()));
            match entry {
                Some(entry) => at(text, &entry.name.span(), error),
                None => error,
            }
        })?;
        Ok(cluster)
    }
}

impl DeviceEntry {
    fn device(&self) -> Result<Machine, ParallelError> {
        let name = self.name.get_ref().clone();
        let speed = match (&self.flops, self.tokens_per_second) {
            (Some(flops), None) => Speed::Flops(flops.0.0),
            (None, Some(rate)) => Speed::TokensPerSecond(rate),
            _ => return Err(ParallelError::NeedsOneSpeed { name }),
        };
        Ok(Machine {
            name,
            count: self.count.unwrap_or(1),
            speed,
            memory: self.memory.as_ref().map(|m| m.0.0),
            price: self.price.as_ref().map(|p| p.0),
            power: self.power.as_ref().map(|p| p.0),
            region: self.region.as_ref().map(|r| r.get_ref().clone()),
            up: self.up.as_ref().map(|b| b.0),
            down: self.down.as_ref().map(|b| b.0),
            tensor_efficiency: self.tensor_efficiency.clone(),
        })
    }
}
