//! The settings of the optimizer: defaults that depend on the optimizer, parameters of its chain of transforms,
//! and rules by names of parameters.

use farflung_optim::local::{LocalSettings, Lookahead};
use farflung_optim::transform::MuonScale;
use farflung_optim::{Decay, LrSchedule, OptimError};
use farflung_zoo::ModelSpec;

use super::choice::{LrScheduleKind, MuonScaleKind};
use super::nearest::nearest;
use super::{RunSettings, TrainArgs, TrainConfig, check};
use crate::{Error, Result};

/// A setting whose default depends on the optimizer.
struct Follows {
    name: &'static str,
    is_given: fn(&TrainArgs) -> bool,
    forget: fn(&mut TrainArgs),
    set: fn(&mut TrainConfig, f64),
}

/// The settings for which an optimizer may have its own default.
const FOLLOWS: [Follows; 4] = [
    Follows {
        name: "beta2",
        is_given: |args| args.beta2.is_some(),
        forget: |args| args.beta2 = None,
        set: |config, value| config.beta2 = value,
    },
    Follows {
        name: "eps",
        is_given: |args| args.eps.is_some(),
        forget: |args| args.eps = None,
        set: |config, value| config.eps = value,
    },
    Follows {
        name: "momentum",
        is_given: |args| args.momentum.is_some(),
        forget: |args| args.momentum = None,
        set: |config, value| config.momentum = value,
    },
    Follows {
        name: "nesterov",
        is_given: |args| args.nesterov.is_some(),
        forget: |args| args.nesterov = None,
        set: |config, value| config.nesterov = value != 0.0,
    },
];

