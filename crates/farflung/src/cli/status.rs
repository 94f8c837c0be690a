//! `farflung status`: shows the state of a run that machines may join and leave.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use farflung::access::SiteMemberArgs;
use farflung::comm::secure::{Identity, Security};
use farflung::comm::tcp::GateConfig;
use farflung::config::choice::TransportKind;
use farflung::train::elastic::{self, Status};
use farflung::transports::{Reach, is_second_network_address};
use farflung::{Error, Result, TrainConfig};

use super::members::{Membership, to_ask};

/// Time limit for a member's answer.
const ASKED: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "Examples:
  farflung status --ticket-file run.ticket
  farflung status --ticket-file runs/gpt-1/run.ticket --json
  farflung status --at my.example.org:29500 --tls-ca site.pem --tls-cert own.pem --tls-key own.key
Each member has a ticket with its own address in its folder, which also works after the host has left.
";

/// Show the state of a run of `farflung host`: its members, their shares, which member waits for which, loss,
/// and lost time.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StatusCommand {
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
    /// The run's name, if it is not the default.
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// File with this machine's key, created on first use. Default: `key` in FARFLUNG_HOME or
    /// ~/.config/farflung.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Print the state as JSON.
    #[arg(long)]
    json: bool,
}

/// The settings and addresses with which the members of a run are asked for its state.
pub(super) struct Asking {
    gate: GateConfig,
    addresses: Vec<String>,
}

impl Asking {
    /// Returns the status that a member reports; `None` before the run's first step.
    ///
    /// Errors: no member answers.
    pub(super) fn ask(&self) -> Result<Option<Status>> {
        elastic::status(&self.gate, &self.addresses)
    }
}

/// Prepares to ask the members of a run with a ticket, or with certificates the members at these addresses.
///
/// Errors: a ticket, a key or certificates that cannot be read.
pub(super) fn asking(
    (ticket, key): (Option<&Path>, Option<&Path>),
    (site, at): (&SiteMemberArgs, &[String]),
    job: Option<String>,
) -> Result<Asking> {
    let Membership { mut security, known, ticket, .. } =
        Membership::new(site, at, ticket, key).map_err(Error::of_input)?;
    if let Some(ticket) = ticket.filter(|_| known.iter().any(|address| is_second_network_address(address))) {
        // Over QUIC a process is reached by its key, which must differ from that of a member on this machine.
        security = Security::by_ticket(&Identity::generate()?, &ticket);
    }
    let job = job.unwrap_or_else(|| TrainConfig::default().job);
    let mut gate = GateConfig::new("", job, security);
    gate.deadline = ASKED;
    let reach = Reach { transport: TransportKind::Auto, relays: Vec::new(), advertise: Vec::new() };
    let gate = reach.open(gate, &known)?;
    Ok(Asking { gate, addresses: to_ask(&known) })
}

impl StatusCommand {
    pub(crate) fn run(self) -> Result<()> {
        let proof = (self.ticket_file.as_deref(), self.key_file.as_deref());
        let status = asking(proof, (&self.site, &self.at), self.job)?.ask()?;
        match status {
            Some(status) if self.json => {
                let text = serde_json::to_string_pretty(&status).expect("texts and numbers are plain data");
                super::print(&format!("{text}\n"))
            }
            Some(status) => super::print(&status.to_string()),
            None if self.json => super::print("null\n"),
            None => super::print("the run has not completed a step yet\n"),
        }
    }
}
