//! The settings that must be the same on all ranks of a job: all except those whose row in the list says why
//! they may differ.

use super::{TrainArgs, TrainConfig, dashed};

/// A setting that may differ between the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerRankSetting {
    /// The setting's field name, such as `keep_last`.
    pub name: &'static str,
    /// The reason why the setting may differ.
    pub why: &'static str,
}

/// A named value that is compared between ranks, or between a run and its checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedValue {
    /// The name; for a setting, its key in a file, such as `eval-every`.
    pub name: String,
    /// The value as text.
    pub value: String,
}

impl NamedValue {
    /// Makes a named value; `value` is stored as text.
    #[expect(clippy::needless_pass_by_value, reason = "takes values and references alike")]
    pub fn new(name: impl Into<String>, value: impl ToString) -> Self {
        Self { name: name.into(), value: value.to_string() }
    }
}

/// Returns whether a setting may differ between ranks; `name` is its key in a file, such as `keep-last`.
#[must_use]
pub fn is_own(name: &str) -> bool {
    TrainArgs::PER_RANK.iter().any(|own| dashed(own.name) == name)
}

/// Returns whether a plan decides a setting; `name` is its key in a file.
#[must_use]
pub fn is_planned(name: &str) -> bool {
    TrainArgs::DECIDED.iter().any(|decided| dashed(decided) == name)
}

impl TrainConfig {
    /// Returns whether the shared setting with the key `name` changes the training itself. `false` if it
    /// changes only measurements or checkpoints.
    #[must_use]
    pub fn is_training(&self, name: &str) -> bool {
        let measured = |heading: &str| heading == "Evaluation and checkpoints";
        let all = self.entries();
        let mut named = all.iter().filter(|(_, entries)| entries.iter().any(|(key, _)| dashed(key) == name));
        named.any(|(heading, _)| !measured(heading))
    }

    /// Returns the settings that must be the same on all ranks, in the order of `--help`. A setting without a
    /// value has the value `none`. With a plan, the settings that it decides are left out, since the plans
    /// themselves are compared.
    #[must_use]
    pub fn shared(&self) -> Vec<NamedValue> {
        let all = self.entries().into_iter().flat_map(|(_, entries)| entries);
        let named_value = |(name, value): (&str, Option<toml::Value>)| {
            NamedValue::new(dashed(name), value.map_or_else(|| "none".to_owned(), |value| value.to_string()))
        };
        all.filter(|(name, _)| !self.is_decided(name))
            .map(named_value)
            .filter(|value| !is_own(&value.name))
            .collect()
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
            assert_ne!(shared.iter().any(|value| value.name == name), is_own(&name), "{name}");
        }
        assert!(TrainArgs::PER_RANK.iter().all(|own| !own.why.is_empty()));
        // Settings that decide the result must be the same on all ranks.
        for name in ["lr", "beta2", "seed", "heads", "batch", "precision", "outer-lr", "clip", "warmup"] {
            assert!(shared.iter().any(|value| value.name == name), "{name}");
        }
    }

    #[test]
    fn what_a_plan_decides_is_left_out_where_there_is_one() {
        let config = TrainConfig { plan: Some("plan.toml".into()), ..TrainConfig::default() };
        let shared = config.shared();
        assert!(shared.iter().all(|value| !is_planned(&value.name)));
        assert!(shared.iter().any(|value| value.name == "lr"));
    }
}
