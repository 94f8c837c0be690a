//! Settings beside a plan: a setting that the plan decides must not be given.

use super::{TrainArgs, TrainConfig, dashed};
use crate::{Error, Result};

impl TrainArgs {
    /// If there is a plan, checks that no setting is given that the plan decides.
    ///
    /// Errors: [`Error::Setting`] with the first setting that the plan decides.
    pub(super) fn beside_plan(&self) -> Result<()> {
        if self.plan.is_none() {
            return Ok(());
        }
        match self.given_values().into_iter().find(|(name, _)| Self::DECIDED.contains(name)) {
            None => Ok(()),
            Some((field, value)) => Err(Error::Setting {
                field,
                value,
                expected: "no value with `plan`, which sets it".to_owned(),
            }),
        }
    }
}

impl TrainConfig {
    /// Returns whether there is a plan that decides this setting.
    pub(super) fn is_decided(&self, name: &str) -> bool {
        self.plan.is_some() && TrainArgs::DECIDED.iter().any(|decided| dashed(decided) == dashed(name))
    }
}
