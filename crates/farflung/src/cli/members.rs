//! `farflung host` and `farflung join`: a run that machines may join and leave.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::own_address;
use farflung::access::{self, Home, KeyClaim, RUN_TICKET, SiteMemberArgs};
use farflung::comm::secure::{ADDRESSES, Identity, Security, Ticket, unix_seconds};
use farflung::comm::tcp::{GateConfig, GrowingNetwork};
use farflung::config::choice::{TokenizerKind, TransportKind};
use farflung::config::member_name::MemberName;
use farflung::config::value::Setting as _;
use farflung::observe::Observed;
use farflung::train::elastic::FormerRun;
use farflung::train::{Report, RunObserver, elastic};
use farflung::transports::{IROH, Reach, TCP, is_second_network_address};
use farflung::zoo::data::{TextEncoding, TokenType};
use farflung::{Error, MemberNoticeArgs, ObserveArgs, Result, Show, TrainArgs, TrainConfig, TrainFlags};

use super::ticket::seconds;
use super::train::{OnTerminal, print_report};

const HOST_EXAMPLES: &str = "Examples:
  farflung host --config run.toml
  farflung host --sync diloco --sync-every 50 --address my.example.org:29500
  farflung host --stages 4 --microbatches 8
  farflung host --stages 4 --pooled true --microbatches 16
  farflung host --listen 127.0.0.1:0 --steps 200 --out runs/shared --ticket-out run.ticket
  farflung host --address my.example.org:29500 --tls-ca site.pem --tls-cert own.pem --tls-key own.key
  farflung host --relay http://198.51.100.7:3340 --sync diloco --sync-every 50
If a member leaves (Ctrl-C), nothing is lost: it hands its part of the model over if no other member has it, and
members that all leave save together. If a member is lost, the others lose at most the step in progress, or the
steps since all parts were last copied or saved if no other member has its part. The host may leave, too.
With --stages, members form as many complete pipelines as possible, and the remaining members are spares.
With --stages and --sync diloco, a pipeline that loses a member gives nothing to that round, and the others
finish it.
With --pooled true, each stage is a pool of members, and there are no spares. If one is lost, the others keep
what they have computed of the step, and do only its work again.
With --relay (a `farflung relay`, in builds with the feature iroh), members connect over TCP where it reaches
and else over QUIC, so that they may be behind routers. With --transport iroh they connect over QUIC alone.
";

/// Start a run that other machines may join and leave, and train.
///
/// Writes a ticket, which `farflung join` needs, to a file, and begins to train alone, or with `--min-members`
/// once these are here. With certificates there is no ticket.
#[derive(Debug, clap::Args)]
#[command(after_help = HOST_EXAMPLES, mut_arg("workers", |workers| workers.hide(true)))]
pub(crate) struct HostCommand {
    /// Address at which this machine listens for others.
    #[arg(long, value_name = "HOST:PORT", default_value = "0.0.0.0:29500")]
    listen: String,
    /// Address at which others reach this machine, for the ticket; up to 16, which are tried in turn. Default:
    /// the addresses from which this machine reaches others, or those of its network interfaces.
    #[arg(long, value_name = "HOST:PORT")]
    address: Vec<String>,
    /// Time for which the ticket is valid, such as 90s, 30min, 24h or 7d.
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = seconds)]
    expires: u64,
    /// File to which the ticket is written, readable only by its owner. Default: run.ticket in the run's
    /// folder.
    #[arg(long, value_name = "FILE")]
    ticket_out: Option<PathBuf>,
    /// File with this machine's key, created on first use. Default: `key` in FARFLUNG_HOME or
    /// ~/.config/farflung.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    #[command(flatten)]
    site: SiteMemberArgs,
    #[command(flatten)]
    notice: MemberNoticeArgs,
    #[command(flatten)]
    observe: ObserveArgs,
    #[command(flatten)]
    flags: TrainFlags,
}

/// Parser for the words of a `host` command.
#[derive(Debug, clap::Parser)]
#[command(no_binary_name = true, args_override_self = true)]
enum Alone {
    Host(HostCommand),
}

