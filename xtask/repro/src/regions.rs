//! Compares averages between two regions with one slow link between them: the coded average in two levels, the
//! flat one, and f32.

use std::sync::Arc;

use anyhow::Result;
use farflung::base::{AccessLink, Algorithm, Link, Nanos, PeerId, Rank, Topology};
use farflung::comm::{
    AllReduce as _, CodedAllReduce as _, CodedBuffer, CommError, Communicator, Program, ReduceOp,
    hierarchical, regions,
};
use farflung::compress::CodecSpec;
use farflung::optim::{Average, AverageConfig, OptimError};
use farflung::tensor::{Device, ParamLayout, Shape};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{on_ranks, over_links};

pub(crate) const BENCH: Bench = Bench {
    name: "regions",
    claim: "between two regions of four machines with one line of 50 Mbit/s and 30 ms, each average takes \
            the bytes and the time of its closed form; averages that are plain inside regions and coded \
            between them are the cheapest, and `auto` chooses them",
    source: "ours; Thakur et al. 2005 for the rings",
    seed: 5,
    run,
};

const CODEC: &str = "int8+ef";
const RANKS: usize = 8;
const REGION: usize = 4;
/// Seconds per byte on the links inside a region and on the link between the regions, then the latencies of
/// both.
const INSIDE: f64 = 8.0 / 1e9;
const LINE: f64 = 8.0 / 50e6;
const NEAR: f64 = 1e-3;
const FAR: f64 = 30e-3;

fn topology() -> Result<Topology> {
    let inside: Link = "1gbit,1ms".parse()?;
    let mut topology = Topology::uniform(RANKS, inside);
    let ranks: Vec<Rank> = (0..RANKS as u32).map(Rank).collect();
    for &a in &ranks {
        for &b in ranks.iter().filter(|b| b.index() / REGION != a.index() / REGION) {
            topology.set_link(a, b, Link { latency: Nanos::from_millis(30), ..inside });
        }
    }
    let line = "50mbit,30ms".parse::<Link>()?.bandwidth;
    for region in ranks.chunks(REGION) {
        topology.set_region(region, AccessLink { up: line, down: line });
    }
    Ok(topology)
}

/// Time of an average, and the bytes that crossed the link between the regions in the busier direction.
#[derive(Debug, Clone, Copy)]
struct AverageCost {
    seconds: f64,
    crossed: f64,
}

/// Returns the bytes of `values` values in int8 with blocks of 256: a header, the codes, and a scale for each
/// block.
fn packed(values: f64) -> f64 {
    32.0 + values + 2.0 * (values / 256.0).ceil()
}

fn measure(
    topology: &Topology,
    average: impl Fn(&Communicator) -> Result<(), CommError> + Sync,
) -> Result<AverageCost> {
    let seen = on_ranks(over_links(topology), |comm| {
        let comm = comm.with_topology(topology.clone())?.with_deadline(Nanos::from_millis(600_000));
        average(&comm)?;
        let outside = (0..RANKS).filter(|peer| peer / REGION != comm.rank().index() / REGION);
        let sent = outside.map(|peer| comm.transport().traffic(PeerId(peer as u32)).sent.payload.0);
        Ok((comm.now(), sent.sum::<u64>()))
    })?;
    let crossed = |region: usize| seen[region * REGION..][..REGION].iter().map(|(_, sent)| sent).sum::<u64>();
    let seconds = seen.iter().map(|(time, _)| *time).max().unwrap_or_default().as_secs_f64();
    Ok(AverageCost { seconds, crossed: crossed(0).max(crossed(1)) as f64 })
}

/// Runs one round of averaging through the codec.
fn coded(topology: &Topology, len: usize, algorithm: Algorithm) -> Result<AverageCost> {
    let layout = ParamLayout::new([("w".to_owned(), Shape::from(len))]);
    let codec: CodecSpec = CODEC.parse()?;
    let config = AverageConfig {
        codec: codec.into(),
        algorithm,
        bucket_bytes: usize::MAX,
        ..AverageConfig::default()
    };
    let round = |comm: &Communicator| -> Result<(), OptimError> {
        let cpu = Device::cpu(1)?;
        let value = |i: usize| ((i * 7 + comm.rank().index()) % 101) as f32 - 50.0;
        let values: Vec<f32> = (0..layout.len()).map(value).collect();
        let mut flat = cpu.tensor(&values, layout.len())?;
        let mut average = Average::new(comm.clone(), &cpu, &layout, config.clone())?;
        average.all(&mut flat)?;
        average.commit();
        let mean = flat.to_vec::<f32>()?[0];
        // The mean of the first values, -50 to -43, with two rounding errors of half a step of 50 / 127.
        assert!((mean + 46.5).abs() < 0.8, "the mean is wrong: {mean}");
        Ok(())
    };
    measure(topology, |comm| match round(comm) {
        Ok(()) => Ok(()),
        Err(OptimError::Comm(error)) => Err(error),
        Err(error) => Err(CommError::Coder { op: "average", source: Arc::new(error) }),
    })
}

