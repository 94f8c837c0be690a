//! The settings that all ranks of a job must have alike: all but those whose row in the list says why they may
//! differ.

use super::plan::DECIDED;
use super::{TrainArgs, TrainConfig, dashed};

/// A setting that may differ between the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    /// Its name as a field, such as `keep_last`.
    pub name: &'static str,
    /// Why it may differ.
    pub why: &'static str,
}

/// A named value that ranks, or a run and its checkpoint, compare.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// The name: of a setting as in a file, such as `eval-every`.
    pub name: String,
    /// The value as text.
    pub value: String,
}

impl Fact {
    /// With this name and value.
    #[expect(clippy::needless_pass_by_value, reason = "takes values and references alike")]
    pub fn new(name: impl Into<String>, value: impl ToString) -> Self {
        Self { name: name.into(), value: value.to_string() }
    }
}

/// Whether a setting may differ between ranks; `name` is its key in a file, such as `keep-last`.
#[must_use]
pub fn is_own(name: &str) -> bool {
    TrainArgs::OWN.iter().any(|own| dashed(own.name) == name)
}

/// Whether a plan decides a setting; `name` is its key in a file.
#[must_use]
pub fn is_planned(name: &str) -> bool {
    DECIDED.iter().any(|decided| dashed(decided) == name)
}

impl TrainConfig {
    /// Whether a setting that ranks share changes what is trained, rather than what is measured and saved;
    /// `name` is its key in a file.
    #[must_use]
    pub fn is_training(&self, name: &str) -> bool {
        let measured = |heading: &str| heading == "Evaluation and checkpoints";
        let all = self.entries();
        let mut named = all.iter().filter(|(_, entries)| entries.iter().any(|(key, _)| dashed(key) == name));
        named.any(|(heading, _)| !measured(heading))
    }

    /// The settings that all ranks must have alike, in the order of `--help`. Those without a value are listed
    /// as `none`; those that a plan decides are left out where a plan was given, since plans are compared by
    /// what they say.
    #[must_use]
    pub fn shared(&self) -> Vec<Fact> {
        let all = self.entries().into_iter().flat_map(|(_, entries)| entries);
        let fact = |(name, value): (&str, Option<toml::Value>)| {
            Fact::new(dashed(name), value.map_or_else(|| "none".to_owned(), |value| value.to_string()))
        };
        all.filter(|(name, _)| !self.is_decided(name)).map(fact).filter(|fact| !is_own(&fact.name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_shared_unless_its_row_says_why_not() {
        let config = TrainConfig::default();
        let shared = config.shared();
        for key in TrainArgs::KEYS {
            let name = dashed(key);
            assert_ne!(shared.iter().any(|fact| fact.name == name), is_own(&name), "{name}");
        }
        assert!(TrainArgs::OWN.iter().all(|own| !own.why.is_empty()));
        // What decides the result is shared.
        for name in ["lr", "beta2", "seed", "heads", "batch", "precision", "outer-lr", "clip", "warmup"] {
            assert!(shared.iter().any(|fact| fact.name == name), "{name}");
        }
    }

    #[test]
    fn what_a_plan_decides_is_left_out_where_there_is_one() {
        let config = TrainConfig { plan: Some("plan.toml".into()), ..TrainConfig::default() };
        let shared = config.shared();
        assert!(shared.iter().all(|fact| !is_planned(&fact.name)));
        assert!(shared.iter().any(|fact| fact.name == "lr"));
    }
}
