//! `farflung plan auto`: simulates all kinds of plans that the trainer can run, and compares them.

use std::fmt::Write as _;
use std::path::PathBuf;

use farflung::StepMemory;
use farflung::base::{Bytes, Nanos, Rank};
use farflung::parallel::churn::CheckpointedJob;
use farflung::parallel::{Axis, Cluster, ParallelError, Plan, render};
use farflung::terminal::print;
use farflung::train::auto::{
    Bottleneck, Candidate, FileChange, Improvement, PlanKind, Ranking, RunningCosts, Wanted, auto,
    bottleneck, by_region, improvements, renamed, running_costs, sent,
};
use farflung::train::{PipelineSizes, Prediction};
use farflung::zoo::ModelSpec;
use farflung::{Error, Result};

use super::file::write;
use super::planned::PlannedArgs;
use super::{churn, regional};

/// Plan pipelines, replicas, and several pipelines in parallel for unequal machines, simulate them all, and
/// print the fastest.
///
/// A pipeline's layers are divided by an exact method, by speed and memory; machines are tried in the file's
/// order and in that of the shortest path over their links. Several pipelines are placed by DT-FM's search.
/// Machines that only slow a pipeline down are left out. All plans average gradients at each step;
/// `farflung plan FILE` decides between that and local steps.
///
/// With more than 256 machines, or with `--by-region`, several pipelines are planned by region with closed-form
/// costs, and a lower bound is printed. If the file names no regions, they are found by clustering its links.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung plan auto homes.toml --model gpt2 --microbatches 16
  farflung plan auto dtfm-5 --model gpt3-xl --microbatches 512 --only both
  farflung plan auto world-4096 --model gpt3-175b --microbatches 1536
  farflung plan auto homes.toml --model nano --out plan.toml --map map.svg --timeline step.svg
  farflung plan auto spot --model gpt2-xl --mtbf 6h
  farflung plan auto homes.toml --what-if add:anna --what-if bert*2 --what-if europe:oregon*4
  farflung train --plan plan.toml --topology homes.toml")]
pub(crate) struct AutoCommand {
    #[command(flatten)]
    planned: PlannedArgs,
    /// Consider only one kind of plan.
    #[arg(long, value_name = "KIND")]
    only: Option<Only>,
    /// Number of plans to print.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Write the plan as TOML, for `train --plan`.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Draw which machine has which layers of which pipeline, as SVG.
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// Draw a step of the plan, rank by rank, as SVG; if the file's name ends in `.json`, as a trace for
    /// Perfetto.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Also plan for a changed file and print the time of a step: `add:MACHINE`, `drop:MACHINE`,
    /// `MACHINE*FACTOR`, or `A:B*FACTOR` for a link of the file (`REGION:REGION` for links inside a region).
    /// May be repeated; each change is applied on its own.
    #[arg(long, value_name = "CHANGE")]
    what_if: Vec<FileChange>,
    /// Mean time until a machine is lost. With it, the output contains how often to save, and how much work is
    /// lost.
    #[arg(long, value_name = "TIME", value_parser = churn::positive)]
    mtbf: Option<Nanos>,
    #[command(flatten)]
    saving: churn::SavingCosts,
    /// Plan several pipelines by region with closed-form costs, as with more than 256 machines. The schedule is
    /// 1F1B.
    #[arg(long)]
    by_region: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Only {
    /// One pipeline.
    Pipeline,
    /// Replicas on one machine each.
    Data,
    /// Several pipelines in parallel.
    Both,
    /// Replicas whose layers are divided among several machines each.
    Tensor,
}

impl Only {
    const fn kind(self) -> PlanKind {
        match self {
            Self::Pipeline => PlanKind::Pipeline,
            Self::Data => PlanKind::Data,
            Self::Both => PlanKind::Both,
            Self::Tensor => PlanKind::Tensor,
        }
    }
}

/// The chosen plan with everything that is printed about it.
struct Chosen<'a> {
    candidate: &'a Candidate,
    tokens: u64,
    sent: Bytes,
    improvements: Vec<Improvement>,
    bottleneck: Option<Bottleneck>,
    costs: RunningCosts,
    what_if: Vec<Answer>,
    /// Interval between checkpoints, if a mean time between losses is given.
    checkpoints: Option<CheckpointedJob>,
}

