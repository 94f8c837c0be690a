//! The setting of sparse attention, which overrides the model's patterns.

use farflung_zoo::ModelSpec;

use super::TrainConfig;
use crate::{Error, Result};

/// Why texts have no prefixes where the keys of a query are not one range.
pub(crate) const NO_PREFIXES: &str =
    "a prefix is read in both directions, and the pattern does not say which keys after a query's own it has";

impl TrainConfig {
    /// Returns the model with the patterns of attention that are given.
    ///
    /// Errors: [`Error::Setting`] if the model, with them or its own, has a pattern that the objective's
    /// prefixes do not go with.
    pub(crate) fn with_attention(&self, model: ModelSpec) -> Result<ModelSpec> {
        let model = match &self.attention {
            Some(patterns) => model.with_patterns(patterns),
            None => model,
        };
        if let Some(pattern) = model.pattern_of_tiles().filter(|_| self.objective.has_prefix()) {
            let expected =
                format!("causal for a model whose attention has the pattern {pattern}: {NO_PREFIXES}");
            return Err(Error::Setting {
                field: "objective",
                value: self.objective.name().to_owned(),
                expected,
            });
        }
        model.validate()?;
        Ok(model)
    }
}
