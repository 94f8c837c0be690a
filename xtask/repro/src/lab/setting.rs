//! Settings that all arms of a comparison share: model, data, steps and links, as flags of `farflung train`.

use anyhow::{Context, Result};
use clap::{Args as _, Command, FromArgMatches as _};
use farflung::config::flags::TrainFlags;
use farflung::config::recipe::RECIPES;
use farflung::config::{TrainArgs, TrainConfig};

use super::arms::Arm;
use crate::harness::Options;

/// Flags shared by all arms, and the flags that trained the weights from which all arms start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    flags: String,
    pretraining: String,
}

/// Flags of the model. It has 34000 parameters, so that a run of a few seconds comes near the loss that it can
/// reach. Far from that loss, every method that learns more slowly per step looks bad, which is not what the
/// papers are about.
const MODEL: &str = "--layers 2 --heads 2 --dim 32 --context 64";

/// Flags for data and links. A worker has 256 tokens per step and computes 50 GFLOP/s on the virtual clock. So
/// the ratio of bytes to operations is that of a worker with 256 thousand tokens per step and 50 TFLOP/s,
/// whatever the model's size. A realistic latency would dominate the time of such a small model, so there is
/// almost none.
const COMMON: &str = "--batch 4 --workers 8 --eval-batches 64 --transport simulated --link 100mbit,1us \
                      --codec none --threads 1";

/// Flags of the pretraining. Arms start from its result, as in the papers of `DiLoCo`.
const PRETRAINING: &str = "--lr 1e-2 --min-lr 3e-3 --warmup 100";
const TRAINING: &str = "--lr 3e-3 --warmup 20";

/// Numbers of steps: of the pretraining, and of an arm.
const STEPS: (u64, u64) = (1000, 2000);
const QUICK_STEPS: (u64, u64) = (110, 100);
const LONG_STEPS: (u64, u64) = (4000, 10_000);

impl Setting {
    /// Returns the setting of all arms.
    pub(crate) fn of(options: &Options) -> Self {
        let (before, steps) = match options {
            Options { quick: true, .. } => QUICK_STEPS,
            Options { long: true, .. } => LONG_STEPS,
            _ => STEPS,
        };
        Self {
            flags: format!("{COMMON} {TRAINING} --steps {steps}"),
            pretraining: format!("{MODEL} {COMMON} {PRETRAINING} --steps {before}"),
        }
    }

    /// Returns this setting with another number of steps for each arm.
    pub(crate) fn steps(self, steps: u64) -> Self {
        Self { flags: format!("{COMMON} {TRAINING} --steps {steps}"), ..self }
    }

    /// Returns a setting in which one worker is three times slower, on a network that takes almost no time,
    /// with a fraction `share` of the steps.
    pub(crate) fn straggling(options: &Options, share: f64) -> Self {
        Self::on("straggler", options, share)
    }

    /// Returns a setting on the machines of a shipped topology, with a fraction `share` of the steps of a
    /// quick or a normal run. `--long` changes the pretraining alone.
    pub(crate) fn on(topology: &str, options: &Options, share: f64) -> Self {
        let common = COMMON.replace("--link 100mbit,1us", &format!("--topology {topology}"));
        let all = Self::of(options);
        let steps = if options.quick { QUICK_STEPS.1 } else { STEPS.1 };
        let steps = (steps as f64 * share).round();
        Self { flags: format!("{common} {TRAINING} --steps {steps}"), ..all }
    }

    /// Returns the command that trains an arm.
    pub(crate) fn command(&self, arm: &Arm) -> String {
        format!("farflung train --init-from PRETRAINED {}", self.flags_of(arm))
    }

