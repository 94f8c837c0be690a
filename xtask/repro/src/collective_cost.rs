//! Compares the time of collectives on the virtual clock with their closed forms.

use anyhow::Result;
use farflung::base::{Bytes, Nanos, Rank, Topology};
use farflung::comm::{Algorithm, AllReduce as _, Program, ReduceOp, cost, double_tree};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{on_ranks, over_links};

pub(crate) const BENCH: Bench = Bench {
    name: "collective-cost",
    claim: "on 8 ranks with links of 10 ms and 1 Gbit/s, every all-reduce takes the time that `cost` computes, \
            and that of its closed form; of the double tree, for which only a bound is known, at most 1.35 \
            times two buffers and the latencies",
    source: "Thakur et al. 2005; Patarasuk and Yuan 2009; Sanders et al. 2009",
    seed: 0,
    run,
};

const N: usize = 8;
const ALPHA: f64 = 0.01;
const BETA: f64 = 8e-9;

/// Returns the alpha-beta time in seconds of an all-reduce of `m` bytes by one of `Algorithm::ALL`. `None` for
/// the double tree, of which only a bound is known.
fn closed_form(algorithm: Algorithm, m: f64) -> Option<f64> {
    let buffers = 1.75 * m * BETA;
    Some(match algorithm {
        Algorithm::Ring | Algorithm::Hierarchical => 14.0 * ALPHA + buffers,
        Algorithm::BidirectionalRing => {
            // Two rings take turns on one access link. A step waits for the other ring's transfer, or for its
            // own latency.
            let transfer = m * BETA / 16.0;
            13.0 * (2.0 * transfer).max(transfer + ALPHA) + 2.0 * transfer + ALPHA
        }
        Algorithm::RecursiveDoubling => 3.0 * (ALPHA + m * BETA),
        Algorithm::HalvingDoubling => 6.0 * ALPHA + buffers,
        Algorithm::Direct | Algorithm::Butterfly => 2.0 * ALPHA + buffers,
        // On a grid of 2 x 4: rings of four, then rings of two.
        Algorithm::Moshpit => (6.0 + 2.0) * ALPHA + (1.5 + 1.0) * m * BETA,
        _ => return None,
    })
}

fn simulated(topology: &Topology, bytes: usize, program: &(dyn Fn(Rank) -> Program + Sync)) -> Result<f64> {
    let times = on_ranks(over_links(topology), |comm| {
        let mut x = vec![1.0_f32; bytes / 4];
        comm.all_reduce_by(program(comm.rank()), &mut x, ReduceOp::Sum)?;
        assert!(x.iter().all(|&v| v.to_bits() == (N as f32).to_bits()), "the sum is wrong");
        Ok(comm.now())
    })?;
    Ok(times.into_iter().max().unwrap_or(Nanos::ZERO).as_secs_f64())
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let topology = Topology::uniform(N, "1gbit,10ms".parse()?);
    let sizes: &[usize] = if options.quick { &[1_000, 1_000_000] } else { &[1_000, 1_000_000, 100_000_000] };
    let off = |a: f64, b: f64| (a / b - 1.0).abs() * 100.0;
    for &bytes in sizes {
        let priced = |program: &dyn Fn(Rank) -> Program| {
            let programs: Vec<_> = (0..N as u32).map(|rank| program(Rank(rank))).collect();
            cost(&programs, Bytes(bytes as u64), &topology).as_secs_f64()
        };
        for algorithm in Algorithm::ALL.into_iter().filter(|&a| a != Algorithm::DoubleTree) {
            let program = |rank| algorithm.program(rank, N);
            let time = simulated(&topology, bytes, &program)?;
            let name = format!("{algorithm:?}, {bytes} B");
            report.row(&name, time, "s", Threshold::None)?;
            if let Some(want) = closed_form(algorithm, bytes as f64) {
                report.row(
                    &format!("{name}: difference from the closed form"),
                    off(time, want),
                    "%",
                    Threshold::AtMost(2.0),
                )?;
            }
            report.row(
                &format!("{name}: difference from the time by `cost`"),
                off(time, priced(&program)),
                "%",
                Threshold::AtMost(2.0),
            )?;
        }
        // The ideal time is two buffers plus the latency up and down the tree; filling the pipeline comes on
        // top.
        let chunks = (bytes / 400_000).clamp(1, 64);
        let program = |rank| double_tree(rank, N, chunks);
        let time = simulated(&topology, bytes, &program)?;
        let name = format!("DoubleTree in {chunks} chunks, {bytes} B");
        report.row(&name, time, "s", Threshold::None)?;
        report.row(
            &format!("{name}: difference from the time by `cost`"),
            off(time, priced(&program)),
            "%",
            Threshold::AtMost(2.0),
        )?;
        let ideal = 6.0 * ALPHA + 2.0 * bytes as f64 * BETA;
        report.row(
            &format!("{name}: time relative to 2 lg n latencies and 2 buffers"),
            time / ideal,
            "x",
            Threshold::AtMost(1.35),
        )?;
    }
    Ok(())
}
