//! Averages a vector over four ranks: on links that exist only in virtual time, then over real sockets. Then
//! reduces statistics with a user-defined reduction.

use std::error::Error;
use std::net::{Ipv4Addr, TcpListener};
use std::thread;

use farflung_base::{Bytes, Link, Nanos, Rank, Topology};
use farflung_comm::{
    Algorithm, AllReduce as _, CommError, Communicator, ReduceOp, UserOp, cost, memory, simulated, tcp,
};

const RANKS: usize = 4;
const LEN: usize = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    println!(
        "{} of f32, averaged over {RANKS} ranks in virtual time, without real waiting",
        Bytes(4 * LEN as u64)
    );
    println!("link        algorithm        predicted  simulated  with 200ms of compute  sent by a rank");
    for (name, ..) in Link::NAMED {
        let topology = Topology::uniform(RANKS, name.parse()?);
        for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling] {
            // A collective is a list of steps for each rank, so it can be priced before anything is sent.
            let programs: Vec<_> =
                (0..RANKS as u32).map(|rank| algorithm.program(Rank(rank), RANKS)).collect();
            let predicted = cost(&programs, Bytes(4 * LEN as u64), &topology);
            let (simulated, sent) = all_reduce(&topology, algorithm, Nanos::ZERO)?;
            let (overlapped, _) = all_reduce(&topology, algorithm, Nanos::from_millis(200))?;
            let algorithm = format!("{algorithm:?}");
            println!("{name:<11} {algorithm:<16} {predicted:<10} {simulated:<10} {overlapped:<22} {sent}");
        }
    }

    println!("\nThe same call over TCP; each rank is a thread with its own sockets:");
    for (rank, mean, sent) in over_tcp()? {
        println!("{rank}: mean {mean}, sent {sent}");
    }

    println!("\nMean and variance of all ranks' samples, by a user-defined reduction:");
    for (rank, first, mean, variance) in statistics()? {
        println!("{rank}: samples from {first} on; mean {mean:.3}, variance {variance:.3}");
    }
    Ok(())
}

/// Merges the statistics of two sets of samples: count, mean, and sum of squared distances from the mean.
///
/// Source: Chan, Golub and LeVeque 1979.
fn merge([n, mean, squares]: [f64; 3], [m, other, more]: [f64; 3]) -> [f64; 3] {
    let (all, distance) = (n + m, other - mean);
    [all, mean + distance * m / all, squares + more + distance * distance * n * m / all]
}

/// Returns for each rank: the rank, the index of its first sample, and the mean and variance of all samples.
/// Rank `r` has `1000 (r + 1)` samples. The index comes from an exclusive scan of the counts. Mean and variance
/// are reduced without sending any sample.
fn statistics() -> Result<Vec<(Rank, u64, f64, f64)>, CommError> {
    on_threads(memory::cluster(RANKS), |transport| {
        let comm = Communicator::new(transport);
        let count = 1000 * u64::from(comm.rank().0 + 1);
        let mut first = [count];
        comm.exclusive_scan(&mut first, ReduceOp::Sum)?;
        if comm.rank() == Rank(0) {
            first = [0];
        }
        let samples = (first[0]..first[0] + count).map(|i| [1.0, (i as f64 * 0.37).sin(), 0.0]);
        let mut all = [samples.reduce(merge).expect("each rank has samples")];
        comm.all_reduce(&mut all, UserOp::commutative("mean and variance", merge))?;
        let [[n, mean, squares]] = all;
        Ok((comm.rank(), first[0], mean, squares / n))
    })
}

/// Runs one all-reduce while each rank computes for `compute`. Returns the virtual time at which the last rank
/// is done, and the bytes that this rank sent.
fn all_reduce(
    topology: &Topology,
    algorithm: Algorithm,
    compute: Nanos,
) -> Result<(Nanos, Bytes), CommError> {
    let ranks = on_threads(simulated::cluster(topology), |transport| {
        let comm = Communicator::new(transport).with_algorithm(algorithm);
        let values = vec![comm.rank().0 as f32; LEN];
        let pending = comm.start_all_reduce(values, ReduceOp::Mean);
        comm.advance(compute); // On a real transport this is the program's own work.
        let mean = pending.wait()?;
        assert_eq!(mean[LEN - 1], 1.5);
        Ok((comm.now(), comm.stats().sent.payload))
    })?;
    Ok(ranks.into_iter().max().expect("there is at least one rank"))
}

/// Averages over TCP. Each rank is a thread here; in a real job it is a process, perhaps on another machine,
/// which makes the same calls. Compared with the simulated links, only `tcp::join` is new.
fn over_tcp() -> Result<Vec<(Rank, f32, Bytes)>, CommError> {
    // A port that is free right now. In a real job, a launcher gives MASTER_ADDR and MASTER_PORT.
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let master = free.expect("the loopback interface has a free port").to_string();
    on_threads(0..RANKS as u32, |rank| {
        let comm = Communicator::new(tcp::join(&tcp::Config::new(rank, RANKS as u32, &master))?);
        let mut values = vec![comm.rank().0 as f32; LEN];
        comm.all_reduce(&mut values, ReduceOp::Mean)?;
        Ok((comm.rank(), values[0], comm.stats().sent.payload))
    })
}

/// Runs `rank` on a thread for each of `endpoints`, as the ranks of a job run in processes.
fn on_threads<S: Send, T: Send>(
    endpoints: impl IntoIterator<Item = S>,
    rank: impl Fn(S) -> Result<T, CommError> + Sync,
) -> Result<Vec<T>, CommError> {
    let rank = &rank;
    thread::scope(|scope| {
        let threads: Vec<_> =
            endpoints.into_iter().map(|endpoint| scope.spawn(move || rank(endpoint))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}
