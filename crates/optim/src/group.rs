//! Parameter groups: settings for the parameters whose names match a pattern.

use std::fmt;
use std::str::FromStr;

use farflung_tensor::Param;

/// Settings of a parameter, relative to those of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParamGroup {
    /// Factor of the learning rate.
    pub lr: f64,
    /// Weight decay; `None` means the optimizer's own.
    pub decay: Option<f64>,
}

impl ParamGroup {
    /// Returns the settings of a parameter that no rule matches: tensors of two or more dimensions have the
    /// optimizer's decay, vectors have none.
    #[must_use]
    pub fn default_of(param: &Param) -> Self {
        let matrix = param.shape.dims().len() >= 2;
        Self { lr: 1.0, decay: if matrix { None } else { Some(0.0) } }
    }
}

/// Rule such as `*.bias:lr=0.1,decay=0`: a pattern of names, and the settings of the parameters that match it.
///
/// In a pattern `*` matches any number of characters, including none, and `?` matches exactly one. `lr` is a
/// factor of the learning rate, `decay` is the weight decay.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupRule {
    pattern: String,
    lr: Option<f64>,
    decay: Option<f64>,
}

impl GroupRule {
    /// Returns the pattern.
    #[must_use]
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// Returns whether the pattern matches this parameter name.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        matches(self.pattern.as_bytes(), name.as_bytes())
    }
}

/// Returns whether a name matches a pattern: `*` is any run of bytes, `?` is one byte. The time is at most
/// proportional to the product of both lengths.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Position in the pattern after the last star, and the end of the part of the name that this star has
    // matched so far.
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, n));
                p += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => {
                let Some((behind, taken)) = star else { return false };
                star = Some((behind, taken + 1));
                (p, n) = (behind, taken + 1);
            }
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

/// Rules in order, separated by `;`. If several rules match a name, the last one that has a setting decides
/// that setting.
///
/// ```
/// use farflung_optim::Groups;
/// use farflung_tensor::{ParamLayout, Shape};
///
/// let groups: Groups = "*.bias:lr=2;h.0.*:lr=0.5,decay=0.1".parse()?;
/// let shapes = [("h.0.b.bias".to_owned(), Shape::from(4)), ("h.1.b.bias".to_owned(), Shape::from(4))];
/// let layout = ParamLayout::new(shapes);
/// let [first, second] = [0, 1].map(|i| groups.of(&layout.params()[i]));
/// assert_eq!((first.lr, first.decay), (0.5, Some(0.1)));
/// assert_eq!((second.lr, second.decay), (2.0, Some(0.0))); // vectors do not decay unless told
/// assert_eq!(groups.unmatched(&["h.1.b.bias"]).unwrap().pattern(), "h.0.*");
/// # Ok::<(), farflung_optim::GroupError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Groups {
    rules: Vec<GroupRule>,
}

/// Error in the text of [`Groups`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("group `{rule}`: {problem}")]
pub struct GroupError {
    /// Text of the rule.
    pub rule: String,
    /// What is wrong with it.
    pub problem: String,
}

impl Groups {
    /// Returns the rules in order.
    #[must_use]
    pub fn rules(&self) -> &[GroupRule] {
        &self.rules
    }

    /// Returns the settings of a parameter.
    #[must_use]
    pub fn of(&self, param: &Param) -> ParamGroup {
        let mut group = ParamGroup::default_of(param);
        for rule in self.rules.iter().filter(|rule| rule.matches(&param.name)) {
            group.lr = rule.lr.unwrap_or(group.lr);
            group.decay = rule.decay.or(group.decay);
        }
        group
    }

    /// Returns the first rule that matches none of a model's names. A chain does not treat this as an error,
    /// because it may hold only a part of the model.
    #[must_use]
    pub fn unmatched(&self, names: &[&str]) -> Option<&GroupRule> {
        self.rules.iter().find(|rule| !names.iter().any(|name| rule.matches(name)))
    }
}

