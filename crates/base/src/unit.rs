//! Integer units: nanoseconds, bytes, bits per second. They are integers so that simulated times are equal on
//! every platform.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};
use std::str::FromStr;
use std::time::Duration;

/// A point or span of time in nanoseconds, real or virtual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Nanos(pub u64);

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Bytes(pub u64);

/// A rate in bits per second. Zero means a dead link, which carries nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Bandwidth(pub u64);

/// Error of parsing a quantity with a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseUnitError {
    /// Text that failed to parse.
    pub text: String,
    /// Description of the expected form, with the known units.
    pub expected: &'static str,
}

impl fmt::Display for ParseUnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not {}", self.text, self.expected)
    }
}

impl std::error::Error for ParseUnitError {}

impl Nanos {
    /// Zero nanoseconds.
    pub const ZERO: Self = Self(0);
    /// Largest value; used for "never".
    pub const MAX: Self = Self(u64::MAX);

    /// Converts from milliseconds.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms * 1_000_000)
    }

    /// Converts from microseconds.
    #[must_use]
    pub const fn from_micros(us: u64) -> Self {
        Self(us * 1_000)
    }

    /// Converts from seconds, rounded to the nearest nanosecond. Negative values and NaN give zero.
    #[must_use]
    pub fn from_secs_f64(s: f64) -> Self {
        Self((s * 1e9).round() as u64)
    }

    /// Converts to seconds.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Returns `self - other`, or zero if `other` is later.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Returns the sum, or [`Nanos::MAX`] on overflow.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl From<Duration> for Nanos {
    fn from(d: Duration) -> Self {
        Self(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Nanos> for Duration {
    fn from(n: Nanos) -> Self {
        Self::from_nanos(n.0)
    }
}

impl Bandwidth {
    /// No limit: a transfer takes no time.
    pub const UNLIMITED: Self = Self(u64::MAX);

    /// Returns the time to send `bytes` at this rate, rounded up to a nanosecond. No bytes take no time at any
    /// rate; at rate zero all others take [`Nanos::MAX`].
    #[must_use]
    pub fn transfer(self, bytes: Bytes) -> Nanos {
        match self.0 {
            0 if bytes.0 > 0 => Nanos::MAX,
            0 | u64::MAX => Nanos::ZERO,
            rate => {
                // Transfers under about 2 GB avoid the 128-bit division.
                if let Some(bits) = bytes.0.checked_mul(8_000_000_000) {
                    return Nanos(bits.div_ceil(rate));
                }
                let ns = (u128::from(bytes.0) * 8_000_000_000).div_ceil(u128::from(rate));
                Nanos(u64::try_from(ns).unwrap_or(u64::MAX))
            }
        }
    }
}

macro_rules! arithmetic {
    ($($name:ident),*) => {$(
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl Mul<u64> for $name {
            type Output = Self;
            fn mul(self, times: u64) -> Self {
                Self(self.0 * times)
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                Self(iter.map(|x| x.0).sum())
            }
        }
    )*};
}
arithmetic!(Nanos, Bytes);

/// Splits text such as `12.5ms` into number and unit. Signs and exponents are not accepted.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, text[end..].trim()))
}

/// Multiplies and rounds to an integer; `None` if the result does not fit.
fn scaled(value: f64, factor: f64) -> Option<u64> {
    let x = (value * factor).round();
    (x.is_finite() && x < u64::MAX as f64).then_some(x as u64)
}

impl FromStr for Nanos {
    type Err = ParseUnitError;

    /// Parses `20ms`, `1.5s`, `300us`, `50ns`, `2min`, `6h`; a bare `0` is zero.
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let parse = || {
            let (value, unit) = split(text)?;
            let factor = match unit.to_ascii_lowercase().as_str() {
                "ns" => 1.0,
                "us" | "µs" => 1e3,
                "ms" => 1e6,
                "s" => 1e9,
                "min" => 60e9,
                "h" => 3600e9,
                "" if value == 0.0 => 1.0,
                _ => return None,
            };
            scaled(value, factor).map(Self)
        };
        parse().ok_or_else(|| ParseUnitError {
            text: text.to_owned(),
            expected: "a time such as `20ms` (units: ns, us, ms, s, min, h)",
        })
    }
}

