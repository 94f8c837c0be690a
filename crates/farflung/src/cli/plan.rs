//! `farflung plan`: decides how the machines of a topology file should train a model together, and explains
//! why.

mod auto;
mod churn;
mod dtfm;
mod file;
mod memory;
mod named;
mod planned;
mod regional;

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use farflung::base::Bytes;
use farflung::compress::CodecSpec;
use farflung::config::value::Setting;
use farflung::model_shape;
use farflung::parallel::{Limits, ModelShape, ParallelError, Plan, Planned, Recompute, StepTime, plan};
use farflung::train::{AveragePrices, Fit, Prediction, fit, planned_codec, planned_model, read_topology};
use farflung::zoo::{ModelSpec, Resize};
use farflung::{Error, Result};

/// Plan how unequal machines over given links should train a model: synchronously or with local steps, and with
/// which share for each machine.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "Examples:
  farflung plan homes.toml --model gpt2 --sequences 64
  farflung plan homes.toml --model nano --sequences 16 --out plan.toml; farflung train --plan plan.toml --topology homes.toml
  farflung plan continents.toml --model gpt3-xl --codec int8 --overhead 10 --json
  farflung plan auto homes.toml --model gpt2 --microbatches 16 --out plan.toml
  farflung plan memory --model gpt3-175b
  farflung plan churn spot --model gpt2-xl --mtbf 4h
  farflung plan dapple lan --model gpt2 --runnable --out plan.toml
  farflung plan dtfm --case 5 --layout search")]