/// The fastest plan after a change of the file.
struct Answer {
    change: FileChange,
    /// The fastest plan for the changed file.
    candidate: Candidate,
}

impl AutoCommand {
    /// Returns the `keep` fastest plans of the requested kind.
    fn fastest(
        &self,
        keep: usize,
        model: &ModelSpec,
        cluster: &Cluster,
        sizes: PipelineSizes,
    ) -> Result<Ranking> {
        let wanted = Wanted { only: self.only.map(Only::kind), keep, each_kind: false };
        auto(&self.planned.model, model, cluster, sizes, wanted)
    }

    /// Finds the fastest plan after one change of the file.
    fn answer(
        &self,
        change: &FileChange,
        now: &Candidate,
        model: &ModelSpec,
        cluster: &Cluster,
        sizes: PipelineSizes,
    ) -> Result<Answer> {
        let changed = change.apply(cluster)?;
        let found = self.fastest(1, model, &changed, sizes)?.candidates;
        let mut candidate = found.into_iter().next().ok_or(ParallelError::NoDevices)?;
        // The current plan may also be the best one for the changed file.
        if let Some(plan) = renamed(&now.plan, &changed) {
            let step = Prediction::on(&plan, model, &changed)?.step();
            if step < candidate.step {
                candidate = Candidate { plan, step, ..now.clone() };
            }
        }
        Ok(Answer { change: change.clone(), candidate })
    }

    pub(crate) fn run(self) -> Result<()> {
        let (cluster, model, sizes) = (self.planned.cluster()?, self.planned.shape()?, self.planned.sizes());
        if self.by_region || cluster.size() >= regional::MACHINES {
            return self.regional(&model, &cluster, sizes);
        }
        // Reports an invalid change before anything is simulated.
        self.what_if.iter().try_for_each(|change| change.apply(&cluster).map(drop))?;
        let Ranking { candidates, compared } = self.fastest(self.top.max(1), &model, &cluster, sizes)?;
        let candidate = &candidates[0];
        if let Some(path) = &self.out {
            write(path, "write the plan", &candidate.plan.to_string())?;
        }
        if let Some(path) = &self.map {
            write(path, "draw the map", &drawn(&candidate.plan, &cluster)?)?;
        }
        if let Some(path) = &self.timeline {
            let step = Prediction::timeline(&candidate.plan, &model, &cluster)?;
            let is_trace = path.extension().is_some_and(|extension| extension == "json");
            let drawn = if is_trace { render::trace(&step) } else { render::svg(&step) };
            write(path, "draw the step", &drawn)?;
        }
        let improvements = improvements(&candidate.plan, &model, &cluster, candidate.step)?;
        let tokens = candidate.plan.sequences() * model.context as u64;
        let chosen = Chosen {
            checkpoints: self.mtbf.map(|mtbf| {
                let most = candidate.held.iter().map(StepMemory::total).max().unwrap_or_default();
                let churn::SavingTimes { save, restart } = self.saving.times(most);
                churn::checkpoints(mtbf, candidate.plan.machines.len() as u32, save, restart)
            }),
            candidate,
            tokens,
            sent: sent(&candidate.plan, &model),
            bottleneck: bottleneck(&candidate.plan, &model, &cluster, &improvements)?,
            improvements,
            costs: running_costs(&candidate.plan, &cluster, tokens, candidate.step),
            what_if: self
                .what_if
                .iter()
                .map(|change| self.answer(change, candidate, &model, &cluster, sizes))
                .collect::<Result<_>>()?,
        };
        print(&if self.json {
            format!("{}\n", json(&chosen, &candidates, compared))
        } else {
            text(&chosen, &candidates, compared, self.top)
        })
    }
}

impl AutoCommand {
    /// Plans several pipelines by region, with closed-form costs.
    fn regional(&self, model: &ModelSpec, cluster: &Cluster, sizes: PipelineSizes) -> Result<()> {
        let refused = |field: &'static str, value: String| {
            let expected =
                "no value: plans by region (over 256 machines, or `--by-region`) do not support it"
                    .to_owned();
            Err(Error::Setting { field, value, expected })
        };
        if let Some(path) = &self.map {
            return refused("map", path.display().to_string());
        }
        if let Some(path) = &self.timeline {
            return refused("timeline", path.display().to_string());
        }
        if self.mtbf.is_some() {
            return refused("mtbf", "given".to_owned());
        }
        if let Some(change) = self.what_if.first() {
            return refused("what-if", change.to_string());
        }
        if let Some(only) = self.only.filter(|only| *only != Only::Both) {
            return refused("only", format!("{only:?}").to_lowercase());
        }
        let found = by_region(model, cluster, sizes)?;
        let plan = found.plans[0].plan(&self.planned.model, model, cluster, sizes)?;
        if let Some(path) = &self.out {
            write(path, "write the plan", &plan.to_string())?;
        }
        let tokens = plan.sequences() * model.context as u64;
        print(&if self.json {
            format!("{}\n", regional::json(&found, &plan.to_string(), tokens))
        } else {
            regional::text(&found, tokens, self.top)
        })
    }
}

