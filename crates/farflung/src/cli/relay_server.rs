//! `farflung relay`: what processes behind routers reach each other through.

use std::net::SocketAddr;
use std::path::PathBuf;

use farflung::Result;

const EXAMPLES: &str = "Examples:
  farflung relay --listen 0.0.0.0:3340
  farflung relay --listen 0.0.0.0:3340 --allow keys
  farflung ticket --address http://198.51.100.7:3340 > ticket   (where rank 0 runs; the address of the relay)

It needs one port that others reach, over TCP and UDP: over TCP it passes packets on, over UDP it tells each process the
address that it has outside, by which processes then find a direct path where their routers let them. It cannot read what
it passes on. The first line on stdout is its URL as it listens; the last line is what it carried. A build without the
feature `iroh` has no relay: cargo build --release --features iroh
";

/// Run a relay of your own for `--transport iroh`: processes behind routers reach each other through it, until a
/// signal.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RelayCommand {
    /// Where to listen, over TCP and UDP; port 0 is any that is free.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:3340")]
    listen: SocketAddr,
    /// File with the public keys that may use it (`farflung ticket --key` prints one), one a line; without it
    /// everybody may.
    #[arg(long, value_name = "FILE")]
    allow: Option<PathBuf>,
}

#[cfg(not(feature = "iroh"))]
impl RelayCommand {
    pub(crate) fn run(self) -> Result<()> {
        let Self { listen, allow: _ } = self;
        let expected = "a build with it: this one has no relay, build it with `--features iroh`".to_owned();
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
