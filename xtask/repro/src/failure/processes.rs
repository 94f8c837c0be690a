//! Injects each [`InjectedFault`] into real processes: a process is killed or stopped, or a link between two of
//! them is cut or flips a bit.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use farflung::base::Philox;
use farflung::comm::{Algorithm, Communicator, ReduceOp, tcp};
use farflung::relay::{LinkEmulator, Relaying};

use super::{DEADLINE, InjectedFault, N, NEIGHBOR, VICTIM};
use crate::harness::{Options, Report, Threshold};
use crate::machine::now;

/// First argument of this program when it runs as one rank.
pub(crate) const CHILD: &str = "--failure-rank";

/// A process that prints nothing for this long counts as hanging.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs one rank. The arguments are its number, the addresses of all ranks, and the index of its algorithm. It
/// prints `ready`, and later its observations: seconds of the call that failed, the culprit, whether a result
/// was half-reduced, and whether it continued with the others.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    let [rank, peers, algorithm] = args else { bail!("expected three arguments") };
    let algorithm: usize = algorithm.parse()?;
    let peers = peers.split(',').map(str::to_owned).collect();
    let comm = Communicator::new(tcp::join(&tcp::Config::with_peers(rank.parse()?, peers))?)
        .with_algorithm(Algorithm::ALL[algorithm]);
    // The first barrier has a longer deadline, because a loaded machine may start processes late.
    comm.barrier()?;
    let comm = comm.with_deadline(DEADLINE);
    writeln!(out, "ready")?;
    out.flush()?;
    let (mut half, mut start, mut result) = (false, now(), Ok(()));
    let mut x = Vec::new();
    while result.is_ok() {
        x = vec![1.0_f32; 300_000];
        start = now();
        result = comm.all_reduce(&mut x, ReduceOp::Sum);
        half |= result.is_ok() && !x.iter().all(|v| v.to_bits() == (N as f32).to_bits());
    }
    let took = start.elapsed().as_secs_f64();
    half |= !x.iter().all(|v| v.is_nan());
    let culprit = result.err().and_then(|error| error.peer()).map_or(u32::MAX, |peer| peer.0);
    let goes_on = comm.shrink().is_ok_and(|left| {
        let mut y = [1_u64];
        left.all_reduce(&mut y, ReduceOp::Sum).is_ok()
            && y[0] as usize == left.size()
            && left.barrier().is_ok()
    });
    writeln!(out, "{took} {culprit} {half} {goes_on}")?;
    Ok(out.flush()?)
}

/// Observations that one survivor printed.
struct SurvivorReport {
    took: f64,
    right: bool,
    half: bool,
    goes_on: bool,
}

/// A rank's process. Dropping it kills the process, even a stopped one.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn signal(rank: &Rank, name: &str) -> Result<()> {
    let sent = Command::new("kill").args([name, &rank.0.id().to_string()]).status()?;
    ensure!(sent.success(), "failed to signal a rank");
    Ok(())
}

/// Starts a job in which the link between the victim and its neighbour goes through a relay.
fn job(algorithm: usize) -> Result<(Vec<Rank>, Relaying)> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let held: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    let mut peers: Vec<String> =
        held.iter().map(|l| Ok(l.local_addr()?.to_string())).collect::<Result<_>>()?;
    let relaying = LinkEmulator::new("127.0.0.1:0", peers[VICTIM.index()].clone()).start()?;
    drop(held);
    let direct = std::mem::replace(&mut peers[VICTIM.index()], relaying.address().to_string());
    let through = peers.join(",");
    peers[VICTIM.index()] = direct;
    let straight = peers.join(",");
    let ranks = (0..N)
        .map(|rank| {
            let peers = if rank == NEIGHBOR.index() { &through } else { &straight };
            let mut command = Command::new(&program);
            command.args([CHILD, &rank.to_string(), peers, &algorithm.to_string()]);
            Ok(Rank(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?))
        })
        .collect::<Result<_>>()?;
    Ok((ranks, relaying))
}

