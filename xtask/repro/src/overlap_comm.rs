//! Checks that started communication is hidden behind compute on the virtual clock, and that simulated ranks
//! compute in parallel.

use std::hint::black_box;

use anyhow::Result;
use farflung::base::{Nanos, Topology};
use farflung::comm::{Algorithm, ReduceOp};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;
use crate::ranks::{on_ranks, over_links};

pub(crate) const BENCH: Bench = Bench {
    name: "overlap-comm",
    claim: "starting communication, computing, and then waiting takes the longer of compute and \
            communication, not their sum; and simulated ranks compute in parallel",
    source: "the contract of `Pending`",
    seed: 0,
    run,
};

const RANKS: usize = 4;

/// Returns the virtual time of an all-reduce with `compute` seconds of compute between its start and its wait.
fn time(topology: &Topology, algorithm: Algorithm, len: usize, compute: f64) -> Result<f64> {
    let times = on_ranks(over_links(topology), |comm| {
        let comm = comm.with_topology(topology.clone())?.with_algorithm(algorithm);
        let pending = comm.start_all_reduce(vec![1.0_f32; len], ReduceOp::Mean);
        comm.advance(Nanos::from_secs_f64(compute));
        pending.wait()?;
        Ok(comm.now())
    })?;
    Ok(times.into_iter().max().unwrap_or(Nanos::ZERO).as_secs_f64())
}

/// Does arithmetic that the compiler cannot remove.
fn spin(rounds: u64) {
    black_box((0..rounds).fold(1.0_f64, |x, i| black_box(x).mul_add(1.000_000_1, i as f64)));
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let topology = Topology::uniform(RANKS, "100mbit,20ms".parse()?);
    let len = if options.quick { 250_000 } else { 2_500_000 };
    for algorithm in Algorithm::ALL {
        let alone = time(&topology, algorithm, len, 0.0)?;
        for ratio in [0.3, 1.0, 3.0] {
            let compute = alone * ratio;
            let both = time(&topology, algorithm, len, compute)?;
            let off = (both / compute.max(alone) - 1.0).abs() * 100.0;
            let name = format!(
                "{algorithm:?}, compute {ratio}x communication: difference from the longer of the two"
            );
            report.row(&name, off, "%", Threshold::AtMost(2.0))?;
        }
    }

    // Compares two times: of ranks that synchronise after each period of real work, with slightly different
    // clocks; and of threads that never synchronise.
    let rounds = if options.quick { 4_000_000 } else { 10_000_000 };
    let spells = 10;
    let (mut threads, mut ranks) = (0.0, 0.0);
    for _ in 0..3 {
        let start = now();
        std::thread::scope(|scope| {
            for _ in 0..RANKS {
                scope.spawn(|| (0..spells).for_each(|_| spin(rounds)));
            }
        });
        threads += start.elapsed().as_secs_f64();
        let start = now();
        on_ranks(over_links(&topology), |comm| {
            for _ in 0..spells {
                spin(rounds);
                comm.advance(Nanos::from_millis(100));
                comm.all_gather_bytes(vec![0; 10 * comm.rank().index()])?;
            }
            Ok(())
        })?;
        ranks += start.elapsed().as_secs_f64();
    }
    report.row(
        "computing on 4 simulated ranks, speed relative to 4 threads",
        threads / ranks,
        "x",
        Threshold::AtLeast(0.8),
    )
}
