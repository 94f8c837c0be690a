//! Compares the exact pipeline planners with a search of all divisions, on small random instances.

use anyhow::Result;
use farflung::base::Bytes;
use farflung::parallel::planner::{alpa, dapple, galvatron, operators as cuts, pipedream, piper, uneven};

use crate::harness::{Bench, Options, Report, Threshold};

mod instances;

use instances::Draw;

pub(crate) const BENCH: Bench = Bench {
    name: "alpa-exact",
    claim: "the dynamic programs for pipelines find the same optimum as a search of all divisions: unequal \
            machines in a fixed order with limited memory, Alpa's submeshes, PipeDream's replicas, Piper's \
            shapes, Galvatron's strategies, DAPPLE's placed replicas; so do the integer programs for Alpa's \
            operators, with and without a memory limit",
    source: "Zheng et al. 2022; Narayanan et al. 2019; Tarnawski et al. 2021; Miao et al. 2022; Fan et al. \
             2021",
    seed: 33,
    run,
};

/// Cost of the best division of all, and of the planner's division. `None` if no division fits, or if the
/// planner states another cost than its division has.
pub(crate) struct Outcome {
    pub(crate) best: Option<u64>,
    pub(crate) found: Option<u64>,
}

/// Plans one random instance.
type One = fn(&mut Draw) -> Outcome;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let rounds = if options.quick { 100 } else { 1000 };
    let planners: [(&str, One); 8] = [
        ("machines in order", in_order),
        ("Alpa", submeshes),
        ("PipeDream", replicas),
        ("Piper", shapes),
        ("Galvatron", strategies),
        ("DAPPLE", placed),
        ("Alpa's operators", operators),
        ("Alpa's operators with a memory limit", operators_within),
    ];
    for (name, one) in planners {
        let mut draw = Draw::new(report.seed());
        let (mut differ, mut feasible) = (0, 0);
        for _ in 0..rounds {
            let Outcome { best, found } = one(&mut draw);
            differ += u32::from(best != found);
            feasible += u32::from(best.is_some());
        }
        report.row(&format!("{name}: instances"), f64::from(rounds), "", Threshold::None)?;
        report.row(
            &format!("{name}: feasible instances"),
            f64::from(feasible),
            "",
            Threshold::AtLeast(f64::from(rounds) / 4.0),
        )?;
        report.row(
            &format!("{name}: instances whose result is not the optimum"),
            f64::from(differ),
            "",
            Threshold::AtMost(0.0),
        )?;
    }
    Ok(())
}

fn in_order(draw: &mut Draw) -> Outcome {
    let chain = instances::chain(draw);
    let all = instances::chain_stages(&chain, 0, 0);
    let best = all.iter().filter_map(|stages| chain.time(stages)).min();
    let found = uneven::uneven(&chain).ok().filter(|plan| chain.time(&plan.stages) == Some(plan.time));
    Outcome { best: best.map(|time| time.0), found: found.map(|plan| plan.time.0) }
}

fn submeshes(draw: &mut Draw) -> Outcome {
    let size = instances::alpa_size(draw);
    let table = draw.table(4096);
    let time = instances::stage_time(&table);
    let meshes = alpa::submeshes(size.nodes, size.devices);
    let all = instances::mesh_stages(&size, &meshes, 0, size.nodes * size.devices);
    let price = |stages: &[alpa::SubmeshStage]| instances::mesh_price(&size, &time, stages);
    let best = all.iter().filter_map(|stages| price(stages)).min();
    let found = alpa::alpa(&size, &time).ok().filter(|plan| price(&plan.stages) == Some(plan.time.0));
    Outcome { best, found: found.map(|plan| plan.time.0) }
}

fn replicas(draw: &mut Draw) -> Outcome {
    let (layers, levels) = instances::profiled(draw);
    let found = pipedream::pipedream(&layers, &levels).ok();
    Outcome { best: Some(instances::least_period(&layers, &levels)), found: found.map(|plan| plan.period.0) }
}

fn shapes(draw: &mut Draw) -> Outcome {
    let size = instances::piper_size(draw);
    let table = draw.table(512);
    let load = instances::shape_load(&table);
    let best = instances::shape_periods(&size, &load, 0, size.devices).into_iter().min();
    let found = piper::piper(&size, &load).ok();
    Outcome { best: best.map(|(period, _)| period), found: found.map(|plan| plan.period.0) }
}

fn strategies(draw: &mut Draw) -> Outcome {
    let instances::Strategies { costs, changes, memory } = instances::strategies(draw);
    let change = |a: usize, b: usize| changes[a][b];
    let found = galvatron::galvatron(&costs, &change, memory, Bytes(1)).ok();
    let best = instances::least_time(&costs, &changes, memory.0, None);
    Outcome { best, found: found.map(|found| found.time.0) }
}

fn placed(draw: &mut Draw) -> Outcome {
    let size = instances::dapple_size(draw);
    let table = draw.table(997);
    let cost = instances::phase_cost(&table);
    let hop = instances::hop_time(&table);
    let all = instances::placed_stages(&size, 0, &vec![0; size.machines as usize]);
    let price = |stages: &[dapple::PlacedStage]| instances::phases_price(&size, &cost, &hop, stages);
    let best = all.iter().filter_map(|stages| price(stages)).min();
    let found =
        dapple::dapple(&size, &cost, &hop).ok().filter(|plan| price(&plan.stages) == Some(plan.time.0));
    Outcome { best, found: found.map(|plan| plan.time.0) }
}

fn operators(draw: &mut Draw) -> Outcome {
    let graph = instances::operator_graph(draw);
    let free = cuts::MemoryLimit { copies: 4, microbatches: 3, bytes: Bytes(u64::MAX) };
    let found = cuts::choose(&graph).ok().filter(|found| graph.cost(&found.strategies) == found.cost);
    Outcome { best: instances::least_cut(&graph, &free), found: found.map(|found| found.cost.0) }
}

/// Limits memory to one to six fifths of what the cheapest strategies take.
fn operators_within(draw: &mut Draw) -> Outcome {
    let graph = instances::operator_graph(draw);
    let mut limit = cuts::MemoryLimit { copies: 4, microbatches: 3, bytes: Bytes(u64::MAX) };
    let free = cuts::choose(&graph).ok().and_then(|found| graph.memory(&found.strategies, &limit));
    limit.bytes = Bytes(free.unwrap_or_default().0 * (1 + draw.below(6)) / 5);
    let found = cuts::choose_within(&graph, &limit).ok().flatten();
    let fits = |found: &cuts::Sharding| {
        graph.memory(&found.strategies, &limit).is_some_and(|taken| taken <= limit.bytes)
    };
    let found = found.filter(|found| fits(found) && graph.cost(&found.strategies) == found.cost);
    Outcome { best: instances::least_cut(&graph, &limit), found: found.map(|found| found.cost.0) }
}