impl fmt::Display for GroupRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = [("lr", self.lr), ("decay", self.decay)];
        let settings: Vec<_> =
            settings.iter().filter_map(|(key, value)| Some(format!("{key}={}", (*value)?))).collect();
        write!(f, "{}:{}", self.pattern, settings.join(","))
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules: Vec<_> = self.rules.iter().map(GroupRule::to_string).collect();
        f.write_str(&rules.join(";"))
    }
}

impl FromStr for GroupRule {
    type Err = GroupError;

    fn from_str(text: &str) -> Result<Self, GroupError> {
        let wrong = |problem: &str| GroupError { rule: text.to_owned(), problem: problem.to_owned() };
        let (pattern, settings) = text
            .rsplit_once(':')
            .ok_or_else(|| wrong("expected PATTERN:lr=FACTOR,decay=X, with lr, decay or both"))?;
        if pattern.is_empty() {
            return Err(wrong("expected a pattern of parameter names before `:`"));
        }
        let mut rule = Self { pattern: pattern.to_owned(), lr: None, decay: None };
        for setting in settings.split(',') {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            let place = match key.trim() {
                "lr" => &mut rule.lr,
                "decay" => &mut rule.decay,
                key => {
                    return Err(wrong(&format!("`{key}` is not a setting of a group, expected lr or decay")));
                }
            };
            let number = value.trim().parse().ok().filter(|x: &f64| *x >= 0.0 && x.is_finite());
            let number = number.ok_or_else(|| {
                wrong(&format!("`{}` is `{value}`, expected a number of at least 0", key.trim()))
            })?;
            if place.replace(number).is_some() {
                return Err(wrong(&format!("`{}` is given twice", key.trim())));
            }
        }
        Ok(rule)
    }
}

impl FromStr for Groups {
    type Err = GroupError;

    fn from_str(text: &str) -> Result<Self, GroupError> {
        let rules = text.split(';').map(|rule| rule.trim().parse()).collect::<Result<_, _>>()?;
        Ok(Self { rules })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, fits) in [
            ("*", "", true),
            ("*", "wte.weight", true),
            ("*.bias", "h.0.mlp.c_fc.bias", true),
            ("*.bias", "h.0.mlp.c_fc.bias.x", false),
            ("h.0.*", "h.0.ln_1.weight", true),
            ("h.0.*", "h.01.ln_1.weight", false),
            ("h.?.ln_?.weight", "h.3.ln_2.weight", true),
            ("h.?.ln_?.weight", "h.13.ln_2.weight", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b*", "xxbxxaxx", false),
            ("a*a", "a", false),
            ("", "", true),
            ("", "a", false),
            ("wte", "wte.weight", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
        // Many stars do not take exponential time.
        assert!(!matches("*a".repeat(40).as_bytes(), "a".repeat(39).as_bytes()));
    }

    #[test]
    fn rules_are_read_and_printed() {
        for text in ["*.bias:lr=0.1,decay=0", "a:lr=2;b*:decay=0.5"] {
            let groups: Groups = text.parse().unwrap();
            assert_eq!(groups.to_string(), text);
        }
        for (text, said) in [
            ("", "group ``: expected PATTERN:lr=FACTOR,decay=X, with lr, decay or both"),
            ("a", "group `a`: expected PATTERN:lr=FACTOR,decay=X, with lr, decay or both"),
            (":lr=1", "group `:lr=1`: expected a pattern of parameter names before `:`"),
            ("a:", "group `a:`: `` is not a setting of a group, expected lr or decay"),
            ("a:rate=1", "group `a:rate=1`: `rate` is not a setting of a group, expected lr or decay"),
            ("a:lr=-1", "group `a:lr=-1`: `lr` is `-1`, expected a number of at least 0"),
            ("a:lr=inf", "group `a:lr=inf`: `lr` is `inf`, expected a number of at least 0"),
            ("a:decay", "group `a:decay`: `decay` is ``, expected a number of at least 0"),
            ("a:lr=1,lr=2", "group `a:lr=1,lr=2`: `lr` is given twice"),
            ("a:lr=1;;", "group ``: expected PATTERN:lr=FACTOR,decay=X, with lr, decay or both"),
        ] {
            assert_eq!(text.parse::<Groups>().unwrap_err().to_string(), said);
        }
    }
}
