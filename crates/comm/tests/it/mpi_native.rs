//! MPI's own collectives under the real `mpirun`.

#![cfg(feature = "mpi")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use farflung_base::{Nanos, Rank};
use farflung_comm::mpi::{self, Collectives};
use farflung_comm::{CommError, Communicator, ReduceOp, UserOp};

/// Environment variable that is set in ranks under `mpirun`, to what they are to do.
const TASK: &str = "FARFLUNG_TEST_NATIVE";

fn join() -> Communicator {
    let number = |name| std::env::var(name).unwrap().parse().unwrap();
    let (rank, size) = (number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE"));
    let joined = mpi::join_by(rank, size, Collectives::Native).unwrap();
    Communicator::new(joined).with_deadline(Nanos::from_millis(20_000))
}

/// Starts ranks that run this test; returns their output and whether they succeeded.
fn under_mpirun(test: &str, task: &str, ranks: usize) -> (String, bool) {
    let mut mpirun = crate::laws::mpirun(ranks);
    mpirun.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]).env(TASK, task);
    let output = mpirun.output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (said, output.status.success())
}

/// Checks the collectives that MPI runs, among the ranks of a communicator. Sums of small integers are exact in
/// any order.
fn check(comm: &Communicator) {
    let (n, me) = (comm.size(), comm.rank().index());
    for len in [0, 1, n, 1001, 300_007] {
        let own = |rank: usize| move |i: usize| ((i % 100) * (rank + 1)) as f32;
        let sum = |i: usize| ((i % 100) * n * (n + 1) / 2) as f32;
        let mut x: Vec<f32> = (0..len).map(own(me)).collect();
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert!(x.iter().enumerate().all(|(i, v)| v.to_bits() == sum(i).to_bits()));
        let mut mean: Vec<f64> = (0..len).map(|i| f64::from(own(me)(i)) * n as f64).collect();
        comm.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
        assert!(mean.iter().enumerate().all(|(i, v)| v.to_bits() == f64::from(sum(i)).to_bits()));
        let mut x: Vec<f32> = (0..len).map(own(me)).collect();
        let shard = comm.reduce_scatter(&mut x, ReduceOp::Sum).unwrap();
        assert!(shard.clone().all(|i| x[i].to_bits() == sum(i).to_bits()));
        comm.all_gather(&mut x).unwrap();
        assert!(x.iter().enumerate().all(|(i, v)| v.to_bits() == sum(i).to_bits()));
        for root in 0..n {
            let mut x = vec![me as u16; len];
            comm.broadcast(&mut x, Rank(root as u32)).unwrap();
            assert!(x.iter().all(|&v| usize::from(v) == root));
        }
    }
    // Many at a time, waited for in another order than they were started. Our own code runs those with `Max`.
    let started: Vec<_> = (0..30_u64)
        .map(|i| {
            let op = if i % 3 == 0 { ReduceOp::Max } else { ReduceOp::Sum };
            comm.start_all_reduce(vec![i + me as u64; 1 + 500 * i as usize], op)
        })
        .collect();
    for (i, pending) in started.into_iter().enumerate().rev() {
        let expected = if i % 3 == 0 { i + n - 1 } else { i * n + n * (n - 1) / 2 };
        assert!(pending.wait().unwrap().iter().all(|&v| v == expected as u64));
    }
    let mut last = [me as u64];
    comm.all_reduce(&mut last, UserOp::new("last", |_, b| b)).unwrap();
    assert_eq!(last, [n as u64 - 1]);
}

#[test]
fn mpi_runs_the_collectives_that_it_has_for_all_and_for_parts() {
    if std::env::var(TASK).is_ok() {
        let comm = join();
        assert!(comm.transport().native().is_some());
        let before = comm.stats().sent.payload;
        let mut x = vec![1.0_f32; 1_000_000];
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(comm.stats().sent.payload, before, "our frames carried nothing of it");
        check(&comm);
        let half = comm.split(comm.rank().0 % 2, comm.rank().0).unwrap();
        check(&half);
        // Collectives of both communicators at the same time.
        let wide = comm.start_all_reduce(vec![1_u32; 200_000], ReduceOp::Sum);
        let narrow = half.start_all_reduce(vec![1_u32; 100_000], ReduceOp::Sum);
        assert!(narrow.wait().unwrap().iter().all(|&v| v as usize == half.size()));
        assert!(wide.wait().unwrap().iter().all(|&v| v as usize == comm.size()));
        drop((comm, half));
        mpi::leave(0);
        println!("checked");
        return;
    }
    let test = "mpi_native::mpi_runs_the_collectives_that_it_has_for_all_and_for_parts";
    for ranks in [1, 2, 5] {
        let (said, succeeded) = under_mpirun(test, "check", ranks);
        assert!(succeeded && said.matches("checked").count() == ranks, "{ranks}: {said}");
    }
}

#[test]
fn the_rank_that_does_not_start_a_collective_of_mpi_is_named_and_the_job_ends() {
    if std::env::var(TASK).is_ok() {
        let comm = join().with_deadline(Nanos::from_millis(1_000));
        if comm.rank().0 == 2 {
            std::thread::sleep(std::time::Duration::from_secs(30));
        }
        let error = comm.all_reduce(&mut [1.0_f32; 1000], ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, CommError::Deadline { .. } | CommError::Aborted { .. }), "{error}");
        println!("silent: {:?}", error.peer());
        drop(comm);
        mpi::leave(75);
        return;
    }
    let test = "mpi_native::the_rank_that_does_not_start_a_collective_of_mpi_is_named_and_the_job_ends";
    let (said, succeeded) = under_mpirun(test, "silent", 3);
    assert!(!succeeded, "{said}");
    assert!(said.contains("silent: Some(PeerId(2))"), "{said}");
    assert!(!said.contains("silent: Some(PeerId(0))") && !said.contains("silent: Some(PeerId(1))"), "{said}");
}
