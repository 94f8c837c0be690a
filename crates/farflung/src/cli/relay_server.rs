//! `farflung relay`: runs the relay through which processes behind routers reach each other.

use std::net::SocketAddr;
use std::path::PathBuf;

use farflung::Result;

const EXAMPLES: &str = "Examples:
  farflung relay --listen 0.0.0.0:3340
  farflung relay --listen 0.0.0.0:3340 --allow keys
  farflung ticket --address http://198.51.100.7:3340 > ticket   (where rank 0 runs; the address of the relay)

All processes must be able to reach the relay's port over TCP and UDP. Over TCP the relay forwards packets,
which it cannot decrypt. Over UDP it tells each process its address outside of its router, so that processes can
connect directly if their routers allow it. The relay prints its URL when it listens, and the number of
forwarded bytes when it ends. This command needs a build with the
feature `iroh`: cargo build --release --features iroh
";

/// Run your own relay (see `--relay`), through which processes behind routers reach each other. Runs
/// until a signal.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RelayCommand {
    /// Address at which to listen, over TCP and UDP; port 0 takes any free port.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:3340")]
    listen: SocketAddr,
    /// File with the public keys that may use the relay, one per line; `farflung ticket --key` prints a
    /// machine's key. Default: any key.
    #[arg(long, value_name = "FILE")]
    allow: Option<PathBuf>,
}

#[cfg(not(feature = "iroh"))]
impl RelayCommand {
    pub(crate) fn run(self) -> Result<()> {
        let Self { listen, allow: _ } = self;
        let expected = "a build with the feature `iroh`: cargo build --release --features iroh".to_owned();
        Err(farflung::Error::Setting { field: "relay", value: listen.to_string(), expected })
    }
}

#[cfg(feature = "iroh")]
impl RelayCommand {
    pub(crate) fn run(self) -> Result<()> {
        use farflung::comm::quic::{Relay, RelayConfig};

        let mut config = RelayConfig::new(self.listen);
        config.allow = self.allow.as_deref().map(farflung::access::allowed).transpose()?;
        let stop = farflung::Stop::install()?;
        let relay = Relay::start(&config)?;
        super::print(&format!("{}\n", relay.url()))?;
        while stop.requested().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        super::print(&format!("{} bytes carried\n", relay.carried()))
    }
}
