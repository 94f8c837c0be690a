//! Weights and gradients of stage 3 of ZeRO in few bits, and between groups of replicas once (ZeRO++): the
//! times that were published, on the virtual clock; bytes between regions; the loss.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, anyhow};
use farflung::base::{Bandwidth, Link, Nanos, Rank};
use farflung::config::value::Setting as _;
use farflung::config::zero::ZeroWithin;
use farflung::optim::ShardGroups;
use farflung::train::{Job, Prediction, Trainer};
use farflung::{PeerCounters, TrainConfig};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "zeropp",
    claim: "ZeRO++ sends a quarter of the bytes of 2-byte weights between nodes, and a seventh of those of f32, \
            takes the published share of the time of stage 3 on slow links, and trains as well",
    source: "Wang et al. 2023, ZeRO++; shared/facts/larger-than-a-machine.md 3.7",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    slices(report)?;
    let nano = job(TrainConfig { workers: 1, ..config(report.seed(), true) }, JobTransport::Memory)?;
    bytes(report, &nano)?;
    times(report, &nano)?;
    losses(report, &nano, options)
}

/// Compares the slice with which each rank of `nodes` nodes of `each` ranks ends, if ranks of a node add up
/// what is in the order of slices, and if it is in the order that ends well.
fn slices(report: &mut Report<'_>) -> Result<()> {
    for (nodes, each) in [(2, 4), (3, 2), (4, 2)] {
        let rank = |node: usize, local: usize| node * each + local;
        let all = || (0..nodes).flat_map(|node| (0..each).map(move |local| (node, local)));
        // A rank adds up `nodes` neighbouring positions, and sends the slice in each to a node.
        let plain = |node: usize, local: usize| local * nodes + node;
        let wrong = all().filter(|&(node, local)| plain(node, local) != rank(node, local)).count();
        let metric = format!("{nodes} nodes of {each}: ranks with another slice, without an order of slices");
        report.row(&metric, wrong as f64, "", Threshold::AtLeast(1.0))?;
        let members = (0..nodes).map(|node| (0..each).map(|local| rank(node, local)).collect()).collect();
        let groups = ShardGroups::new(members);
        // A rank ends with what its own slice's adders send it: one of each node, with the same place there.
        let ends =
            |owner: usize| (0..nodes).all(|node| groups.adder(node, owner) == rank(node, owner % each));
        let wrong = (0..nodes * each).filter(|&owner| !ends(owner)).count();
        let metric = format!("{nodes} nodes of {each}: ranks with another slice");
        report.row(&metric, wrong as f64, "", Threshold::AtMost(0.0))?;
    }
    Ok(())
}

/// How replicas send weights and gradients.
#[derive(Debug, Clone, Copy)]
struct Way {
    codec: &'static str,
    /// Whether each of the two nodes has two ranks, which divide the weights once more, instead of one.
    in_groups: bool,
}

/// The baseline of the paper: each value takes two bytes, and a node gets each once.
const STAGE_3: Way = Way { codec: "bf16,bf16", in_groups: false };

/// Returns the settings of two nodes whose links inside take no time, with one uplink for each in a file.
fn two_nodes(nano: &Job, way: Way, line: Bandwidth, folder: &tempfile::TempDir) -> Result<TrainConfig> {
    let each = if way.in_groups { 2 } else { 1 };
    let mut text = "default = \"1000000gbit,0us\"\n".to_owned();
    for node in ["a", "b"] {
        let Bandwidth(line) = line;
        write!(text, "[[region]]\nname = \"{node}\"\ninside = \"1000000gbit,0us\"\nup = \"{line}bit\"\n")?;
        writeln!(text, "down = \"{line}bit\"")?;
        for rank in 0..each {
            let name = format!("{node}{rank}");
            write!(text, "[[device]]\nname = \"{name}\"\nflops = \"5 GFLOPS\"\nregion = \"{node}\"\n")?;
        }
    }
    let path = folder.path().join(format!("{line}-{each}.toml"));
    std::fs::write(&path, text).context("failed to write the topology")?;
    Ok(TrainConfig {
        workers: 2 * each,
        zero: 3,
        zero_codec: way.codec.parse().map_err(|error| anyhow!("{error}"))?,
        zero_within: if way.in_groups { ZeroWithin::Neighbours(2) } else { ZeroWithin::No },
        topology: Some(path),
        overlap: false,
        batch: 1,
        ..config(nano.config.seed, true)
    })
}

const FREE: JobTransport =
    JobTransport::Simulated(Link { bandwidth: Bandwidth(u64::MAX), latency: Nanos::ZERO });

/// Returns the virtual seconds of the second step.
fn step(nano: &Job, config: TrainConfig) -> Result<f64> {
    let job = again(nano, config, FREE);
    let took = on_all(&job, |worker| {
        worker.step(false)?;
        let begun = worker.comm().now();
        worker.step(false)?;
        Ok((worker.comm().now() - begun).as_secs_f64())
    })?;
    Ok(took.into_iter().fold(0.0, f64::max))
}

