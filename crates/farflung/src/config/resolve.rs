//! Resolves a run's settings from flags, a file and defaults, and writes them as a file.

use std::fmt::Write as _;
use std::path::Path;

use super::given::BY_DEFAULT;
use super::{TrainArgs, TrainConfig, dashed};
use crate::Result;

impl TrainConfig {
    /// Returns a run's settings, checked: `given` overrides the file, which overrides the defaults.
    ///
    /// Errors: those of [`TrainArgs::read`], and [`Error::Setting`](crate::Error::Setting) for a value out of
    /// its range.
    pub fn resolve(given: TrainArgs, file: Option<&Path>) -> Result<Self> {
        Self::merge(given, file.map(TrainArgs::read).transpose()?.unwrap_or_default())
    }

    /// Like [`TrainConfig::resolve`], with the settings of the file in `file`.
    ///
    /// Errors: [`Error::Setting`](crate::Error::Setting) for a value out of its range.
    pub fn merge(given: TrainArgs, mut file: TrainArgs) -> Result<Self> {
        // In the file, `min-lr` is a default that was derived from the file's `lr`.
        if given.lr.is_some() && file.by_default.remove("min_lr") {
            file.min_lr = None;
        }
        if given.sync.is_some() && file.by_default.remove("outer_momentum") {
            file.outer_momentum = None;
        }
        if given.optimizer.is_some() || given.recipe.is_some() {
            file.forget_optimizer_defaults();
        }
        let args = given.with_recipe(file);
        args.beside_plan()?;
        let config = Self::fill(args);
        config.validate()?;
        Ok(config)
    }

    /// Reads the settings of a file, such as a run's own `config.toml`, and fills in the defaults.
    pub fn read(path: &Path) -> Result<Self> {
        Self::resolve(TrainArgs::default(), Some(path))
    }

    /// Returns all settings as a TOML file, which [`TrainConfig::read`] reads back unchanged. Those that a plan
    /// decides are left out. Settings that were not given are marked with [`BY_DEFAULT`], so that they do not
    /// count as given when the file is read.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for (heading, entries) in self.entries() {
            let gap = if text.is_empty() { "" } else { "\n" };
            writeln!(text, "{gap}# {heading}").expect("writing to a string cannot fail");
            for (name, value) in entries {
                if let Some(value) = value.filter(|_| !self.is_decided(name)) {
                    let name = dashed(name);
                    let mark = if self.was_given(&name) { String::new() } else { format!(" {BY_DEFAULT}") };
                    writeln!(text, "{name} = {value}{mark}").expect("writing to a string cannot fail");
                }
            }
        }
        text
    }

    /// Returns a setting's value as in a file; `None` if it has no value or there is no setting of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<toml::Value> {
        let mut all = self.entries().into_iter().flat_map(|(_, entries)| entries);
        all.find(|(key, _)| dashed(key) == name)?.1
    }
}
