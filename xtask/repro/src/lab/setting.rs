//! What all arms of a comparison share: model, data, steps, links, as flags of `farflung train`.

use anyhow::{Context, Result};
use clap::{Args as _, Command, FromArgMatches as _};
use farflung::config::flags::TrainFlags;
use farflung::config::{TrainArgs, TrainConfig};

use super::Arm;
use crate::harness::Options;

/// Flags that an arm's own come on top of, and how the weights that all arms start from were trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    flags: String,
    pretraining: String,
}

/// The model: 34000 parameters, so that a run of a few seconds brings it near what it can learn. Far from
/// there, every method that learns more slowly per step looks bad, and none of the papers is about that.
const MODEL: &str = "--layers 2 --heads 2 --dim 32 --context 64";

/// Data and links. A worker has 256 tokens a step and computes 50 GFLOP/s on the virtual clock: bytes and
/// operations are to each other as for a worker with 256 thousand tokens and 50 TFLOP/s, whatever the model's
/// size. A latency that matters to such a model would hide everything here, so there is almost none.
const COMMON: &str = "--batch 4 --workers 8 --eval-batches 64 --transport simulated --link 100mbit,1us \
                      --codec none --threads 1";

/// Arms start where these steps of f32 end, as in the papers of `DiLoCo`: a third of the steps of an arm.
const PRETRAINING: &str = "--lr 1e-2 --min-lr 3e-3 --warmup 100";
const TRAINING: &str = "--lr 3e-3 --warmup 20";

/// Steps of pretraining and of an arm.
const STEPS: (u64, u64) = (1000, 2000);
const QUICK_STEPS: (u64, u64) = (110, 100);
const LONG_STEPS: (u64, u64) = (4000, 10_000);

/// What a closed form of bytes needs.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    /// Parameters of the model.
    pub params: f64,
    /// Ranks that average.
    pub ranks: f64,
    /// Steps between averages.
    pub every: f64,
    /// Shapes of the model's tensors.
    pub tensors: Vec<Vec<f64>>,
}

impl Setting {
    /// The setting of all arms.
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

    /// The command that trains an arm.
    pub(crate) fn command(&self, arm: &Arm) -> String {
        format!("farflung train --init-from PRETRAINED {} {}", self.flags, arm.flags).trim_end().to_owned()
    }

    /// The command that trains what arms start from.
    pub(crate) fn pretraining(&self) -> String {
        format!("farflung train {}", self.pretraining)
    }

    /// The settings of the pretraining.
    ///
    /// Errors: as [`Setting::config`].
    pub(super) fn pretraining_config(&self, seed: u64) -> Result<TrainConfig> {
        let args = parse(&format!("--seed {seed}"))?.or(parse(&self.pretraining)?);
        TrainConfig::merge(args, TrainArgs::default()).context("wrong settings of the pretraining")
    }

    /// The settings of an arm without those that all share.
    ///
    /// Errors: as [`Setting::config`].
    pub(crate) fn bare(arm: &Arm) -> Result<TrainConfig> {
        Ok(TrainConfig::merge(parse(arm.flags)?, TrainArgs::default())?)
    }

    /// The settings of a run, without the weights that it starts from.
    ///
    /// Errors: a flag that does not exist, or a value out of its range.
    pub(crate) fn config(&self, arm: &Arm, seed: u64) -> Result<TrainConfig> {
        let seed = format!("--seed {seed}");
        let args = parse(&seed)?.or(parse(arm.flags)?).or(parse(&self.flags)?);
        TrainConfig::merge(args, TrainArgs::default())
            .with_context(|| format!("wrong settings of arm `{}`", arm.name))
    }

    /// Parameters and ranks of an arm.
    pub(super) fn sizes(&self, arm: &Arm) -> Result<Sizes> {
        let config = self.config(arm, 0)?;
        let model = super::kept::model(&self.pretraining_config(0)?)?;
        let every = config.sync.every.unwrap_or(config.sync_every) as f64;
        let (params, ranks) = (model.parameters() as f64, config.workers as f64);
        let shape = |shape: Vec<usize>| shape.into_iter().map(|n| n as f64).collect();
        let tensors = model.tensors().into_iter().map(|tensor| shape(tensor.shape)).collect();
        Ok(Sizes { params, ranks, every, tensors })
    }
}

/// Flags as `farflung train` takes them. A flag may come again; the last one holds.
fn parse(flags: &str) -> Result<TrainArgs> {
    let command = TrainFlags::augment_args(Command::new("train").args_override_self(true));
    let matches = command.try_get_matches_from(["train"].into_iter().chain(flags.split_whitespace()))?;
    Ok(TrainFlags::from_arg_matches(&matches)?.args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::arms;

    #[test]
    fn an_arm_wins_over_the_setting_and_the_last_flag_over_the_first() {
        let flags = "--steps 5 --workers 8 --codec none --steps 6".to_owned();
        let setting = Setting { flags, pretraining: String::new() };
        let arm = Arm { flags: "--codec int8 --workers 2", ..arms::F32 };
        let config = setting.config(&arm, 7).unwrap();
        assert_eq!((config.steps, config.workers, config.seed), (6, 2, 7));
        assert_eq!(config.codec.to_string(), "int8");
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
