//! Examples to learn answers from, in the rows that a run trains on.

use std::sync::Arc;

use farflung_zoo::data::{ExampleRows, LossOn, Packing, has_examples, is_file_of_examples};
use farflung_zoo::{Objective, Sampler, Shard, Sharding, Split, ZooError};

use super::bound_plan::BoundPlan;
use crate::config::choice::packing_of;
use crate::data_notes::ExampleCounts;
use crate::{Error, Result, RunSettings};

/// The rows of both parts of the data.
#[derive(Debug, Clone)]
pub struct ExampleSets {
    training: Arc<ExampleRows>,
    held_out: Arc<ExampleRows>,
}

impl RunSettings {
    /// Returns whether the data is a file of examples, by its name.
    pub(crate) fn reads_lines(&self) -> bool {
        self.data.as_deref().is_some_and(is_file_of_examples)
    }

    /// Returns whether the data is examples, by the names of its files.
    pub(crate) fn reads_examples(&self) -> bool {
        self.data.as_deref().is_some_and(has_examples)
    }
}

/// Puts the examples of a part of the data into rows.
///
/// Errors: the objective is one that makes its sequences of a text; there is no target.
pub fn rows_of_examples(
    split: &Split,
    length: usize,
    packing: Packing,
    (objective, loss_on): (Objective, LossOn),
) -> Result<Arc<ExampleRows>> {
    if objective.has_prefix() && loss_on == LossOn::All {
        let expected =
            format!("answers with the objective {objective}: the tokens before an answer are the prefix");
        return Err(Error::Setting { field: "loss-on", value: loss_on.name().to_owned(), expected });
    }
    if objective == Objective::Ul2 {
        let expected = "causal or prefix-lm with examples: ul2 makes its sequences of a text".to_owned();
        return Err(Error::Setting { field: "objective", value: objective.to_string(), expected });
    }
    if split.is_empty() {
        let (value, expected) = ("a single example".to_owned(), "at least two: one is held out".to_owned());
        return Err(Error::Setting { field: "data", value, expected });
    }
    match ExampleRows::new(split.clone(), length, packing, objective.has_prefix()) {
        Ok(rows) => Ok(Arc::new(rows)),
        Err(ZooError::TooShort { .. }) => {
            let value = format!("such that the {} part has no target", split.name());
            let expected = format!("examples with a token of an answer among their first {length} tokens");
            Err(Error::Setting { field: "data", value, expected })
        }
        Err(error) => Err(error.into()),
    }
}

impl ExampleSets {
    /// Returns the rows, if the data is examples.
    ///
    /// Errors: those of [`rows_of_examples`] and [`ExampleSets::check`].
    pub(super) fn of(
        config: &RunSettings,
        plan: &BoundPlan,
        [training, held_out]: [&Split; 2],
        context: usize,
    ) -> Result<Option<Self>> {
        if !training.has_examples() {
            return Ok(None);
        }
        let rows = |split| {
            let learnt = (config.objective, config.loss_on);
            rows_of_examples(split, context, packing_of(config.packing), learnt)
        };
        let this = Self { training: rows(training)?, held_out: rows(held_out)? };
        this.check(config, plan)?;
        Ok(Some(this))
    }

    /// Checks that settings and a plan go with examples, whose steps have different numbers of targets.
    ///
    /// Errors: [`Error::Setting`] with the reason.
    pub(super) fn check(&self, config: &RunSettings, plan: &BoundPlan) -> Result<()> {
        let refuse = |field, value: String, expected: &str| {
            let expected = format!("{expected}, since the data is examples");
            Err(Error::Setting { field, value, expected })
        };
        let method = plan.outermost().method;
        if !method.changing_weights {
            let known = farflung_optim::sync::METHODS.iter().filter(|row| row.changing_weights);
            let names: Vec<&str> = known.map(|row| row.name).collect();
            let expected = format!("{}, which take different numbers of targets", names.join(", "));
            return refuse("sync", method.name.to_owned(), &expected);
        }
        if config.own_data {
            return refuse("own-data", "true".to_owned(), "false: all ranks count the targets of all others");
        }
        if config.shards != Sharding::Random {
            return refuse("shards", config.shards.to_string(), "random: all replicas draw from all rows");
        }
        if plan.paths() > 1 {
            return refuse("paths", plan.paths().to_string(), "none: paths train on parts of a text");
        }
        let (lanes, rows) = (lanes(plan), self.training.count());
        if rows as u64 >= lanes {
            return Ok(());
        }
        let value = format!("such that a step takes {lanes} rows of examples");
        refuse("batch", value, &format!("at most {rows} rows, as many as there are"))
    }

    /// Returns the sampler of training: the same for all replicas.
    pub(super) fn sampler(&self, seed: u64, plan: &BoundPlan) -> Result<Sampler, ZooError> {
        let shard = Shard::whole(plan.batch as usize);
        Sampler::examples(Arc::clone(&self.training), seed, shard, lanes(plan))
    }

    /// Returns the sampler of evaluations.
    pub(super) fn evaluation(&self, shard: Shard, windows: usize) -> Result<Sampler, ZooError> {
        Sampler::evaluation_of_examples(Arc::clone(&self.held_out), shard, windows)
    }

    /// Returns what is told of the rows to train on.
    pub(super) fn counts(&self) -> ExampleCounts {
        ExampleCounts::of(&self.training)
    }
}

/// Returns into how many lanes the rows are divided: one, unless a codec stores what it sent of a row, on the
/// rank that had it.
fn lanes(plan: &BoundPlan) -> u64 {
    let remembers = plan.links().iter().any(|links| links.forward.remembers() || links.backward.remembers());
    if remembers { plan.sequences() } else { 1 }
}
