//! A run on rows of tokens (`--tokens`): each step has all of them, and only their targets count.

use std::path::Path;

use farflung_parallel::Plan;
use farflung_zoo::spec::Positions;
use farflung_zoo::{ModelSpec, Objective, TokenRows};

use super::planned;
use crate::{Error, Result, TrainConfig};

impl TrainConfig {
    /// Reads the rows of `tokens`, if the settings give some.
    ///
    /// Errors: a file that cannot be read or is not valid; settings that do not go with rows.
    pub(super) fn token_rows(&self) -> Result<Option<TokenRows>> {
        let Some(path) = &self.tokens else { return Ok(None) };
        let refused = [
            ("data", self.data.is_some(), "not given beside `tokens`, which are the data"),
            ("own-data", self.own_data, "false, since all ranks have the rows of `tokens`"),
        ];
        for (field, is_wrong, expected) in refused {
            if is_wrong {
                let value =
                    self.data.as_deref().map_or_else(|| "true".to_owned(), |p| p.display().to_string());
                return Err(Error::Setting { field, value, expected: expected.to_owned() });
            }
        }
        Ok(Some(rows_of(path, self.document_mask, self.objective)?))
    }

    /// Returns the settings with a batch that lets a step of `world` ranks have all rows, and sequences as long
    /// as the rows if the model has no table of positions; settings that are given stay as they are.
    ///
    /// Errors: a number of ranks that makes no whole replicas.
    pub(super) fn fitting(mut self, rows: &TokenRows, model: &ModelSpec, world: usize) -> Self {
        if model.positions == Positions::None && !self.was_given("context") {
            self.context = Some(rows.length());
        }
        if self.plan.is_none() && !self.was_given("batch") {
            let replicas = if self.is_pooled() { 1 } else { self.readers_of(world).max(1) };
            self.batch = rows.count().div_ceil(replicas * planned::microbatches(&self).max(1));
        }
        self
    }
}

/// Reads rows of tokens, with where their documents begin or their prefixes end if the settings need that.
///
/// Errors: those of the file; [`Error::Setting`] for an objective that makes its sequences itself.
pub fn rows_of(path: &Path, document_mask: bool, objective: Objective) -> Result<TokenRows> {
    let wrong = |field, value: String, expected: &str| {
        Err(Error::Setting { field, value, expected: expected.to_owned() })
    };
    Ok(match (objective, document_mask) {
        (Objective::Causal, true) => TokenRows::read_packed(path)?,
        (Objective::Causal, false) => TokenRows::read(path)?,
        (Objective::PrefixLm, false) => TokenRows::read_prefixed(path)?,
        (Objective::PrefixLm, true) => {
            let expected = "false with the objective prefix-lm: rows with prefixes are one document each";
            return wrong("document-mask", "true".to_owned(), expected);
        }
        (Objective::Ul2, _) => {
            let expected = "causal or prefix-lm with `tokens`: ul2 makes its sequences of a text";
            return wrong("objective", objective.to_string(), expected);
        }
    })
}

/// Checks that a step of the plan has room for all rows.
///
/// Errors: [`Error::Setting`] with the batch that has.
pub(super) fn fits(rows: &TokenRows, plan: &Plan) -> Result<()> {
    let (has, needs) = (plan.sequences(), rows.count() as u64);
    if has >= needs {
        return Ok(());
    }
    let least = needs.div_ceil(plan.all_microbatches().max(1));
    let expected = format!("at least {least}: a step must have all {needs} rows of `tokens`, and has {has}");
    Err(Error::Setting { field: "batch", value: plan.batch.to_string(), expected })
}