impl HostCommand {
    /// Parses these words as a `host` command; `None` if they are another command.
    ///
    /// Errors: [`Error::Setting`] for flags or values that `host` does not accept.
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

    /// Returns the resolved settings.
    pub(super) fn config(&self) -> Result<TrainConfig> {
        self.flags.clone().resolve()
    }

    /// Returns the settings that the command line gives.
    pub(super) const fn given(&self) -> &TrainArgs {
        &self.flags.args
    }

    /// Returns the address at which another process of this machine listens: any port of the same interface.
    pub(super) fn listen_of_joiner(&self) -> String {
        format!("{}:0", self.listen.rsplit_once(':').map_or(&self.listen[..], |(host, _)| host))
    }

    /// Returns how this machine's end is announced.
    pub(super) const fn notice(&self) -> &MemberNoticeArgs {
        &self.notice
    }

    /// Returns the certificates that members show in place of a ticket, if they are given.
    pub(super) fn certificates(&self) -> Option<&SiteMemberArgs> {
        Some(&self.site).filter(|site| **site != SiteMemberArgs::default())
    }

    /// Returns the path of this machine's key, if it was given.
    pub(super) fn key_file(&self) -> Option<&Path> {
        self.key_file.as_deref()
    }

    pub(crate) fn run(mut self) -> Result<()> {
        match self.flags.args.workers {
            Some(workers) if workers > 1 => {
                let expected =
                    "1, because each member is one worker; a machine may join several times".to_owned();
                return Err(Error::Setting { field: "workers", value: workers.to_string(), expected });
            }
            // A member has one worker, even if the settings are those of a simulated run.
            _ => self.flags.args.workers = Some(1),
        }
        if self.flags.print_config {
            return super::print(&self.flags.resolve()?.with_own_model()?.to_toml());
        }
        let config = self.flags.clone().resolve()?;
        own_address::check_listen(&self.listen)?;
        own_address::check_schemes("address", &self.address)?;
        check_addresses(&self.address)?;
        let env = |name: &str| std::env::var(name).ok();
        let site = self.site.hosting(env)?;
        let home = match site {
            Some(_) => None,
            None => Some(Home::new(self.key_file.as_deref(), env)?),
        };
        let own = home.as_ref().map(|home| Ok::<_, Error>((home.identity()?, home.join_secret()?)));
        let own = own.transpose()?;
        let security = match (site, &own) {
            (Some(site), _) => site,
            (None, Some((identity, secret))) => Security::by_secret(identity, secret),
            (None, None) => Security::unencrypted(),
        };
        let mut gate = GateConfig::new(&self.listen, &config.job, security);
        gate.advertise = Some(self.address.join(",")).filter(|given| !given.is_empty());
        gate.deadline = Duration::from(config.deadline);
        let reach = Reach {
            transport: config.transport,
            relays: config.run_settings().relays(),
            advertise: self.address.clone(),
        };
        let _claim = claim(home.as_ref(), &reach, &[])?;
        let gate = reach.open(gate, &[])?;
        let expiry = unix_seconds().saturating_add(self.expires);
        let former = match &config.out {
            Some(folder) => former_runs(folder, &gate, own.as_ref().map(|(identity, _)| identity))?,
            None => Vec::new(),
        };
        let mut open = |gate: &GrowingNetwork, folder: &Path| {
            let addresses = addresses(gate);
            let Some((identity, secret)) = &own else {
                if self.ticket_out.is_some() {
                    return Err(Error::Setting {
                        field: "ticket_out",
                        value: "given".to_owned(),
                        expected: "nothing: with certificates there is no ticket".to_owned(),
                    });
                }
                access::write_addresses(folder, &addresses)?;
                let at: Vec<String> = addresses.iter().map(|at| format!("--at {at}")).collect();
                farflung::terminal::write_stderr(format!(
                    "other machines join with their own certificates:\n  farflung join {} --tls-ca FILE \
                     --tls-cert FILE --tls-key FILE{}\n",
                    at.join(" "),
                    if self.site.has_secret(env) { " --secret-file FILE" } else { "" },
                ));
                return Ok(());
            };
            let is_local = own_address::are_loopback(&addresses);
            let ticket = Ticket { addresses, host: identity.public(), secret: secret.until(expiry), expiry };
            let path = write_ticket(&ticket, folder, self.ticket_out.as_deref())?;
            farflung::terminal::write_stderr(how_to_join(&path, is_local));
            Ok(())
        };
        let (quiet, json) = (config.quiet, config.json);
        let stop = self.notice.install(super::print_error)?;
        watched(quiet, json, &self.observe, |watch| {
            elastic::host(config, &gate, &former, &stop, watch, &mut open)
        })
    }
}

