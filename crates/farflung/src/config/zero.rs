//! The settings of what replicas divide of the state that all of them would hold.

use toml::Value;

use super::TrainConfig;
use super::choice::StatePlace;
use super::validate::check;
use super::value::Setting;
use crate::Result;

/// Shares separated by commas, of which some may be 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weights(pub Vec<u32>);

impl Setting for Weights {
    fn expected() -> String {
        "numbers separated by commas, at least one above 0, such as 3,1".to_owned()
    }

    fn parse(text: &str) -> Option<Self> {
        let weights = text.split(',').map(|n| n.trim().parse().ok()).collect::<Option<Vec<u32>>>()?;
        weights.iter().any(|&weight| weight > 0).then_some(Self(weights))
    }

    fn value(&self) -> Value {
        Value::String(self.0.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
    }
}

/// The share of the optimizer's state that a replica keeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShareOfState {
    own: u128,
    all: u128,
}

impl ShareOfState {
    /// Returns the bytes that the replica keeps of all.
    pub(crate) const fn of(self, bytes: u128) -> u128 {
        bytes.saturating_mul(self.own).div_ceil(self.all)
    }
}

impl TrainConfig {
    pub(super) fn validate_zero(&self) -> Result<()> {
        check("zero", &self.zero, self.zero <= 3, "0 to 3")?;
        let expected = "0 with `state` disk: the trial steps would be written over the run's state";
        let trials = self.state == StatePlace::Disk && self.tune > 0;
        check("tune", &self.tune, !trials, expected)
    }

    /// Returns whether replicas divide gradients, too.
    pub(crate) const fn divides_gradients(&self) -> bool {
        self.zero > 1
    }

    /// Returns whether replicas divide weights, too.
    pub(crate) const fn divides_weights(&self) -> bool {
        self.zero > 2
    }

    /// Returns the share of the optimizer's state that a replica of several keeps.
    pub(crate) fn share_of_state(&self, replica: usize, replicas: usize) -> ShareOfState {
        let weights = match &self.zero_weights {
            _ if self.zero == 0 => return ShareOfState { own: 1, all: 1 },
            Some(Weights(weights)) => weights.clone(),
            None => vec![1; replicas],
        };
        let all = weights.iter().map(|&weight| u128::from(weight)).sum::<u128>().max(1);
        ShareOfState { own: weights.get(replica).map_or(all, |&weight| weight.into()), all }
    }

    /// Returns the weights by which replicas divide the optimizer's state; none if they divide it equally.
    pub(crate) fn zero_weights(&self) -> Vec<u32> {
        let weights = self.zero_weights.as_ref().filter(|_| self.zero > 0);
        weights.map_or_else(Vec::new, |weights| weights.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_may_be_zero_but_not_all() {
        assert_eq!(Weights::parse("3, 0,1"), Some(Weights(vec![3, 0, 1])));
        for text in ["", "0", "0,0", "1,-1", "1,,2", "4294967296", "a"] {
            assert_eq!(Weights::parse(text), None, "{text}");
        }
    }
}
