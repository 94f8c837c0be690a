//! Changes of a topology file as typed by a user: one machine more or fewer, a machine or a link faster or
//! slower.

use std::fmt;
use std::str::FromStr;

use farflung_base::Bandwidth;
use farflung_parallel::{Cluster, Plan, Speed};

use crate::{Error, Result};

/// The accepted forms, for error messages.
const FORM: &str = "`add:MACHINE`, `drop:MACHINE`, `MACHINE*FACTOR`, or `A:B*FACTOR` for a link of the file";

/// A change of a file.
#[derive(Debug, Clone, PartialEq)]
pub enum FileChange {
    /// Adds a machine equal to the machine of this name, with the same links.
    Add(String),
    /// Removes one machine of this name.
    Drop(String),
    /// Multiplies a machine's speed by a factor.
    Machine(String, Factor),
    /// Multiplies the bandwidth of the link between these two by a factor; of the links inside a region if both
    /// names are that region.
    Link([String; 2], Factor),
}

/// A factor that is above 0 and finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factor(f64);

impl Factor {
    fn of(self, value: u64) -> u64 {
        // The conversion to u64 saturates.
        ((value as f64 * self.0).round() as u64).max(1)
    }
}

impl FromStr for FileChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected {FORM}");
        let Some((name, factor)) = text.rsplit_once('*') else {
            return match text.split_once(':') {
                Some(("add", name)) if !name.is_empty() => Ok(Self::Add(name.to_owned())),
                Some(("drop", name)) if !name.is_empty() => Ok(Self::Drop(name.to_owned())),
                _ => Err(wrong()),
            };
        };
        let factor: f64 = factor.parse().map_err(|_| wrong())?;
        if !(factor > 0.0 && factor.is_finite()) {
            return Err("expected a factor above 0".to_owned());
        }
        let factor = Factor(factor);
        Ok(match name.split_once(':') {
            Some((a, b)) => Self::Link([a.to_owned(), b.to_owned()], factor),
            None => Self::Machine(name.to_owned(), factor),
        })
    }
}

impl fmt::Display for FileChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add(name) => write!(f, "one more machine like `{name}`"),
            Self::Drop(name) => write!(f, "one machine `{name}` fewer"),
            Self::Machine(name, Factor(factor)) => write!(f, "`{name}` {factor} times as fast"),
            Self::Link([a, b], Factor(factor)) if a == b => {
                write!(f, "links inside `{a}` {factor} times as fast")
            }
            Self::Link([a, b], Factor(factor)) => write!(f, "the link `{a}` - `{b}` {factor} times as fast"),
        }
    }
}

impl FileChange {
    /// Applies the change to a file.
    ///
    /// Errors: a name that the file does not have, with the names that it has; those of [`Cluster::check`], for
    /// example if no machine is left.
    pub fn apply(&self, cluster: &Cluster) -> Result<Cluster> {
        let mut changed = cluster.clone();
        match self {
            Self::Add(name) => {
                let device = &mut changed.devices[machine(cluster, name)?];
                device.count = device.count.saturating_add(1);
                changed.check()?;
                // Two equal machines need a link between them.
                changed.topology()?;
            }
            Self::Drop(name) => {
                let at = machine(cluster, name)?;
                changed.devices[at].count -= 1;
                if changed.devices[at].count == 0 {
                    changed.devices.remove(at);
                    changed.links.retain(|link| !link.ends.contains(name));
                }
                changed.check()?;
            }
            Self::Machine(name, factor) => {
                let speed = &mut changed.devices[machine(cluster, name)?].speed;
                *speed = match *speed {
                    Speed::Flops(rate) => Speed::Flops(factor.of(rate)),
                    Speed::TokensPerSecond(rate) => Speed::TokensPerSecond(factor.of(rate)),
                };
            }
            Self::Link(ends, factor) => {
                let rate = link(&mut changed, ends).ok_or_else(|| no_link(cluster, ends))?;
                *rate = Bandwidth(factor.of(rate.0));
            }
        }
        Ok(changed)
    }
}

/// Renames the machines of a plan for a changed file, in which another count of a machine changes its name;
/// `None` if one of them is gone.
#[must_use]
pub fn renamed(plan: &Plan, changed: &Cluster) -> Option<Plan> {
    let names = changed.rank_names();
    let of = |name: &String| {
        let single = name.strip_suffix(".0").map(ToOwned::to_owned);
        [Some(name.clone()), Some(format!("{name}.0")), single]
            .into_iter()
            .flatten()
            .find(|name| names.contains(name))
    };
    let machines = plan.machines.iter().map(of).collect::<Option<Vec<_>>>()?;
    Some(Plan { machines, ..plan.clone() })
}

