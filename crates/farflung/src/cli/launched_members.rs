//! The processes of `farflung launch --elastic`: one hosts a run, the others join it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use farflung::access::{RUN_ADDRESSES, RUN_TICKET};
use farflung::config::choice::TransportKind;
use farflung::launch::{Elastic, Start};
use farflung::shell_word::shell_word;
use farflung::transports::Reach;
use farflung::{Error, Result, Stop, TrainConfig, terminal};

use super::members::HostCommand;

/// What the launcher needs to make the commands of the job's processes.
struct Members<'a> {
    program: &'a Path,
    /// The words of the command: `host` with its flags.
    words: &'a [OsString],
    host: HostCommand,
    /// The run's folder; it contains the folders of the members that join.
    folder: PathBuf,
    config: TrainConfig,
    /// Threads of each process, unless the command sets them.
    threads: Option<usize>,
    /// Number of members with which the run begins, unless the command sets it.
    least: Option<usize>,
    /// Whether the first process still hosts the run. If it fails and is started again, it joins.
    hosts: bool,
    /// Modification time of the ticket, or of the addresses, that an earlier run left in the folder.
    former: Option<SystemTime>,
}

/// Starts the processes of a `host` command and waits until the run has ended.
///
/// Errors: [`Error::Setting`] for another command or one without a folder; those of [`Elastic::run`].
pub(super) fn launch(program: &Path, command: &[OsString], job: &Elastic, stop: &Stop) -> Result<()> {
    let wrong = |expected: &str| {
        let value = command.first().map_or_else(|| "nothing".to_owned(), |word| word.display().to_string());
        Error::Setting { field: "elastic", value, expected: expected.to_owned() }
    };
    let host = HostCommand::read(command).ok_or_else(|| wrong("`host` with its flags after `--`"))??;
    let job = Elastic { notice: Some(host.notice().notice().clone()), ..job.clone() };
    let config = host.config()?;
    let folder = config.out.clone();
    let folder = folder.ok_or_else(|| {
        wrong("`host --out DIR`, because the folders of the members that join are in this folder")
    })?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = (config.threads == 0 && host.given().threads.is_none()).then(|| cores.div_ceil(job.most));
    let least = (config.min_members < job.least && host.given().min_members.is_none()).then_some(job.least);
    let former = written(&folder.join(invitation_of(&host)));
    let words = command;
    let mut members = Members { program, words, host, folder, config, threads, least, hosts: true, former };
    let ended = job.run(stop, |start| Ok(members.command(start)));
    if let Err(error) = &ended
        && let Some(path) = members.newest_checkpoint()
    {
        let line = match error {
            Error::Stopped(_) => {
                format!("to continue with all members: {}\n", resume_line(std::env::args_os()))
            }
            _ => format!("the newest checkpoint is {}\n", path.display()),
        };
        terminal::write_stderr(line);
    }
    ended
}

/// Returns the command line of this process, such that its run continues. The host's words are at its end.
fn resume_line(args: impl Iterator<Item = OsString>) -> String {
    let words: Vec<String> = args.skip(1).map(|word| shell_word(&word.to_string_lossy())).collect();
    let (launch, host) = words.split_at(words.iter().position(|word| word == "--").unwrap_or(words.len()));
    let kept = host.iter().enumerate().filter(|(at, word)| {
        let is_value = *at > 0 && host[at - 1] == "--resume";
        !is_value && *word != "--resume" && !word.starts_with("--resume=")
    });
    let kept: Vec<&str> = launch.iter().chain(kept.map(|(_, word)| word)).map(String::as_str).collect();
    format!("farflung {} --resume auto", kept.join(" "))
}

/// Returns the name of the file with which others join a member: its ticket, or its addresses if members show
/// certificates.
fn invitation_of(host: &HostCommand) -> &'static str {
    if host.certificates().is_some() { RUN_ADDRESSES } else { RUN_TICKET }
}

/// Returns the time at which a file was last written.
fn written(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|found| found.modified()).ok()
}

