//! The settings of stages that are pools of ranks.

use farflung_parallel::pipeline::Pools;
use toml::Value;

use super::TrainConfig;
use super::validate::check;
use super::value::Setting;
use crate::Result;

/// Numbers separated by commas: one per stage, or one per rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbers(pub Vec<u32>);

impl Setting for Numbers {
    fn expected() -> String {
        "numbers of at least 1, separated by commas, such as 1,2".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        let number = |n: &str| n.trim().parse().ok().filter(|&n: &u32| n > 0);
        text.split(',').map(number).collect::<Option<_>>().map(Self)
    }
    fn value(&self) -> Value {
        Value::String(self.0.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
    }
}

impl TrainConfig {
    /// Returns the pools from the settings, with equal rates if none are given; `None` without pools.
    #[must_use]
    pub fn pools(&self) -> Option<Pools> {
        let sizes = self.pools.as_ref()?.0.clone();
        Some(match &self.pool_rates {
            Some(Numbers(rates)) => Pools { sizes, rates: rates.clone() },
            None => Pools::equal(sizes),
        })
    }

    /// Returns whether stages are pools of members that come and leave.
    #[must_use]
    pub const fn is_pooled(&self) -> bool {
        self.pooled && self.stages > 1
    }

    /// Sets the numbers of stages and workers to the number of ranks in `pools`, unless other numbers were
    /// given: a run with pools is one pipeline in which each rank counts as a stage. `stages` may be given as
    /// the number of pools; it is replaced, too.
    pub(super) fn take_pools(&mut self) {
        let Some(Numbers(sizes)) = &self.pools else { return };
        let (stages, ranks) =
            (sizes.len(), sizes.iter().fold(0, |sum: usize, &n| sum.saturating_add(n as usize)));
        if !self.was_given("stages") || self.stages == stages {
            self.stages = ranks;
        }
        if !self.was_given("workers") {
            self.workers = ranks;
        }
    }

    pub(super) fn validate_pools(&self) -> Result<()> {
        if self.is_pooled() {
            let own = self.schedule_file.as_ref().map_or_else(String::new, |path| path.display().to_string());
            let expected = "no file with `pooled`, which determines the schedule";
            check("schedule-file", &own, self.schedule_file.is_none(), expected)?;
        }
        let Some(Numbers(sizes)) = &self.pools else { return Ok(()) };
        let shown =
            self.pools.as_ref().map(Setting::value).map_or_else(String::new, |value| value.to_string());
        check("pools", &shown, sizes.len() > 1, "at least two numbers: the number of ranks of each stage")?;
        let ranks: u64 = sizes.iter().map(|&n| u64::from(n)).sum();
        let expected =
            format!("{} (number of stages in `pools`) or {ranks} (number of their ranks)", sizes.len());
        check("stages", &self.stages, self.stages as u64 == ranks, &expected)?;
        let own = self.schedule_file.as_ref().map_or_else(String::new, |path| path.display().to_string());
        check(
            "schedule-file",
            &own,
            self.schedule_file.is_none(),
            "no file with `pools`, which determines the schedule",
        )?;
        if let Some(rates) = &self.pool_rates {
            let good = rates.0.len() as u64 == ranks && rates.0.iter().all(|&rate| rate <= Pools::MOST);
            let expected =
                format!("{ranks} numbers of at most {}, one for each rank of `pools`", Pools::MOST);
            check("pool-rates", &rates.value(), good, &expected)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TrainArgs;

    fn resolved(stages: Option<usize>, pools: &str, rates: Option<&str>) -> Result<TrainConfig> {
        let given = TrainArgs {
            stages,
            pools: Numbers::parse(pools),
            pool_rates: rates.and_then(Numbers::parse),
            ..TrainArgs::default()
        };
        TrainConfig::merge(given, TrainArgs::default())
    }

    #[test]
    fn pools_say_how_many_ranks_there_are() {
        for stages in [None, Some(2), Some(3)] {
            let config = resolved(stages, "1,2", Some("1,4,2")).unwrap();
            assert_eq!((config.stages, config.workers), (3, 3), "{stages:?}");
            assert_eq!(config.pools(), Some(Pools { sizes: vec![1, 2], rates: vec![1, 4, 2] }));
            // The run's own file gives the same settings.
            let mut file = TrainArgs::default();
            for (key, value) in config.to_toml().parse::<toml::Table>().unwrap() {
                file.set(&key.replace('-', "_"), &value).unwrap();
            }
            let again = TrainConfig::merge(file, TrainArgs::default()).unwrap();
            assert_eq!((again.stages, again.workers, again.pools()), (3, 3, config.pools()));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_its_name() {
        let refused = |stages, pools, rates| resolved(stages, pools, rates).unwrap_err().to_string();
        assert!(
            refused(Some(4), "1,2", None).contains("`stages` is 4, expected 2 (number of stages in `pools`)")
        );
        assert!(refused(None, "3", None).contains("`pools` is"));
        assert!(refused(None, "1,2", Some("1,2")).contains("`pool-rates` is"));
        // Rates without pools are ignored; the settings' notes say so.
        assert_eq!(resolved(None, "", Some("1,2")).unwrap().pools(), None);
        for wrong in ["", "1,0", "1,,2", "a"] {
            assert_eq!(Numbers::parse(wrong), None, "{wrong}");
        }
    }
}
