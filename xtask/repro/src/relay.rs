//! Checks that a relay is as slow as requested.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use anyhow::Result;
use farflung::base::Nanos;
use farflung::relay::LinkEmulator;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{median, now};

pub(crate) const BENCH: Bench = Bench {
    name: "relay",
    claim: "`farflung net relay` has the rate and the delay that were requested, within 5% for up to 100 \
            Mbit/s",
    source: "bytes over rate, and twice the delay there and back",
    seed: 0,
    run,
};

/// Returns two ends of a connection through a relay.
fn through(rate: &str, delay: &str) -> Result<(TcpStream, TcpStream, farflung::relay::Relaying)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut relay = LinkEmulator::new("127.0.0.1:0", listener.local_addr()?.to_string());
    (relay.rate, relay.delay) = (rate.parse()?, delay.parse::<Nanos>()?);
    let relaying = relay.start()?;
    let near = TcpStream::connect(relaying.address())?;
    near.set_nodelay(true)?;
    let (far, _) = listener.accept()?;
    far.set_nodelay(true)?;
    Ok((near, far, relaying))
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let pings = if options.quick { 10 } else { 50 };
    for (rate, bits, delay, seconds) in
        [("20mbit", 20e6, "25ms", 0.025), ("100mbit", 100e6, "10ms", 0.010), ("1gbit", 1e9, "5ms", 0.005)]
    {
        // Above 100 Mbit/s, the machine's own scheduling affects the figures.
        let most = if bits > 1e8 { Threshold::None } else { Threshold::AtMost(1.05) };
        let (mut near, mut far, _relaying) = through(rate, delay)?;
        let mut turns = Vec::new();
        for _ in 0..pings {
            let start = now();
            let mut byte = [1];
            near.write_all(&byte)?;
            far.read_exact(&mut byte)?;
            far.write_all(&byte)?;
            near.read_exact(&mut byte)?;
            turns.push(start.elapsed().as_secs_f64());
        }
        let turn = median(turns) / (2.0 * seconds);
        report.row(
            &format!("round trip over {rate},{delay}, relative to twice the delay"),
            turn,
            "x",
            Threshold::AtMost(1.05),
        )?;
        report.row(
            &format!("round trip over {rate},{delay}, at least twice the delay"),
            turn,
            "x",
            Threshold::AtLeast(1.0),
        )?;
        // The bytes of half a second on the link.
        let bytes = (bits / 16.0) as usize;
        let start = now();
        let writer = std::thread::spawn(move || near.write_all(&vec![1; bytes]).map(|()| near));
        far.read_exact(&mut vec![0; bytes])?;
        let took = start.elapsed().as_secs_f64() - seconds;
        let _near = writer.join().expect("a writer does not panic")?;
        let share = took / (bytes as f64 * 8.0 / bits);
        report.row(&format!("{bytes} bytes over {rate}, time relative to bytes / rate"), share, "x", most)?;
        report.row(
            &format!("{bytes} bytes over {rate}, time at least bytes / rate"),
            share,
            "x",
            Threshold::AtLeast(0.95),
        )?;
    }
    Ok(())
}
