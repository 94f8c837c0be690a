//! `farflung launch`: starts several processes of this binary, on this machine or over ssh on several.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::env;
use std::ffi::OsString;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use farflung::comm::secure::JoinSecret;
use farflung::launch::{Elastic, Hosts, Remote, restarting, serve};
use farflung::{Error, Launch, NoticeArgs, Result, Stop, access, launch_env};
use farflung_base::Nanos;

use super::launched_members as members;
use super::own_address;
use super::train::TrainCommand;

/// Start several processes of one job, on this machine (over shared memory) or over ssh on several
/// (over TCP).
///
/// Everything after `--` is a farflung command. Each process runs it with RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. If one process fails, the others are ended. If other
/// machines can reach --master, connections are encrypted with a secret that only these processes have. With
/// train --transport iroh, or auto with --relay, each process gets its own key, and all get a ticket.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung launch -n 4 -- train --steps 200 --sync ddp
  farflung launch -n 4 --restarts 3 -- train --sync ddp --out runs/mine --resume auto --checkpoint-every 50
  farflung launch --elastic 2:4 --restarts 10 -- host --out runs/mine --checkpoint-every 50
  farflung launch --hosts hosts.txt -- train --steps 200 --sync diloco")]
pub(crate) struct LaunchCommand {
    /// Number of processes. Default with --hosts: the number of slots of all machines.
    #[arg(short = 'n', long = "nproc", value_name = "N",
          required_unless_present_any = ["hosts", "from_stdin", "elastic"],
          value_parser = clap::value_parser!(u16).range(1..=i64::from(launch_env::MOST_PROCESSES)))]
    processes: Option<u16>,
    /// Address at which rank 0 listens; port 0 takes any free port. [default: 127.0.0.1:0, with --hosts port
    /// 29500 of the first machine]
    #[arg(long, value_name = "ADDR:PORT", value_parser = master)]
    master: Option<(String, u16)>,
    /// Time for which the other processes may continue after one has failed, and time within which they must
    /// end when asked to.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    grace: Nanos,
    /// Number of times that all processes are started again after one failed, unless it failed with a usage
    /// error. With `train --resume auto --out DIR` they continue from their checkpoints.
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,
    /// Start MIN to MAX processes of a `host` command, which may join and leave: the first one hosts the run,
    /// the others join it. A process that fails is started again after a second, while the others continue;
    /// --restarts limits the restarts of all processes together. The job ends if fewer than MIN processes are
    /// running or still to be started again, or if none is running. Further machines may join. Those that join
    /// get the host's --data, --device, --threads, --job, --key-file, --tls-*, --secret-file, --transport,
    /// --relay, --quiet and --notice-*, listen on any port of its interface, and have folders within its --out.
    #[arg(long, value_name = "MIN:MAX", value_parser = range,
          conflicts_with_all = ["processes", "master", "hosts", "from_stdin"])]
    elastic: Option<Range>,
    /// File with the machines, one per line: `name`, or `user@name slots=4`. Each is reached by ssh, which must
    /// not ask for a password. FARFLUNG_ variables are passed on; secrets are never on a command line.
    #[arg(long, value_name = "FILE", conflicts_with = "from_stdin")]
    hosts: Option<PathBuf>,
    /// The ssh command with its flags.
    #[arg(
        long,
        value_name = "COMMAND",
        requires = "hosts",
        default_value = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
    )]
    ssh: String,
    /// Path of farflung on the machines. Default: the path on this machine.
    #[arg(long, value_name = "PATH", requires = "hosts")]
    program: Option<String>,
    /// Folder in which the processes run on the machines. Default: the current folder.
    #[arg(long, value_name = "DIR", requires = "hosts")]
    dir: Option<PathBuf>,
    /// Start the processes that the first line of standard input describes; used by --hosts on each machine.
    #[arg(long, hide = true, conflicts_with_all = ["processes", "master", "command"])]
    from_stdin: bool,
    /// Command of each process.
    #[arg(last = true, required_unless_present = "from_stdin", value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchCommand {
    pub(super) fn run(self) -> Result<()> {
        let lost = |source| Error::Io { action: "find", path: "the path of this program".into(), source };
        let program = env::current_exe().map_err(lost)?;
        if self.from_stdin {
            return serve(&program, BufReader::new(std::io::stdin()), &Stop::install_serving()?);
        }
        if let Some(hosts) = &self.hosts {
            return self.on_hosts(Hosts::read(hosts).map_err(Error::of_input)?, &program);
        }
        if let Some(Range { least, most }) = self.elastic {
            let (restarts, grace) = (self.restarts, Duration::from(self.grace));
            let job = Elastic { least, most, restarts, grace, notice: None };
            return members::launch(&program, &self.command, &job, &Stop::install_passing()?);
        }
        let processes = usize::from(self.processes.unwrap_or(1));
        let here = Launch::here(processes);
        self.master.as_ref().map_or(Ok(()), own_address::check_master)?;
        let master = self.master.unwrap_or(here.master);
        let secret = secret(&master.0)?;
        let over_quic = TrainCommand::launched_over_quic(&self.command)?;
        let grace = Duration::from(self.grace);
        let launch = Launch { master, secret, grace, over_quic, ..Launch::here(processes) };
        let stop = Stop::install_passing()?;
        let notice = TrainCommand::notice_of(&self.command);
        let is_taken = || notice.as_ref().is_some_and(NoticeArgs::is_given);
        restarting(self.restarts, &stop, is_taken, || launch.run(&program, &self.command, &stop))
    }

    fn on_hosts(&self, hosts: Hosts, program: &Path) -> Result<()> {
        if TrainCommand::launched_over_quic(&self.command)? {
            let expected = "tcp, because processes that are started over ssh connect over TCP; for QUIC, \
                            start each rank by hand with RANK, WORLD_SIZE and --ticket-file, with a ticket \
                            that `farflung ticket` made on the machine of rank 0";
            let value = "iroh, or auto with --relay".to_owned();
            let (field, expected) = ("transport", expected.to_owned());
            return Err(Error::Setting { field, value, expected });
        }
        let first = hosts.first().address().to_owned();
        let master = self.master.clone().unwrap_or((first, launch_env::MASTER_PORT));
        let wrong = |expected: &str| Error::Setting {
            field: "master",
            value: format!("{}:{}", master.0, master.1),
            expected: expected.to_owned(),
        };
        if master.1 == 0 {
            return Err(wrong("a port other than 0, because rank 0 listens on another machine"));
        }
        let processes = self.processes.map_or(hosts.slots(), usize::from);
        let elsewhere = |address: &str| !launch_env::is_loopback(address);
        if !elsewhere(&master.0) && hosts.ranks(processes)?.iter().any(|(host, _)| elsewhere(host.address()))
        {
            return Err(wrong("an address of the first machine that the other machines can reach"));
        }
        let text = |path: &Path| {
            let wrong = Error::Setting {
                field: "program",
                value: path.display().to_string(),
                expected: "a path in UTF-8".to_owned(),
            };
            path.to_str().map(str::to_owned).ok_or(wrong)
        };
        let lost = |source| Error::Io { action: "find", path: "the current folder".into(), source };
        let here = env::current_dir().map_err(lost)?;
        let remote = Remote {
            hosts,
            processes,
            secret: secret(&master.0)?,
            master,
            grace: Duration::from(self.grace),
            ssh: self.ssh.split_whitespace().map(str::to_owned).collect(),
            program: self.program.clone().map_or_else(|| text(program), Ok)?,
            dir: Some(self.dir.clone().unwrap_or(here)),
        };
        let stop = Stop::install_passing()?;
        // Notices are given to the other machines, which this one cannot ask.
        restarting(self.restarts, &stop, || false, || remote.run(&self.command, env::vars_os(), &stop))
    }
}

