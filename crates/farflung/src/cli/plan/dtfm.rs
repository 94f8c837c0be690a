//! `farflung plan dtfm`: DT-FM's placement of GPT-3 XL, on one of the paper's five networks or on that of a
//! file.

use std::fmt::Write as _;
use std::path::PathBuf;

use farflung::Result;
use farflung::base::{Nanos, Rank};
use farflung::parallel::planner::dtfm::{
    Layout, PairCosts, TrainingLoad, Workload, contiguous, evolution, exhaustive, random, search,
    simulate_layout, transposed,
};
use farflung::parallel::{Cluster, render, shipped};
use farflung::terminal::print;
use farflung::train::read_topology;

use super::file::write;

/// Place pipelines with data parallelism by DT-FM's cost model: which devices share a stage, and in which order
/// the stages are.
///
/// The model is GPT-3 XL with a batch of a million tokens, as in the paper. The costs are only those of a
/// step's communication, in seconds; the simulated time of a step also contains the computation.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farflung plan dtfm --case 5 --layout transp
  farflung plan dtfm --case 2 --layout search --evaluations 20000 --seed 1 --json
  farflung plan dtfm --topology machines.toml --stages 4 --layout search --by simulation --batch 1024")]
pub(crate) struct DtfmCommand {
    /// Network of the paper: 1 a data centre, 2 spot machines, 3 two regions, 4 four regions, 5 eight regions
    /// of the world.
    #[arg(
        long,
        value_name = "1..5",
        value_parser = clap::value_parser!(u8).range(1..=5),
        required_unless_present = "topology",
        conflicts_with = "topology"
    )]
    case: Option<u8>,
    /// Topology file with devices and links, instead of a network of the paper.
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Number of stages, each a group of devices; it must divide the number of devices.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    stages: u32,
    /// Method that divides devices into groups.
    #[arg(long, value_name = "NAME", default_value = "search")]
    layout: Grouping,
    /// Highest number of layouts that a search evaluates.
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..))]
    evaluations: u64,
    /// Seed of searches and of random groups.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// Criterion that chooses the best layout of a search.
    #[arg(long, value_name = "NAME", default_value = "cost")]
    by: By,
    /// Sequences per simulated step.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Layers of the model; the gradients of a stage grow with them.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 24,
        value_parser = clap::value_parser!(u32).range(1..=4096)
    )]
    layers: u32,
    /// Draw which device has which stage of which pipeline, as SVG.
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Grouping {
    /// Neighbours in the file share a stage.
    Contig,
    /// Neighbours in the file form a pipeline.
    Transp,
    /// Random groups.
    Random,
    /// The paper's evolutionary search.
    Paper,
    /// Our search: exhaustive if --evaluations suffices for that, else swaps with late acceptance.
    Search,
    /// Exhaustive search over all groupings, for up to 16 devices.
    Exhaustive,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum By {
    /// DT-FM's cost of communication.
    Cost,
    /// The simulated time of a step.
    Simulation,
}

/// A layout with the simulated time of its step.
struct Finalist {
    layout: Layout,
    step: Nanos,
}

impl DtfmCommand {
    pub(crate) fn run(self) -> Result<()> {
        let cluster = self.cluster()?;
        let workload = Workload::PUBLISHED.with_layers(self.layers);
        let costs = PairCosts::new(&cluster.topology()?, self.stages, workload)?;
        let (layouts, evaluations, is_optimal) = self.layouts(&costs)?;
        let load = TrainingLoad::gpt3_xl(self.layers, self.batch);
        let finalist = |layout: Layout| {
            let step = simulate_layout(&layout, &costs, &load)?;
            Ok(Finalist { layout, step })
        };
        let mut finalists: Vec<Finalist> = layouts.into_iter().map(finalist).collect::<Result<_>>()?;
        if self.by == By::Simulation {
            finalists.sort_by_key(|finalist| finalist.step);
        }
        let chosen = &finalists[0];
        if let Some(path) = &self.map {
            let stages: Vec<String> = (0..self.stages).map(|stage| format!("stage {stage}")).collect();
            let svg = render::map(&chosen.layout.pipelines, &stages, &cluster, &cluster.topology()?);
            write(path, "draw the map", &svg)?;
        }
        print(&if self.json {
            format!("{}\n", json(chosen, &finalists, evaluations, is_optimal))
        } else {
            text(chosen, &finalists, &cluster, evaluations)
        })
    }

    fn cluster(&self) -> Result<Cluster> {
        match (&self.topology, self.case) {
            (Some(path), _) => read_topology(path),
            (None, case) => Ok(shipped::cluster(&format!("dtfm-{}", case.unwrap_or(1)))?),
        }
    }

    /// Returns layouts, first the one of least cost that the chosen method found; how many were evaluated; and
    /// whether the first is proven to be the best. A search also returns the layouts by the file's order.
    fn layouts(&self, costs: &PairCosts) -> Result<(Vec<Layout>, u64, bool)> {
        let of = |groups: Vec<Vec<Rank>>| Ok((vec![Layout::of_groups(&groups, costs)?], 1, false));
        let found = match self.layout {
            Grouping::Contig => return of(contiguous(costs)),
            Grouping::Transp => return of(transposed(costs)),
            Grouping::Random => return of(random(costs, self.seed)),
            Grouping::Paper => evolution(costs, self.evaluations, self.seed)?,
            Grouping::Search => search(costs, self.evaluations, self.seed)?,
            Grouping::Exhaustive => exhaustive(costs)?,
        };
        let mut layouts = vec![found.layout];
        layouts.extend(found.runners_up);
        for groups in [contiguous(costs), transposed(costs)] {
            let layout = Layout::of_groups(&groups, costs)?;
            if layouts.iter().all(|other| other.groups != layout.groups) {
                layouts.push(layout);
            }
        }
        Ok((layouts, found.evaluations, found.is_optimal))
    }
}

/// Returns three times in seconds: the data-parallel part of a cost, the pipeline's part for both passes, and
/// their sum.
fn parts(layout: &Layout) -> [f64; 3] {
    let cost = layout.cost;
    [cost.data_parallel, cost.pipeline * 2, cost.total()].map(Nanos::as_secs_f64)
}

fn numbers(lists: &[Vec<Rank>]) -> Vec<Vec<u32>> {
    lists.iter().map(|list| list.iter().map(|rank| rank.0).collect()).collect()
}

fn json(chosen: &Finalist, finalists: &[Finalist], evaluations: u64, is_optimal: bool) -> serde_json::Value {
    let [data_parallel, pipeline, total] = parts(&chosen.layout);
    let each = finalists.iter().map(|finalist| {
        let [data_parallel, pipeline, total] = parts(&finalist.layout);
        serde_json::json!({
            "data_parallel": data_parallel, "pipeline": pipeline, "total": total,
            "simulated_s": finalist.step.as_secs_f64(),
        })
    });
    serde_json::json!({
        "data_parallel": data_parallel, "pipeline": pipeline, "total": total,
        "groups": numbers(&chosen.layout.groups), "order": chosen.layout.order,
        "pipelines": numbers(&chosen.layout.pipelines), "evaluations": evaluations, "optimal": is_optimal,
        "simulated_s": chosen.step.as_secs_f64(), "finalists": each.collect::<Vec<_>>(),
    })
}

fn text(chosen: &Finalist, finalists: &[Finalist], cluster: &Cluster, evaluations: u64) -> String {
    let names = cluster.rank_names();
    let mut text = String::new();
    for (stage, &group) in chosen.layout.order.iter().enumerate() {
        let devices: Vec<&str> =
            chosen.layout.groups[group].iter().map(|rank| names[rank.index()].as_str()).collect();
        let _ = writeln!(text, "stage {stage:>2}  {}", devices.join(" "));
    }
    let _ = writeln!(
        text,
        "\n  {:>14} {:>14} {:>14} {:>16}",
        "data parallel", "pipeline", "total", "simulated step"
    );
    for (at, finalist) in finalists.iter().enumerate() {
        let [data_parallel, pipeline, total] = parts(&finalist.layout);
        let mark = if at == 0 { '>' } else { ' ' };
        let step = finalist.step.as_secs_f64();
        let _ = writeln!(
            text,
            "{mark} {data_parallel:>12.4} s {pipeline:>12.4} s {total:>12.4} s {step:>14.2} s"
        );
    }
    let _ = writeln!(text, "\n{evaluations} layouts evaluated.");
    text
}