/// Returns how others join with a ticket. `is_local` is whether only this machine reaches its addresses.
fn how_to_join(ticket: &Path, is_local: bool) -> String {
    let path = ticket.display();
    if is_local {
        return format!(
            "the ticket is in {path}: only this machine reaches its addresses (see --listen and --address); here \
             run\n  farflung join --ticket-file {path}\n"
        );
    }
    format!(
        "the ticket is in {path}: copy it to other machines, and there run\n  farflung join --ticket-file \
         {RUN_TICKET}\n"
    )
}

/// Returns the access to the members of earlier runs in this folder: by the tickets that these runs left there,
/// or by the certificates, without an `identity`.
///
/// Errors: the folder cannot be read; the ticket of its newest run cannot be read. One of an older run is left
/// out, with a warning.
fn former_runs(folder: &Path, gate: &GateConfig, identity: Option<&Identity>) -> Result<Vec<FormerRun>> {
    let mut former = Vec::new();
    for place in elastic::former_folders(folder)? {
        let mut gate = gate.clone();
        let ticket = place.join(RUN_TICKET);
        gate.security = match identity {
            Some(_) if !ticket.exists() => continue,
            Some(identity) => match access::ticket_for(Some(&ticket), |_| None) {
                Ok(ticket) => Security::by_ticket(identity, &ticket).by_any_member(),
                Err(error) if place != folder => {
                    let place = place.display();
                    let problem = "are not asked whether it still runs";
                    tracing::warn!(%error, "the members of the run in {place} {problem}");
                    continue;
                }
                Err(error) => return Err(error),
            },
            None => gate.security.joining(),
        };
        former.push(FormerRun { folder: place, gate });
    }
    Ok(former)
}

const JOIN_EXAMPLES: &str = "Examples:
  farflung join --ticket-file run.ticket
  farflung join --ticket-file - --data book.txt --device wgpu < run.ticket
  farflung join --ticket-file run.ticket --out runs/helper --threads 4
  farflung join --ticket-file run.ticket --transport iroh
  farflung join --at my.example.org:29500 --tls-ca site.pem --tls-cert own.pem --tls-key own.key
  farflung join --ticket-file run.ticket --notice-command 'curl -sf http://169.254.169.254/latest/meta-data/spot/instance-action'
After Ctrl-C, this member finishes the current step (with local steps, the round), saves a checkpoint, or hands over
the part of the model that it holds, and leaves; the others continue.
";

