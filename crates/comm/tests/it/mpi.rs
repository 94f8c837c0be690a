//! The contract of every transport, over the machine's MPI, under the real `mpirun`.

#![cfg(feature = "mpi")]
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests; ranks print for the test that starts them"
)]

use std::collections::BTreeMap;

use crate::common::{memory_cluster, on_ranks};
use crate::laws::{Among, Found, LAWS, Law};
use farflung_comm::{Cancel, CommError, Communicator, mpi};

/// Environment variable with the name of the law that a rank under `mpirun` runs.
const LAW: &str = "FARFLUNG_TEST_LAW";

/// Runs one rank of a law and prints its result.
fn rank(law: &Law) {
    let number = |name| std::env::var(name).unwrap().parse().unwrap();
    let (rank, size) = (number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE"));
    let joined = mpi::join(rank, size).unwrap();
    // MPI can be initialised only once.
    assert!(matches!(mpi::join(rank, size), Err(CommError::Mpi { .. })));
    let found = law.hold(Communicator::new(joined), Among::Processes).unwrap();
    println!("{found}");
    mpi::leave(0);
}

/// Runs a law under `mpirun`, and returns the results of all ranks, in any order.
fn under_mpirun(law: &Law) -> Vec<Found> {
    let test = "mpi::every_law_holds_over_mpi_or_is_refused_with_the_reason";
    let mut mpirun = crate::laws::mpirun(law.ranks);
    mpirun.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]).env(LAW, law.name);
    let output = mpirun.output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {}\n{said}\n{errors}", law.name, output.status);
    said.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Returns the number of ranks by hash of their results.
fn bits(found: &[Found]) -> BTreeMap<u64, usize> {
    let mut bits = BTreeMap::new();
    for found in found {
        *bits.entry(found.bits).or_default() += 1;
    }
    bits
}

#[test]
fn every_law_holds_over_mpi_or_is_refused_with_the_reason() {
    if let Ok(name) = std::env::var(LAW) {
        return rank(Law::named(&name).unwrap());
    }
    for law in LAWS {
        let found = under_mpirun(law);
        assert_eq!(found.len(), law.ranks, "{}", law.name);
        let broken = found.iter().find(|found| found.broken > 0);
        assert_eq!(broken, None, "{}: see that line of laws/mod.rs", law.name);
        if law.refusal.is_none() {
            let switch = Cancel::new();
            let memory =
                on_ranks(memory_cluster(law.ranks), |comm| law.hold(comm, Among::Threads(&switch)).unwrap());
            assert_eq!(bits(&found), bits(&memory), "{}", law.name);
        }
    }
}
