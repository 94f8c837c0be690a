//! Measures the time of an all-reduce between processes over the loopback interface, and between threads.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use farflung::base::Nanos;
use farflung::comm::{Algorithm, CommError, Communicator, ReduceOp, tcp};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{median, now};
use crate::peers::Peers;
use crate::ranks::{on_ranks, over_memory};

pub(crate) const BENCH: Bench = Bench {
    name: "all-reduce",
    claim: "an all-reduce over TCP on the loopback interface takes at most 25% longer than moving the bytes \
            alone, for 25 and 100 MiB and 2 processes, and is faster than gloo and, for large buffers, than \
            OpenMPI's TCP",
    source: "nccl-tests' definitions: the slowest rank's time, the median of the iterations",
    seed: 0,
    run,
};

/// First argument of this program when it runs as one rank.
pub(crate) const CHILD: &str = "--all-reduce-rank";

pub(crate) const MIB: usize = 1024;

/// Scheduling class of the ranks. A comparison uses the same class for both systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Default,
    /// Real-time, first in first out (`chrt -f 1`). Ranks do not start if the system does not allow it.
    Fifo,
}

/// Returns how often an all-reduce of `kib` KiB is measured, after two warm-up iterations.
pub(crate) const fn iterations(kib: usize, quick: bool) -> usize {
    match kib {
        0..=64 => 200,
        65..=MIB => 30,
        _ if quick => 3,
        _ => 7,
    }
}

/// Returns the median time in seconds of an all-reduce of `kib` KiB. Each time is that of the slowest rank, so
/// the result is the same on all ranks. Between two measured all-reduces a rank does no more work than the
/// scripts of the other systems do, because such work delays ranks that are still busy. So sums are checked
/// only in the two warm-up iterations and in the last one.
pub(crate) fn measure(comm: &Communicator, kib: usize, quick: bool) -> Result<f64, CommError> {
    let mut x = vec![0.0_f32; kib * 256];
    let iterations = iterations(kib, quick);
    let mut times = Vec::new();
    for iteration in 0..iterations + 2 {
        let is_checked = iteration < 2 || iteration == iterations + 1;
        if is_checked {
            x.fill(1.0);
        } else {
            x.fill(0.0);
        }
        comm.barrier()?;
        let start = now();
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        if iteration >= 2 {
            times.push(start.elapsed().as_secs_f64());
        }
        if is_checked {
            assert!(x.iter().all(|&v| v.to_bits() == (comm.size() as f32).to_bits()), "the sum is wrong");
        }
    }
    comm.all_reduce(&mut times, ReduceOp::Max)?;
    Ok(median(times))
}

/// Returns the algorithm for `kib` KiB: whole buffers if latency dominates, a ring if bandwidth does.
pub(crate) const fn algorithm(kib: usize) -> Algorithm {
    if kib <= 16 { Algorithm::RecursiveDoubling } else { Algorithm::Ring }
}

/// Runs one rank. The arguments are its number, the number of ranks, the address where they connect, KiB, and
/// `quick` or `long`. Rank 0 prints the time in seconds.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    let [rank, size, master, kib, pace] = args else { bail!("expected five arguments") };
    let kib = kib.parse()?;
    let comm = Communicator::new(tcp::join(&tcp::Config::new(rank.parse()?, size.parse()?, master))?);
    let comm = comm.with_algorithm(algorithm(kib)).with_deadline(Nanos::from_millis(60_000));
    let seconds = measure(&comm, kib, pace == "quick")?;
    if comm.rank().0 == 0 {
        writeln!(out, "{seconds}")?;
    }
    Ok(comm.barrier()?)
}

/// Returns the same time as [`measure`], between `n` processes.
pub(crate) fn between_processes(n: usize, kib: usize, quick: bool, class: Class) -> Result<f64> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut children = Vec::new();
    for rank in 0..n {
        let mut command = match class {
            Class::Default => Command::new(&program),
            Class::Fifo => {
                let mut command = Command::new("chrt");
                command.args(["-f", "1"]).arg(&program);
                command
            }
        };
        let (rank, n, master) = (rank.to_string(), n.to_string(), format!("127.0.0.1:{port}"));
        command.args([CHILD, &rank, &n, &master, &kib.to_string(), if quick { "quick" } else { "long" }]);
        children.push(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?);
    }
    let mut seconds = None;
    for child in children {
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "a rank failed: {}", output.status);
        let said = String::from_utf8_lossy(&output.stdout).trim().parse().ok();
        seconds = seconds.or(said);
    }
    seconds.context("rank 0 printed no time")
}

/// Returns the bytes per second that a loopback connection moves each way while both ways are busy. It is the
/// best of three block sizes, each tried twice. The buffers begin at a page: processors with fast short moves
/// copy out of a socket six times slower if the target's offset in its page is 1 to 31 bytes beyond the
/// source's, as it is in a large allocation.
pub(crate) fn both_ways() -> Result<f64> {
    let blocks = [64 << 10, 256 << 10, 1 << 20].repeat(2);
    let rates: Vec<f64> = blocks.into_iter().map(both_ways_in).collect::<Result<_>>()?;
    Ok(rates.into_iter().fold(0.0, f64::max))
}

