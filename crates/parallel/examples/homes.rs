//! Plans training on four homes with 20 Mbit/s uplinks. Prints the plan's report, a timeline, and the time that
//! plain all-reduce would take.
#![expect(clippy::print_stdout, reason = "an example prints")]

use farflung_base::{Algorithm, Link, Nanos, Rank};
use farflung_parallel::{
    Cluster, Codec, Cost, Limits, ModelShape, ParallelError, WhatIf, all_reduce_bytes, plan, render,
    simulate_replicas,
};

fn main() -> Result<(), ParallelError> {
    let homes: Cluster = include_str!("homes.toml").parse()?;
    let shape = ModelShape::dense(10_000_000, 256, 64 * 256);
    let topology = homes.topology()?;
    let link = Link { bandwidth: topology.rate(Rank(0), Rank(1)), latency: Nanos::from_millis(25) };
    // Closed forms of a ring and of a direct exchange. `farflung plan` uses the times of the collectives that
    // it runs.
    let price = |algorithm, codec: &Codec, values| {
        let messages = match algorithm {
            Algorithm::Ring if *codec == Codec::F32 => 6,
            Algorithm::Direct => 2,
            _ => return None,
        };
        let bytes = all_reduce_bytes(4, codec.bytes(values));
        Some(Nanos(link.latency.0 * messages).saturating_add(link.bandwidth.transfer(bytes)))
    };
    let planned = plan(&shape, &homes, &Limits::default(), &price)?;
    println!("{planned}");

    let time = |values| price(planned.replicas.algorithm, &Codec::F32, values).unwrap_or(Nanos::MAX);
    let every = planned.replicas.sync.period();
    let timeline = simulate_replicas(&planned.replicas, &shape, &Cost::of(&shape, &homes), 2 * every, &time)?;
    println!("{}\n{timeline}", render::grid(&timeline, 110));

    let run = WhatIf {
        parameters: shape.parameters,
        ranks: 4,
        link,
        steps: 2 * every,
        compute: planned.compute,
        optimizer: Nanos::ZERO,
        buckets: 16,
        codec: Codec::INT8,
        every,
    };
    print!("{}", run.answer(&price)?);
    Ok(())
}
