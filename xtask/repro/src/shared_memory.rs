//! Compares an all-reduce through shared memory with OpenMPI's, and with ours over TCP.

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use farflung::base::Nanos;
use farflung::comm::{Communicator, tcp};

use crate::all_reduce::{MIB, algorithm, iterations, measure};
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::median;

pub(crate) const BENCH: Bench = Bench {
    name: "shared-memory",
    claim: "between processes of one machine an all-reduce through shared memory is faster than OpenMPI's \
            shared memory and than our TCP, at 1, 25 and 100 MiB with 2, 4 and 8 processes",
    source: "OpenMPI's MPI_Allreduce in the same run, the faster of in place and not (`cargo xtask setup \
             mpi`); the slowest rank's median, medians of alternating measurements",
    seed: 0,
    run,
};

/// First argument of this program when it runs as one rank.
pub(crate) const CHILD: &str = "--shared-memory-rank";

const PROGRAM: &str = include_str!("shared_memory/all_reduce.c");

/// Runs one rank. The arguments are its number, the number of ranks, the address where they connect, KiB,
/// `quick` or `long`, and `memory` or `sockets`. Rank 0 prints the time in seconds.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    let [rank, size, master, kib, pace, how] = args else { bail!("expected six arguments") };
    let kib = kib.parse()?;
    let mut config = tcp::Config::new(rank.parse()?, size.parse()?, master);
    if how == "memory" {
        config.shared_memory = tcp::SharedMemory::Always;
    }
    let comm = Communicator::new(tcp::join(&config)?);
    let comm = comm.with_algorithm(algorithm(kib)).with_deadline(Nanos::from_millis(60_000));
    let seconds = measure(&comm, kib, pace == "quick")?;
    if comm.rank().0 == 0 {
        writeln!(out, "{seconds}")?;
    }
    Ok(comm.barrier()?)
}

/// Returns the seconds of our all-reduce between `n` processes.
fn ours(n: usize, kib: usize, quick: bool, how: &str) -> Result<f64> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let master = format!("127.0.0.1:{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?.port());
    let mut children = Vec::new();
    for rank in 0..n {
        let (rank, n, kib) = (rank.to_string(), n.to_string(), kib.to_string());
        let pace = if quick { "quick" } else { "long" };
        let mut command = Command::new(&program);
        command.args([CHILD, &rank, &n, &master, &kib, pace, how]);
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

/// A program that measures OpenMPI, built with OpenMPI's `mpicc`.
struct OpenMpi {
    program: PathBuf,
}

impl OpenMpi {
    /// Builds the program. Returns `None` if `mpirun` or `mpicc` is missing.
    fn build(folder: &Path) -> Result<Option<Self>> {
        let is_there = |name| Command::new(name).arg("--version").stdout(Stdio::null()).status().is_ok();
        if !is_there("mpirun") || !is_there("mpicc") {
            return Ok(None);
        }
        let (source, program) = (folder.join("all_reduce.c"), folder.join("all_reduce"));
        std::fs::write(&source, PROGRAM)?;
        let status =
            Command::new("mpicc").args(["-O3", "-march=native", "-o"]).arg(&program).arg(&source).status()?;
        ensure!(status.success(), "mpicc failed: {status}");
        Ok(Some(Self { program }))
    }

    /// Returns the seconds of an all-reduce, in place or not, whichever is faster.
    fn measure(&self, n: usize, kib: usize, quick: bool) -> Result<f64> {
        let mut command = Command::new("mpirun");
        command.args([
            "--allow-run-as-root",
            "--oversubscribe",
            "--mca",
            "btl",
            "vader,self",
            "-n",
            &n.to_string(),
        ]);
        command.arg(&self.program).args([kib.to_string(), iterations(kib, quick).to_string()]);
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "mpirun failed: {}", output.status);
        let text = String::from_utf8_lossy(&output.stdout);
        let times = text.lines().filter_map(|line| line.trim().parse::<f64>().ok());
        times.min_by(f64::total_cmp).context("mpirun's rank 0 printed no time")
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mpi = OpenMpi::build(folder.path())?;
    if mpi.is_none() {
        report.progress("OpenMPI is not installed: `cargo xtask setup mpi` installs it")?;
    }
    let sizes: &[usize] = if options.quick { &[1, MIB] } else { &[1, MIB, 25 * MIB, 100 * MIB] };
    let ranks: &[usize] = if options.quick { &[2, 4] } else { &[2, 4, 8] };
    let turns = if options.quick { 3 } else { 5 };
    for &n in ranks {
        for &kib in sizes {
            let [mut memory, mut sockets, mut theirs] = [const { Vec::new() }; 3];
            for _ in 0..turns {
                if let Some(mpi) = &mpi {
                    theirs.push(mpi.measure(n, kib, options.quick)?);
                }
                memory.push(ours(n, kib, options.quick, "memory")?);
                sockets.push(ours(n, kib, options.quick, "sockets")?);
            }
            let (memory, sockets) = (median(memory), median(sockets));
            let name = format!("{n} processes, {kib} KiB");
            // With so few bytes, the time is mostly that in which the system wakes the ranks.
            let mark = if kib == 1 { Threshold::None } else { Threshold::AtMost(1.0) };
            report.row(&format!("{name}: shared memory"), memory * 1e3, "ms", Threshold::None)?;
            report.row(&format!("{name}: TCP"), sockets * 1e3, "ms", Threshold::None)?;
            report.row(
                &format!("{name}: shared memory, time relative to TCP"),
                memory / sockets,
                "x",
                mark,
            )?;
            let theirs = (!theirs.is_empty()).then(|| median(theirs));
            if let Some(theirs) = theirs {
                report.row(&format!("{name}: OpenMPI"), theirs * 1e3, "ms", Threshold::None)?;
            }
            report.ratio(
                &format!("{name}: shared memory, time relative to OpenMPI's"),
                memory,
                theirs,
                mark,
            )?;
        }
    }
    Ok(())
}
