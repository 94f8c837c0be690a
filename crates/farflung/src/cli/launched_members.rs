//! The processes of `farflung launch --elastic`: one that hosts a run, and those that join it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use farflung::launch::{Elastic, Start};
use farflung::{Error, Result, Stop, TrainConfig};

use super::members::{HostCommand, TICKET};

/// What the processes have in common.
struct Members<'a> {
    program: &'a Path,
    /// `host` with its flags.
    host: &'a [OsString],
    /// The run's folder; those of members that join are in it.
    folder: PathBuf,
    config: TrainConfig,
    /// Flags of all that join.
    shared: Vec<OsString>,
    /// Threads of each process, where the command does not say.
    threads: Option<usize>,
}

/// Starts the processes of a `host` command and stays until the run has ended.
///
/// Errors: another command, or one without a folder; those of [`Elastic::run`].
pub(super) fn launch(program: &Path, command: &[OsString], job: &Elastic, stop: &Stop) -> Result<()> {
    let wrong = |expected: &str| {
        let value = command.first().map_or_else(|| "nothing".to_owned(), |word| word.display().to_string());
        Error::Setting { field: "elastic", value, expected: expected.to_owned() }
    };
    let host = HostCommand::read(command).ok_or_else(|| wrong("`host` with its flags behind `--`"))??;
    let config = host.config()?;
    let folder = config
        .out
        .clone()
        .ok_or_else(|| wrong("`host --out DIR`: the folders of the members that join are in it"))?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = (config.threads == 0).then(|| cores.div_ceil(job.most));
    let members = Members { program, host: command, folder, config, shared: host.shared_flags(), threads };
    let mut founded = false;
    job.run(stop, |start| Ok(members.command(start, &mut founded)))
}

impl Members<'_> {
    /// The folder of a member; the first is in the run's own, until it comes back.
    fn folder(&self, member: usize) -> PathBuf {
        self.folder.join("members").join(member.to_string())
    }

    /// The ticket of a member that runs, where it has written one.
    fn ticket(&self, by: usize) -> Option<PathBuf> {
        let own = self.folder(by).join(TICKET);
        let hosts = (by == 0).then(|| self.folder.join(TICKET));
        [Some(own), hosts].into_iter().flatten().find(|path| path.exists())
    }

    /// The command of a process; none while it cannot join.
    fn command(&self, Start { member, by }: Start, founded: &mut bool) -> Option<Command> {
        let mut command = Command::new(self.program);
        match by {
            // Whoever is alone founds the run, or goes on with it.
            None if member == 0 => {
                command.args(self.host);
                if std::mem::replace(founded, true) {
                    command.args(["--resume", "auto"]);
                }
            }
            None => return None,
            Some(by) => {
                command.arg("join").arg("--ticket-file").arg(self.ticket(by)?);
                command.arg("--out").arg(self.folder(member)).args(&self.shared);
                command.arg("--device").arg(self.config.device.of(member).to_string());
                if self.config.quiet {
                    command.arg("--quiet");
                }
                let data = self.config.data.iter();
                data.for_each(|path| {
                    command.arg("--data").arg(path);
                });
                if self.threads.is_none() {
                    command.arg("--threads").arg(self.config.threads.to_string());
                }
            }
        }
        if let Some(threads) = self.threads {
            command.arg("--threads").arg(threads.to_string());
        }
        Some(command)
    }
}