/// Returns the map of a plan as SVG.
fn drawn(plan: &Plan, cluster: &Cluster) -> Result<String> {
    let names = cluster.rank_names();
    let machine = |rank: Rank| {
        let name = &plan.machines[rank.index()];
        names.iter().position(|known| known == name).map(|at| Rank(at as u32))
    };
    let rows: Vec<Vec<Rank>> = plan
        .mesh
        .groups(Axis::Pipeline)
        .into_iter()
        .map(|pipeline| pipeline.into_iter().filter_map(machine).collect())
        .collect();
    let stages: Vec<String> =
        plan.parts.iter().map(|part| format!("layers {}..{}", part.layers.start, part.layers.end)).collect();
    Ok(render::map(&rows, &stages, cluster, &cluster.topology()?))
}

fn rate(tokens: u64, step: Nanos) -> f64 {
    if step == Nanos::ZERO { 0.0 } else { tokens as f64 / step.as_secs_f64() }
}

fn json(chosen: &Chosen<'_>, candidates: &[Candidate], compared: usize) -> serde_json::Value {
    let Chosen { candidate, tokens, sent, improvements, bottleneck, costs, what_if, checkpoints } = chosen;
    let (plan, held) = (&candidate.plan, &candidate.held);
    let memory: serde_json::Map<_, _> = plan
        .machines
        .iter()
        .cloned()
        .zip(held.iter().map(|held| serde_json::json!(held.total().0)))
        .collect();
    let kinds = |held: &StepMemory| serde_json::json!(held.by_kind());
    let by_kind: serde_json::Map<_, _> = plan.machines.iter().cloned().zip(held.iter().map(kinds)).collect();
    let each = candidates.iter().map(|candidate| {
        serde_json::json!({
            "what": candidate.what, "step_s": candidate.step.as_secs_f64(), "bubble": candidate.bubble,
            "tokens_per_s": rate(*tokens, candidate.step), "compute_s": candidate.compute.as_secs_f64(),
            "replicas": candidate.plan.replicas(), "stages": candidate.plan.stages(),
            "tensor": candidate.plan.tensor_ranks(),
            "baseline": candidate.is_baseline,
        })
    });
    let help = improvements.iter().map(|improvement| {
        serde_json::json!({ "what": improvement.what, "step_s": improvement.step.as_secs_f64() })
    });
    let answers = what_if.iter().map(|Answer { change, candidate }| {
        serde_json::json!({
            "what": change.to_string(), "step_s": candidate.step.as_secs_f64(),
            "chosen": candidate.what, "machines": candidate.plan.machines.len(),
        })
    });
    let churn = checkpoints.as_ref().map(|every| {
        let lost = every.expected();
        serde_json::json!({
            "interval_s": every.every, "every_steps": every_steps(every, candidate.step),
            "checkpoint_s": every.save, "goodput": lost.work, "saving": lost.saving, "lost": lost.failures,
            "lost_per_failure_s": every.lost_per_failure(),
        })
    });
    serde_json::json!({
        "churn": churn,
        "plan": plan.to_string(), "step_s": candidate.step.as_secs_f64(),
        "tokens_per_s": rate(*tokens, candidate.step), "bytes_per_step": sent.0, "memory": memory,
        "memory_by_kind": by_kind,
        "bottleneck": bottleneck.as_ref().map(|bottleneck| {
            serde_json::json!({ "what": bottleneck.what, "step_s": bottleneck.step.as_secs_f64() })
        }),
        "price_per_billion_tokens": costs.price, "kwh_per_billion_tokens": costs.energy,
        "what_if": answers.collect::<Vec<_>>(),
        "candidates": each.collect::<Vec<_>>(), "compared": compared, "would_help": help.collect::<Vec<_>>(),
    })
}

