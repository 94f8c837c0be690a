//! Recipes: names for published methods that consist of several settings.

use super::{TrainArgs, TrainConfig};

/// A row of the table of recipes.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// The name on command lines.
    pub name: &'static str,
    /// One-line description of the recipe.
    pub summary: &'static str,
    /// The publication.
    pub source: &'static str,
    /// Names of flags without the leading dashes, with their values.
    pub settings: &'static [(&'static str, &'static str)],
}

/// All recipes.
///
/// Differs from the papers: if a codec selects elements, the mean is over all workers, including those that did
/// not select an element (`DeMo` and `SparseLoCo` divide by the number that did). Chunks are of the flat buffer
/// of all parameters, not of each tensor. The learning rate of `demo` is applied outside its momentum.
pub const RECIPES: &[Recipe] = &[
    Recipe {
        name: "bytegrad",
        summary: "gradients in 8 bits",
        source: "Gan et al. 2021, BAGUA",
        settings: &[("codec", "minmax8:4096"), ("error-feedback", "false")],
    },
    Recipe {
        name: "onebit-adam",
        summary: "Adam's momentum in one bit, after a warm-up",
        source: "Tang et al. 2021, 1-bit Adam",
        settings: &[("optimizer", "onebit-adam"), ("codec", "sign")],
    },
    Recipe {
        name: "dgc",
        summary: "the largest thousandth of the gradients; momentum is accumulated before the selection, and \
                  the density falls at the start",
        source: "Lin et al. 2018, Deep Gradient Compression",
        settings: &[
            // AdamW without a first moment, since the codec accumulates momentum; the paper uses SGD.
            ("beta1", "0.0"),
            ("codec", "topk:0.001/none+dgc"),
            ("density-warmup", "100"),
            ("algorithm", "all-gather"),
        ],
    },
    Recipe {
        name: "demo",
        summary: "of each worker's own momentum, the 32 largest of 4096 DCT coefficients",
        source: "Peng et al. 2024, DeMo",
        settings: &[
            ("optimizer", "signum"),
            ("momentum", "0.0"),
            ("codec", "dct:64/topk:32of4096/none+ef:0.999"),
            ("algorithm", "all-gather"),
        ],
    },
    Recipe {
        name: "distro",
        summary: "as demo, but only the signs of the 4 largest of 4096 coefficients",
        source: "Nous Research 2024, DisTrO; Psyche",
        settings: &[
            ("optimizer", "signum"),
            ("momentum", "0.0"),
            ("codec", "dct:64/topk:4of4096/sign+ef:0.999"),
            ("algorithm", "all-gather"),
        ],
    },
    Recipe {
        name: "intellect-1",
        summary: "DiLoCo every 100 steps, in 8 bits",
        source: "Jaghouar et al. 2024, INTELLECT-1",
        settings: &[
            ("sync", "diloco"),
            ("sync-every", "100"),
            ("codec", "meanstd8"),
            ("error-feedback", "false"),
        ],
    },
    Recipe {
        name: "muloco",
        summary: "DiLoCo every 30 steps with Muon, in 2 bits with error feedback",
        source: "Therien et al. 2025, MuLoCo",
        settings: &[
            ("optimizer", "muon"),
            ("sync", "diloco"),
            ("sync-every", "30"),
            ("codec", "meanstd2+ef"),
            // All-gather encodes once: rounding the sums to 2 bits again costs as much loss as the recipe
            // saves.
            ("algorithm", "all-gather"),
        ],
    },
    Recipe {
        name: "dipaco",
        summary: "DiLoCo of four paths through two levels of two shared modules, each on its own kind of text",
        source: "Douillard et al. 2024, DiPaCo",
        settings: &[("sync", "diloco"), ("paths", "2,2")],
    },
    Recipe {
        name: "gpt-jt",
        summary: "UL2's mixture of denoisers, and CocktailSGD every 2 steps",
        source: "Together 2022, GPT-JT; Wang et al. 2023, CocktailSGD; Tay et al. 2022, UL2R",
        settings: &[
            ("objective", "ul2"),
            ("sync", "cocktail"),
            ("sync-every", "2"),
            ("codec", "rolling:10/topk:0.2/int4"),
        ],
    },
    Recipe {
        name: "sparseloco",
        summary: "DiLoCo every 30 steps, 64 of 4096 elements in 2 bits, with error feedback instead of outer \
                  momentum",
        source: "Sarfi et al. 2025, SparseLoCo",
        settings: &[
            ("sync", "diloco"),
            ("sync-every", "30"),
            ("outer-lr", "1.0"),
            ("outer-momentum", "0.0"),
            ("codec", "topk:64of4096/meanstd2+ef:0.95"),
            ("algorithm", "all-gather"),
        ],
    },
];

