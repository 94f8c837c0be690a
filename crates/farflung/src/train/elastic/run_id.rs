//! Identity of a run. A machine may host several runs under one name, with one secret, and at one address after
//! another: the identity tells them apart.

use std::fmt;
use std::str::FromStr;

use farflung_comm::secure;
use serde::{Deserialize, Serialize};

use crate::Result;

/// Number of hexadecimal digits of an identity.
const DIGITS: usize = 32;

/// Random number of a run, the same on all its members and in all its incarnations. As text, 32 hexadecimal
/// digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(in crate::train) struct RunId(u128);

impl RunId {
    /// Draws the identity of a new run.
    ///
    /// Errors: the system's random number generator fails.
    pub(super) fn draw() -> Result<Self> {
        let drawn = secure::random()?;
        let (first, _) = drawn.split_first_chunk().expect("32 bytes begin with 16");
        Ok(Self(u128::from_le_bytes(*first)))
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0DIGITS$x}", self.0)
    }
}

impl FromStr for RunId {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let digits = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = digits.then(|| u128::from_str_radix(text, 16).ok()).flatten();
        number.map(Self).ok_or_else(|| format!("the identity of a run has {DIGITS} hexadecimal digits"))
    }
}

impl TryFrom<String> for RunId {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        text.parse()
    }
}

impl From<RunId> for String {
    fn from(id: RunId) -> Self {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_have_two_identities_that_are_read_again() {
        let (one, other) = (RunId::draw().unwrap(), RunId::draw().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.to_string().parse(), Ok(one));
        assert_eq!(RunId(7).to_string(), "00000000000000000000000000000007");
        for wrong in ["", "7", "+0000000000000000000000000000007", &"g".repeat(32), &"0".repeat(33)] {
            assert!(wrong.parse::<RunId>().unwrap_err().contains("32 hexadecimal digits"));
        }
    }
}