/// Returns the index of a machine by its name in the file.
fn machine(cluster: &Cluster, name: &str) -> Result<usize> {
    cluster.devices.iter().position(|device| device.name == name).ok_or_else(|| {
        let known: Vec<String> = cluster.devices.iter().map(|device| format!("`{}`", device.name)).collect();
        refused(name, format!("a machine of the file: {}", known.join(", ")))
    })
}

/// Returns the bandwidth of a link in the file.
fn link<'a>(cluster: &'a mut Cluster, [a, b]: &[String; 2]) -> Option<&'a mut Bandwidth> {
    let inside = cluster.regions.iter().position(|r| a == b && r.name == *a && r.inside.is_some());
    if let Some(at) = inside {
        return cluster.regions[at].inside.as_mut().map(|link| &mut link.bandwidth);
    }
    let joins = |[x, y]: &[String; 2]| (x == a && y == b) || (x == b && y == a);
    cluster.links.iter_mut().find(|link| joins(&link.ends)).map(|between| &mut between.link.bandwidth)
}

fn no_link(cluster: &Cluster, [a, b]: &[String; 2]) -> Error {
    let inside = cluster.regions.iter().filter(|region| region.inside.is_some());
    let known: Vec<String> = inside
        .map(|region| format!("`{0}:{0}`", region.name))
        .chain(cluster.links.iter().map(|link| format!("`{}:{}`", link.ends[0], link.ends[1])))
        .collect();
    let known = if known.is_empty() { "the file has none".to_owned() } else { known.join(", ") };
    refused(&format!("{a}:{b}"), format!("a link of the file: {known}"))
}

fn refused(value: &str, expected: String) -> Error {
    Error::Setting { field: "what-if", value: value.to_owned(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
default = "100mbit,10ms"
[[region]]
name = "here"
inside = "10gbit,1ms"
[[device]]
name = "a"
count = 2
flops = "10 GFLOPS"
region = "here"
[[device]]
name = "b"
tokens_per_second = 7
[[link]]
between = ["here", "b"]
link = "1gbit,5ms"
"#;

    fn changed(change: &str) -> Result<Cluster> {
        change.parse::<FileChange>().unwrap().apply(&FILE.parse().unwrap())
    }

    #[test]
    fn changes_are_those_of_the_file() {
        assert_eq!(changed("add:a").unwrap().devices[0].count, 3);
        let without = changed("drop:b").unwrap();
        assert_eq!((without.devices.len(), without.links.len()), (1, 0), "its links go with it");
        assert_eq!(changed("drop:a").unwrap().devices[0].count, 1);
        assert_eq!(changed("a*2.5").unwrap().devices[0].speed, Speed::Flops(25_000_000_000));
        assert_eq!(changed("b*0.01").unwrap().devices[1].speed, Speed::TokensPerSecond(1));
        assert_eq!(changed("b:here*3").unwrap().links[0].link.bandwidth, Bandwidth(3_000_000_000));
        let inside = changed("here:here*0.5").unwrap().regions[0].inside.unwrap();
        assert_eq!(inside.bandwidth, Bandwidth(5_000_000_000));
    }

    #[test]
    fn what_is_not_in_the_file_is_refused_with_what_is() {
        for (change, words) in [
            ("add:c", "`what-if` is c, expected a machine of the file: `a`, `b`"),
            ("drop:a.0", "a machine of the file"),
            ("c*2", "a machine of the file"),
            ("a:b*2", "a link of the file: `here:here`, `here:b`"),
        ] {
            let error = changed(change).unwrap_err().to_string();
            assert!(error.contains(words), "{change}: {error}");
        }
        for text in ["", "a", "add:", "more:a", "a*0", "a*-1", "a*inf", "a*x", "a:b"] {
            assert!(text.parse::<FileChange>().unwrap_err().starts_with("expected"), "{text}");
        }
        let one: Cluster = "[[device]]\nname = \"a\"\nflops = \"1 GFLOPS\"".parse().unwrap();
        let apply = |text: &str| text.parse::<FileChange>().unwrap().apply(&one).unwrap_err().to_string();
        assert!(apply("drop:a").contains("no device"), "{}", apply("drop:a"));
        assert!(apply("add:a").contains("`a.0`"), "nothing joins the two: {}", apply("add:a"));
    }
}
