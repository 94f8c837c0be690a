//! `farflung launch`: several processes of this binary on this machine.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::env;
use std::ffi::OsString;
use std::time::Duration;

use farflung::comm::secure::JoinSecret;
use farflung::{Error, Launch, Result, Stop, access, launch_env};
use farflung_base::Nanos;

/// Start several processes of one job on this machine, joined over TCP.
///
/// Everything after `--` is a farflung command; each process runs it with RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. When one fails, the others are ended. Where other
/// machines can reach --master, connections are encrypted by a secret that only these processes know.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  farflung launch -n 4 -- train --steps 200 --sync ddp")]
pub(crate) struct LaunchCommand {
    /// Number of processes.
    #[arg(short = 'n', long = "nproc", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(launch_env::MOST_PROCESSES)))]
    processes: u16,
    /// Where rank 0 listens; port 0 is any free one.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0", value_parser = master)]
    master: (String, u16),
    /// How long the others may go on after one failed, and how long they may then take to end.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    grace: Nanos,
    /// The command of each process.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchCommand {
    pub(super) fn run(self) -> Result<()> {
        let program = env::current_exe().map_err(|source| Error::Start { rank: 0, source })?;
        let launch = Launch {
            processes: usize::from(self.processes),
            secret: secret(&self.master.0)?,
            master: self.master,
            grace: Duration::from(self.grace),
        };
        launch.run(&program, &self.command, &Stop::install_passing()?)
    }
}

/// A secret for processes that meet where others can reach them, unless there is one already.
fn secret(host: &str) -> Result<Option<JoinSecret>> {
    let given = [access::TICKET, access::TICKET_FILE, access::SECRET, access::SECRET_FILE];
    if launch_env::is_loopback(host) || given.iter().any(|name| env::var_os(name).is_some()) {
        return Ok(None);
    }
    Ok(Some(JoinSecret::generate()?))
}

/// Reads `HOST:PORT`; an IPv6 host stands in brackets.
fn master(text: &str) -> std::result::Result<(String, u16), String> {
    let expected = || format!("expected ADDR:PORT such as `127.0.0.1:29500`, found `{text}`");
    let (host, port) = text.rsplit_once(':').ok_or_else(expected)?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    if host.is_empty() {
        return Err(expected());
    }
    Ok((host.to_owned(), port.parse().map_err(|_| expected())?))
}
