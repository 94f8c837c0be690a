//! Compares the paper's search for DT-FM layouts with ours, at equal numbers of evaluations, and both with the
//! optimum.

use std::time::Instant;

use anyhow::Result;
use farflung::base::{Bandwidth, Link, Nanos, Philox, Rank, Topology};
use farflung::parallel::planner::dtfm::{
    Layout, PairCosts, Workload, evolution, exhaustive, local_search, transposed,
};

use crate::dtfm_cost::costs;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "dtfm-search",
    claim: "with equal numbers of evaluations, our search for a DT-FM layout is never worse than the \
            paper's, nor than pipelines of neighbouring devices; on networks small enough for an exhaustive \
            search it finds the optimum; 64 devices take under 5 s",
    source: "Yuan et al. 2022, DT-FM",
    seed: 21,
    run,
};

/// Number of evaluations in the paper: a population of 100 and 4,900 children.
const EVALUATIONS: u64 = 5000;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let seeds = if options.quick { 1 } else { 5 };
    let evaluations = if options.quick { 500 } else { EVALUATIONS };
    for case in 1..=5 {
        let costs = costs(case)?;
        let by_pipeline = Layout::of_groups(&transposed(&costs), &costs)?.cost.total().as_secs_f64();
        let (mut worst, mut best_of_paper, mut over_paper) = (0.0, f64::INFINITY, 0.0);
        let mut slowest = 0.0;
        for seed in report.seed()..report.seed() + seeds {
            let begun = now();
            let ours = local_search(&costs, evaluations, seed)?.layout.cost.total().as_secs_f64();
            slowest = f64::max(slowest, begun.elapsed().as_secs_f64());
            let paper = evolution(&costs, evaluations, seed)?.layout.cost.total().as_secs_f64();
            worst = f64::max(worst, ours);
            best_of_paper = f64::min(best_of_paper, paper);
            over_paper = f64::max(over_paper, ours / paper);
        }
        let row = |what: &str| format!("case {case}: {what}");
        report.row(&row("pipelines of neighbours"), by_pipeline, "s", Threshold::None)?;
        report.row(&row("the paper's search, best of all seeds"), best_of_paper, "s", Threshold::None)?;
        report.row(&row("our search, worst of all seeds"), worst, "s", Threshold::AtMost(by_pipeline))?;
        report.row(
            &row("our cost relative to the paper's, same seed"),
            over_paper,
            "",
            Threshold::AtMost(1.0),
        )?;
        let mark = if options.quick { Threshold::None } else { Threshold::AtMost(5.0) };
        report.row(&row("time of our search"), slowest, "s", mark)?;
    }
    small(report, options)
}

/// Runs both searches on networks of 8 to 12 devices, which are small enough to try all divisions.
fn small(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let sizes: &[(usize, u32)] = if options.quick {
        &[(8, 2), (9, 3)]
    } else {
        &[(8, 2), (8, 4), (9, 3), (10, 5), (12, 3), (12, 4), (12, 6)]
    };
    let networks = if options.quick { 4 } else { 20 };
    let (mut tried, mut optimal, mut of_paper, mut over_paper) = (0.0_f64, 0.0_f64, 0.0_f64, 0.0_f64);
    for &(devices, groups) in sizes {
        for seed in 0..networks {
            let costs = uneven(devices, groups, report.seed() + seed)?;
            let best = exhaustive(&costs)?.layout.cost.total();
            let ours = local_search(&costs, EVALUATIONS, seed)?.layout.cost.total();
            let paper = evolution(&costs, EVALUATIONS, seed)?.layout.cost.total();
            tried += 1.0;
            optimal += f64::from(ours == best);
            of_paper += f64::from(paper == best);
            over_paper = over_paper.max(ours.as_secs_f64() / paper.as_secs_f64());
        }
    }
    report.row("small networks", tried, "networks", Threshold::None)?;
    report.row(
        "small networks where our search finds the optimum",
        optimal,
        "networks",
        Threshold::AtLeast(tried),
    )?;
    report.row(
        "small networks where the paper's search finds the optimum",
        of_paper,
        "networks",
        Threshold::None,
    )?;
    report.row(
        "small networks: our cost relative to the paper's, at most",
        over_paper,
        "",
        Threshold::AtMost(1.0),
    )
}

/// Returns the costs of a random network in which every pair has another bandwidth and latency, which also
/// differ by direction.
fn uneven(devices: usize, groups: u32, seed: u64) -> Result<PairCosts> {
    let philox = Philox::new(seed, devices as u64);
    let mut topology = Topology::uniform(devices, Link::FREE);
    for (a, b) in (0..devices).flat_map(|a| (0..devices).map(move |b| (a, b))) {
        let at = (a * devices + b) as u64;
        let bandwidth = Bandwidth(50_000_000 + 1_000_000 * philox.below(2 * at, 4000));
        let latency = Nanos::from_millis(philox.below(2 * at + 1, 150));
        topology.set_link(Rank(a as u32), Rank(b as u32), Link { bandwidth, latency });
    }
    Ok(PairCosts::new(&topology, groups, Workload::PUBLISHED)?)
}

#[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
fn now() -> Instant {
    Instant::now()
}