pub(crate) struct PlanCommand {
    #[command(subcommand)]
    planner: Option<Planner>,
    /// TOML file with devices, links and regions, as for `train --topology`; devices need a speed.
    #[arg(value_name = "FILE", required = true)]
    topology: Option<PathBuf>,
    /// Model preset: nano, baby, gpt2, or one of the larger sizes of GPT-2 and GPT-3.
    #[arg(long, value_name = "NAME", default_value = "gpt2")]
    model: String,
    /// Tokens per sequence; overrides the preset.
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    context: Option<usize>,
    /// Sequences per step, over all machines.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    sequences: u64,
    /// Codec of averaged values.
    #[arg(long, value_name = "CODEC", default_value = "none", value_parser = CodecSpec::from_flag)]
    codec: CodecSpec,
    /// Time that communication may add to a step, in percent of its computation.
    #[arg(long, value_name = "PERCENT", default_value_t = Limits::default().overhead_percent)]
    overhead: u32,
    /// Highest number of local steps between two averages.
    #[arg(long, value_name = "STEPS", default_value_t = Limits::default().max_every, value_parser = clap::value_parser!(u32).range(1..))]
    max_every: u32,
    /// Write the plan as TOML, for `train --plan`.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Planners other than the one for data parallelism.
#[derive(Debug, clap::Subcommand)]
enum Planner {
    Dtfm(dtfm::DtfmCommand),
    Auto(auto::AutoCommand),
    Memory(memory::MemoryCommand),
    Churn(churn::ChurnCommand),
    /// Alpa: chooses stages, submeshes and how the operators of a layer are split in each, for the shortest
    /// step by its cost model. All machines are treated as equal to the slowest.
    Alpa(named::NamedCommand),
    /// PipeDream: chooses stages and their copies over machines and links in two levels, for the shortest time
    /// between two microbatches. All machines are treated as equal to the slowest.
    Pipedream(named::NamedCommand),
    /// Piper: chooses stages with tensor ranks, copies and recomputation within memory, for the shortest time
    /// between two microbatches. All machines are treated as equal to the slowest.
    Piper(named::NamedCommand),
    /// Galvatron: chooses tensor ranks, sharding and recomputation for each layer within memory; all machines
    /// share each layer. All machines are treated as equal to the slowest.
    Galvatron(named::NamedCommand),
    /// DAPPLE: places stages and their copies on unequal machines, for the shortest warm-up, steady phase and
    /// ending of a synchronous pipeline. With more than 24 machines, the numbers of copies are powers of two
    /// from an eighth of all machines on.
    Dapple(named::NamedCommand),
}

impl PlanCommand {
    pub(crate) fn run(self) -> Result<()> {
        match self.planner {
            Some(Planner::Dtfm(command)) => return command.run(),
            Some(Planner::Auto(command)) => return command.run(),
            Some(Planner::Memory(command)) => return command.run(),
            Some(Planner::Churn(command)) => return command.run(),
            Some(Planner::Alpa(command)) => return command.run("alpa"),
            Some(Planner::Pipedream(command)) => return command.run("pipedream"),
            Some(Planner::Piper(command)) => return command.run("piper"),
            Some(Planner::Galvatron(command)) => return command.run("galvatron"),
            Some(Planner::Dapple(command)) => return command.run("dapple"),
            None => {}
        }
        let cluster = read_topology(&self.topology.unwrap_or_default())?;
        let model =
            model_shape(&self.model)?.resized(Resize { context: self.context, ..Resize::default() })?;
        let context = model.context as u64;
        let tokens = context.checked_mul(self.sequences).ok_or_else(|| Error::Setting {
            field: "sequences",
            value: self.sequences.to_string(),
            expected: "fewer sequences: the number of tokens in a step must fit into 64 bits".to_owned(),
        })?;
        let shape = ModelShape {
            tensors: model.tensors().iter().map(|t| t.count() as u64).collect(),
            flops_per_token: model.flops_per_token(model.context),
            ..ModelShape::dense(model.parameters(), context, tokens)
        };
        let limits = Limits {
            overhead_percent: self.overhead,
            max_every: self.max_every,
            // Error feedback for a biased codec, as in `train` by default.
            codec: planned_codec(self.codec.with_feedback()),
            ..Limits::default()
        };
        let prices = AveragePrices::new(cluster.topology()?);
        let price = |algorithm, codec: &_, values| prices.of(algorithm, codec, values);
        let named = planned_model(&self.model, &model);
        let fitted = |plan: Plan| {
            let state = limits.replica(shape.parameters, plan.outermost().every);
            fit(plan, &model, &cluster, state)
        };
        let step = |plan: &Plan| -> Result<Option<StepTime>> {
            // Local steps need more memory than synchronous ones, so they may not fit where those do.
            let plan = match fitted(plan.clone()) {
                Err(Error::Parallel(ParallelError::Memory { .. })) if plan.outermost().every > 1 => {
                    return Ok(None);
                }
                fitted => fitted?.plan,
            };
            let predicted = Prediction::on(&plan, &model, &cluster)?;
            Ok(Some(StepTime { step: predicted.step(), compute: predicted.compute }))
        };
        let planned = plan(&shape, &cluster, &limits, &price)?.predicted(&named, step)?;
        let Fit { plan: chosen, needs, repeated } = fitted(planned.plan(named)?)?;
        if let Some(path) = &self.out {
            std::fs::write(path, chosen.to_string()).map_err(|source| Error::Io {
                action: "write the plan",
                path: path.clone(),
                source,
            })?;
        }
        super::print(&if self.json {
            format!("{}\n", json(&planned, &chosen, &shape, needs))
        } else {
            format!("{planned}{}", memory(&chosen, &model, repeated))
        })
    }
}

/// Returns a line on recomputation, if memory makes it necessary; else an empty text.
fn memory(plan: &Plan, model: &ModelSpec, repeated: usize) -> String {
    let Recompute::Within(budget) = plan.parts[0].recompute else { return String::new() };
    let layers = model.layers();
    format!(
        "Activations are kept within {budget}: of {layers} layers, {repeated} are recomputed for each \
         microbatch.\n"
    )
}

/// Returns the plan, its predicted time and the candidates as JSON; times in seconds.
fn json(planned: &Planned, plan: &Plan, shape: &ModelShape, needs: Bytes) -> serde_json::Value {
    let chosen = planned.candidates.iter().find(|c| c.sync == planned.replicas.sync);
    let step_s = chosen.map_or(0.0, |c| c.step.as_secs_f64());
    let memory: serde_json::Map<_, _> =
        plan.machines.iter().map(|name| (name.clone(), serde_json::json!(needs.0))).collect();
    let ranks = planned.ranks.iter().map(|(name, microbatches, compute)| {
        serde_json::json!({ "name": name, "microbatches": microbatches, "compute_s": compute.as_secs_f64() })
    });
    let candidates = planned.candidates.iter().map(|c| {
        serde_json::json!({
            "sync": c.sync.to_string(), "algorithm": c.algorithm.to_string(), "step_s": c.step.as_secs_f64(),
            "bytes_per_step": c.sent_per_step.0, "overhead_percent": c.overhead as f64 / 100.0,
        })
    });
    serde_json::json!({
        "plan": plan.to_string(), "step_s": step_s,
        "tokens_per_s": if step_s > 0.0 { shape.tokens_per_step as f64 / step_s } else { 0.0 },
        "bytes_per_step": chosen.map(|c| c.sent_per_step.0), "memory": memory,
        "ranks": ranks.collect::<Vec<_>>(), "candidates": candidates.collect::<Vec<_>>(),
        "compute_s": planned.compute.as_secs_f64(), "within": planned.within,
    })
}
