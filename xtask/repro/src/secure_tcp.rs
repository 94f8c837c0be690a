//! Measures the cost of encryption in an all-reduce between processes, compared with the cipher's own
//! arithmetic.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};
use farflung::base::Nanos;
use farflung::comm::secure::{Identity, JoinSecret, Security};
use farflung::comm::{Communicator, tcp};
use farflung::relay::LinkEmulator;
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::all_reduce::{MIB, algorithm, measure};
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{median, now};

pub(crate) const BENCH: Bench = Bench {
    name: "secure-tcp",
    claim: "an all-reduce under TLS takes at most 1.25 times the time of unencrypted TCP plus that of the \
            cipher alone, and over a link of 100 Mbit/s at most 3% longer than unencrypted TCP",
    source: "unencrypted TCP and AES-128-GCM with records of 16 KiB, both measured in the same run; medians \
             of alternating measurements",
    seed: 0,
    run,
};

/// First argument of this program when it runs as one rank.
pub(crate) const CHILD: &str = "--secure-tcp-rank";

/// Bytes of a TLS record.
const RECORD: usize = 16 * 1024;

/// Returns the seconds per byte that one core takes to seal and open a record.
fn cipher() -> Result<f64> {
    let broken = |_| anyhow!("the cipher failed");
    let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &[7; 16]).map_err(broken)?);
    let mut record = vec![1; RECORD];
    let mut times = Vec::new();
    for _ in 0..9 {
        let start = now();
        for i in 0..1000_u32 {
            let nonce = || {
                let mut nonce = [0; 12];
                nonce[..4].copy_from_slice(&i.to_le_bytes());
                Nonce::assume_unique_for_key(nonce)
            };
            let tag = key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record).map_err(broken)?;
            record.extend_from_slice(tag.as_ref());
            key.open_in_place(nonce(), Aad::empty(), &mut record).map_err(broken)?;
            record.truncate(RECORD);
        }
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times) / (1000 * RECORD) as f64)
}

/// Runs one rank. The arguments are its number, the number of ranks, the address where they connect, KiB,
/// `quick` or `long`, and `clear` or `sealed`. Rank 0 prints the time in seconds.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    let [rank, size, master, kib, pace, how] = args else { bail!("expected six arguments") };
    let kib = kib.parse()?;
    let mut config = tcp::Config::new(rank.parse()?, size.parse()?, master);
    if how == "sealed" {
        let secret = JoinSecret::from_text(b"a secret of this bench alone")?;
        config.security = Security::by_secret(&Identity::generate()?, &secret);
    }
    let comm = Communicator::new(tcp::join(&config)?);
    let comm = comm.with_algorithm(algorithm(kib)).with_deadline(Nanos::from_millis(120_000));
    let seconds = measure(&comm, kib, pace == "quick")?;
    if comm.rank().0 == 0 {
        writeln!(out, "{seconds}")?;
    }
    Ok(comm.barrier()?)
}

/// Returns the seconds of an all-reduce between `n` processes, over the loopback or through a relay with this
/// rate.
fn between(n: usize, kib: usize, quick: bool, how: &str, rate: Option<&str>) -> Result<f64> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let master = format!("127.0.0.1:{port}");
    let relaying = match rate {
        None => None,
        Some(rate) => {
            let mut relay = LinkEmulator::new("127.0.0.1:0", master.clone());
            relay.rate = rate.parse()?;
            Some(relay.start()?)
        }
    };
    let through = relaying.as_ref().map_or_else(|| master.clone(), |relaying| relaying.address().to_string());
    let mut children = Vec::new();
    for rank in 0..n {
        let at = if rank == 0 { &master } else { &through };
        let (rank, n, kib) = (rank.to_string(), n.to_string(), kib.to_string());
        let pace = if quick { "quick" } else { "long" };
        let mut command = Command::new(&program);
        command.args([CHILD, &rank, &n, at, &kib, pace, how]);
        children.push(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?);
    }
    let mut seconds = None;
    for child in children {
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "a rank failed: {}", output.status);
        seconds = seconds.or(String::from_utf8_lossy(&output.stdout).trim().parse().ok());
    }
    seconds.context("rank 0 printed no time")
}

/// Returns the median seconds of an all-reduce without encryption and with TLS, measured in turns.
fn both(turns: usize, n: usize, kib: usize, quick: bool, rate: Option<&str>) -> Result<[f64; 2]> {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..turns {
        for (times, how) in times.iter_mut().zip(["clear", "sealed"]) {
            times.push(between(n, kib, quick, how, rate)?);
        }
    }
    Ok(times.map(median))
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cipher = cipher()?;
    report.row("AES-128-GCM, sealed and opened on one core", 1e-9 / cipher, "GB/s", Threshold::None)?;
    let sizes: &[usize] = if options.quick { &[1, MIB] } else { &[1, MIB, 25 * MIB, 100 * MIB] };
    let turns = if options.quick { 3 } else { 5 };
    for n in [2, 4] {
        for &kib in sizes {
            let [clear, sealed] = both(turns, n, kib, options.quick, None)?;
            let name = format!("{n} processes, {kib} KiB");
            report.row(&format!("{name}: unencrypted"), clear * 1e3, "ms", Threshold::None)?;
            report.row(&format!("{name}: TLS"), sealed * 1e3, "ms", Threshold::None)?;
            // Recursive doubling sends whole buffers, and a ring sends parts. Each byte is sealed once and
            // opened once.
            let through = if kib <= 16 { n.ilog2() as f64 * n as f64 } else { 2.0 * (n - 1) as f64 };
            let arithmetic = through * (kib * 1024) as f64 * cipher / n.min(cores) as f64;
            report.row(&format!("{name}: the cipher alone"), arithmetic * 1e3, "ms", Threshold::None)?;
            let ratio = sealed / (clear + arithmetic);
            report.row(
                &format!("{name}: TLS, time relative to unencrypted plus cipher"),
                ratio,
                "x",
                Threshold::AtMost(1.25),
            )?;
        }
    }
    let kib = if options.quick { MIB } else { 4 * MIB };
    let [clear, sealed] = both(turns, 2, kib, true, Some("100mbit"))?;
    let name = format!("2 processes, {kib} KiB over 100 Mbit/s");
    report.row(&format!("{name}: unencrypted"), clear * 1e3, "ms", Threshold::None)?;
    report.row(
        &format!("{name}: TLS, time relative to unencrypted"),
        sealed / clear,
        "x",
        Threshold::AtMost(1.03),
    )
}
