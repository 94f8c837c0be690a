//! Quantities of a topology file that `base` does not parse, and exact printing of all quantities. (`base`
//! rounds to two decimals for display.)

use std::fmt;
use std::str::FromStr;

use farflung_base::{Bandwidth, Bytes, Link, Nanos, ParseUnitError};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

const BYTE_UNITS: [(&str, u64); 8] = [
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];
const FLOPS_UNITS: [(&str, u64); 5] = [
    ("PFLOPS", 1_000_000_000_000_000),
    ("TFLOPS", 1_000_000_000_000),
    ("GFLOPS", 1_000_000_000),
    ("MFLOPS", 1_000_000),
    ("FLOPS", 1),
];

const PRICE_UNITS: [(&str, u64); 1] = [("/h", 1_000_000)];
const POWER_UNITS: [(&str, u64); 2] = [("kW", 1_000), ("W", 1)];

/// Price of a machine per hour, in millionths of the file's currency. Written `1.25/h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Price(pub u64);

/// Power that a machine draws while it trains, in watts. Written `350W`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Power(pub u64);

impl Price {
    /// Maximum price that is accepted, in millionths, so that printed prices are exact.
    const MOST: u64 = 1_000_000_000_000_000;
}

impl FromStr for Price {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let expected = "a price such as `1.25/h`, at most 1000000000/h";
        let value = read(text, &PRICE_UNITS).filter(|&value| value <= Self::MOST);
        value.map(Self).ok_or_else(|| ParseUnitError { text: text.to_owned(), expected })
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}/h", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

impl FromStr for Power {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let expected = "a power such as `350W` (units: W, kW)";
        let value = read(text, &POWER_UNITS);
        value.map(Self).ok_or_else(|| ParseUnitError { text: text.to_owned(), expected })
    }
}

impl fmt::Display for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&exact(self.0, &POWER_UNITS))
    }
}

/// Percentage of a device's speed that remains when its matrix products are divided over 2, 4, 8 and so on
/// tensor ranks. Thinner matrices run slower. `farflung devices --measure` measures these percentages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorEfficiency(Vec<u8>);

impl TensorEfficiency {
    /// Creates an efficiency from the percentages for 2, 4, 8 and so on ranks. `None` if one is not from 1 to
    /// 100, or there are more than 16.
    #[must_use]
    pub fn new(percents: Vec<u8>) -> Option<Self> {
        (percents.len() <= 16 && percents.iter().all(|percent| (1..=100).contains(percent)))
            .then_some(Self(percents))
    }

    /// Returns the minimum of several efficiencies at each number of ranks.
    #[must_use]
    pub fn least(all: &[&Self]) -> Self {
        let steps = all.iter().map(|one| one.0.len()).max().unwrap_or(0) as u32;
        let least = |step: u32| all.iter().map(|one| one.percent(1 << step)).min().unwrap_or(100);
        Self((1..=steps).map(least).collect())
    }

    /// Returns the percentage of a device's speed that remains if `ranks` tensor ranks share a layer: the one
    /// measured for the smallest power of two that is at least `ranks`, or the last one known. 100 for one
    /// rank, or if nothing was measured.
    #[must_use]
    pub fn percent(&self, ranks: u32) -> u8 {
        let Some(last) = self.0.len().checked_sub(1).filter(|_| ranks > 1) else { return 100 };
        let step = ranks.next_power_of_two().trailing_zeros() as usize;
        self.0[(step - 1).min(last)]
    }

    /// Returns the percentages for 2, 4, 8 and so on ranks, as given.
    #[must_use]
    pub fn percents(&self) -> &[u8] {
        &self.0
    }
}

impl<'de> Deserialize<'de> for TensorEfficiency {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let expected = "percentages from 1 to 100 for 2, 4, 8 and so on tensor ranks, at most 16 of them";
        let percents = Vec::<u8>::deserialize(from).map_err(|_| D::Error::custom(expected))?;
        Self::new(percents).ok_or_else(|| D::Error::custom(expected))
    }
}

/// An amount of memory in the form used by topology files: `8GB`, `512MiB`.
pub(crate) struct MemoryText(pub(crate) Bytes);

/// A speed in the form used by topology files: `40 TFLOPS`.
pub(super) struct FlopsText(pub(super) u64);

fn read(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let unit = text[end..].trim();
    let &(_, factor) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    if let Ok(whole) = text[..end].parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let value = (text[..end].parse::<f64>().ok()? * factor as f64).round();
    (value.is_finite() && value < u64::MAX as f64).then_some(value as u64)
}

impl FromStr for MemoryText {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let expected = "an amount of memory such as `8GB` (units: B, kB, MB, GB, TB, KiB, MiB, GiB)";
        let value = read(text, &BYTE_UNITS);
        value.map(|v| Self(Bytes(v))).ok_or_else(|| ParseUnitError { text: text.to_owned(), expected })
    }
}

impl FromStr for FlopsText {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let expected = "a speed such as `40 TFLOPS` (units: FLOPS, MFLOPS, GFLOPS, TFLOPS, PFLOPS)";
        let value = read(text, &FLOPS_UNITS);
        value.map(Self).ok_or_else(|| ParseUnitError { text: text.to_owned(), expected })
    }
}

/// Formats a value in the first unit in which it is a whole number.
fn exact(value: u64, units: &[(&str, u64)]) -> String {
    let divides = |&&(_, factor): &&(&str, u64)| value != 0 && value.is_multiple_of(factor);
    let (name, factor) = units.iter().find(divides).or(units.last()).expect("every list has a unit");
    format!("{}{name}", value / factor)
}

pub(crate) fn bytes(value: Bytes) -> String {
    exact(value.0, &BYTE_UNITS)
}

pub(super) fn flops(value: u64) -> String {
    exact(value, &FLOPS_UNITS)
}

pub(super) fn bandwidth(value: Bandwidth) -> String {
    match value {
        Bandwidth::UNLIMITED => "unlimited".to_owned(),
        Bandwidth(bits) => {
            exact(bits, &[("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)])
        }
    }
}

pub(super) fn link(value: Link) -> String {
    let Nanos(ns) = value.latency;
    let latency = exact(ns, &[("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)]);
    format!("{},{latency}", bandwidth(value.bandwidth))
}
