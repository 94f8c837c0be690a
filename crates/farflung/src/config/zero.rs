//! The settings of what replicas divide of the state that all of them would hold.

use std::fmt;
use std::str::FromStr;

use farflung_compress::CodecSpec;
use farflung_optim::ShardCoder;
use farflung_parallel::plan::NO_CODEC;
use toml::Value;

use super::TrainConfig;
use super::choice::StatePlace;
use super::validate::check;
use super::value::Setting;

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

/// The codecs of weights and of gradients on their way between replicas that divide weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZeroCodecs {
    /// That of weights; `None` for plain f32.
    pub weights: Option<CodecSpec>,
    /// That of gradients.
    pub gradients: Option<CodecSpec>,
}

impl ZeroCodecs {
    /// What a text must be.
    pub(crate) const EXPECTED: &str = "none, or the names of two codecs that remember and select nothing, of weights \
                                       and of gradients, such as int8,int4";

    fn codec(name: &str) -> Result<Option<CodecSpec>, &'static str> {
        match name.trim().parse::<CodecSpec>() {
            Ok(spec) if spec == CodecSpec::default() => Ok(None),
            Ok(spec) if ShardCoder::takes(&spec) => Ok(Some(spec)),
            _ => Err(Self::EXPECTED),
        }
    }
}

impl FromStr for ZeroCodecs {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim() == NO_CODEC {
            return Ok(Self::default());
        }
        let (weights, gradients) = text.split_once(',').ok_or(Self::EXPECTED)?;
        Ok(Self { weights: Self::codec(weights)?, gradients: Self::codec(gradients)? })
    }
}

impl fmt::Display for ZeroCodecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::default() {
            return f.write_str(NO_CODEC);
        }
        let name = |codec: Option<CodecSpec>| codec.unwrap_or_default();
        write!(f, "{},{}", name(self.weights), name(self.gradients))
    }
}

impl Setting for ZeroCodecs {
    fn expected() -> String {
        Self::EXPECTED.to_owned()
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn value(&self) -> Value {
        Value::String(self.to_string())
    }
}

/// Inside which replicas divide weights once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroWithin {
    /// Nowhere.
    #[default]
    No,
    /// Inside the regions of the links.
    Region,
    /// Inside groups of this many neighbours.
    Neighbours(u32),
}

impl Setting for ZeroWithin {
    fn expected() -> String {
        "no, region, or a number of neighbouring replicas of at least 2".to_owned()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "no" => Some(Self::No),
            "region" => Some(Self::Region),
            number => number.parse().ok().filter(|&n| n > 1).map(Self::Neighbours),
        }
    }

    fn value(&self) -> Value {
        Value::String(match self {
            Self::No => "no".to_owned(),
            Self::Region => "region".to_owned(),
            Self::Neighbours(n) => n.to_string(),
        })
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
    pub(super) fn validate_zero(&self) -> crate::Result<()> {
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
    fn two_codecs_of_fixed_rate_encode_what_is_divided() {
        for text in ["none", "int8,int4", "none,int4", "bf16,none", "int8:64,e4m3"] {
            assert_eq!(ZeroCodecs::parse(text).unwrap().to_string(), text, "{text}");
        }
        for text in ["int8", "int8,int4,int2", "int8+ef,int4", "topk:0.1,int4", "", "int8,x"] {
            assert_eq!(ZeroCodecs::parse(text), None, "{text}");
        }
        assert_eq!(["no", "region", "4"].map(|text| ZeroWithin::parse(text).is_some()), [true; 3]);
        assert_eq!(["0", "1", "yes", "-2"].map(|text| ZeroWithin::parse(text).is_some()), [false; 4]);
    }

    #[test]
    fn shares_may_be_zero_but_not_all() {
        assert_eq!(Weights::parse("3, 0,1"), Some(Weights(vec![3, 0, 1])));
        for text in ["", "0", "0,0", "1,-1", "1,,2", "4294967296", "a"] {
            assert_eq!(Weights::parse(text), None, "{text}");
        }
    }
}