/// Join a run of `farflung host`, at any time, as a member that trains.
///
/// The settings are those of the run; flags set only what concerns this machine. All members that hold the
/// state send parts of it at the same time, in proportion to the rates of their links, while they train if
/// their links are fast enough. The time for which the members then wait is printed before.
#[derive(Debug, clap::Args)]
#[command(after_help = JOIN_EXAMPLES)]
pub(crate) struct JoinCommand {
    /// File with the run's ticket; - reads standard input. A ticket can also be given by FARFLUNG_TICKET (the
    /// ticket itself) or FARFLUNG_TICKET_FILE.
    #[arg(long, value_name = "FILE")]
    ticket_file: Option<PathBuf>,
    /// Address of a member, where processes have certificates and there is no ticket; several are tried in
    /// turn.
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "ticket_file", requires = "tls_ca")]
    at: Vec<String>,
    #[command(flatten)]
    site: SiteMemberArgs,
    /// The run's text on this machine, which must be the same as on the other members. Default: the default
    /// text.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// The run's tokenizer on this machine, if the run has that of a file: the path of a tokenizer.json, a
    /// model or a run.
    #[arg(long, value_name = "PATH", value_parser = TokenizerKind::from_flag)]
    tokenizer: Option<TokenizerKind>,
    /// Encoding of this machine's text, if it is not UTF-8 and has no byte-order mark.
    #[arg(long, value_name = "NAME")]
    encoding: Option<TextEncoding>,
    /// Type of the ids in this machine's .bin files, if it is not u16 and no file beside them says it.
    #[arg(long, value_name = "TYPE")]
    token_type: Option<TokenType>,
    /// Device of this machine: cpu, wgpu or cuda, with a number if there are several, such as `cuda:1`.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Number of threads; 0 takes all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Folder for this member's checkpoints and metrics.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Name of this machine in messages and in farflung status: up to 32 letters, digits, -, _ and dots.
    /// Without one, it has a number only.
    #[arg(long, value_name = "NAME", value_parser = MemberName::from_flag)]
    name: Option<MemberName>,
    /// Address at which this machine listens for members that join later.
    #[arg(long, value_name = "HOST:PORT", default_value = "0.0.0.0:0")]
    listen: String,
    /// Address at which those members reach this machine, if it differs.
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,
    /// How this machine connects to the members: auto is over TCP where it reaches, and over QUIC elsewhere if
    /// the ticket has a relay or an address of QUIC; tcp or iroh (QUIC) uses that alone. Default: auto.
    #[arg(long, value_name = "KIND", value_parser = transport)]
    transport: Option<TransportKind>,
    /// Relays that this machine may use, besides those of the ticket, separated by commas.
    #[arg(long, value_name = "URL")]
    relay: Option<String>,
    /// The run's name, if it is not the default.
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// File with this machine's key, created on first use. Default: `key` in FARFLUNG_HOME or
    /// ~/.config/farflung.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Show no progress on stderr.
    #[arg(long)]
    quiet: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    notice: MemberNoticeArgs,
    #[command(flatten)]
    observe: ObserveArgs,
}

impl JoinCommand {
    pub(crate) fn run(self) -> Result<()> {
        own_address::check_listen(&self.listen)?;
        own_address::check_schemes("address", self.address.as_slice())?;
        own_address::check_schemes("at", &self.at)?;
        check_addresses(&self.address)?;
        let Membership { security, known, ticket, home } =
            Membership::new(&self.site, &self.at, self.ticket_file.as_deref(), self.key_file.as_deref())
                .map_err(Error::of_input)?;
        let mut given = TrainArgs {
            data: self.data.clone(),
            tokenizer: self.tokenizer.clone(),
            encoding: self.encoding,
            token_type: self.token_type,
            out: self.out.clone(),
            name: self.name.clone(),
            threads: self.threads,
            workers: Some(1),
            quiet: Some(self.quiet),
            json: Some(self.json),
            transport: self.transport,
            relay: self.relay.clone(),
            ..TrainArgs::default()
        };
        if let Some(device) = &self.device {
            let line = format!("device = {}", toml::Value::String(device.clone()));
            given.device = TrainArgs::from_toml(&line, Path::new("the command line"))?.device;
        }
        let job = self.job.clone().unwrap_or_else(|| TrainConfig::default().job);
        let mut gate = GateConfig::new(&self.listen, job, security);
        gate.advertise.clone_from(&self.address);
        let transport = self.transport.unwrap_or(TransportKind::Auto);
        let relays: Vec<String> =
            self.relay.iter().flat_map(|relays| relays.split(',')).map(str::to_owned).collect();
        let reach = Reach { transport, relays, advertise: self.address.clone().into_iter().collect() };
        let _claim = claim(home.as_ref(), &reach, &known)?;
        let gate = reach.open(gate, &known)?;
        let stop = self.notice.install(super::print_error)?;
        let mut open = |gate: &GrowingNetwork, folder: &Path| {
            // Others may also join through this member, since the host may leave.
            let addresses = addresses(gate);
            let Some(ticket) = &ticket else { return access::write_addresses(folder, &addresses) };
            let host = gate.own().key.unwrap_or(ticket.host);
            write_ticket(&Ticket { addresses, host, ..ticket.clone() }, folder, None).map(drop)
        };
        watched(self.quiet, self.json, &self.observe, |watch| {
            elastic::join(&given, &gate, &to_ask(&known), &stop, watch, &mut open)
        })
    }
}