    /// Returns the flags of a run: those of the setting that neither the arm nor its recipe sets, then the
    /// arm's.
    fn flags_of(&self, arm: &Arm) -> String {
        let pairs = |flags: &'static str| -> Vec<(&str, &str)> {
            let words: Vec<&str> = flags.split_whitespace().collect();
            words.as_chunks::<2>().0.iter().map(|&[flag, value]| (flag, value)).collect()
        };
        let own = pairs(arm.flags);
        let recipe = own.iter().find(|(flag, _)| *flag == "--recipe").map(|(_, name)| *name);
        let recipe = RECIPES.iter().find(|row| Some(row.name) == recipe);
        let by_recipe = |flag: &str| {
            recipe.is_some_and(|row| row.settings.iter().any(|(name, _)| flag == format!("--{name}")))
        };
        let taken = |flag: &str| own.iter().any(|(other, _)| *other == flag) || by_recipe(flag);
        let words: Vec<&str> = self.flags.split_whitespace().collect();
        let shared = words.as_chunks::<2>().0.iter().filter(|[flag, _]| !taken(flag));
        let shared = shared.map(|[flag, value]| format!("{flag} {value}"));
        let own = own.iter().map(|(flag, value)| format!("{flag} {value}"));
        shared.chain(own).collect::<Vec<_>>().join(" ")
    }

    /// Returns the command that trains the weights from which arms start.
    pub(crate) fn pretraining(&self) -> String {
        format!("farflung train {}", self.pretraining)
    }

    /// Returns the settings of the pretraining.
    ///
    /// Errors: those of [`Setting::config`].
    pub(super) fn pretraining_config(&self, seed: u64) -> Result<TrainConfig> {
        resolved(&format!("--seed {seed}"), &self.pretraining).context("wrong settings of the pretraining")
    }

    /// Returns the settings of an arm alone, without the shared flags.
    ///
    /// Errors: those of [`Setting::config`].
    pub(crate) fn bare(arm: &Arm) -> Result<TrainConfig> {
        resolved(arm.flags, "")
    }

    /// Returns the settings of a run, without the weights that it starts from.
    ///
    /// Errors: a flag does not exist, or a value is out of its range.
    pub(crate) fn config(&self, arm: &Arm, seed: u64) -> Result<TrainConfig> {
        resolved(&self.flags_of(arm), &format!("--seed {seed}"))
            .with_context(|| format!("wrong settings of arm `{}`", arm.name))
    }
}

/// Returns the settings of `flags`, and those of `base` for settings that `flags` does not give.
///
/// Errors: a flag does not exist, or a value is out of its range.
pub(crate) fn resolved(flags: &str, base: &str) -> Result<TrainConfig> {
    let resolved = TrainConfig::merge(parse(flags)?.or(parse(base)?), TrainArgs::default());
    resolved.with_context(|| format!("wrong settings `{flags}`"))
}

/// Parses flags as `farflung train` does.
fn parse(flags: &str) -> Result<TrainArgs> {
    let command = TrainFlags::augment_args(Command::new("train"));
    let matches = command.try_get_matches_from(["train"].into_iter().chain(flags.split_whitespace()))?;
    Ok(TrainFlags::from_arg_matches(&matches)?.args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::arms;

    #[test]
    fn an_arm_and_its_recipe_win_over_the_setting() {
        let flags = "--steps 6 --workers 8 --codec none".to_owned();
        let setting = Setting { flags, pretraining: String::new() };
        let arm = Arm { flags: "--codec int8 --workers 2", ..arms::F32 };
        let config = setting.config(&arm, 7).unwrap();
        assert_eq!((config.steps, config.workers, config.seed), (6, 2, 7));
        assert_eq!(config.codec.to_string(), "int8");
        let arm = Arm { flags: "--recipe sparseloco --sync-every 9", ..arms::F32 };
        let command =
            "farflung train --init-from PRETRAINED --steps 6 --workers 8 --recipe sparseloco --sync-every 9";
        assert_eq!(setting.command(&arm), command);
        let config = setting.config(&arm, 7).unwrap();
        assert_eq!(
            (config.sync_every, config.codec.to_string().as_str()),
            (9, "topk:64of4096/meanstd2+ef:0.95")
        );
    }

    #[test]
    fn every_arm_has_flags_that_go_together_and_a_name_of_its_own() {
        let setting = Setting::of(&Options::default());
        for (i, arm) in arms::ALL.iter().enumerate() {
            assert!(setting.config(arm, 1).is_ok(), "{}", arm.name);
            assert!(arms::ALL[..i].iter().all(|other| other.name != arm.name), "{}", arm.name);
        }
    }

    #[test]
    fn a_wrong_flag_is_refused() {
        let arm = Arm { flags: "--codec nothing-like-it", ..arms::F32 };
        assert!(Setting::of(&Options::default()).config(&arm, 1).is_err());
    }
}
