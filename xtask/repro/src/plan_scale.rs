//! Plans GPT-3 175B for 4,096 machines in 20 regions. Measures the time of planning, the distance of the plan
//! from a lower bound, and the difference between the closed forms used for pricing and the price of the actual
//! steps.

use anyhow::Result;
use farflung::base::{AccessLink, Bytes, Link, Rank, Topology};
use farflung::comm::{Algorithm, AllReduce as _, Program, cost};
use farflung::parallel::planner::regional::{Exchange, direct_time, ring_time};
use farflung::parallel::shipped;
use farflung::train::PipelineSizes;
use farflung::train::auto::by_region;
use farflung::zoo::ModelSpec;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;

pub(crate) const BENCH: Bench = Bench {
    name: "plan-scale",
    claim: "GPT-3 175B on 4,096 devices in 20 regions is planned in under 60 s; closed forms agree with the \
            price of the actual steps for up to 64 ranks",
    source: "issue 21, mark 7",
    seed: 0,
    run,
};

const BYTES: Bytes = Bytes(1 << 28);

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let most = if options.quick { 16 } else { 64 };
    for ranks in [2, 4, 8, 16, 32, 64].into_iter().filter(|&ranks| ranks <= most) {
        for regions in [1, 4] {
            if regions < ranks {
                closed_forms(report, ranks, regions)?;
            }
        }
    }
    let cluster = shipped::cluster("world-4096")?;
    let model = ModelSpec::preset("gpt3-175b")?;
    let began = now();
    let found = by_region(&model, &cluster, PipelineSizes { batch: 1, microbatches: 1536 })?;
    report.row(
        "4,096 devices: time of planning",
        began.elapsed().as_secs_f64(),
        "s",
        Threshold::AtMost(60.0),
    )?;
    let step = found.plans[0].found.time.step();
    report.row("4,096 devices: layouts priced", found.priced as f64, "", Threshold::AtLeast(100.0))?;
    report.row("4,096 devices: a step", step.as_secs_f64(), "s", Threshold::None)?;
    report.row("4,096 devices: lower bound of a step", found.bound.as_secs_f64(), "s", Threshold::None)?;
    let ratio = step.as_secs_f64() / found.bound.as_secs_f64();
    report.row("4,096 devices: a step relative to the bound", ratio, "x", Threshold::AtLeast(1.0))
}

/// Compares the closed forms on ranks in equal regions, with the ranks of each region next to each other, and
/// an access link for each rank.
fn closed_forms(report: &mut Report<'_>, ranks: usize, regions: usize) -> Result<()> {
    let (inside, across): (Link, Link) = ("10gbit,200us".parse()?, "1gbit,40ms".parse()?);
    let each = ranks / regions;
    let mut topology = Topology::uniform(ranks, inside);
    let all = || (0..ranks as u32).map(Rank);
    for from in all() {
        topology.set_access_link(from, AccessLink { up: inside.bandwidth, down: inside.bandwidth });
        for to in all().filter(|to| to.index() / each != from.index() / each) {
            topology.set_link(from, to, across);
        }
    }
    let link = |from: Rank, to: Rank| topology.link(from, to);
    let around: Vec<Link> = all().map(|from| link(from, Rank((from.0 + 1) % ranks as u32))).collect();
    let shard = Bytes(BYTES.0.div_ceil(ranks as u64));
    let exchange = Exchange {
        ranks: ranks as u64,
        slowest: if regions > 1 { across } else { inside },
        busiest: inside.bandwidth.transfer(Bytes(shard.0 * (ranks as u64 - 1))),
    };
    let forms =
        [(Algorithm::Ring, ring_time(&around, BYTES)), (Algorithm::Direct, direct_time(exchange, BYTES))];
    for (algorithm, form) in forms {
        let programs: Vec<Program> = all().map(|rank| algorithm.program(rank, ranks)).collect();
        let price = cost(&programs, BYTES, &topology);
        let off = (form.as_secs_f64() / price.as_secs_f64() - 1.0).abs() * 100.0;
        let name = format!(
            "{algorithm:?}, {ranks} ranks in {regions} regions: difference of the closed form \
                            from the price of the steps"
        );
        report.row(&name, off, "%", Threshold::AtMost(5.0))?;
    }
    Ok(())
}
