//! The machines of a job: a file with one machine per line, similar to OpenMPI's hostfiles.

use std::ops::Range;
use std::path::Path;

use crate::launch_env::MOST_PROCESSES;
use crate::{Error, Result};

/// A machine and its number of processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The machine's name for ssh: a name of ssh's configuration or of the network, optionally with `user@` in
    /// front.
    pub name: String,
    /// Number of processes on the machine.
    pub slots: usize,
}

impl Host {
    /// Returns the address at which others reach the machine.
    #[must_use]
    pub fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, address)| address)
    }
}

/// The machines of a job, in the order in which they are filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts(Vec<Host>);

impl Hosts {
    /// Reads a file with one machine per line: `name`, `name slots=4` or `user@name slots=4`. Comments begin
    /// with #.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Setting`] with the first invalid line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut hosts: Vec<Host> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split_once('#').map_or(line, |(before, _)| before).trim();
            if line.is_empty() {
                continue;
            }
            let wrong = |expected: &str| Error::Setting {
                field: "hosts",
                value: line.to_owned(),
                expected: format!("in line {}: {expected}", number + 1),
            };
            let host = host(line).ok_or_else(|| wrong("`name`, `name slots=4` or `user@name slots=4`"))?;
            if hosts.iter().any(|other| other.name == host.name) {
                return Err(wrong("each machine only once, with all of its slots"));
            }
            hosts.push(host);
        }
        let all = hosts.iter().fold(0_usize, |sum, host| sum.saturating_add(host.slots));
        let wrong = |value: usize, expected: String| Error::Setting {
            field: "hosts",
            value: value.to_string(),
            expected,
        };
        match all {
            0 => Err(wrong(0, "at least one machine".to_owned())),
            all if all > MOST_PROCESSES as usize => {
                Err(wrong(all, format!("at most {MOST_PROCESSES} processes together")))
            }
            _ => Ok(Self(hosts)),
        }
    }

    /// Returns the number of slots of all machines together.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.0.iter().map(|host| host.slots).sum()
    }

    /// Returns the machine of rank 0.
    #[must_use]
    pub fn first(&self) -> &Host {
        &self.0[0]
    }

    /// Returns each machine with its ranks, filling machines in order. Machines beyond the last rank are left
    /// out.
    ///
    /// # Errors
    /// [`Error::Setting`] for more processes than there are slots.
    pub fn ranks(&self, processes: usize) -> Result<Vec<(&Host, Range<usize>)>> {
        if processes > self.slots() {
            let expected = format!("at most the {} slots of the machines", self.slots());
            return Err(Error::Setting { field: "nproc", value: processes.to_string(), expected });
        }
        let mut next = 0;
        let mut all = Vec::new();
        for host in &self.0 {
            let ranks = next..processes.min(next + host.slots);
            next = ranks.end;
            if !ranks.is_empty() {
                all.push((host, ranks));
            }
        }
        Ok(all)
    }
}

fn host(line: &str) -> Option<Host> {
    let mut words = line.split_whitespace();
    let name = words.next()?;
    let slots = match words.next() {
        None => 1,
        Some(word) => word.strip_prefix("slots=")?.parse().ok().filter(|&slots| slots > 0)?,
    };
    // ssh would read a name with a leading dash as a flag.
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:@%[]".contains(c);
    let named = !name.starts_with('-') && name.chars().all(plain) && !name.ends_with('@');
    (words.next().is_none() && named).then(|| Host { name: name.to_owned(), slots })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_filled_in_the_order_of_the_file() {
        let hosts = Hosts::parse("# ours\na slots=2\n\nme@b.lan   # one\nc slots=3\n").unwrap();
        assert_eq!((hosts.slots(), hosts.first().address()), (6, "a"));
        let placed = |n| -> Vec<(String, Range<usize>)> {
            hosts
                .ranks(n)
                .unwrap()
                .into_iter()
                .map(|(host, ranks)| (host.address().to_owned(), ranks))
                .collect()
        };
        assert_eq!(placed(6), [("a".to_owned(), 0..2), ("b.lan".to_owned(), 2..3), ("c".to_owned(), 3..6)]);
        assert_eq!(placed(2), [("a".to_owned(), 0..2)]);
        let refused = hosts.ranks(7).unwrap_err().to_string();
        assert!(refused.contains("at most the 6 slots"), "{refused}");
    }

    #[test]
    fn a_line_that_is_wrong_is_named() {
        for bad in [
            "-oProxyCommand=x",
            "a slots=0",
            "a slots=x",
            "a b",
            "a slots=1 b",
            "$(x)",
            "a;b",
            "me@",
            "a slot=3",
        ] {
            let error = Hosts::parse(&format!("good\n{bad}\n")).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains(bad), "{bad}: {error}");
        }
        for bad in ["", "# nobody\n", "a slots=3000", "a slots=18446744073709551615\nb slots=9"] {
            assert!(Hosts::parse(bad).is_err(), "{bad}");
        }
        assert!(Hosts::parse("a\na slots=2").unwrap_err().to_string().contains("once"));
    }
}