impl FromStr for Bandwidth {
    type Err = ParseUnitError;

    /// Parses rates per second in decimal units: `9600bit`, `512kbit`, `100mbit`, `1.5gbit`, `12mbyte`, or
    /// `unlimited`. A suffix `/s` or `ps` is accepted: `12mbyte/s`, `1Gbps`.
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let parse = || {
            if text.trim().eq_ignore_ascii_case("unlimited") {
                return Some(Self::UNLIMITED);
            }
            let (value, unit) = split(text)?;
            let unit = unit.to_ascii_lowercase();
            let unit = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps")).unwrap_or(&unit);
            let factor = match unit {
                "bit" => 1.0,
                "kbit" | "kb" => 1e3,
                "mbit" | "mb" => 1e6,
                "gbit" | "gb" => 1e9,
                "kbyte" => 8e3,
                "mbyte" => 8e6,
                "gbyte" => 8e9,
                _ => return None,
            };
            scaled(value, factor).map(Self)
        };
        parse().ok_or_else(|| ParseUnitError {
            text: text.to_owned(),
            expected: "a bandwidth such as `100mbit` (units per second: bit, kbit, mbit, gbit, kbyte, mbyte, \
                       gbyte)",
        })
    }
}

/// Prints `value` with at most two decimals and no trailing zeros.
fn trimmed(f: &mut fmt::Formatter<'_>, value: f64, unit: &str) -> fmt::Result {
    let text = format!("{value:.2}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    f.pad(&format!("{text}{unit}"))
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n < 1_000 => trimmed(f, n as f64, "ns"),
            n if n < 1_000_000 => trimmed(f, n as f64 / 1e3, "us"),
            n if n < 1_000_000_000 => trimmed(f, n as f64 / 1e6, "ms"),
            n => trimmed(f, n as f64 / 1e9, "s"),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n < 1_000 => trimmed(f, n as f64, " B"),
            n if n < 1_000_000 => trimmed(f, n as f64 / 1e3, " kB"),
            n if n < 1_000_000_000 => trimmed(f, n as f64 / 1e6, " MB"),
            n => trimmed(f, n as f64 / 1e9, " GB"),
        }
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            u64::MAX => f.pad("unlimited"),
            n if n < 1_000 => trimmed(f, n as f64, "bit"),
            n if n < 1_000_000 => trimmed(f, n as f64 / 1e3, "kbit"),
            n if n < 1_000_000_000 => trimmed(f, n as f64 / 1e6, "mbit"),
            n => trimmed(f, n as f64 / 1e9, "gbit"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_prints_units() {
        assert_eq!("20ms".parse(), Ok(Nanos(20_000_000)));
        assert_eq!("1.5s".parse(), Ok(Nanos(1_500_000_000)));
        assert_eq!("0".parse(), Ok(Nanos(0)));
        assert_eq!("100mbit".parse(), Ok(Bandwidth(100_000_000)));
        assert_eq!("1Gbps".parse(), Ok(Bandwidth(1_000_000_000)));
        assert_eq!("2mbyte/s".parse(), Ok(Bandwidth(16_000_000)));
        assert_eq!(Nanos(1_500_000).to_string(), "1.5ms");
        assert_eq!(Bytes(100).to_string(), "100 B");
        assert_eq!(Bandwidth(100_000_000).to_string(), "100mbit");
        for bad in ["", "ms", "20", "-3ms", "1e3ms", "20 parsecs", "nan", "99999999999999999999s"] {
            assert!(bad.parse::<Nanos>().is_err(), "{bad}");
        }
    }

    #[test]
    fn transfer_rounds_up_and_never_overflows() {
        assert_eq!(Bandwidth(8_000_000_000).transfer(Bytes(1)), Nanos(1));
        assert_eq!(Bandwidth(3).transfer(Bytes(1)), Nanos(2_666_666_667));
        assert_eq!(Bandwidth(0).transfer(Bytes(0)), Nanos(0));
        assert_eq!(Bandwidth(0).transfer(Bytes(1)), Nanos::MAX);
        assert_eq!(Bandwidth(1).transfer(Bytes(u64::MAX)), Nanos::MAX);
        assert_eq!(Bandwidth::UNLIMITED.transfer(Bytes(u64::MAX)), Nanos(0));
    }
}
