//! The setting for the number of local steps of each replica between two averages.

use toml::Value;

use super::value::Setting;

/// Number of local steps of each replica per `--sync-every` steps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LocalStepsKind {
    /// All replicas do all steps.
    #[default]
    Equal,
    /// Each replica does the number of steps that its machines can compute while the fastest replica does all
    /// steps.
    BySpeed,
    /// Explicit numbers, by replica.
    Each(Vec<u32>),
}

impl LocalStepsKind {
    /// Returns the number of local steps of each replica, for a plan with `every` steps between averages.
    /// `speeds` are local steps per second by replica. Empty for [`Self::Equal`].
    #[must_use]
    pub fn of(&self, every: u32, speeds: &[f64]) -> Vec<u32> {
        match self {
            Self::Equal => Vec::new(),
            Self::Each(steps) => steps.clone(),
            Self::BySpeed => {
                let fastest = speeds.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
                // The addition of 1e-6 prevents that rounding errors of the speeds cost a step.
                let steps = |speed: &f64| (f64::from(every) * speed / fastest + 1e-6).floor() as u32;
                speeds.iter().map(|speed| steps(speed).clamp(1, every)).collect()
            }
        }
    }
}

impl Setting for LocalStepsKind {
    fn expected() -> String {
        "equal, by-speed, or a number for each replica, separated by commas, such as 30,30,10".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        match text {
            "equal" => Some(Self::Equal),
            "by-speed" => Some(Self::BySpeed),
            numbers => {
                numbers.split(',').map(|n| n.trim().parse().ok()).collect::<Option<_>>().map(Self::Each)
            }
        }
    }
    fn value(&self) -> Value {
        Value::String(match self {
            Self::Equal => "equal".to_owned(),
            Self::BySpeed => "by-speed".to_owned(),
            Self::Each(steps) => steps.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_speeds() {
        // floor(H v / v_max).
        let steps = LocalStepsKind::BySpeed.of(50, &[1.0, 0.8, 0.5, 0.33]);
        assert_eq!(steps, [50, 40, 25, 16]);
        assert_eq!(LocalStepsKind::BySpeed.of(20, &[1e-9, 7.0]), [1, 20]);
        assert_eq!(LocalStepsKind::Equal.of(20, &[1.0, 0.5]), Vec::<u32>::new());
        for text in ["equal", "by-speed", "30,30,10", "5"] {
            let read = LocalStepsKind::parse(text).unwrap();
            assert_eq!(read.value(), Value::String(text.to_owned()));
        }
        for wrong in ["", "fast", "3,,4", "-1", "3,x"] {
            assert_eq!(LocalStepsKind::parse(wrong), None, "{wrong}");
        }
    }
}
