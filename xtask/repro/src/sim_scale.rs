//! Measures simulated links with hundreds of workers: the time that a message, and training, take on this
//! machine.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Topology;
use farflung::comm::ReduceOp;
use farflung::train::Trainer;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{median, now};
use crate::ranks::{on_ranks, over_links};
use crate::workers::{JobTransport, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "sim-scale",
    claim: "a message on simulated links takes at most 2.5 times as long with 256 workers as with 16; six \
            steps of nano with 128 workers take at most a quarter of the 54 s that they took when every \
            event was found by a search",
    source: "ours",
    seed: 1337,
    run,
};

/// Number of values in a rank's message.
const VALUES: usize = 64;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let rounds = if options.quick { 1 } else { 3 };
    let sizes: &[usize] = if options.quick { &[16, 64] } else { &[16, 64, 128, 256] };
    let mut turns = vec![Vec::new(); sizes.len()];
    // A shared machine is fast in one moment and slow in the next, so each size is measured several times.
    for _ in 0..rounds {
        for (&size, turns) in sizes.iter().zip(&mut turns) {
            turns.push(message(size)?);
        }
    }
    let each: Vec<f64> = turns.into_iter().map(median).collect();
    for (size, time) in sizes.iter().zip(&each) {
        report.row(&format!("{size} workers: a message"), time * 1e6, "us", Threshold::None)?;
    }
    let last = sizes.len() - 1;
    let mark = if options.quick { Threshold::None } else { Threshold::AtMost(2.5) };
    let metric = format!("a message with {} workers, time relative to 16 workers", sizes[last]);
    report.row(&metric, each[last] / each[0], "x", mark)?;

    let workers = if options.quick { 16 } else { 128 };
    let (took, clock, hash) = six_steps(workers, report.seed())?;
    let (_, again, same) = six_steps(workers, report.seed())?;
    let mark = if options.quick { Threshold::None } else { Threshold::AtMost(54.0 / 4.0) };
    report.row(&format!("{workers} workers: six steps of nano"), took, "s", mark)?;
    report.row(
        &format!("{workers} workers: virtual clock after these steps"),
        clock,
        "s",
        Threshold::None,
    )?;
    let differ = f64::from(u8::from(clock.to_bits() != again.to_bits() || hash != same));
    report.row("second runs with another virtual clock or other bits", differ, "", Threshold::AtMost(0.0))
}

/// Returns the seconds of real time per message of all-reduces by a ring.
fn message(size: usize) -> Result<f64> {
    let reduces = (4096 / size).max(2);
    let begun = now();
    on_ranks(over_links(&Topology::uniform(size, "100mbit,5ms".parse()?)), |comm| {
        for _ in 0..reduces {
            comm.all_reduce(&mut vec![1.0_f32; VALUES * size], ReduceOp::Sum)?;
        }
        Ok(())
    })?;
    Ok(begun.elapsed().as_secs_f64() / (reduces * size * 2 * (size - 1)) as f64)
}

/// Trains six steps. Returns the seconds of real time, the virtual clock at the end, and the hash of the
/// parameters.
fn six_steps(workers: usize, seed: u64) -> Result<(f64, f64, blake3::Hash)> {
    let config = TrainConfig { workers, batch: 1, codec: "int8".parse()?, ..config(seed, true) };
    let link = TrainConfig::default().link;
    let job = job(config, JobTransport::Simulated(link))?;
    let begun = now();
    let ranks = on_all(&job, |rank: &mut Trainer| {
        for _ in 0..6 {
            rank.step(false)?;
        }
        Ok((rank.comm().now().as_secs_f64(), rank.hash()?))
    })?;
    let took = begun.elapsed().as_secs_f64();
    let (clock, hash) = ranks.into_iter().next().context("the job has no ranks")?;
    Ok((took, clock, hash))
}
