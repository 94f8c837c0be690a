//! Termination notices, as spot machines get them before they are taken away: a file appears, or a command
//! succeeds. The run is then asked to stop as by SIGTERM, but it always finishes the current step, or with
//! local steps and other members the round. A member does not wait for the end of a round that is farther away
//! than its machine's end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use farflung_base::Nanos;

use crate::signals::PrintError;
use crate::{Error, Result, Signal, Stop, terminal};

/// How the process detects a termination notice for its machine.
#[derive(Debug, Clone, clap::Args)]
pub struct NoticeArgs {
    /// Stop once this file exists: the run, or in a run that machines join and leave only this member. The
    /// current step is always finished first, and in such a run with local steps the round.
    #[arg(long = "notice-file", value_name = "FILE", help_heading = NOTICE)]
    file: Option<PathBuf>,
    /// The same once this shell command succeeds. On an AWS spot machine, for example: `curl -sf
    /// http://169.254.169.254/latest/meta-data/spot/instance-action`.
    #[arg(long = "notice-command", value_name = "COMMAND", help_heading = NOTICE)]
    command: Option<String>,
    /// Time between two checks of the file and the command.
    #[arg(long = "notice-every", value_name = "TIME", default_value = "2s", help_heading = NOTICE)]
    every: Nanos,
}

const NOTICE: &str = "Termination notices";

/// How a member of a run that machines join and leave is told that its machine is taken away, and how long
/// before.
#[derive(Debug, Clone, clap::Args)]
pub struct MemberNoticeArgs {
    #[command(flatten)]
    notice: NoticeArgs,
    /// Time from a notice or a signal until this machine is taken away, such as 2m on AWS and 30s on other
    /// clouds. With local steps, a member leaves after the round. If that takes longer than this time, it
    /// leaves at once, and what it did in the round is lost; unless the others would be no majority without it,
    /// or have no whole model. Default: it always waits for the end of the round.
    #[arg(long = "notice-time", value_name = "TIME", help_heading = NOTICE)]
    time: Option<Nanos>,
}

impl MemberNoticeArgs {
    /// Returns the notice without its time.
    #[must_use]
    pub const fn notice(&self) -> &NoticeArgs {
        &self.notice
    }

    /// Returns the flags with which another process has the same notice.
    #[must_use]
    pub fn flags(&self) -> Vec<OsString> {
        let NoticeArgs { file, command, every } = &self.notice;
        let mut flags: Vec<OsString> = vec!["--notice-every".into(), every.to_string().into()];
        let mut add = |flag: &str, value: Option<OsString>| {
            flags.extend(value.into_iter().flat_map(|value| [flag.into(), value]));
        };
        add("--notice-file", file.as_ref().map(|file| file.clone().into()));
        add("--notice-command", command.as_ref().map(Into::into));
        add("--notice-time", self.time.map(|time| time.to_string().into()));
        flags
    }

    /// Catches signals as [`Stop::install_leaving`] does, and checks for a notice as [`NoticeArgs::watch`]
    /// does.
    ///
    /// Errors: [`Error::Io`] if the system does not accept the handlers, or cannot start a thread.
    pub fn install(&self, say: PrintError) -> Result<Stop> {
        let stop = Stop::install_leaving(say)?.within(self.time);
        self.notice.watch(&stop)?;
        Ok(stop)
    }
}

impl NoticeArgs {
    /// Starts a thread that checks for a notice at the given interval and requests a stop from `stop` once
    /// there is one.
    ///
    /// Errors: [`Error::Io`] if the system cannot start a thread.
    pub fn watch(&self, stop: &Stop) -> Result<()> {
        if self.file.is_none() && self.command.is_none() {
            return Ok(());
        }
        let (notice, stop) = (self.clone(), stop.clone());
        let every = Duration::from(self.every).max(Duration::from_millis(10));
        let look = move || {
            while stop.requested().is_none() {
                if let Some(what) = notice.given() {
                    terminal::write_stderr(format!(
                        "{what}: this process stops after the current step, or with local steps the round\n"
                    ));
                    stop.request(Signal::Terminate);
                    return;
                }
                thread::sleep(every);
            }
        };
        let started = thread::Builder::new().name("farflung-notice".to_owned()).spawn(look);
        started.map(drop).map_err(Error::io("start", Path::new("a thread that checks for a notice")))
    }

    /// Returns whether the notice has been given.
    #[must_use]
    pub fn is_given(&self) -> bool {
        self.given().is_some()
    }

    /// Returns a description of the notice, or `None` if there is none yet.
    fn given(&self) -> Option<String> {
        if let Some(file) = self.file.as_ref().filter(|file| file.exists()) {
            return Some(format!("{} exists", file.display()));
        }
        let command = self.command.as_ref()?;
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        match shell.status() {
            Ok(status) => status.success().then(|| format!("`{command}` succeeds")),
            Err(error) => {
                tracing::warn!(%error, command, "failed to run the command of --notice-command");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(file: Option<PathBuf>, command: Option<&str>) -> NoticeArgs {
        NoticeArgs { file, command: command.map(str::to_owned), every: Nanos::from_millis(10) }
    }

    #[test]
    fn a_file_or_a_command_gives_notice() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notice");
        let by_file = notice(Some(file.clone()), None);
        assert_eq!(by_file.given(), None);
        std::fs::write(&file, "").unwrap();
        assert!(by_file.given().is_some());
        assert_eq!(notice(None, Some("exit 1")).given(), None);
        assert_eq!(notice(None, Some("exit 0")).given().unwrap(), "`exit 0` succeeds");
        let stop = Stop::manual();
        by_file.watch(&stop).unwrap();
        while stop.requested().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(stop.requested(), Some(Signal::Terminate));
    }
}
