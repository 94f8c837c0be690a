//! Simulates a step of DT-FM's placements in its five networks.

use anyhow::{Context, Result};
use farflung::base::Rank;
use farflung::parallel::planner::dtfm::{
    Layout, PairCosts, TrainingLoad, Workload, contiguous, local_search, random, simulate_layout, transposed,
};
use farflung::parallel::shipped;

use crate::dtfm_cost::pipelines;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "dtfm-world",
    claim: "placement is what makes training across the world possible: the planned layout is compared with \
            random layouts and with ranks in order, in simulated steps of GPT-3 XL; a step in eight regions \
            of the world takes 1.7 to 3.5 times as long as in a data centre",
    source: "Yuan et al. 2022, DT-FM: 4.8x, 1.2-2.5x, 1.7-3.5x",
    seed: 5,
    run,
};

/// A setting of the paper, with step times in seconds from an independent event simulation: the best step of
/// case 1, and those of case 5 with neighbouring devices in one group or in one pipeline.
struct Setting {
    layers: u32,
    batch: u32,
    data_centre: f64,
    by_group: f64,
    by_pipeline: f64,
}

const SETTINGS: [Setting; 5] = [
    Setting { layers: 24, batch: 1024, data_centre: 9.47, by_group: 31.36, by_pipeline: 33.74 },
    Setting { layers: 24, batch: 2048, data_centre: 18.25, by_group: 56.1, by_pipeline: 43.89 },
    Setting { layers: 24, batch: 4096, data_centre: 35.81, by_group: 105.6, by_pipeline: 64.18 },
    Setting { layers: 40, batch: 1024, data_centre: 13.43, by_group: 34.62, by_pipeline: 50.0 },
    Setting { layers: 40, batch: 4096, data_centre: 50.85, by_group: 108.9, by_pipeline: 87.83 },
];

/// Simulated step times in seconds of a network's layouts.
struct Steps {
    by_group: f64,
    by_pipeline: f64,
    /// Best of the layouts with neighbours in one group or one pipeline, and of those that the search found.
    best: f64,
    /// Mean over random placements.
    random: f64,
    /// Ranks in order with data-parallel groups next to each other, without reordering or matching.
    in_order: f64,
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let samples = if options.quick { 2 } else { 10 };
    let evaluations = if options.quick { 200 } else { 5000 };
    let small = TrainingLoad::gpt3_xl(24, 512);
    for case in 1..=5 {
        let Steps { best, random, in_order, .. } = steps(case, &small, evaluations, samples, report.seed())?;
        let row = |what: &str| format!("case {case}, batch 512: {what}");
        report.row(&row("planned step"), best, "s", Threshold::None)?;
        report.row(&row("sequences per second"), 512.0 / best, "1/s", Threshold::None)?;
        report.row(&row("faster than random placement"), random / best, "x", Threshold::AtLeast(1.0))?;
        report.row(
            &row("faster than ranks in order (Megatron's layout)"),
            in_order / best,
            "x",
            Threshold::AtLeast(1.0),
        )?;
    }
    for setting in SETTINGS.iter().take(if options.quick { 1 } else { 5 }) {
        let load = TrainingLoad::gpt3_xl(setting.layers, setting.batch);
        let centre = steps(1, &load, evaluations, samples, report.seed())?;
        let world = steps(5, &load, evaluations, samples, report.seed())?;
        let row = |what: &str| format!("{} layers, batch {}: {what}", setting.layers, setting.batch);
        let structured = centre.by_group.min(centre.by_pipeline);
        let off = [
            (structured, setting.data_centre),
            (world.by_group, setting.by_group),
            (world.by_pipeline, setting.by_pipeline),
        ];
        let off = off.iter().map(|(seen, said)| (seen / said - 1.0).abs()).fold(0.0, f64::max);
        // The independent simulation printed four digits.
        report.row(
            &row("relative difference from an independent simulation"),
            off,
            "",
            Threshold::AtMost(1.1e-3),
        )?;
        report.row(
            &row("case 5, step time relative to case 1"),
            world.best / centre.best,
            "x",
            Threshold::AtMost(3.5),
        )?;
        report.row(
            &row("case 5, random placement relative to planned"),
            world.random / world.best,
            "x",
            Threshold::AtLeast(2.4),
        )?;
        report.row(
            &row("case 5, ranks in order relative to planned"),
            world.in_order / world.best,
            "x",
            Threshold::AtLeast(1.0),
        )?;
    }
    Ok(())
}

fn steps(case: u32, load: &TrainingLoad, evaluations: u64, samples: u64, seed: u64) -> Result<Steps> {
    let topology = shipped::cluster(&format!("dtfm-{case}"))?.topology()?;
    let costs = PairCosts::new(&topology, 8, Workload::PUBLISHED.with_layers(load.layers))?;
    let time = |layout: &Layout| -> Result<f64> { Ok(simulate_layout(layout, &costs, load)?.as_secs_f64()) };
    let of = |groups: &[Vec<Rank>]| time(&Layout::of_groups(groups, &costs)?);
    let in_order = time(&Layout::as_given(&pipelines(&contiguous(&costs)), &costs)?)?;
    let (by_group, by_pipeline) = (of(&contiguous(&costs))?, of(&transposed(&costs))?);
    let found = local_search(&costs, evaluations, seed)?;
    let mut finalists = vec![by_group, by_pipeline];
    for layout in found.runners_up.iter().chain([&found.layout]) {
        finalists.push(time(layout)?);
    }
    let best = finalists.into_iter().min_by(f64::total_cmp).context("no layout was found")?;
    let mut random_sum = 0.0;
    for sample in 0..samples {
        let placed = pipelines(&random(&costs, seed + sample));
        random_sum += time(&Layout::as_given(&placed, &costs)?)?;
    }
    Ok(Steps { by_group, by_pipeline, best, random: random_sum / samples as f64, in_order })
}
