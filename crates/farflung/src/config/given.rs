//! Tracks which settings were given by a flag or file, and which have their defaults.

use std::collections::BTreeSet;

use super::{TrainArgs, TrainConfig, dashed};

/// The comment after a value in a file that marks it as a default rather than as given.
pub const BY_DEFAULT: &str = "# by default";

/// The settings that count as given, rather than as defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Given {
    /// All settings whose value differs from the default. Used for a config that was made in code, which does
    /// not record the given settings.
    #[default]
    Differs,
    /// The settings with these field names, which a flag or a file gave.
    Only(BTreeSet<&'static str>),
}

impl Default for TrainConfig {
    /// Returns the default run: nano, four workers behind home uplinks, gradients in eight bits.
    fn default() -> Self {
        Self { given: Given::Differs, ..Self::fill(TrainArgs::default()) }
    }
}

impl TrainConfig {
    /// Marks settings as given, by their field names.
    pub(crate) fn mark_given(&mut self, names: &[&'static str]) {
        if let Given::Only(given) = &mut self.given {
            given.extend(names);
        }
    }

    /// Returns whether a setting was given; `name` is its key in a file, such as `eval-every`.
    #[must_use]
    pub fn was_given(&self, name: &str) -> bool {
        match &self.given {
            Given::Differs => self.get(name) != Self::default().get(name),
            Given::Only(names) => names.iter().any(|given| dashed(given) == name),
        }
    }
}
