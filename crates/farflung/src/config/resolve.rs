//! What holds for a run: what was given over a file over the defaults, and all of it as a file again.

use std::fmt::Write as _;
use std::path::Path;

use super::given::BY_DEFAULT;
use super::{TrainArgs, TrainConfig, dashed};
use crate::Result;

impl TrainConfig {
    /// What holds for a run: `given` over the file over the defaults, checked.
    ///
    /// Errors: those of [`TrainArgs::read`], and [`Error::Setting`](crate::Error::Setting) for a value out of
    /// its range.
    pub fn resolve(given: TrainArgs, file: Option<&Path>) -> Result<Self> {
        Self::merge(given, file.map(TrainArgs::read).transpose()?.unwrap_or_default())
    }

    /// `given` over `file` over the defaults, checked.
    ///
    /// Errors: [`Error::Setting`](crate::Error::Setting) for a value out of its range.
    pub fn merge(given: TrainArgs, mut file: TrainArgs) -> Result<Self> {
        // The file's value is a default that followed the file's `lr`.
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

    /// The settings that a file holds, over the defaults: a run's own `config.toml`, say.
    pub fn read(path: &Path) -> Result<Self> {
        Self::resolve(TrainArgs::default(), Some(path))
    }

    /// All settings as a TOML file that [`TrainConfig::read`] reads back the same. Settings that were not given
    /// are marked with [`BY_DEFAULT`], so that they do not count as given when the file is read.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for (heading, entries) in self.entries() {
            let gap = if text.is_empty() { "" } else { "\n" };
            writeln!(text, "{gap}# {heading}").expect("a string takes everything");
            for (name, value) in entries {
                if let Some(value) = value.filter(|_| !self.is_decided(name)) {
                    let name = dashed(name);
                    let mark = if self.was_given(&name) { String::new() } else { format!(" {BY_DEFAULT}") };
                    writeln!(text, "{name} = {value}{mark}").expect("a string takes everything");
                }
            }
        }
        text
    }

    /// One setting's value as it would stand in a file; `None` if it has none or no setting is called `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<toml::Value> {
        let mut all = self.entries().into_iter().flat_map(|(_, entries)| entries);
        all.find(|(key, _)| dashed(key) == name)?.1
    }
}
