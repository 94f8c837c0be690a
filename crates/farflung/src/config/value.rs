//! Parses and prints the value of a setting, in the same way for the command line and for TOML.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use farflung_base::{Bandwidth, LayerPatterns, Link, Nanos};
use toml::Value;

use super::nearest::with_nearest;

/// A type of a setting's value.
pub trait Setting: Sized + Clone + Send + Sync + 'static {
    /// Returns the allowed values as text that completes "expected ...".
    #[must_use]
    fn expected() -> String {
        format!("one of {}", Self::names().join(" "))
    }

    /// Like [`Setting::expected`], for this invalid text; a type may return a more precise reason.
    #[must_use]
    fn expected_not(_: &str) -> String {
        Self::expected()
    }

    /// Returns the allowed names, if the value is one of a list.
    #[must_use]
    fn names() -> Vec<String> {
        Vec::new()
    }

    /// Like [`Setting::expected_not`], with a suggestion of the name that was probably meant.
    #[must_use]
    fn wanted(text: &str) -> String {
        with_nearest(Self::expected_not(text), text, &Self::names())
    }

    /// Parses a flag's argument or the text of a TOML value; `None` if it is invalid.
    fn parse(text: &str) -> Option<Self>;

    /// Returns the value as in a TOML file.
    fn value(&self) -> Value;

    /// Parses for clap: as [`Setting::parse`], with an error that names the allowed values.
    fn from_flag(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| format!("expected {}", Self::wanted(text)))
    }

    /// Parses a TOML value; `None` if it is invalid. A number must not be in quotes, and a word must be.
    #[must_use]
    fn from_toml(value: &Value) -> Option<Self> {
        let text = match value {
            Value::String(s) => s.clone(),
            Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => value.to_string(),
            Value::Datetime(_) | Value::Array(_) | Value::Table(_) => return None,
        };
        let read = Self::parse(&text)?;
        let quoted = |v: &Value| matches!(v, Value::String(_));
        (quoted(&read.value()) == quoted(value)).then_some(read)
    }
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Setting for $ty {
            fn expected() -> String {
                "a whole number that is not negative".to_owned()
            }
            fn parse(text: &str) -> Option<Self> {
                // TOML's integers end at 2^63 - 1: larger values could not be printed, so they are not
                // accepted.
                text.parse().ok().filter(|&n: &Self| i64::try_from(n).is_ok())
            }
            fn value(&self) -> Value {
                Value::Integer(i64::try_from(*self).unwrap_or(i64::MAX))
            }
        }
    )*};
}
integers!(u32, u64, usize);

impl Setting for f64 {
    fn expected() -> String {
        "a number".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|x: &Self| x.is_finite())
    }
    fn value(&self) -> Value {
        Value::Float(*self)
    }
}

impl Setting for bool {
    fn expected() -> String {
        "true or false".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::Boolean(*self)
    }
}

impl Setting for String {
    fn expected() -> String {
        "a text".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
    fn value(&self) -> Value {
        Value::String(self.clone())
    }
}

impl Setting for PathBuf {
    fn expected() -> String {
        "a path".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self::from(text))
    }
    fn value(&self) -> Value {
        Value::String(self.to_string_lossy().into_owned())
    }
}

/// Returns what was expected instead of a text, and why it cannot be read.
pub(super) fn expected_with_reason<T: Setting + FromStr<Err: Display>>(text: &str) -> String {
    match text.parse::<T>() {
        Err(error) => format!("{}: {error}", T::expected()),
        Ok(_) => T::expected(),
    }
}

impl Setting for LayerPatterns {
    fn expected() -> String {
        "patterns with `/` between them, of full, window:W, strided:S, fixed:L,G[,P], variable:L,... and \
         bigbird:W,G,R, where W, S, L and P are at least 1, with fields such as +sinks:4"
            .to_owned()
    }
    fn expected_not(text: &str) -> String {
        expected_with_reason::<Self>(text)
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(self.to_string())
    }
}

impl Setting for Link {
    fn expected() -> String {
        let names = Self::NAMED.map(|(name, ..)| name).join(", ");
        format!("BANDWIDTH,LATENCY such as `100mbit,20ms`, or one of {names}")
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        let exact = match self.bandwidth.0 {
            u64::MAX => format!("unlimited,{}ns", self.latency.0),
            bits => format!("{bits}bit,{}ns", self.latency.0),
        };
        Value::String(shortest(self, self.to_string(), exact))
    }
}

impl Setting for Bandwidth {
    fn expected() -> String {
        "a bandwidth such as `20mbit` (units: bit, kbit, mbit, gbit, kbyte, mbyte, gbyte), or `unlimited`"
            .to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(match *self {
            Self::UNLIMITED => "unlimited".to_owned(),
            rate => shortest(self, self.to_string(), format!("{}bit", rate.0)),
        })
    }
}

impl Setting for Nanos {
    fn expected() -> String {
        "a time such as `30s` (units: ns, us, ms, s, min)".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(shortest(self, self.to_string(), format!("{}ns", self.0)))
    }
}

/// Returns the short form (rounded to two decimals) if it parses to the same value, else the exact one.
fn shortest<T: FromStr + PartialEq>(of: &T, short: String, exact: String) -> String {
    if short.parse::<T>().is_ok_and(|read| read == *of) { short } else { exact }
}