/// Compares how much faster a step is with the closed form of steps in which nothing overlaps: `(C + 3) / (C +
/// s)`, where `C` is the time of the computation in units of that of the weights on the line.
fn times(report: &mut Report<'_>, nano: &Job) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let all = Way { codec: "int8,int4", in_groups: true };
    let arms = [
        ("weights in int8", Way { codec: "int8,bf16", in_groups: false }, 2.522, 2.0, "1.31"),
        ("weights once more in each node", Way { codec: "bf16,bf16", in_groups: true }, 2.522, 2.0, "1.31"),
        ("gradients in int4", Way { codec: "bf16,int4", in_groups: false }, 2.522, 2.25, "1.22"),
        ("all", all, 0.41, 0.75, "1.28"),
        ("all", all, 0.55, 0.75, "1.36"),
        ("all", all, 2.522, 0.75, "2.16"),
        ("all", all, 2.667, 0.75, "2.2"),
        ("all", all, 3.5, 0.75, "2.4"),
    ];
    let compute = {
        let config = two_nodes(nano, STAGE_3, Bandwidth(1 << 40), &folder)?;
        Prediction::of(&again(nano, config, FREE))?.compute.as_secs_f64()
    };
    for (what, way, ratio, sent, published) in arms {
        // A node gets half of all 2-byte values from the other one.
        let bits = 8.0 * nano.model.parameters() as f64;
        let line = Bandwidth((3.0 / ratio * bits / compute) as u64);
        let base = step(nano, two_nodes(nano, STAGE_3, line, &folder)?)?;
        let found = base / step(nano, two_nodes(nano, way, line, &folder)?)?;
        let unit = 3.0 / ratio;
        let form = (unit + 3.0) / (unit + sent);
        let metric = format!(
            "{what}, 3/C = {ratio}: {found:.3} times as fast (published {published}), off (C + 3) / (C + {sent})"
        );
        report.row(&metric, 100.0 * (found / form - 1.0).abs(), "%", Threshold::AtMost(2.0))?;
        let both = |way| {
            let config = TrainConfig { overlap: true, ..two_nodes(nano, way, line, &folder)? };
            step(nano, config)
        };
        let metric = format!("{what}, 3/C = {ratio}, where layers overlap: times as fast");
        report.row(&metric, both(STAGE_3)? / both(way)?, "", Threshold::None)?;
    }
    Ok(())
}

/// Compares the bytes of a step that leave a node with those of f32 without groups.
fn bytes(report: &mut Report<'_>, nano: &Job) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let leaving = |way: Way| -> Result<f64> {
        let job = again(nano, two_nodes(nano, way, Bandwidth(1 << 40), &folder)?, FREE);
        let each = if way.in_groups { 2 } else { 1 };
        let sent = on_all(&job, |worker| {
            let sent = |worker: &Trainer| {
                let own = worker.comm().rank().index() / each;
                let peers = PeerCounters::all(worker.comm()).into_iter();
                peers.filter(|peer| peer.peer as usize / each != own).map(|peer| peer.bytes_sent).sum::<u64>()
            };
            worker.step(false)?;
            let before = sent(worker);
            worker.step(false)?;
            Ok((worker.comm().rank(), sent(worker) - before))
        })?;
        Ok(sent.into_iter().filter(|(rank, _)| *rank < Rank(each as u32)).map(|(_, sent)| sent as f64).sum())
    };
    let plain = leaving(Way { codec: "none", in_groups: false })?;
    let fewer = plain / leaving(Way { codec: "int8:256,int4:256", in_groups: true })?;
    report.row(
        "bytes between nodes, from f32 with blocks of 256: times fewer",
        fewer,
        "",
        Threshold::AtLeast(7.7),
    )?;
    let half = leaving(STAGE_3)? / leaving(Way { codec: "int8:256,int4:256", in_groups: true })?;
    report.row(
        "bytes between nodes, from 2-byte values with blocks of 256: times fewer",
        half,
        "",
        Threshold::AtLeast(3.8),
    )
}

/// Compares the held-out loss after a run with that of stage 3 in f32, with the same seeds.
fn losses(report: &mut Report<'_>, nano: &Job, options: &Options) -> Result<()> {
    let (steps, seeds) = if options.quick { (20, 1) } else { (500, 3) };
    for seed in 0..seeds {
        let seed = nano.config.seed + seed;
        let trained = |codec: &str, within: &str| -> Result<f64> {
            let settings = TrainConfig {
                workers: 4,
                zero: 3,
                zero_codec: codec.parse().map_err(|error| anyhow!("{error}"))?,
                zero_within: ZeroWithin::parse(within).context("a way to divide weights")?,
                steps,
                lr: 1e-3,
                warmup: steps / 10,
                ..config(seed, true)
            };
            let job = again(nano, settings, JobTransport::Memory);
            let all = on_all(&job, |worker| {
                (0..steps).try_for_each(|_| worker.step(false).map(drop))?;
                Ok(worker.evaluate()?)
            })?;
            all.into_iter().next().context("no rank has a loss")
        };
        let plain = trained("none", "no")?;
        let coded = trained("int8,int4", "2")?;
        let metric =
            format!("seed {seed}: loss {coded:.4} after {steps} steps, off {plain:.4} of stage 3 in f32");
        report.row(&metric, 100.0 * (coded / plain - 1.0), "%", Threshold::AtMost(1.0))?;
    }
    Ok(())
}