/// Injects one fault and returns the survivors' observations; `None` for a survivor that printed nothing in
/// time.
fn inject_fault(
    fault: InjectedFault,
    algorithm: usize,
    after: Duration,
) -> Result<Vec<Option<SurvivorReport>>> {
    let (mut ranks, relaying) = job(algorithm)?;
    let lines: Vec<_> = ranks
        .iter_mut()
        .map(|rank| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let out = BufReader::new(rank.0.stdout.take().context("stdout is not piped")?);
            std::thread::spawn(move || {
                // Ends when the rank ends, or when the receiver is dropped.
                out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
            });
            Ok(receiver)
        })
        .collect::<Result<_>>()?;
    for line in &lines {
        ensure!(
            line.recv_timeout(PATIENCE).context("a rank did not start in time")? == "ready",
            "a rank printed a first line other than `ready`"
        );
    }
    std::thread::sleep(after);
    match fault {
        InjectedFault::Crash => signal(&ranks[VICTIM.index()], "-KILL")?,
        InjectedFault::Freeze => signal(&ranks[VICTIM.index()], "-STOP")?,
        InjectedFault::Cut => relaying.cut(true),
        InjectedFault::Corrupt => relaying.corrupt(),
    }
    let read = |line: String| -> Option<SurvivorReport> {
        let mut words = line.split(' ');
        let took = words.next()?.parse().ok()?;
        let culprit: u32 = words.next()?.parse().ok()?;
        let mut flag = || words.next()?.parse::<bool>().ok();
        let right = fault.culprits().iter().any(|peer| peer.0 == culprit);
        Some(SurvivorReport { took, right, half: flag()?, goes_on: flag()? })
    };
    let survivors = (0..N).filter(|&rank| !fault.culprits().iter().any(|peer| peer.index() == rank));
    Ok(survivors.map(|rank| lines[rank].recv_timeout(PATIENCE).ok().and_then(read)).collect())
}

pub(super) fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let rng = Philox::new(report.seed(), 6);
    let place = |wanted| Algorithm::ALL.iter().position(|&a| a == wanted).unwrap_or(0);
    // With these algorithms, frames go both ways over the faulty link. A ring uses it in one direction only.
    let everywhere = [place(Algorithm::Direct), place(Algorithm::Butterfly)];
    let any = [place(Algorithm::Ring), place(Algorithm::HalvingDoubling), place(Algorithm::Direct)];
    let times = if options.quick { 1 } else { 6 };
    let (mut survivors, mut silent, mut innocent, mut half, mut stuck) = (0_u32, 0_u32, 0_u32, 0_u32, 0_u32);
    let mut slowest = 0.0_f64;
    for (i, fault) in
        [InjectedFault::Crash, InjectedFault::Freeze, InjectedFault::Cut, InjectedFault::Corrupt]
            .into_iter()
            .enumerate()
    {
        for time in 0..times {
            let choice = if matches!(fault, InjectedFault::Crash | InjectedFault::Freeze) {
                &any[..]
            } else {
                &everywhere
            };
            let after = Duration::from_micros(20_000 + rng.below(100 * i as u64 + time, 150_000));
            for said in inject_fault(fault, choice[time as usize % choice.len()], after)? {
                survivors += 1;
                let Some(said) = said else {
                    silent += 1;
                    continue;
                };
                slowest = slowest.max(said.took);
                innocent += u32::from(!said.right);
                half += u32::from(said.half);
                stuck += u32::from(!said.goes_on);
            }
        }
    }
    report.row("processes: survivors", f64::from(survivors), "1", Threshold::None)?;
    report.row("processes: survivors that hang", f64::from(silent), "1", Threshold::AtMost(0.0))?;
    report.row("processes: longest time to notice", slowest, "s", Threshold::AtMost(2.25))?;
    report.row("processes: partly reduced results", f64::from(half), "1", Threshold::AtMost(0.0))?;
    report.row(
        "processes: survivors that name an innocent rank",
        f64::from(innocent),
        "1",
        Threshold::AtMost(0.0),
    )?;
    report.row("processes: survivors that could not continue", f64::from(stuck), "1", Threshold::AtMost(0.0))
}
