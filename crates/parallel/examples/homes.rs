//! Plans four homes on 20 Mbit/s uplinks and prints the report, the timeline and what plain all-reduce would take.
#![expect(clippy::print_stdout, reason = "an example prints")]

use farflung_base::{Bytes, Link, Nanos, Rank};
use farflung_parallel::{
    Cluster, Codec, Cost, Limits, ModelShape, ParallelError, WhatIf, collective, plan, render, simulate,
};

fn main() -> Result<(), ParallelError> {
    let homes: Cluster = include_str!("homes.toml").parse()?;
    let shape = ModelShape::dense(10_000_000, 256, 64 * 256);
    let planned = plan(&shape, &homes, &Limits::default())?;
    println!("{planned}");

    let topology = homes.topology()?;
    let ranks: Vec<Rank> = (0..4).map(Rank).collect();
    let price =
        |bytes: Bytes| collective::all_reduce_over(planned.replicas.algorithm, &ranks, bytes, &topology);
    let every = planned.replicas.sync.period();
    let timeline = simulate(&planned.replicas, &shape, &Cost::of(&shape, &homes), 2 * every, &price)?;
    println!("{}\n{timeline}", render::grid(&timeline, 110));

    let run = WhatIf {
        parameters: shape.parameters,
        ranks: 4,
        link: Link { bandwidth: topology.rate(Rank(0), Rank(1)), latency: Nanos::from_millis(25) },
        steps: 2 * every,
        compute: planned.compute,
        optimizer: Nanos::ZERO,
        buckets: 16,
        codec: Codec::INT8,
        every,
    };
    print!("{}", run.answer()?);
    Ok(())
}
