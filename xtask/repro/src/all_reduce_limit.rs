//! Compares the speed of an all-reduce with the most that the machine can move: over loopback sockets, and
//! between threads.

use std::hint::black_box;

use anyhow::Result;

use crate::all_reduce::{Class, MIB, between_processes, both_ways, measure};
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;
use crate::ranks::{on_ranks, over_memory};

pub(crate) const BENCH: Bench = Bench {
    name: "all-reduce-limit",
    claim: "between 2 processes, an all-reduce moves at least 0.8 times as many bytes per second as plain \
            sockets, including reduction and checksums",
    source: "rates of the same machine, measured in the same run: a plain loopback connection busy in both \
             directions, and memcpy",
    seed: 0,
    run,
};

/// Returns the bytes per second that one thread copies between two buffers of 64 MiB, the best of 8 copies.
fn memcpy() -> f64 {
    const BYTES: usize = 64 << 20;
    let (from, mut to) = (vec![1_u8; BYTES], vec![0_u8; BYTES]);
    let once = || {
        let start = now();
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        BYTES as f64 / start.elapsed().as_secs_f64()
    };
    std::iter::repeat_with(once).take(8).fold(0.0, f64::max)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let sizes: &[usize] = if options.quick { &[25 * MIB] } else { &[25 * MIB, 100 * MIB] };
    let copied = memcpy();
    report.row("memcpy, one thread", copied / 1e9, "GB/s", Threshold::None)?;
    for &kib in sizes {
        for n in [2, 4] {
            // Bytes that each rank sends. It receives as many.
            let through = (kib * 1024) as f64 * 2.0 * (n - 1) as f64 / n as f64;
            // The limit is measured next to each figure, since the machine may be shared.
            let limit = both_ways()?;
            let rate = through / between_processes(n, kib, options.quick, Class::Default)?;
            let name = format!("{n} processes, {kib} KiB");
            report.row(
                &format!("{name}: raw loopback, both directions together"),
                2.0 * limit / 1e9,
                "GB/s",
                Threshold::None,
            )?;
            report.row(
                &format!("{name}: sent by all ranks together"),
                n as f64 * rate / 1e9,
                "GB/s",
                Threshold::None,
            )?;
            let mark = if n == 2 { Threshold::AtLeast(0.8) } else { Threshold::None };
            report.row(
                &format!("{name}: bandwidth relative to the raw loopback"),
                n as f64 * rate / (2.0 * limit),
                "x",
                mark,
            )?;

            let times = on_ranks(over_memory(n), |comm| measure(&comm, kib, options.quick))?;
            let rate = through / times[0];
            let name = format!("{n} threads, {kib} KiB");
            report.row(&format!("{name}: busbw"), rate / 1e9, "GB/s", Threshold::None)?;
            report.row(
                &format!("{name}: busbw relative to one thread's memcpy"),
                rate / copied,
                "x",
                Threshold::None,
            )?;
        }
    }
    Ok(())
}
