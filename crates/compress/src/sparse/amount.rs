//! The number of elements to keep: a count, or a share of the vector, rounded down to a multiple.

use std::fmt;
use std::str::FromStr;

use crate::CompressError;

const MILLION: u64 = 1_000_000;

/// A count of elements, or a share of a vector's length.
///
/// ```
/// use farflung_compress::Amount;
///
/// let amount: Amount = "0.2x128".parse()?;
/// assert_eq!(amount.of(26_112), 5120); // a fifth, rounded up, then down to a multiple of 128
/// assert_eq!(amount.to_string(), "0.2x128");
/// assert_eq!("1000".parse::<Amount>()?.of(300), 300);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Amount {
    count: u32,
    /// True if `count` is in millionths of the length.
    share: bool,
    multiple: u32,
}

impl Amount {
    /// Creates the amount of `count` elements.
    #[must_use]
    pub const fn count(count: u32) -> Self {
        Self { count, share: false, multiple: 1 }
    }

    /// Creates the amount of this many millionths of the elements, rounded up.
    #[must_use]
    pub const fn millionths(share: u32) -> Self {
        Self { count: share, share: true, multiple: 1 }
    }

    /// Rounds the amount down to a multiple (0 counts as 1), so that the inner codec's blocks are full.
    #[must_use]
    pub const fn multiple_of(self, multiple: u32) -> Self {
        Self { multiple: if multiple == 0 { 1 } else { multiple }, ..self }
    }

    /// Returns the share in millionths, or `None` for a count.
    #[must_use]
    pub const fn share(self) -> Option<u32> {
        if self.share { Some(self.count) } else { None }
    }

    /// Returns the multiple that amounts are rounded down to.
    #[must_use]
    pub const fn multiple(self) -> u32 {
        self.multiple
    }

    /// Returns true if the amount is zero for every vector: its count is 0, or less than one multiple.
    #[must_use]
    pub const fn is_nothing(self) -> bool {
        self.count == 0 || (!self.share && self.count < self.multiple)
    }

    /// Returns the number of elements for a vector of `len` elements.
    #[must_use]
    pub fn of(self, len: usize) -> usize {
        let count = if self.share {
            (len as u128 * u128::from(self.count)).div_ceil(u128::from(MILLION)).min(len as u128) as usize
        } else {
            (self.count as usize).min(len)
        };
        count - count % self.multiple as usize
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.share {
            let (whole, rest) = (u64::from(self.count) / MILLION, u64::from(self.count) % MILLION);
            let digits = format!("{whole}.{rest:06}");
            let digits = digits.trim_end_matches('0');
            write!(f, "{digits}{}", if rest == 0 { "0" } else { "" })?;
        } else {
            write!(f, "{}", self.count)?;
        }
        if self.multiple == 1 { Ok(()) } else { write!(f, "x{}", self.multiple) }
    }
}

impl FromStr for Amount {
    type Err = CompressError;

    /// Parses a number (`64`) or a decimal share of at most 1 with one to six digits after the point (`0.01`),
    /// optionally with a multiple (`x128`).
    fn from_str(text: &str) -> Result<Self, CompressError> {
        let wrong = || CompressError::Amount { text: text.to_owned() };
        let (amount, multiple) = match text.split_once('x') {
            Some((amount, multiple)) => (amount, multiple.parse().ok().filter(|m| *m > 0).ok_or_else(wrong)?),
            None => (text, 1),
        };
        let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
        let parsed = match amount.split_once('.') {
            None if digits(amount) => Self::count(amount.parse().map_err(|_| wrong())?),
            Some((whole, part)) if digits(whole) && digits(part) && (1..=6).contains(&part.len()) => {
                let value: u64 = format!("{whole}{part:0<6}").parse().map_err(|_| wrong())?;
                Self::millionths(
                    u32::try_from(value).ok().filter(|v| u64::from(*v) <= MILLION).ok_or_else(wrong)?,
                )
            }
            _ => return Err(wrong()),
        };
        Ok(parsed.multiple_of(multiple))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_print_as_they_parse() {
        for text in ["0", "64", "0.01", "0.2x128", "1.0", "0.000001", "64x2"] {
            assert_eq!(text.parse::<Amount>().unwrap().to_string(), text);
        }
        for text in ["", ".", "0.", "x2", "1.5", "0.0000001", "-1", "1e3", "0.5x0", "0.5x", "+1"] {
            assert!(text.parse::<Amount>().is_err(), "{text}");
        }
        assert_eq!("0.001".parse::<Amount>().unwrap().of(1 << 20), 1049);
    }

    #[test]
    fn nothing_is_nothing_of_any_vector() {
        for (text, nothing) in [
            ("0", true),
            ("0.0", true),
            ("0x4", true),
            ("5x128", true),
            ("128x128", false),
            ("0.000001", false),
        ] {
            let amount: Amount = text.parse().unwrap();
            assert_eq!(amount.is_nothing(), nothing, "{text}");
            assert_eq!(amount.of(1 << 30) == 0, nothing, "{text}");
        }
    }
}
