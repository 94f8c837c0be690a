//! Tracks which settings were given by flag or file, and which are defaults.

use std::collections::BTreeSet;

use super::{TrainConfig, dashed};

/// The comment behind a value in a file that marks it as a default, not as given.
pub const BY_DEFAULT: &str = "# by default";

/// Which settings were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Given {
    /// Those that differ from their defaults. For a config made in code, where nothing else is known.
    #[default]
    Differs,
    /// These, by flag or file.
    Only(BTreeSet<&'static str>),
}

impl TrainConfig {
    /// Counts settings as given, by their names as fields.
    pub(crate) fn mark_given(&mut self, names: &[&'static str]) {
        if let Given::Only(given) = &mut self.given {
            given.extend(names);
        }
    }

    /// Whether a setting was given; `name` is its key in a file, such as `eval-every`.
    #[must_use]
    pub fn was_given(&self, name: &str) -> bool {
        match &self.given {
            Given::Differs => self.get(name) != Self::default().get(name),
            Given::Only(names) => names.iter().any(|given| dashed(given) == name),
        }
    }
}