impl Recipe {
    /// Returns the settings of this recipe.
    pub(super) fn args(&self) -> TrainArgs {
        let mut args = TrainArgs::default();
        for (name, value) in self.settings {
            let key = TrainArgs::key(name).expect("recipes name only existing settings");
            let value = value.parse().unwrap_or_else(|_| toml::Value::String((*value).to_owned()));
            args.set(key, &value).expect("recipes have only valid values");
        }
        args
    }
}

impl TrainArgs {
    /// Returns the field name of a setting from its name on command lines.
    fn key(name: &str) -> Option<&'static str> {
        Self::KEYS.iter().copied().find(|key| super::dashed(key) == name)
    }

    /// Returns these settings. A setting that is not given here is taken from `file`, then from the recipe that
    /// the command line or the file names. A recipe of the command line also overrides the file's defaults and
    /// the settings of the file's own recipe.
    pub(super) fn with_recipe(self, mut file: Self) -> Self {
        let recipe = self.recipe.or(file.recipe);
        let Some(recipe) = recipe.map(|recipe| recipe.args()) else { return self.or(file) };
        if self.recipe.is_some() {
            for key in recipe.given() {
                if file.by_default.remove(key) {
                    file.forget(key);
                }
            }
            let old = file.recipe.map_or_else(Vec::new, |recipe| recipe.args().given_values());
            let given = file.given_values();
            old.iter().filter(|setting| given.contains(setting)).for_each(|(key, _)| file.forget(key));
        }
        self.or(file).or(recipe)
    }
}

impl TrainConfig {
    /// Returns whether all settings of the recipe were overridden with other values.
    pub(super) fn outweighs_recipe(&self) -> bool {
        let Some(recipe) = self.recipe else { return false };
        let own = Self::fill(recipe.args());
        recipe.settings.iter().all(|(name, _)| self.get(name) != own.get(name))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::choice::RecipeKind;
    use super::*;

    fn merged(given: TrainArgs, file: &str) -> TrainConfig {
        let file = TrainArgs::from_toml(file, Path::new("run.toml")).unwrap();
        TrainConfig::merge(given, file).unwrap()
    }

    fn of(name: &str) -> TrainArgs {
        let recipe = RecipeKind::all().find(|row| row.name == name);
        TrainArgs { recipe, ..TrainArgs::default() }
    }

    #[test]
    fn every_recipe_has_the_values_that_it_names_and_goes_into_a_file_and_back() {
        for row in RECIPES {
            let config = merged(of(row.name), "");
            for (name, value) in row.settings {
                let found = config.get(name).unwrap();
                let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
                assert_eq!(found, *value, "{} {name}", row.name);
            }
            assert_eq!(merged(TrainArgs::default(), &config.to_toml()), config);
            assert!(!config.outweighs_recipe());
        }
    }

    #[test]
    fn flags_and_files_win_over_a_recipe_and_a_recipe_over_defaults_of_a_file() {
        let given = TrainArgs { sync_every: Some(7), ..of("sparseloco") };
        let config = merged(given, "outer-lr = 0.5\nouter-momentum = 0.9 # by default");
        assert_eq!((config.sync_every, config.outer_lr, config.outer_momentum), (7, 0.5, 0.0));
        // The file of a `muloco` run is continued with the recipe `demo`.
        let other = merged(of("muloco"), "").to_toml();
        let config = merged(of("demo"), &other);
        assert_eq!(
            (config.optimizer.name, config.codec.to_string()),
            ("signum", "dct:64/topk:32of4096/none+ef:0.999".into())
        );
    }
}
