//! Which settings a run was given, rather than left as they are by default.

use std::collections::BTreeSet;

use super::{TrainConfig, dashed};

/// What stands in a file behind a value that was not given.
pub const BY_DEFAULT: &str = "# by default";

/// Which settings were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Given {
    /// Those that differ from their defaults: for settings that a program wrote down.
    #[default]
    Differs,
    /// These, by flag or file.
    Only(BTreeSet<&'static str>),
}

impl TrainConfig {
    /// Whether the setting of this name, as it stands in a file, was given.
    #[must_use]
    pub fn was_given(&self, name: &str) -> bool {
        match &self.given {
            Given::Differs => self.get(name) != Self::default().get(name),
            Given::Only(names) => names.iter().any(|given| dashed(given) == name),
        }
    }
}