fn text(chosen: &Chosen<'_>, candidates: &[Candidate], compared: usize, top: usize) -> String {
    let Chosen { candidate, tokens, sent, improvements, bottleneck, costs, what_if, checkpoints } = chosen;
    let (plan, held) = (&candidate.plan, &candidate.held);
    let mut text = format!(
        "{:>16} {:>8} {:>12} {:>10} {:>12}\n",
        "machine", "replica", "layers", "memory", "activations"
    );
    for (rank, (machine, held)) in plan.machines.iter().zip(held).enumerate() {
        let at = plan.at(Rank(rank as u32));
        let (replica, part) = (at.data, &plan.parts[at.pipeline as usize]);
        let weights = plan.shares_of_width();
        let piece = match weights.len() {
            1 => String::new(),
            _ => format!(" {}/{}", weights[at.tensor as usize], weights.iter().sum::<u32>()),
        };
        let layers = format!("{}..{}{piece}", part.layers.start, part.layers.end);
        let _ = writeln!(
            text,
            "{machine:>16} {replica:>8} {layers:>12} {:>10} {:>12}",
            held.total(),
            held.device.activations
        );
    }
    let shares: Vec<String> = plan.microbatches.iter().map(ToString::to_string).collect();
    let _ = writeln!(text, "\nMicrobatches of each replica: {}. Sent in a step: {sent}.\n", shares.join(" "));
    let _ = writeln!(text, "  {:<62} {:>10} {:>8} {:>12}", "", "a step", "bubble", "tokens/s");
    for (at, candidate) in candidates.iter().take(top.max(1)).enumerate() {
        let mark = if at == 0 { '>' } else { ' ' };
        let _ = writeln!(
            text,
            "{mark} {:<62} {:>10} {:>7.1}% {:>12.0}",
            candidate.what,
            candidate.step,
            100.0 * candidate.bubble,
            rate(*tokens, candidate.step)
        );
    }
    let _ = writeln!(text, "\nOf {compared} plans that were compared.");
    let ratio = |step: Nanos| step.as_secs_f64() / candidate.step.as_secs_f64().max(1e-9);
    if let Some(baseline) = candidates.iter().filter(|candidate| candidate.is_baseline).map(|c| c.step).min()
    {
        let _ = writeln!(
            text,
            "{:.2} times as fast as the best plan with equal shares in the file's order.",
            ratio(baseline)
        );
    }
    if let Some(Bottleneck { what, step }) = bottleneck {
        let gain = 100.0 * (1.0 - ratio(*step));
        let _ = writeln!(
            text,
            "Bottleneck: {what}. If it took no time, a step would take {step}, {gain:.1}% less."
        );
    }
    for improvement in improvements.iter().take(3) {
        let gain = 100.0 * (1.0 - ratio(improvement.step));
        let _ = writeln!(text, "With {}, a step takes {:.1}% less.", improvement.what, gain);
    }
    for Answer { change, candidate } in what_if {
        let change_percent = 100.0 * (ratio(candidate.step) - 1.0);
        let _ = writeln!(
            text,
            "What if {change}: a step takes {}, {change_percent:+.1}%, with {}.",
            candidate.step, candidate.what
        );
    }
    let costs = [
        costs.price.map(|price| format!("cost {price:.2} in the file's currency")),
        costs.energy.map(|energy| format!("take {energy:.1} kWh")),
    ];
    let costs: Vec<String> = costs.into_iter().flatten().collect();
    if !costs.is_empty() {
        let _ = writeln!(text, "A billion tokens {}.", costs.join(" and "));
    }
    if let Some(every) = checkpoints {
        let _ = write!(text, "\n{}", churn::interval(every));
        let _ = writeln!(
            text,
            "On average a loss costs {} of work. With `farflung train --checkpoint-every {}`, which saves at \
             this interval, {:.0} tokens/s are useful.",
            Nanos::from_secs_f64(every.lost_per_failure()),
            every_steps(every, candidate.step),
            every.expected().work * rate(*tokens, candidate.step)
        );
    }
    text
}

/// Returns an interval in steps, at least one.
fn every_steps(every: &CheckpointedJob, step: Nanos) -> u64 {
    (every.every / step.as_secs_f64().max(1e-9)).round().max(1.0) as u64
}
