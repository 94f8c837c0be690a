//! Checks one contract for every transport: results and failures do not depend on the transport.

#[path = "../../../crates/comm/tests/it/laws/mod.rs"]
mod laws;

use std::io::Write;

use anyhow::{Context, Result, bail, ensure};
use farflung::comm::Cancel;
use farflung::{base, comm};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{Cluster, NETWORK_KINDS, on_ranks};
use laws::{Among, Found, LAWS, Law};

pub(crate) const BENCH: Bench = Bench {
    name: "transports",
    claim: "collectives, order of messages, deadlines, cancelling, shrinking, admitting and the loss of a \
            peer behave the same on every transport, with the same bits; over MPI shrinking and admitting \
            are rejected, with the reason",
    source: "the rules in the README of farflung-comm; the memory transport's bits; the real mpirun",
    seed: 0,
    run,
};

/// First argument of this program when it runs as one rank under `mpirun`.
pub(crate) const CHILD: &str = "--contract-rank";

/// Runs one rank under `mpirun`. The argument is the name of its law. It prints its result.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    let [name] = args else { bail!("expected one argument") };
    let law = Law::named(name).context("no such law")?;
    let number = |name| -> Result<u32> { Ok(std::env::var(name).context(name)?.parse()?) };
    let found = over_mpi(law, number("OMPI_COMM_WORLD_RANK")?, number("OMPI_COMM_WORLD_SIZE")?)?;
    writeln!(out, "{found}")?;
    farflung::transports::leave(0);
    Ok(())
}

#[cfg(feature = "mpi")]
fn over_mpi(law: &Law, rank: u32, size: u32) -> Result<Found> {
    Ok(law.hold(comm::Communicator::new(comm::mpi::join(rank, size)?), Among::Processes)?)
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(_: &Law, _: u32, _: u32) -> Result<Found> {
    bail!("this program was built without MPI")
}

/// Checks a law on threads of this process, and returns each rank's result.
fn over(cluster: Cluster, law: &Law) -> Result<Vec<Found>> {
    let switch = Cancel::new();
    on_ranks(cluster, |comm| law.hold(comm, Among::Threads(&switch)))
}

/// Checks a law on processes under `mpirun`, and returns the ranks' results in any order.
fn under_mpirun(law: &Law) -> Result<Vec<Found>> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let output = laws::mpirun(law.ranks).arg(program).args([CHILD, law.name]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "under mpirun: {}: {}\n{said}", law.name, output.status);
    let found: Vec<Found> =
        String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| line.parse().ok()).collect();
    ensure!(
        found.len() == law.ranks,
        "under mpirun: {}: {} of {} ranks printed a result",
        law.name,
        found.len(),
        law.ranks
    );
    Ok(found)
}

fn broken(found: &[Found]) -> f64 {
    found.iter().map(|found| found.broken).sum::<u64>() as f64
}

/// Counts the ranks whose bits differ from those over memory.
fn other_bits(found: &[Found], memory: &[Found]) -> usize {
    let sorted = |found: &[Found]| {
        let mut bits: Vec<u64> = found.iter().map(|found| found.bits).collect();
        bits.sort_unstable();
        bits
    };
    sorted(found).iter().zip(sorted(memory)).filter(|(a, b)| *a != b).count()
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let memory: Vec<Vec<Found>> =
        LAWS.iter().map(|law| over((NETWORK_KINDS[0].open)(law.ranks)?, law)).collect::<Result<_>>()?;
    for way in NETWORK_KINDS {
        let mut others = 0;
        for (law, memory) in LAWS.iter().zip(&memory) {
            let found = over((way.open)(law.ranks)?, law)?;
            let name = format!("{}: {}: violations", way.name, law.name);
            report.row(&name, broken(&found), "1", Threshold::AtMost(0.0))?;
            others += found.iter().zip(memory).filter(|(a, b)| a.bits != b.bits).count();
        }
        report.row(
            &format!("{}: ranks whose bits differ from those over memory", way.name),
            others as f64,
            "1",
            Threshold::AtMost(0.0),
        )?;
    }
    if cfg!(not(feature = "mpi")) {
        return report.progress("no rows for MPI: `cargo xtask setup mpi` installs what they need");
    }
    let mut others = 0;
    for (law, memory) in LAWS.iter().zip(&memory) {
        let found = under_mpirun(law)?;
        let what = if law.refusal.is_some() { "rejected: violations" } else { "violations" };
        report.row(&format!("mpi: {}: {what}", law.name), broken(&found), "1", Threshold::AtMost(0.0))?;
        // A law that is rejected there gives no bits to compare.
        if law.refusal.is_none() {
            others += other_bits(&found, memory);
        }
    }
    report.row(
        "mpi: ranks whose bits differ from those over memory",
        others as f64,
        "1",
        Threshold::AtMost(0.0),
    )?;
    Ok(())
}
