//! The name that a user gives to a member of a run that machines join and leave.

use std::fmt;

use serde::{Deserialize, Serialize};
use toml::Value;

use super::value::Setting;

/// Maximum length of a name.
const LONGEST: usize = 32;

/// Letters that are not seen: fillers of the Korean script.
const BLANK_LETTERS: [char; 4] = ['\u{115F}', '\u{1160}', '\u{3164}', '\u{FFA0}'];

/// Name of a member: up to 32 letters, digits and `-`, `_`, `.`. A newcomer may not have that of a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct MemberName(String);

impl MemberName {
    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MemberName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for MemberName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).ok_or_else(|| format!("a member's name: expected {}", Self::expected()))
    }
}

impl Setting for MemberName {
    fn expected() -> String {
        format!("1 to {LONGEST} letters, digits, -, _ and dots")
    }
    fn parse(text: &str) -> Option<Self> {
        let is_letter = |c: char| c.is_alphanumeric() && !BLANK_LETTERS.contains(&c);
        let is_allowed = |c: char| is_letter(c) || matches!(c, '-' | '_' | '.');
        let length = text.chars().take(LONGEST + 1).count();
        ((1..=LONGEST).contains(&length) && text.chars().all(is_allowed)).then(|| Self(text.to_owned()))
    }
    fn value(&self) -> Value {
        Value::String(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_in_one_line() {
        for good in ["home-3", "a", "büro_2.links", &"x".repeat(LONGEST)] {
            assert_eq!(MemberName::parse(good).map(|name| name.to_string()).as_deref(), Some(good));
        }
        for bad in ["", "home 3", "a\nb", "\u{1b}[2J", "a\u{3164}", &"x".repeat(LONGEST + 1)] {
            assert_eq!(MemberName::parse(bad), None, "{bad:?}");
            // Another member may send any text.
            assert!(serde_json::from_value::<MemberName>(bad.into()).is_err(), "{bad:?}");
        }
    }
}
