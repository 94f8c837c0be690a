//! Which part of a text each replica trains on, and which path a text takes.

use std::sync::Arc;

use farflung_parallel::Plan;
use farflung_zoo::data::{Reading, Split, TextRouter};
use farflung_zoo::{Sharding, Shards, ZooError};

use crate::config::choice::SamplingKind;
use crate::data_notes::plain_special_tokens;
use crate::{Error, Result, RunSettings};

/// The parts of the training data.
#[derive(Debug, Clone, Default)]
pub struct TextParts {
    /// The part of each replica, or of each path; `None` if all replicas use all data.
    pub shards: Option<Shards>,
    /// Decides which path a text takes; `None` if all replicas train one model.
    pub router: Option<Arc<TextRouter>>,
    /// The settings that say which text takes which path; empty if all replicas train one model.
    pub(super) routing: String,
}

impl TextParts {
    /// Returns the parts that the settings and the plan say. Without `shards`, the text is grouped into as many
    /// clusters as there are paths.
    ///
    /// Errors: [`Error::Setting`] for settings that cannot be combined with shards; fewer parts than replicas
    /// or paths.
    pub(super) fn of(
        config: &RunSettings,
        plan: &Plan,
        (training, reading): (&Split, &Reading),
        context: usize,
    ) -> Result<Self> {
        let paths = plan.paths();
        let (sharding, parts) = match config.shards {
            Sharding::Random if paths > 1 => (Sharding::KMeans(paths), paths),
            sharding => (sharding, if paths > 1 { paths } else { plan.replicas() }),
        };
        if sharding == Sharding::Random {
            return Ok(Self::default());
        }
        if paths > 1 && training.rows().is_some() {
            let (value, expected) =
                ("rows".to_owned(), "a text with `paths`, which takes one by its beginning");
            return Err(Error::Setting { field: "tokens", value, expected: expected.to_owned() });
        }
        let refuse = |expected: &str| {
            let (field, value) = match config.shards {
                Sharding::Random => ("paths", format!("{paths} paths, and `shards` {sharding}")),
                _ => ("shards", sharding.to_string()),
            };
            Err(Error::Setting { field, value, expected: expected.to_owned() })
        };
        if config.sampling == SamplingKind::Epochs {
            return refuse("random with `sampling` epochs, whose windows are numbered over the whole text");
        }
        if plan.context.divides() {
            return refuse(
                "random with `context-parallel` above 1: replicas that divide sequences read the same",
            );
        }
        if config.own_data {
            return refuse("random with `own-data`: each process already has its own text");
        }
        let shards = match Shards::new(sharding, training, context, parts as usize, config.seed) {
            Err(error @ ZooError::Shards { .. }) => {
                let hints: Vec<_> = plain_special_tokens(reading).map(|line| format!("; {line}")).collect();
                let fewer = if paths > 1 { "paths" } else { "replicas" };
                return refuse(&format!("another kind, or fewer {fewer}: {error}{}", hints.concat()));
            }
            shards => shards?,
        };
        let router = match &shards {
            Some(shards) if paths > 1 => {
                let prefix = config.route_tokens;
                if prefix >= context {
                    let expected = format!("less than the context, {context}: the others are predicted");
                    return Err(Error::Setting {
                        field: "route-tokens",
                        value: prefix.to_string(),
                        expected,
                    });
                }
                Some(Arc::new(TextRouter::of(shards, training, prefix)?))
            }
            _ => None,
        };
        let routing = match &router {
            Some(router) => format!("{sharding}, by {} tokens", router.prefix()),
            None => String::new(),
        };
        Ok(Self { shards, router, routing })
    }

    /// Returns the number of the part on which a replica trains.
    pub(super) fn part_of(&self, plan: &Plan, replica: usize) -> usize {
        match &self.router {
            Some(_) => plan.path(replica as u32) as usize,
            None => replica,
        }
    }
}
