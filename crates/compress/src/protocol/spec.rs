//! Protocols by name. A [`ProtocolSpec`] is plain data: printing and parsing give the same spec again.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use super::{MatrixShape, Protocol, Row, power_sgd};
use crate::CompressError;

/// All protocols, in the order of the help text.
const PROTOCOLS: &[Row] = &[power_sgd::ROW];

/// A protocol and its number, as data, such as `powersgd:4`.
#[derive(Clone, Copy)]
pub struct ProtocolSpec {
    row: &'static Row,
    number: u32,
}

impl ProtocolSpec {
    /// Creates the protocol for matrices of a shape. Returns `None` if it would send no fewer values than the
    /// matrix has. All ranks need the same `seed`; use another one for each matrix.
    #[must_use]
    pub fn build(&self, shape: MatrixShape, seed: u64) -> Option<Box<dyn Protocol>> {
        (self.row.build)(self.number, shape, seed)
    }

    /// Returns the names, for a help text.
    #[must_use]
    pub fn names() -> Vec<String> {
        PROTOCOLS.iter().map(|row| format!("{}:{}", row.name, row.argument)).collect()
    }

    fn key(&self) -> (&'static str, u32) {
        (self.row.name, self.number)
    }
}

impl FromStr for ProtocolSpec {
    type Err = CompressError;

    /// Errors: [`CompressError::UnknownCodec`] if no protocol has the name; [`CompressError::CodecName`] if its
    /// number is missing or wrong.
    fn from_str(name: &str) -> Result<Self, CompressError> {
        let (kind, number) = name.split_once(':').unwrap_or((name, ""));
        let row = PROTOCOLS.iter().find(|row| row.name == kind);
        let row = row.ok_or_else(|| CompressError::UnknownCodec { name: name.to_owned() })?;
        let number = number.parse().ok().filter(|number| *number > 0).ok_or_else(|| {
            let why = "needs a whole number of at least 1, as in powersgd:4";
            CompressError::CodecName { name: name.to_owned(), part: name.to_owned(), why }
        })?;
        Ok(Self { row, number })
    }
}

impl PartialEq for ProtocolSpec {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ProtocolSpec {}

impl Hash for ProtocolSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl fmt::Debug for ProtocolSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ProtocolSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.row.name, self.number)
    }
}
