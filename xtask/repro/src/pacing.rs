//! Limits the total rate of each rank, over TCP, TLS and, with the feature `iroh`, QUIC, and measures the rate
//! and the time of an all-reduce.

use anyhow::Result;
use farflung::base::Bandwidth;
use farflung::comm::ReduceOp;
use farflung::comm::secure::{Identity, JoinSecret, Security};
use farflung::comm::tcp::Pace;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{Cluster, on_ranks, over_sockets};

pub(crate) const BENCH: Bench = Bench {
    name: "pacing",
    claim: "a rank sends at the rate given by --up, within 5%; an all-reduce then takes the bytes that each \
            rank sends divided by the rate, within 5%, and gives the same bits as without a limit",
    source: "the closed form of the ring: 2 (n-1)/n buffers out of each rank",
    seed: 0,
    run,
};

/// A kind of network whose ranks have rate limits.
struct PacedNetwork<'a> {
    name: &'static str,
    /// Opens a network of this many ranks.
    open: &'a dyn Fn(usize, Pace) -> Result<Cluster>,
}

/// Result of a rank: the time, the bytes given to its sockets, and the bits of the reduced values.
struct RankResult {
    seconds: f64,
    sent: u64,
    bits: Vec<u32>,
}

/// Runs one all-reduce of `bytes` bytes on each rank of a cluster.
fn reduced(cluster: Cluster, bytes: usize) -> Result<Vec<RankResult>> {
    on_ranks(cluster, |comm| {
        let rank = comm.rank().0 as f32;
        let mut x: Vec<f32> = (0..bytes / 4).map(|i| (i as f32 * 0.37 + rank).sin()).collect();
        comm.barrier()?;
        let (start, before) = (comm.now(), comm.stats().sent.wire.0);
        comm.all_reduce(&mut x, ReduceOp::Mean)?;
        // The barrier makes all ranks measure the time of the last one, since a rank that is done early did not
        // have to wait for the others.
        comm.barrier()?;
        let seconds = comm.now().saturating_sub(start).as_secs_f64();
        let sent = comm.stats().sent.wire.0 - before;
        Ok(RankResult { seconds, sent, bits: x.iter().map(|v| v.to_bits()).collect() })
    })
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let clear = Security::unencrypted();
    let sealed = Security::by_secret(&Identity::generate()?, &JoinSecret::generate()?);
    let over_tcp = |n, pace| over_sockets(n, &clear, pace);
    let over_tls = |n, pace| over_sockets(n, &sealed, pace);
    let networks = &[
        PacedNetwork { name: "tcp", open: &over_tcp },
        PacedNetwork { name: "tls", open: &over_tls },
        #[cfg(feature = "iroh")]
        PacedNetwork { name: "quic", open: &crate::ranks::over_paced_quic },
    ];
    let rates: &[u64] = if options.quick { &[100] } else { &[20, 100, 500] };
    for &mbit in rates {
        let rate = Bandwidth(mbit * 1_000_000);
        for n in [2, 4] {
            // Two seconds, or less for a quick run.
            let seconds = if options.quick { 0.4 } else { 2.0 };
            let share = 2.0 * (n - 1) as f64 / n as f64;
            let bytes = (seconds * rate.0 as f64 / 8.0 / share) as usize / 4 * 4;
            let free = reduced(over_tcp(n, Pace::default())?, bytes)?;
            for PacedNetwork { name, open } in networks {
                let slow = reduced(open(n, Pace { all: rate, ..Pace::default() })?, bytes)?;
                let name = format!("{mbit} mbit, {n} ranks, {name}");
                // The closed form leaves out that, after a pause, the bytes of 10 ms may be sent at once.
                let closed = share * bytes as f64 * 8.0 / rate.0 as f64;
                let off = slow.iter().map(|rank| {
                    let held = rank.sent as f64 * 8.0 / rank.seconds / rate.0 as f64;
                    (held - 1.0).abs()
                });
                let held = Threshold::AtMost(if options.quick { 0.25 } else { 0.05 });
                report.row(
                    &format!("{name}: difference from the rate"),
                    off.fold(0.0, f64::max),
                    "1",
                    held,
                )?;
                let over = slow.iter().map(|rank| (rank.seconds / closed - 1.0).abs()).fold(0.0, f64::max);
                report.row(&format!("{name}: difference from the closed form"), over, "1", held)?;
                let unlike = slow.iter().filter(|rank| rank.bits != free[0].bits).count();
                report.row(
                    &format!("{name}: ranks whose bits differ from those without a limit"),
                    unlike as f64,
                    "1",
                    Threshold::AtMost(0.0),
                )?;
            }
        }
    }
    Ok(())
}
