//! Compares an all-reduce with shares by bandwidth with one with equal shares, on links with different
//! bandwidths.

use anyhow::Result;
use farflung::base::{AccessLink, Bandwidth, Bytes, Link, Nanos, Rank, Topology};
use farflung::comm::{Algorithm, AllReduce as _, ReduceOp, shares};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{on_ranks, over_links};

pub(crate) const BENCH: Bench = Bench {
    name: "uneven",
    claim: "on access links of 4, 2, 1 and 1 Gbit/s a butterfly with weighted shares reaches the optimum of \
            the linear program; a ring cannot come near it, because every rank of a ring sends one and a \
            half buffers",
    source: "hivemind's load balancing; Ryabinin et al. 2021",
    seed: 0,
    run,
};

const GBIT: [u64; 4] = [4, 2, 1, 1];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let bytes: usize = if options.quick { 20_000_000 } else { 100_000_000 };
    let len = bytes / 4;
    let mut topology = Topology::uniform(4, Link::FREE);
    let rates = GBIT.map(|gbit| Bandwidth(gbit * 1_000_000_000));
    for (rank, rate) in (0..).map(Rank).zip(rates) {
        topology.set_access_link(rank, AccessLink { up: rate, down: rate });
    }
    let time = |algorithm: Algorithm| -> Result<f64> {
        let times = on_ranks(over_links(&topology), |comm| {
            let comm = comm.with_topology(topology.clone())?.with_algorithm(algorithm);
            let mut x = vec![comm.rank().0 as f32; len];
            comm.all_reduce(&mut x, ReduceOp::Sum)?;
            assert!(x.iter().all(|&v| v.to_bits() == 6_f32.to_bits()), "the sum is wrong");
            Ok(comm.now())
        })?;
        Ok(times.into_iter().max().unwrap_or(Nanos::ZERO).as_secs_f64())
    };
    for (gbit, count) in GBIT.iter().zip(shares(len, &rates, 0)) {
        report.row(&format!("share of {gbit} Gbit/s"), count as f64 / len as f64, "1", Threshold::None)?;
    }
    let butterfly = time(Algorithm::Butterfly)?;
    let ring = time(Algorithm::Ring)?;
    // The slowest rank must send at least one buffer, and with these shares no other rank takes longer.
    let optimum = bytes as f64 * 8e-9;
    report.row("weighted butterfly", butterfly, "s", Threshold::None)?;
    report.row("ring", ring, "s", Threshold::None)?;
    report.row("equal shares", time(Algorithm::Direct)?, "s", Threshold::None)?;
    report.row(
        "weighted butterfly, time relative to the optimum",
        butterfly / optimum,
        "x",
        Threshold::AtMost(1.05),
    )?;
    report.row(
        "ring, time relative to the weighted butterfly",
        ring / butterfly,
        "x",
        Threshold::AtLeast(1.4),
    )?;
    let chosen = Algorithm::Auto.resolve(Bytes(bytes as u64), &topology);
    report.row(
        "`auto` chooses the weighted butterfly",
        f64::from(u8::from(chosen == Algorithm::Butterfly)),
        "1",
        Threshold::AtLeast(1.0),
    )
}
