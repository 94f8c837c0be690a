//! A job on several machines, with one ssh to each. The description of the processes is sent over ssh's
//! standard input, so that only the program's path is on a command line.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use farflung_comm::secure::JoinSecret;

use super::as_text;
use super::hosts::Hosts;
use super::job::{Job, Whose};
use super::share::Share;
use crate::{Error, LaunchError, Result, Stop};

/// Prefix of the variables that are passed on to the machines.
const OURS: &str = "FARFLUNG_";

/// Further variables that are passed on.
const ALSO: [&str; 1] = ["RUST_LOG"];

/// A job's processes on several machines.
#[derive(Debug, Clone)]
pub struct Remote {
    /// The machines.
    pub hosts: Hosts,
    /// Number of processes.
    pub processes: usize,
    /// Host and port of rank 0.
    pub master: (String, u16),
    /// The same as [`Launch::grace`](super::Launch::grace); also the time to wait at the end for a machine that
    /// can no longer be reached.
    pub grace: Duration,
    /// A join secret for the processes; `None` if they get one in another way.
    pub secret: Option<JoinSecret>,
    /// The ssh command with its flags.
    pub ssh: Vec<String>,
    /// The path of this program on the machines.
    pub program: String,
    /// The folder in which the processes run; by default the one in which ssh starts.
    pub dir: Option<PathBuf>,
}

impl Remote {
    /// Runs this program with `args` once per rank and waits for all of them, as
    /// [`Launch::run`](super::Launch::run) does. `variables` are this process's environment variables; those of
    /// farflung and `RUST_LOG` are passed on.
    ///
    /// Errors: [`LaunchError::OnHost`] with the machine whose failure ended the job, [`LaunchError::Ssh`] for
    /// one that cannot be reached, [`Error::Stopped`], [`LaunchError::StartSsh`]; [`Error::Setting`] for more
    /// processes than there are slots, and for arguments that are not UTF-8.
    pub fn run(
        &self,
        args: &[OsString],
        variables: impl IntoIterator<Item = (OsString, OsString)>,
        stop: &Stop,
    ) -> Result<()> {
        let Self { processes, master, grace, secret, ssh, program, dir, .. } = self;
        let text = |words: &OsString| {
            let expected = "text in UTF-8".to_owned();
            let wrong = || Error::Setting { field: "command", value: words.display().to_string(), expected };
            words.clone().into_string().map_err(|_| wrong())
        };
        let args = args.iter().map(text).collect::<Result<Vec<String>>>()?;
        let mut passed: BTreeMap<String, String> = variables
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with(OURS) || ALSO.contains(&name.as_str()))
            .collect();
        if let Some(secret) = secret {
            passed.insert(crate::access::SECRET.to_owned(), as_text(secret));
        }
        let placed = self.hosts.ranks(*processes)?;
        let mut job = Job::default();
        for (host, ranks) in placed {
            let share = Share {
                ranks,
                world_size: *processes,
                master: master.clone(),
                grace: *grace,
                dir: dir.clone(),
                variables: passed.clone(),
                args: args.clone(),
            };
            let (first, flags) = ssh.split_first().ok_or_else(|| Error::Setting {
                field: "ssh",
                value: String::new(),
                expected: "a command".to_owned(),
            })?;
            let mut command = Command::new(first);
            command.args(flags).arg("--").arg(&host.name);
            command.arg(format!("{} launch --from-stdin", quoted(program))).stdin(Stdio::piped());
            let started = job.start(command, Whose::Host(host.name.clone()));
            started.map_err(|source| LaunchError::StartSsh { command: first.clone(), source })?;
            job.tell_last(&serde_json::to_string(&share).expect("texts and numbers can be written as JSON"));
        }
        job.run(*grace, stop)
    }
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_a_quoted_word_as_it_is() {
        for word in ["/usr/bin/farflung", "it's $HOME", "a b;c", "\\"] {
            let said =
                Command::new("sh").args(["-c", &format!("printf %s {}", quoted(word))]).output().unwrap();
            assert_eq!(String::from_utf8(said.stdout).unwrap(), word);
        }
    }
}