impl Members<'_> {
    /// Returns the folder of a member that joins.
    fn folder(&self, member: usize) -> PathBuf {
        self.folder.join("members").join(member.to_string())
    }

    /// Returns the path of a running member's ticket or addresses, if the member has written them.
    fn invitation(&self, of: usize) -> Option<PathBuf> {
        let name = invitation_of(&self.host);
        if of == 0 && self.hosts {
            let path = self.folder.join(name);
            return written(&path).filter(|at| Some(*at) != self.former).map(|_| path);
        }
        Some(self.folder(of).join(name)).filter(|path| path.exists())
    }

    /// Returns the flags with which a process joins the member that has written this ticket or these addresses.
    fn joining(&self, invitation: PathBuf) -> Vec<OsString> {
        let Some(site) = self.host.certificates() else {
            return vec!["--ticket-file".into(), invitation.into_os_string()];
        };
        let text = fs::read_to_string(invitation).unwrap_or_default();
        // The member is on this machine, and its certificate may name only that.
        let port = text.lines().next().and_then(|first| first.rsplit_once(':')).map(|(_, port)| port);
        let own = port.map(|port| format!("localhost:{port}"));
        let all = text.lines().map(str::to_owned).chain(own);
        all.flat_map(|at| ["--at".into(), at.into()]).chain(site.flags()).collect()
    }

    /// Returns the path of a joining member's key, if it is not the default: the host's, and over QUIC, where
    /// each member needs its own, a file beside the member's folder.
    fn key_of_joiner(&self, member: usize) -> Option<PathBuf> {
        let (transport, relays) = (self.config.transport, self.config.run_settings().relays());
        if (Reach { transport, relays, advertise: Vec::new() }).over_quic(&[]) {
            return Some(self.folder(member).with_extension("key"));
        }
        self.host.key_file().map(Path::to_owned)
    }

    /// Returns the command of a process; `None` if there is no member yet that it could join.
    fn command(&mut self, Start { member, running }: &Start) -> Option<Command> {
        let mut command = Command::new(self.program);
        if running.is_empty() {
            command.args(self.words);
            if let Some(least) = self.least {
                command.arg("--min-members").arg(least.to_string());
            }
        } else {
            let invitation = running.iter().find_map(|&of| self.invitation(of))?;
            // What this member wrote before it was restarted has its old address.
            let _ = fs::remove_file(self.folder(*member).join(invitation_of(&self.host)));
            self.hosts &= *member != 0;
            command.arg("join").args(self.joining(invitation)).arg("--out").arg(self.folder(*member));
            command.arg("--job").arg(&self.config.job).arg("--listen").arg(self.host.listen_of_joiner());
            if let TransportKind::Named(name) = self.config.transport {
                command.arg("--transport").arg(name.to_string());
            }
            command.arg("--device").arg(self.config.device.of(*member).to_string());
            if self.config.quiet {
                command.arg("--quiet");
            }
            command.args(self.host.notice().flags());
            if let Some(data) = &self.config.data {
                command.arg("--data").arg(data);
            }
            if let Some(key) = self.key_of_joiner(*member) {
                command.arg("--key-file").arg(key);
            }
            if let Some(encoding) = self.config.encoding {
                command.arg("--encoding").arg(encoding.to_string());
            }
            if let Some(kind) = self.config.token_type {
                command.arg("--token-type").arg(kind.to_string());
            }
            if let Some(name) = self.config.name.as_ref().filter(|_| *member == 0) {
                command.arg("--name").arg(name.as_str());
            }
            if let Some(relay) = &self.config.relay {
                command.arg("--relay").arg(relay);
            }
            if self.threads.is_none() {
                command.arg("--threads").arg(self.config.threads.to_string());
            }
        }
        if let Some(threads) = self.threads {
            command.arg("--threads").arg(threads.to_string());
        }
        Some(command)
    }

    /// Returns the checkpoint of the latest step that any member has saved.
    fn newest_checkpoint(&self) -> Option<PathBuf> {
        let within = |folder: &Path| fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        let members = within(&self.folder.join("members")).map(|entry| entry.path());
        let saved = |folder: PathBuf| {
            let entries: Vec<_> = within(&folder).collect();
            entries.into_iter().filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                Some((name.strip_prefix("step-")?.parse::<u64>().ok()?, entry.path()))
            })
        };
        members.chain([self.folder.clone()]).flat_map(saved).max().map(|(_, path)| path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_continues_a_job_is_its_own() {
        let line = |words: &str| resume_line(words.split(' ').map(OsString::from));
        let same = "farflung launch --elastic 1:3 -- host --out run --resume auto";
        assert_eq!(line("/bin/farflung launch --elastic 1:3 -- host --out run"), same);
        assert_eq!(line("/bin/farflung launch --elastic 1:3 -- host --resume no --out run"), same);
        assert_eq!(line("/bin/farflung launch --elastic 1:3 -- host --resume=no --out run"), same);
    }
}
