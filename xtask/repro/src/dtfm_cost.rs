//! Compares DT-FM's cost model with figures of its published scheduler.

use anyhow::Result;
use farflung::base::Nanos;
use farflung::parallel::planner::dtfm::{Layout, PairCosts, Workload, contiguous, random, transposed};
use farflung::parallel::shipped;

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "dtfm-cost",
    claim: "our cost of a layout equals that of DT-FM's published scheduler: data-parallel cost, bottleneck \
            matchings, shortest path",
    source: "Yuan et al. 2022, DT-FM, scheduler/",
    seed: 0,
    run,
};

/// Costs of two layouts for one case by the published code, in seconds: data-parallel, pipeline and total.
struct Published {
    case: u32,
    contiguous: [f64; 3],
    transposed: [f64; 3],
}

const PUBLISHED: [Published; 3] = [
    Published { case: 1, contiguous: [0.0910, 16.8896, 16.9806], transposed: [2.9120, 0.5278, 3.4398] },
    Published { case: 3, contiguous: [1.8340, 15.8141, 17.6481], transposed: [5.5169, 10.5700, 16.0868] },
    Published { case: 5, contiguous: [4.6200, 54.8169, 59.4369], transposed: [22.7584, 26.4600, 49.2184] },
];

/// Published mean total cost in seconds of random placements without a matching, for each case.
const RANDOM: [f64; 5] = [19.80, 49.50, 54.6, 61.0, 171.0];

pub(crate) fn costs(case: u32) -> Result<PairCosts> {
    let topology = shipped::cluster(&format!("dtfm-{case}"))?.topology()?;
    Ok(PairCosts::new(&topology, 8, Workload::PUBLISHED)?)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    for Published { case, contiguous: by_group, transposed: by_pipeline } in PUBLISHED {
        let costs = costs(case)?;
        for (name, groups, expected) in
            [("contiguous", contiguous(&costs), by_group), ("transposed", transposed(&costs), by_pipeline)]
        {
            let cost = Layout::of_groups(&groups, &costs)?.cost;
            let seen = [cost.data_parallel, cost.pipeline * 2, cost.total()].map(Nanos::as_secs_f64);
            let off = seen.iter().zip(expected).map(|(seen, expected)| (seen - expected).abs());
            let off = off.fold(0.0, f64::max);
            report.row(
                &format!("case {case}, {name}: difference from the published cost"),
                off,
                "s",
                Threshold::AtMost(1e-4),
            )?;
        }
    }
    for case in [2, 4] {
        let costs = costs(case)?;
        for (name, groups) in [("contiguous", contiguous(&costs)), ("transposed", transposed(&costs))] {
            let total = Layout::of_groups(&groups, &costs)?.cost.total().as_secs_f64();
            report.row(&format!("case {case}, {name}: total"), total, "s", Threshold::None)?;
        }
    }
    let samples = if options.quick { 50 } else { 2000 };
    for (case, expected) in (1..).zip(RANDOM) {
        let costs = costs(case)?;
        let mut sum = 0.0;
        for sample in 0..samples {
            let pipelines = pipelines(&random(&costs, report.seed() + sample));
            sum += Layout::as_given(&pipelines, &costs)?.cost.total().as_secs_f64();
        }
        let mean = sum / samples as f64;
        // The published mean is over 200 placements.
        report.row(&format!("case {case}, mean of random placements"), mean, "s", Threshold::None)?;
        let off = (mean / expected - 1.0).abs();
        report.row(
            &format!("case {case}, mean of random placements: relative difference from the published mean"),
            off,
            "",
            Threshold::AtMost(0.02),
        )?;
    }
    Ok(())
}

/// Returns the pipelines in which each group's ranks keep their order: pipeline `r` has the rank at index `r`
/// of each group.
pub(crate) fn pipelines(groups: &[Vec<farflung::base::Rank>]) -> Vec<Vec<farflung::base::Rank>> {
    let size = groups.first().map_or(0, Vec::len);
    (0..size).map(|replica| groups.iter().map(|group| group[replica]).collect()).collect()
}
