//! `farflung status`: shows the state of a run that machines may join and leave.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use farflung::access::{self, Home};
use farflung::comm::secure::Security;
use farflung::comm::tcp::GateConfig;
use farflung::train::elastic::{self, Status};
use farflung::{Result, TrainConfig};

/// Time limit for a member's answer.
const ASKED: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "Examples:
  farflung status --ticket-file run.ticket
  farflung status --ticket-file runs/gpt-1/run.ticket --json
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

/// Prepares to ask the members of the run to which a ticket belongs.
///
/// Errors: a ticket or a key that cannot be read.
pub(super) fn asking(ticket: Option<&Path>, job: Option<String>, key: Option<&Path>) -> Result<Asking> {
    let env = |name: &str| std::env::var(name).ok();
    let ticket = access::ticket_for(ticket, env)?;
    let identity = Home::new(key, env)?.identity()?;
    let job = job.unwrap_or_else(|| TrainConfig::default().job);
    let mut gate = GateConfig::new("", job, Security::by_ticket(&identity, &ticket));
    gate.deadline = ASKED;
    Ok(Asking { gate, addresses: ticket.addresses })
}

impl StatusCommand {
    pub(crate) fn run(self) -> Result<()> {
        let status = asking(self.ticket_file.as_deref(), self.job, self.key_file.as_deref())?.ask()?;
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