fn both_ways_in(block: usize) -> Result<f64> {
    const TOTAL: usize = 256 << 20;
    const PAGE: usize = 4096;
    fn end(stream: &TcpStream, block: usize) -> Result<()> {
        let room = || vec![1_u8; block + PAGE];
        let aligned = |room: &[u8]| {
            let at = room.as_ptr().align_offset(PAGE);
            at..at + block
        };
        stream.set_nodelay(true)?;
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| -> std::io::Result<()> {
                let room = room();
                (0..TOTAL / block).try_for_each(|_| (&*stream).write_all(&room[aligned(&room)]))
            });
            let mut room = room();
            let aligned = aligned(&room);
            let mut left = TOTAL;
            while left > 0 {
                let got = (&*stream).read(&mut room[aligned.clone()])?;
                ensure!(got > 0, "the other end closed the connection");
                left -= got;
            }
            Ok(writing.join().expect("writing does not panic")?)
        })
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    let start = now();
    std::thread::scope(|scope| -> Result<()> {
        let other = scope.spawn(|| end(&far, block));
        end(&near, block)?;
        other.join().expect("reading does not panic")
    })?;
    Ok(TOTAL as f64 / start.elapsed().as_secs_f64())
}

/// Returns another system's time in milliseconds.
fn theirs(peers: &Peers, bench: &str, n: usize, kib: usize) -> Option<f64> {
    let (n, kib) = (n.to_string(), kib.to_string());
    peers.least(bench, &[("op", "all_reduce"), ("nproc", &n), ("kib", &kib)], "ms")
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let limit = both_ways()?;
    report.row("raw loopback, each direction while both are busy", limit / 1e9, "GB/s", Threshold::None)?;
    let sizes: &[usize] = if options.quick { &[1, MIB, 25 * MIB] } else { &[1, MIB, 25 * MIB, 100 * MIB] };
    let ranks: &[usize] = if options.quick { &[2, 4] } else { &[2, 4, 8] };
    let fifo = Command::new("chrt").args(["-f", "1", "true"]).status().is_ok_and(|status| status.success());
    for &n in ranks {
        for &kib in sizes {
            let seconds = between_processes(n, kib, options.quick, Class::Default)?;
            let name = format!("{n} processes, {kib} KiB");
            report.row(&name, seconds * 1e3, "ms", Threshold::None)?;
            let through = (kib * 1024) as f64 * 2.0 * (n - 1) as f64 / n as f64;
            report.row(&format!("{name}: busbw"), through / seconds / 1e9, "GB/s", Threshold::None)?;
            let large = kib >= 25 * MIB;
            if n == 2 && large {
                let fraction = through / seconds / limit;
                report.row(
                    &format!("{name}: bandwidth relative to the raw loopback"),
                    fraction,
                    "x",
                    Threshold::AtLeast(0.8),
                )?;
            }
            let against = |report: &mut Report<'_>, seconds: f64, peer: &str, small, big| {
                let mark = match kib {
                    1 => Threshold::AtMost(small),
                    _ if large && n > 2 => Threshold::AtMost(big),
                    _ => Threshold::None,
                };
                let figure = theirs(&options.peers, peer, n, kib);
                report.ratio(&format!("{name}: time relative to {peer}'s"), seconds * 1e3, figure, mark)
            };
            against(report, seconds, "gloo", 0.25, 1.0 / 1.7)?;
            against(report, seconds, "openmpi-tcp", 3.0, 1.0)?;
            if fifo {
                let seconds = between_processes(n, kib, options.quick, Class::Fifo)?;
                report.row(&format!("{name}, FIFO"), seconds * 1e3, "ms", Threshold::None)?;
                against(report, seconds, "gloo-fifo", 0.25, 1.0)?;
            }
        }
    }
    for &n in ranks {
        for &kib in sizes {
            // The system's placement of threads is random and stays the same while they run. It dominates the
            // time of small all-reduces, so these are measured with nine groups of threads.
            let clusters = if kib < MIB { 9 } else { 1 };
            let once = |_| -> Result<f64> {
                let ranks = over_memory(n);
                let times = on_ranks(ranks, |comm| {
                    measure(&comm.with_algorithm(algorithm(kib)), kib, options.quick)
                })?;
                Ok(times[0])
            };
            let ms = median((0..clusters).map(once).collect::<Result<_>>()?) * 1e3;
            let name = format!("{n} threads, {kib} KiB");
            report.row(&name, ms, "ms", Threshold::None)?;
            let figure = theirs(&options.peers, "openmpi-shm", n, kib);
            report.ratio(
                &format!("{name}: time relative to OpenMPI's shared memory"),
                ms,
                figure,
                Threshold::AtMost(1.0),
            )?;
        }
    }
    Ok(())
}
