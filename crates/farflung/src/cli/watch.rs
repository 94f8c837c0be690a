//! `farflung watch`: shows a run in a browser.

use std::path::PathBuf;

use farflung::Result;
use farflung::access::SiteMemberArgs;

const EXAMPLES: &str = "Examples:
  farflung watch runs/nano-1
  farflung watch runs/nano-1 --listen 127.0.0.1:0
  farflung watch runs/gpt-1 --ticket-file runs/gpt-1/run.ticket
  farflung watch runs/gpt-1 --at my.example.org:29500 --tls-ca site.pem --tls-cert own.pem --tls-key own.key
  ssh -L 8642:127.0.0.1:8642 far-machine farflung watch runs/nano-1

The first line on stdout is the page's address. The page reads what the run writes into its folder, live or afterwards:
members and their links, shares, where each step's time went, loss, bytes, goodput, events. It changes nothing.
/snapshot returns the same data as JSON. The page needs a build with the feature `watch`:
cargo build --release --features watch
";

/// Show a run in a browser: members and links, shares, how each step's time is spent, loss, bytes, goodput,
/// events.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("asks").args(["ticket_file", "at"]))]
pub(crate) struct WatchCommand {
    /// The run's folder; the run may have ended.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Address of the web page; port 0 takes any free port. At an address other than the loopback, anyone who
    /// can reach it sees the run, without encryption.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8642")]
    listen: String,
    /// File with the ticket of a run of `farflung host`. With it, the page also asks the members which of them
    /// are present, what their shares are and which ones they wait for.
    #[arg(long, value_name = "FILE")]
    ticket_file: Option<PathBuf>,
    /// Address of a member, where processes have certificates and there is no ticket; several are tried in
    /// turn.
    #[arg(long, value_name = "HOST:PORT", requires = "tls_ca")]
    at: Vec<String>,
    #[command(flatten)]
    site: SiteMemberArgs,
    /// The run's name, if it is not the default.
    #[arg(long, value_name = "NAME", requires = "asks")]
    job: Option<String>,
    /// File with this machine's key, created on first use. Default: `key` in `FARFLUNG_HOME` or
    /// ~/.config/farflung.
    #[arg(long, value_name = "FILE", requires = "ticket_file")]
    key_file: Option<PathBuf>,
}

#[cfg(not(feature = "watch"))]
impl WatchCommand {
    pub(crate) fn run(self) -> Result<()> {
        let expected =
            "a build with the feature `watch`, which this one lacks: build it with `--features watch`"
                .to_owned();
        Err(farflung::Error::Setting { field: "watch", value: self.run.display().to_string(), expected })
    }
}

#[cfg(feature = "watch")]
impl WatchCommand {
    pub(crate) fn run(self) -> Result<()> {
        let ask = self.ask()?;
        let stop = farflung::Stop::install()?;
        farflung::watch::serve(&self.run, &self.listen, ask, &stop, |address| {
            if !address.ip().is_loopback() {
                tracing::warn!(
                    "anyone who can reach {address} can see this run, without encryption and without a \
                     password: use this only in trusted networks"
                );
            }
            super::print(&format!("http://{address}/\n"))
        })
    }

    /// Returns a function that asks a member of the run, if there are a ticket or certificates.
    fn ask(&self) -> Result<Option<farflung::watch::Ask>> {
        if self.ticket_file.is_none() && self.site == SiteMemberArgs::default() {
            return Ok(None);
        }
        let proof = (self.ticket_file.as_deref(), self.key_file.as_deref());
        let asking = super::status::asking(proof, (&self.site, &self.at), self.job.clone())?;
        Ok(Some(Box::new(move || asking.ask())))
    }
}
