//! `farflung ticket`: makes a ticket, with which other machines join a job of this one.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::path::PathBuf;

use farflung::comm::secure::{PublicKey, Ticket, unix_seconds};
use farflung::{Error, Home, Result, access};

use super::own_address;

/// Make a ticket: one word with this machine's addresses and key, a secret and an expiry time. Give it to the
/// other ranks of a job whose rank 0 runs here. Any process with the ticket can join until it expires, so
/// protect it like a password.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung ticket --address 203.0.113.5:29500 > ticket
  farflung ticket --address http://198.51.100.7:3340 > ticket   (of a relay, where rank 0 is behind a router)
  RANK=0 WORLD_SIZE=2 farflung train --sync ddp --ticket-file ticket   (here)
  RANK=1 WORLD_SIZE=2 farflung train --sync ddp --ticket-file ticket   (there, with the same ticket)
  farflung ticket --show --ticket-file ticket
  farflung ticket --rotate
  farflung ticket --key >> allow")]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(crate) struct TicketCommand {
    /// Address at which other machines reach rank 0; up to 16, which are tried in turn. In a build with
    /// the feature iroh also relays, as http://HOST:PORT.
    #[arg(long, value_name = "HOST:PORT", required_unless_present_any = ["show", "rotate", "key"])]
    address: Vec<String>,
    /// Time for which the ticket is valid, such as 90s, 30min, 24h or 7d.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = seconds)]
    expires: u64,
    /// File to which the ticket is written, readable only by its owner. Default: standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the content of a ticket, without its secret.
    #[arg(long, conflicts_with_all = ["address", "out", "rotate", "key"])]
    show: bool,
    /// File with the ticket to show; - reads standard input.
    #[arg(long, value_name = "FILE", default_value = "-", requires = "show")]
    ticket_file: PathBuf,
    /// Make a new secret: jobs that start from now on reject earlier tickets.
    #[arg(long, conflicts_with = "key")]
    rotate: bool,
    /// Print this machine's public key, for the --allow list of others.
    #[arg(long, conflicts_with = "address")]
    key: bool,
    /// File with this machine's key, created on first use. Default: `key` in FARFLUNG_HOME or
    /// ~/.config/farflung.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Print results as JSON.
    #[arg(long)]
    json: bool,
}

impl TicketCommand {
    pub(crate) fn run(self) -> Result<()> {
        if self.show {
            return self.print(&access::ticket_of(&self.ticket_file)?);
        }
        let home = Home::new(self.key_file.as_deref(), |name| std::env::var(name).ok())?;
        if self.rotate {
            home.rotate()?;
            if self.address.is_empty() {
                let said = "jobs that start from now on reject earlier tickets\n";
                return if self.json { super::print("{\"rotated\":true}\n") } else { super::print(said) };
            }
        }
        let host = home.identity()?.public();
        if self.key {
            let json = serde_json::json!({ "key": host.to_string() });
            return super::print(&if self.json { format!("{json}\n") } else { format!("{host}\n") });
        }
        let word = self.make(&home, host)?;
        match (&self.out, self.json) {
            (Some(path), _) => access::write_private(path, &word),
            (None, true) => super::print(&format!("{}\n", serde_json::json!({ "ticket": word }))),
            (None, false) => super::print(&format!("{word}\n")),
        }
    }

    fn make(&self, home: &Home, host: PublicKey) -> Result<String> {
        own_address::check_schemes("address", &self.address)?;
        let expiry = unix_seconds().saturating_add(self.expires);
        let secret = home.join_secret()?.until(expiry);
        let ticket = Ticket { addresses: self.address.clone(), host, secret, expiry };
        ticket.word().map_err(|_| Error::Setting {
            field: "address",
            value: self.address.join(" "),
            expected: "1 to 16 times `host:port`, with a port of 1 to 65535".to_owned(),
        })
    }

    fn print(&self, ticket: &Ticket) -> Result<()> {
        let Ticket { addresses, host, expiry, .. } = ticket;
        let left = i128::from(*expiry) - i128::from(unix_seconds());
        if self.json {
            let shown = serde_json::json!({
                "addresses": addresses, "host": host.to_string(), "expiry": expiry, "seconds_left": left as i64,
            });
            return super::print(&format!("{shown}\n"));
        }
        let holds = match left {
            0.. => format!("for {}", lasting(left as u64)),
            _ => format!("no more: it expired {} ago", lasting(left.unsigned_abs() as u64)),
        };
        super::print(&format!("host      {host}\naddresses {}\nvalid     {holds}\n", addresses.join(" ")))
    }
}

/// Units of time, the longest first.
const UNITS: [(&str, u64); 4] = [("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)];

/// Parses a time such as `24h`; returns seconds.
pub(super) fn seconds(text: &str) -> std::result::Result<u64, String> {
    let read = |(unit, seconds): &(&str, u64)| {
        text.strip_suffix(unit)?.parse::<u64>().ok().filter(|n| *n > 0)?.checked_mul(*seconds)
    };
    let longest = 3660 * 86_400;
    let found = UNITS.iter().find_map(read).filter(|seconds| *seconds <= longest);
    found.ok_or_else(|| {
        format!("expected a time such as 90s, 30min, 24h or 7d, of ten years at most, found `{text}`")
    })
}

/// Formats a time in its longest unit and, unless it is 0, the next shorter one.
fn lasting(seconds: u64) -> String {
    let at = UNITS.iter().position(|(_, unit)| seconds >= *unit).unwrap_or(3);
    let (unit, of) = UNITS[at];
    let whole = format!("{}{unit}", seconds / of);
    match UNITS.get(at + 1) {
        Some((next, smaller)) if seconds % of / smaller > 0 => {
            format!("{whole} {}{next}", seconds % of / smaller)
        }
        _ => whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_said() {
        assert_eq!((seconds("90s"), seconds("30min"), seconds("7d")), (Ok(90), Ok(1800), Ok(604_800)));
        for wrong in ["", "5", "0h", "-1h", "1.5h", "h", "9999999d", "18446744073709551615min"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            (lasting(0).as_str(), lasting(61).as_str(), lasting(90_000).as_str()),
            ("0s", "1min 1s", "1d 1h")
        );
        assert_eq!(lasting(7200), "2h");
    }
}