/// Claims the key of a member that connects over QUIC; `home` is `None` for one with certificates.
fn claim(home: Option<&Home>, reach: &Reach, known: &[String]) -> Result<Option<KeyClaim>> {
    home.filter(|_| reach.over_quic(known)).map(Home::claim).transpose()
}

/// Checks the addresses of `--address`. If they cannot be checked now, tells the user.
fn check_addresses<'a>(given: impl IntoIterator<Item = &'a String>) -> Result<()> {
    for warning in own_address::check(given)? {
        farflung::terminal::write_stderr(format!("{warning}\n"));
    }
    Ok(())
}

/// How a process proves that it may join a run, and where its members are.
pub(super) struct Membership {
    pub(super) security: Security,
    /// Addresses of members.
    pub(super) known: Vec<String>,
    /// The ticket, if processes have no certificates.
    pub(super) ticket: Option<Ticket>,
    /// Where its key is, if processes have no certificates.
    pub(super) home: Option<Home>,
}

impl Membership {
    /// Reads the certificates, or the ticket and the key.
    ///
    /// Errors: files that cannot be read; certificates without an address.
    pub(super) fn new(
        site: &SiteMemberArgs,
        at: &[String],
        ticket: Option<&Path>,
        key: Option<&Path>,
    ) -> Result<Self> {
        let env = |name: &str| std::env::var(name).ok();
        if let Some(security) = site.joining(at, env)? {
            if at.is_empty() {
                return Err(Error::Setting {
                    field: "at",
                    value: "missing".to_owned(),
                    expected: "the address of a member, which `farflung host` printed".to_owned(),
                });
            }
            return Ok(Self { security, known: at.to_vec(), ticket: None, home: None });
        }
        let ticket = access::ticket_for(ticket, env)?;
        let home = Home::new(key, env)?;
        let security = Security::by_ticket(&home.identity()?, &ticket);
        Ok(Self { security, known: ticket.addresses.clone(), ticket: Some(ticket), home: Some(home) })
    }
}

/// Writes a member's ticket to its folder and, if given, to another path. Returns the path to show to the user.
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
    let own = folder.join(RUN_TICKET);
    access::write_private(&own, &word)?;
    match wanted {
        Some(path) => access::write_private(path, &word).map(|()| path.to_owned()),
        None => Ok(own),
    }
}

/// Calls `run` with progress on the terminal and with the observers, and prints the report.
fn watched(
    quiet: bool,
    json: bool,
    observe: &ObserveArgs,
    run: impl FnOnce(&mut dyn RunObserver) -> Result<Option<Report>>,
) -> Result<()> {
    let show = if quiet { Show::Nothing } else { Show::Auto };
    let mut watch = OnTerminal::new(0, show);
    let observers = observe.observers(None, &mut |text| watch.note(text))?;
    let report = run(&mut Observed::new(&mut watch, observers));
    watch.finish();
    print_report(report?, json)
}

/// Parses the transport of a member.
fn transport(text: &str) -> std::result::Result<TransportKind, String> {
    let fits = |kind: &TransportKind| {
        *kind == TransportKind::Auto || [TCP, IROH].iter().any(|row| *kind == TransportKind::of(row))
    };
    TransportKind::parse(text).filter(fits).ok_or_else(|| "expected auto, tcp or iroh".to_owned())
}

/// Returns the addresses of a member's ticket: first those of TCP.
fn addresses(gate: &GrowingNetwork) -> Vec<String> {
    let parts = gate.address().split(',').map(str::to_owned);
    let (second_network, own): (Vec<String>, Vec<String>) =
        parts.partition(|one| is_second_network_address(one));
    own.into_iter().chain(second_network).take(ADDRESSES).collect()
}

/// Returns the addresses of a ticket as they are asked: those of TCP in turn, and those of QUIC at once.
pub(super) fn to_ask(addresses: &[String]) -> Vec<String> {
    let (second_network, mut own): (Vec<String>, Vec<String>) =
        addresses.iter().cloned().partition(|one| is_second_network_address(one));
    if !second_network.is_empty() {
        own.push(second_network.join(","));
    }
    own
}
