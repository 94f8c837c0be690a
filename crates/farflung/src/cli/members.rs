//! `farflung host` and `farflung join`: a run that machines join and leave.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::ffi::OsString;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::time::Duration;

use farflung::access::{self, Home};
use farflung::comm::secure::{Security, Ticket, unix_seconds};
use farflung::comm::tcp::{Gate, GateConfig};
use farflung::observe::Observed;
use farflung::train::{Report, Watch, elastic};
use farflung::{Error, NoticeArgs, ObserveArgs, Result, Show, Stop, TrainArgs, TrainConfig, TrainFlags};

use super::ticket::seconds;
use super::train::{OnTerminal, print_report};

/// Where a run's ticket is, in its folder.
pub(super) const TICKET: &str = "run.ticket";

const HOST_EXAMPLES: &str = "Examples:
  farflung host --config run.toml
  farflung host --sync diloco --sync-every 50 --address my.example.org:29500
  farflung host --stages 4 --microbatches 8
  farflung host --listen 127.0.0.1:0 --steps 200 --out runs/shared --ticket-out run.ticket
A member that leaves (Ctrl-C) or is lost costs the others the step in flight at most. The host may leave, too.
With --stages, members form pipelines: as many whole ones as there can be, and the others are spares.
";

/// Found a run that other machines join and leave, and train.
///
/// Prints a ticket, which `farflung join` needs, and begins alone.
#[derive(Debug, clap::Args)]
#[command(after_help = HOST_EXAMPLES)]
pub(crate) struct HostCommand {
    /// Where this machine listens for others.
    #[arg(long, value_name = "HOST:PORT", default_value = "0.0.0.0:29500")]
    listen: String,
    /// Where others reach it, for the ticket; up to 16, tried in turn. Unless told, the address from which this
    /// machine reaches others.
    #[arg(long, value_name = "HOST:PORT")]
    address: Vec<String>,
    /// How long the ticket holds: 90s, 30min, 24h or 7d.
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = seconds)]
    expires: u64,
    /// Where the ticket is written, for its owner alone; unless told, run.ticket in the run's folder.
    #[arg(long, value_name = "FILE")]
    ticket_out: Option<PathBuf>,
    /// This machine's key, made on first use; unless told `key` in FARFLUNG_HOME or ~/.config/farflung.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    #[command(flatten)]
    notice: NoticeArgs,
    #[command(flatten)]
    observe: ObserveArgs,
    #[command(flatten)]
    flags: TrainFlags,
}

/// A `host` command on its own.
#[derive(Debug, clap::Parser)]
#[command(no_binary_name = true)]
enum Alone {
    Host(HostCommand),
}

impl HostCommand {
    /// The command of these words; none of another command.
    ///
    /// Errors: flags that `host` does not have.
    pub(super) fn read(words: &[OsString]) -> Option<Result<Self>> {
        words.first().filter(|word| *word == "host")?;
        Some(match <Alone as clap::Parser>::try_parse_from(words) {
            Ok(Alone::Host(host)) => Ok(host),
            Err(wrong) => {
                let value = "not a command".to_owned();
                let expected = super::args::said(&wrong);
                Err(Error::Setting { field: "host", value, expected })
            }
        })
    }

    /// The settings that hold.
    pub(super) fn config(&self) -> Result<TrainConfig> {
        self.flags.clone().resolve()
    }

    /// Whether the command says how many threads there are.
    pub(super) const fn tells_threads(&self) -> bool {
        self.flags.args.threads.is_some()
    }

    /// This machine's key, where it is told.
    pub(super) fn key_file(&self) -> Option<&Path> {
        self.key_file.as_deref()
    }

    pub(crate) fn run(mut self) -> Result<()> {
        match self.flags.args.workers {
            Some(workers) if workers > 1 => {
                let expected =
                    "1: each member is one worker, and a machine may join several times".to_owned();
                return Err(Error::Setting { field: "workers", value: workers.to_string(), expected });
            }
            // The settings may be those of a simulated run.
            _ => self.flags.args.workers = Some(1),
        }
        if self.flags.print_config {
            return super::print(&self.flags.resolve()?.to_toml());
        }
        let config = self.flags.clone().resolve()?;
        let home = Home::new(self.key_file.as_deref(), |name| std::env::var(name).ok())?;
        let (identity, secret) = (home.identity()?, home.join_secret()?);
        let mut gate = GateConfig::new(&self.listen, &config.job, Security::by_secret(&identity, &secret));
        gate.advertise = self.address.first().cloned();
        gate.deadline = Duration::from(config.deadline);
        let expiry = unix_seconds().saturating_add(self.expires);
        // Of an earlier run of the folder.
        let former = match &config.out {
            Some(folder) if folder.join(TICKET).exists() => {
                let ticket = access::ticket_for(Some(&folder.join(TICKET)), |_| None)?;
                let mut former = gate.clone();
                former.security = Security::by_ticket(&identity, &ticket).by_any_member();
                Some(former)
            }
            _ => None,
        };
        let mut open = |gate: &Gate, folder: &Path| {
            let addresses = match &self.address[..] {
                [] => vec![reached(gate.address())],
                given => given.to_vec(),
            };
            let ticket = Ticket { addresses, host: identity.public(), secret: secret.until(expiry), expiry };
            let path = write_ticket(&ticket, folder, self.ticket_out.as_deref())?;
            farflung::terminal::say(format!(
                "the ticket is in {}: copy it to other machines, and there run\n  farflung join --ticket-file {TICKET}\n",
                path.display(),
            ));
            Ok(())
        };
        let (quiet, json) = (config.quiet, config.json);
        let stop = Stop::install_leaving()?;
        self.notice.watch(&stop)?;
        watched(quiet, json, &self.observe, |watch| {
            elastic::host(config, &gate, former.as_ref(), &stop, watch, &mut open)
        })
    }
}