/// Limits on the number of processes.
#[derive(Debug, Clone, Copy)]
struct Range {
    least: usize,
    most: usize,
}

/// Parses `MIN:MAX`.
fn range(text: &str) -> std::result::Result<Range, String> {
    let most_allowed = launch_env::MOST_PROCESSES as usize;
    let numbers = text.split_once(':').map(|(least, most)| (least.parse(), most.parse()));
    match numbers {
        Some((Ok(least), Ok(most))) if (1..=most).contains(&least) && most <= most_allowed => {
            Ok(Range { least, most })
        }
        _ => Err(format!("two numbers such as 2:4, from 1 to {most_allowed}, the smaller first")),
    }
}

/// Makes a secret if the processes meet at an address that others can reach, unless a variable gives a ticket
/// or secret.
fn secret(host: &str) -> Result<Option<JoinSecret>> {
    let given = [access::TICKET, access::TICKET_FILE, access::SECRET, access::SECRET_FILE];
    if launch_env::is_loopback(host) || given.iter().any(|name| env::var_os(name).is_some()) {
        return Ok(None);
    }
    Ok(Some(JoinSecret::generate()?))
}

/// Parses `HOST:PORT`; an IPv6 host is in brackets.
fn master(text: &str) -> std::result::Result<(String, u16), String> {
    let expected = || format!("expected ADDR:PORT such as `127.0.0.1:29500`, found `{text}`");
    // As in `init_method` of PyTorch.
    let (host, port) = text.strip_prefix("tcp://").unwrap_or(text).rsplit_once(':').ok_or_else(expected)?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    if host.is_empty() {
        return Err(expected());
    }
    Ok((host.to_owned(), port.parse().map_err(|_| expected())?))
}