/// Runs one all-reduce of plain f32 with a program.
fn plain(topology: &Topology, len: usize, program: impl Fn(Rank) -> Program + Sync) -> Result<AverageCost> {
    measure(topology, |comm| {
        let mut x = vec![1.0_f32; len];
        comm.all_reduce_by(program(comm.rank()), &mut x, ReduceOp::Sum)?;
        assert!(x.iter().all(|&v| v.to_bits() == (RANKS as f32).to_bits()), "the sum is wrong");
        Ok(())
    })
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let topology = topology()?;
    let len: usize = if options.quick { 1 << 20 } else { 1 << 22 };
    let v = len as f64;
    let found = regions(&topology);
    let (n, g) = (RANKS as f64, REGION as f64);

    let inside = NEAR + (g - 1.0) * v * INSIDE;
    let two_level =
        AverageCost { seconds: 2.0 * inside + FAR + g * packed(v / g) * LINE, crossed: g * packed(v / g) };
    // In each phase, each rank sends the other region's ranks their shards, or its own shard's result.
    let phase = g * g * packed(v / n);
    // The first ranks that have received all of the first phase begin the second, so the link between the
    // regions is always busy and only one latency counts.
    let flat = AverageCost { seconds: FAR + 2.0 * phase * LINE, crossed: 2.0 * phase };
    // In f32: rings inside the regions, then rings of two between the owners of each quarter, which use the
    // link between the regions one after the other.
    let grouped = AverageCost {
        seconds: 2.0 * (g - 1.0) * (NEAR + v * INSIDE) + FAR + 4.0 * v * LINE,
        crossed: 4.0 * v,
    };
    // Blocks cross the link between the regions one after the other.
    let ring = AverageCost {
        seconds: FAR + 2.0 * (n - 1.0) * 4.0 * v / n * LINE,
        crossed: 2.0 * (n - 1.0) * 4.0 * v / n,
    };
    let seen = [
        ("int8, two levels", coded(&topology, len, Algorithm::Hierarchical)?, two_level),
        ("int8, flat", coded(&topology, len, Algorithm::Direct)?, flat),
        ("f32, by regions", plain(&topology, len, |rank| hierarchical(rank, &found, 1))?, grouped),
        ("f32, ring", plain(&topology, len, |rank| Algorithm::Ring.program(rank, RANKS))?, ring),
    ];
    let off = |a: f64, b: f64| (a / b - 1.0).abs() * 100.0;
    for (name, taken, form) in &seen {
        report.row(&format!("{name}: time"), taken.seconds, "s", Threshold::None)?;
        let mark = Threshold::AtMost(3.0);
        report.row(
            &format!("{name}: time, difference from the closed form"),
            off(taken.seconds, form.seconds),
            "%",
            mark,
        )?;
        report.row(
            &format!("{name}: bytes over the line in the busier direction"),
            taken.crossed,
            "B",
            Threshold::None,
        )?;
        report.row(
            &format!("{name}: bytes, difference from the closed form"),
            off(taken.crossed, form.crossed),
            "%",
            mark,
        )?;
    }
    let [(_, two, _), (_, flat, _), (_, grouped, _), _] = &seen;
    report.row(
        "int8, flat: time relative to two levels",
        flat.seconds / two.seconds,
        "x",
        Threshold::AtLeast(2.5),
    )?;
    report.row(
        "f32, by regions: time relative to int8 in two levels",
        grouped.seconds / two.seconds,
        "x",
        Threshold::AtLeast(2.5),
    )?;

    let codec = CODEC.parse::<CodecSpec>()?.build();
    let payload = |values: usize| codec.max_payload(values);
    let buffer = CodedBuffer { len, payload: &payload, topology: &topology, regions: None };
    let price = |form: Algorithm| Ok(form.coded_cost(&buffer)?.as_secs_f64());
    let prices = Algorithm::CODED.into_iter().map(price).collect::<Result<Vec<_>>>()?;
    let least = prices.iter().copied().fold(f64::INFINITY, f64::min);
    for (form, price) in Algorithm::CODED.into_iter().zip(&prices) {
        report.row(&format!("price of {form}"), *price, "s", Threshold::None)?;
    }
    let auto = coded(&topology, len, Algorithm::Auto)?;
    let taken = Algorithm::Auto.resolve_coded(&buffer)?;
    report.row(
        &format!("auto, which is {taken}: price relative to the lowest"),
        price(taken)? / least,
        "x",
        Threshold::AtMost(1.0),
    )?;
    report.row(
        "auto: time, difference from the lowest price",
        off(auto.seconds, least),
        "%",
        Threshold::AtMost(3.0),
    )
}