const JOIN_EXAMPLES: &str = "Examples:
  farflung join --ticket-file run.ticket
  farflung join --ticket-file - --data book.txt --device wgpu < run.ticket
  farflung join --ticket-file run.ticket --out runs/helper --threads 4
  farflung join --ticket-file run.ticket --notice-command 'curl -sf http://169.254.169.254/latest/meta-data/spot/instance-action'
Ctrl-C leaves after the step under way, with a checkpoint; the others go on.
";

/// Join a run of `farflung host`, now or later, as a member that trains.
///
/// Settings come with the run; those of this machine alone are flags. Its state comes from all members at once,
/// by the rates of their links, and for how long these wait for it is said before.
#[derive(Debug, clap::Args)]
#[command(after_help = JOIN_EXAMPLES)]
pub(crate) struct JoinCommand {
    /// File with the run's ticket; - is standard input. Or FARFLUNG_TICKET (the ticket itself),
    /// FARFLUNG_TICKET_FILE.
    #[arg(long, value_name = "FILE")]
    ticket_file: Option<PathBuf>,
    /// The run's text on this machine, which has to be the same; unless told, the default text.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// What this machine computes on: cpu, wgpu, cuda, with a number behind for one of several.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Threads; 0 is as many as there are cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Folder for checkpoints and metrics of this member.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Where this machine listens for members that come later.
    #[arg(long, value_name = "HOST:PORT", default_value = "0.0.0.0:0")]
    listen: String,
    /// Where those reach it, if that is elsewhere.
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,
    /// The run's name, where it has another than the default.
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// This machine's key, made on first use; unless told `key` in FARFLUNG_HOME or ~/.config/farflung.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// No progress.
    #[arg(long)]
    quiet: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    notice: NoticeArgs,
    #[command(flatten)]
    observe: ObserveArgs,
}

impl JoinCommand {
    pub(crate) fn run(self) -> Result<()> {
        let env = |name: &str| std::env::var(name).ok();
        let ticket = access::ticket_for(self.ticket_file.as_deref(), env)?;
        let home = Home::new(self.key_file.as_deref(), env)?;
        let identity = home.identity()?;
        let mut given = TrainArgs {
            data: self.data.clone(),
            out: self.out.clone(),
            threads: self.threads,
            workers: Some(1),
            quiet: Some(self.quiet),
            json: Some(self.json),
            ..TrainArgs::default()
        };
        if let Some(device) = &self.device {
            let line = format!("device = {}", toml::Value::String(device.clone()));
            given.device = TrainArgs::from_toml(&line, Path::new("the command line"))?.device;
        }
        let job = self.job.clone().unwrap_or_else(|| TrainConfig::default().job);
        let mut gate = GateConfig::new(&self.listen, job, Security::by_ticket(&identity, &ticket));
        gate.advertise.clone_from(&self.address);
        let stop = Stop::install_leaving()?;
        self.notice.watch(&stop)?;
        let mut open = |gate: &Gate, folder: &Path| {
            // Others may come in by this member, too: the host may have left.
            let addresses = vec![reached(gate.address())];
            let ticket = Ticket { addresses, host: identity.public(), ..ticket.clone() };
            write_ticket(&ticket, folder, None).map(drop)
        };
        watched(self.quiet, self.json, &self.observe, |watch| {
            elastic::join(&given, &gate, &ticket.addresses, &stop, watch, &mut open)
        })
    }
}

/// Writes a member's ticket into its folder, and to where else it is wanted, which it gives.
fn write_ticket(ticket: &Ticket, folder: &Path, wanted: Option<&Path>) -> Result<PathBuf> {
    let word = ticket.word().map_err(|_| Error::Setting {
        field: "address",
        value: ticket.addresses.join(" "),
        expected: "1 to 16 times `host:port`, with a port of 1 to 65535".to_owned(),
    })?;
    std::fs::create_dir_all(folder).map_err(|source| Error::Io {
        action: "create",
        path: folder.to_owned(),
        source,
    })?;
    let own = folder.join(TICKET);
    access::write_private(&own, &word)?;
    match wanted {
        Some(path) => access::write_private(path, &word).map(|()| path.to_owned()),
        None => Ok(own),
    }
}

/// Runs with progress on the terminal and what else observes it, and prints the report.
fn watched(
    quiet: bool,
    json: bool,
    observe: &ObserveArgs,
    run: impl FnOnce(&mut dyn Watch) -> Result<Option<Report>>,
) -> Result<()> {
    let show = if quiet { Show::Nothing } else { Show::Auto };
    let mut watch = OnTerminal::new(0, show);
    let observers = observe.observers(None, &mut |text| watch.note(text))?;
    let report = run(&mut Observed::new(&mut watch, observers));
    watch.finish();
    print_report(report?, json)
}

/// An address at which this machine listens as others reach it: where it listens at all of its addresses, the
/// one from which it would reach others.
fn reached(listens: &str) -> String {
    let Ok(at) = listens.parse::<std::net::SocketAddr>() else { return listens.to_owned() };
    if !at.ip().is_unspecified() {
        return listens.to_owned();
    }
    // Nothing is sent: the system only says by which way it would go.
    let way = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    let ip = way.map_or(std::net::Ipv4Addr::LOCALHOST.into(), |way| way.ip());
    std::net::SocketAddr::new(ip, at.port()).to_string()
}
