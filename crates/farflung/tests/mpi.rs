//! `--transport mpi`: a run under the real `mpirun`, where it is built in; what to do, where it is not.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod tiny;

use std::process::Command;

use tiny::{Run, farflung};

/// The training losses of three ranks under mpirun.
#[cfg(feature = "mpi")]
fn trained(run: &Run, transport: &str) -> Vec<String> {
    let out = run.at(transport);
    let args = format!("--steps 5 --sync ddp --workers 3 --transport {transport} --out {}", out.display());
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "3"]).arg(farflung().get_program());
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let done = mpirun.args(run.args(&args)).env("MASTER_PORT", port.to_string()).output().unwrap();
    assert!(done.status.success(), "{transport}: {}", String::from_utf8_lossy(&done.stderr));
    let rows = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let loss =
        |line: &str| line.split_once("\"train_loss\":").unwrap().1.split(',').next().unwrap().to_owned();
    rows.lines().map(loss).collect()
}

#[test]
#[cfg(feature = "mpi")]
fn a_run_over_mpi_has_the_bits_of_one_over_sockets() {
    let run = Run::new();
    let sockets = trained(&run, "tcp");
    assert_eq!(sockets.len(), 5);
    assert_eq!(trained(&run, "mpi"), sockets);
}

#[test]
#[cfg(feature = "mpi")]
fn ranks_that_mpirun_has_not_started_are_told_so() {
    let run = Run::new();
    let mut train = farflung();
    train.args(run.args("--steps 1 --sync ddp --workers 2 --transport mpi"));
    let done =
        train.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(!done.status.success() && said.contains("rank 0 of 1 to it, and not 0 of 2"), "{said}");
    assert!(said.contains("mpirun -n N") && said.contains("cargo xtask setup mpi"), "{said}");
}

#[test]
#[cfg(not(feature = "mpi"))]
fn a_program_without_mpi_says_what_to_do() {
    let run = Run::new();
    let mut train: Command = farflung();
    train.args(run.args("--steps 1 --sync ddp --workers 2 --transport mpi"));
    let done =
        train.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(said.contains("built without MPI") && said.contains("cargo xtask setup mpi"), "{said}");
}
