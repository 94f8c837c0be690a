//! `farflung net relay`: simulates a bad link.

use std::time::Duration;

use farflung::base::{Bandwidth, Nanos};
use farflung::relay::{Carries, LinkEmulator};
use farflung::{Error, Result, Stop};

/// Forward data from one address to another, over a simulated link with the given rate, delay, jitter and loss.
/// Runs until a signal.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung net relay --listen 127.0.0.1:9001 --to 127.0.0.1:29500 --rate 100mbit --delay 20ms
  farflung net relay --listen 127.0.0.1:9002 --to 10.0.0.2:4000 --udp --loss 0.5% --jitter 3ms

The first line on stdout is the address at which it listens; the last line is the number of bytes forwarded in
each direction. If a rank's list of peers (`farflung net bench --peers`) contains the relay's address in place
of another rank's, it reaches that rank through the relay.")]
pub(crate) struct RelayArgs {
    /// Address at which to listen; port 0 takes any free port.
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// Address to which to forward.
    #[arg(long, value_name = "HOST:PORT")]
    to: String,
    /// Forward UDP datagrams instead of TCP streams.
    #[arg(long)]
    udp: bool,
    /// Rate of all connections together in each direction, in bits per second. Default: no limit.
    #[arg(long, value_name = "RATE")]
    rate: Option<Bandwidth>,
    /// Delay in one direction.
    #[arg(long, value_name = "TIME", default_value = "0ms")]
    delay: Nanos,
    /// Largest additional random delay.
    #[arg(long, value_name = "TIME", default_value = "0ms")]
    jitter: Nanos,
    /// Fraction of datagrams that are lost, or of pieces of a stream that are sent again.
    #[arg(long, value_name = "PERCENT", default_value = "0%", value_parser = percent)]
    loss: u32,
    /// Time after which a lost piece of a stream is sent again.
    #[arg(long, value_name = "TIME", default_value = "200ms")]
    retransmit: Nanos,
    /// Seed of jitter and losses.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Parses a percentage such as `0.5%`; returns losses per million.
fn percent(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    match number {
        Some(number) if (0.0..=100.0).contains(&number) => Ok((number * 1e4).round() as u32),
        _ => Err("a percentage such as 0.5%, at most 100%".to_owned()),
    }
}

impl RelayArgs {
    pub(crate) fn run(self) -> Result<()> {
        let mut relay = LinkEmulator::new(self.listen, self.to);
        relay.carries = if self.udp { Carries::Udp } else { Carries::Tcp };
        relay.rate = self.rate.unwrap_or(Bandwidth::UNLIMITED);
        (relay.delay, relay.jitter, relay.retransmit) = (self.delay, self.jitter, self.retransmit);
        (relay.loss, relay.seed) = (self.loss, self.seed);
        if relay.rate.0 == 0 {
            let expected = "more than 0".to_owned();
            return Err(Error::Setting { field: "rate", value: "0".to_owned(), expected });
        }
        let stop = Stop::install()?;
        let relaying = relay.start()?;
        super::print(&format!("{}\n", relaying.address()))?;
        while stop.requested().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let [there, back] = relaying.carried();
        super::print(&format!("{there} there, {back} back\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percent() {
        assert_eq!([percent("0.5%"), percent("100 %"), percent("0%")], [Ok(5_000), Ok(1_000_000), Ok(0)]);
        assert!(["0.5", "101%", "-1%", "x%", "nan%"].iter().all(|bad| percent(bad).is_err()));
    }
}