/// The optimizer's own defaults for settings that were not given.
pub(super) struct OptimizerDefaults(Vec<(&'static Follows, f64)>);

impl OptimizerDefaults {
    pub(super) fn fill(self, config: &mut TrainConfig) {
        self.0.into_iter().for_each(|(setting, value)| (setting.set)(config, value));
    }
}

impl TrainArgs {
    pub(super) fn optimizer_defaults(&self) -> OptimizerDefaults {
        let row = self.optimizer.unwrap_or_default();
        let open = FOLLOWS.iter().filter(|setting| !(setting.is_given)(self));
        OptimizerDefaults(open.filter_map(|setting| Some((setting, row.default_of(setting.name)?))).collect())
    }

    /// Clears values that a file marks as defaults: they may be those of another optimizer.
    pub(super) fn forget_optimizer_defaults(&mut self) {
        if self.by_default.remove("sync") {
            self.sync = None;
        }
        for setting in &FOLLOWS {
            if self.by_default.remove(setting.name) {
                (setting.forget)(self);
            }
        }
    }
}

impl RunSettings {
    /// Returns the parameters of the optimizer, for a learning-rate schedule and a number of updates per step.
    /// Replicas of optimizers with local steps average every `most_local` steps, or more often.
    pub(crate) fn local(&self, schedule: LrSchedule, updates: u64, most_local: u64) -> LocalSettings {
        let every = self.lookahead;
        LocalSettings {
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            momentum: self.momentum,
            dampening: self.dampening,
            nesterov: self.nesterov,
            rho: self.rho,
            centered: self.centered,
            lr_decay: self.lr_decay,
            final_lr: self.final_lr,
            gamma: self.gamma,
            muon_scale: match self.muon_scale {
                MuonScaleKind::MatchAdamW => MuonScale::MatchAdamW,
                MuonScaleKind::Original => MuonScale::Original,
            },
            weight_decay: self.weight_decay,
            clip: (self.clip > 0.0).then_some(self.clip),
            schedule,
            freeze: self.warm_steps().saturating_mul(updates),
            variance_doubling: self.variance_doubling.saturating_mul(updates),
            local_doubling: self.local_doubling().saturating_mul(updates),
            most_local,
            lookahead: (every > 0).then_some(Lookahead { every, alpha: self.lookahead_alpha }),
        }
    }

    /// Returns the learning-rate schedule of a run that makes `updates` updates per step.
    pub(crate) fn schedule(&self, updates: u64) -> Result<LrSchedule, OptimError> {
        let steps = self.steps * updates;
        let decay = match self.lr_schedule {
            LrScheduleKind::Constant => Decay::Constant,
            LrScheduleKind::Linear => Decay::Linear,
            LrScheduleKind::Cosine => Decay::Cosine,
            LrScheduleKind::Wsd => Decay::Wsd { steps: (self.decay_fraction * steps as f64).round() as u64 },
            LrScheduleKind::InverseSqrt => Decay::InverseSqrt,
        };
        LrSchedule::new(self.lr, self.min_lr.min(self.lr), self.warmup * updates, steps, decay)
    }
}

impl TrainConfig {
    pub(super) fn validate_optimizer(&self) -> Result<()> {
        let share = 0.0..=1.0;
        for (field, value) in [("decay-fraction", self.decay_fraction), ("dampening", self.dampening)] {
            check(field, &value, share.contains(&value), "at least 0 and at most 1")?;
        }
        check(
            "eps",
            &self.eps,
            self.eps as f32 > 0.0 && self.eps.is_finite(),
            "more than 0 as a 32-bit float",
        )?;
        let gamma = self.gamma;
        check("gamma", &gamma, gamma > 0.0 && gamma < 1.0, "more than 0 and below 1")?;
        let alpha = self.lookahead_alpha;
        check("lookahead-alpha", &alpha, alpha > 0.0 && alpha <= 1.0, "more than 0 and at most 1")
    }

    /// Checks that each rule of `group` matches a parameter of the model.
    ///
    /// Errors: [`Error::Setting`] with the first pattern that matches none, and the nearest name.
    pub(crate) fn check_groups(&self, model: &ModelSpec) -> Result<()> {
        let Some(groups) = &self.group else { return Ok(()) };
        let tensors = model.tensors();
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let Some(rule) = groups.unmatched(&names) else { return Ok(()) };
        let pattern = rule.pattern();
        let meant = nearest(pattern, names.iter().copied());
        let meant = meant.map_or_else(String::new, |name| format!("; did you mean `{name}`?"));
        let expected = format!(
            "patterns that match parameters of the model, whose names range from {} to {}{meant}",
            names[0],
            names[names.len() - 1]
        );
        Err(Error::Setting { field: "group", value: pattern.to_owned(), expected })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use farflung_optim::local::{ADABELIEF, ADAMW, LION, METHODS, MUON, RMSPROP};

    use super::*;
    use crate::config::choice::OptimizerKind;

    fn config(text: &str) -> TrainConfig {
        let file = TrainArgs::from_toml(text, Path::new("run.toml")).unwrap();
        TrainConfig::merge(TrainArgs::default(), file).unwrap()
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "defaults are exact")]
    fn defaults_follow_the_optimizer() {
        let c = config("");
        assert_eq!((c.beta2, c.eps, c.momentum, c.nesterov), (0.95, 1e-8, 0.9, false));
        assert_eq!(config("optimizer = 'lion'").beta2, 0.99);
        assert_eq!(config("optimizer = 'lion'\nbeta2 = 0.5").beta2, 0.5);
        assert_eq!(config("optimizer = 'adabelief'").eps, 1e-16);
        assert_eq!(config("optimizer = 'rmsprop'").momentum, 0.0);
        let muon = config("optimizer = 'muon'");
        assert_eq!((muon.momentum, muon.nesterov, muon.was_given("momentum")), (0.95, true, false));
        // `config.toml` of a run contains Muon's defaults. They are kept for Muon, and replaced for another
        // optimizer.
        let file = |text: &str| TrainArgs::from_toml(text, Path::new("config.toml")).unwrap();
        let again = TrainConfig::merge(TrainArgs::default(), file(&muon.to_toml())).unwrap();
        assert_eq!((again.momentum, again.nesterov), (0.95, true));
        let other = TrainArgs { optimizer: Some(OptimizerKind::of(&ADAMW)), ..TrainArgs::default() };
        let other = TrainConfig::merge(other, file(&muon.to_toml())).unwrap();
        assert_eq!((other.momentum, other.nesterov), (0.9, false));
        for row in METHODS {
            for (name, _) in row.defaults {
                assert!(FOLLOWS.iter().any(|setting| setting.name == *name), "{}: {name}", row.name);
            }
        }
        assert!([ADABELIEF, LION, MUON, RMSPROP].iter().all(|row| !row.defaults.is_empty()));
    }

    #[test]
    fn a_rule_about_nothing_is_refused_with_the_nearest_name() {
        let model = ModelSpec::preset("nano").unwrap();
        for good in ["*.bias:lr=0.1", "h.0.*:decay=0;wte.weight:lr=2"] {
            config(&format!("group = '{good}'")).check_groups(&model).unwrap();
        }
        let refused =
            |rules: &str| config(&format!("group = '{rules}'")).check_groups(&model).unwrap_err().to_string();
        let said = refused("*.bias:lr=0.1;wte.wieght:lr=1");
        assert!(said.contains("wte.wieght") && said.ends_with("did you mean `wte.weight`?"), "{said}");
        assert!(!refused("nothing like it:lr=1").contains("did you mean"));
        let file = TrainArgs::from_toml("group = '*.bias:rate=1'", Path::new("run.toml"));
        let said = file.unwrap_err().to_string();
        assert!(said.contains("`rate` is not a setting of a group"), "{said}");
    }
}
