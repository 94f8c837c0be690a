//! `farflung plan alpa`, `dapple`, `galvatron`, `pipedream`, `piper`: runs one planner of the literature.

use std::fmt::Write as _;
use std::path::PathBuf;

use farflung::parallel::ParallelError;
use farflung::terminal::print;
use farflung::train::auto::{Choice, Instance, PLANNERS, PlannedStage};
use farflung::{Error, Result};

use super::file::write;
use super::planned::PlannedArgs;

/// Arguments of a planner of the literature.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung plan dapple lan --model gpt2 --microbatches 32
  farflung plan alpa dtfm-1 --model gpt3-xl --microbatches 64 --json
  farflung plan piper lan --model gpt2 --runnable --out plan.toml; farflung train --plan plan.toml --topology lan")]
pub(crate) struct NamedCommand {
    #[command(flatten)]
    planned: PlannedArgs,
    /// Only consider plans that the trainer can run: no tensor ranks, and the same number of copies of each
    /// stage. (PipeDream still chooses the number of copies by itself.)
    #[arg(long)]
    runnable: bool,
    /// Write the plan as TOML, for `train --plan`, if the trainer can run it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl NamedCommand {
    pub(crate) fn run(self, name: &str) -> Result<()> {
        let (cluster, model, sizes) = (self.planned.cluster()?, self.planned.shape()?, self.planned.sizes());
        let planner = PLANNERS.iter().find(|planner| planner.name == name);
        let instance = Instance {
            name: &self.planned.model,
            model: &model,
            cluster: &cluster,
            sizes,
            runnable: self.runnable,
        };
        let choice = planner.ok_or(ParallelError::NoDevices)?.choose(&instance)?;
        if let Some(path) = &self.out {
            let Some(plan) = &choice.plan else {
                let reason = choice.refused.clone().unwrap_or_default();
                return Err(Error::Setting {
                    field: "out",
                    value: path.display().to_string(),
                    expected: format!("a plan that the trainer can run, as with `--runnable`: {reason}"),
                });
            };
            write(path, "write the plan", &plan.to_string())?;
        }
        let names = cluster.rank_names();
        print(&if self.json { json(name, &choice, &names) } else { text(name, &choice, &names) })
    }
}

fn machines(stage: &PlannedStage, names: &[String]) -> Vec<String> {
    stage.devices.iter().filter_map(|&device| names.get(device as usize).cloned()).collect()
}

fn json(planner: &str, choice: &Choice, names: &[String]) -> String {
    let stage = |stage: &PlannedStage| {
        serde_json::json!({
            "layers": [stage.layers.start, stage.layers.end], "machines": machines(stage, names),
            "tensor": stage.tensor, "copies": stage.devices.len() as u32 / stage.tensor.max(1),
            "recompute": stage.recompute, "sharded": stage.sharded,
            "operators": stage.operators.iter().map(|cut| {
                serde_json::json!({ "operator": cut.operator, "cut": cut.cut })
            }).collect::<Vec<_>>(),
        })
    };
    let stages: Vec<serde_json::Value> = choice.stages.iter().map(stage).collect();
    let object = serde_json::json!({
        "planner": planner, "stages": stages, "model_step_s": choice.modelled.as_secs_f64(),
        "simulated_step_s": choice.simulated.as_secs_f64(), "runnable": choice.plan.is_some(),
        "refused": choice.refused, "plan": choice.plan.as_ref().map(ToString::to_string),
    });
    format!("{object}\n")
}

fn text(planner: &str, choice: &Choice, names: &[String]) -> String {
    let mut text = format!("{:>12} {:>7} {:>7}  machines\n", "layers", "copies", "tensor");
    for stage in &choice.stages {
        let more = [(stage.recompute, ", recomputed"), (stage.sharded, ", sharded")];
        let more: String = more.iter().filter(|(is, _)| *is).map(|(_, what)| *what).collect();
        let list = machines(stage, names);
        let list = match list.as_slice() {
            [first, .., last] if list.len() > 3 => format!("{first} to {last} ({})", list.len()),
            _ => list.join(" "),
        };
        let layers = format!("{}..{}", stage.layers.start, stage.layers.end);
        let copies = stage.devices.len() as u32 / stage.tensor.max(1);
        let _ = writeln!(text, "{layers:>12} {copies:>7} {:>7}  {list}{more}", stage.tensor);
    }
    for (at, stage) in choice.stages.iter().enumerate() {
        let same = |other: &PlannedStage| other.operators == stage.operators;
        if stage.operators.is_empty() || choice.stages[..at].iter().any(same) {
            continue;
        }
        let of: Vec<&PlannedStage> = choice.stages.iter().filter(|other| same(other)).collect();
        let of: Vec<String> =
            of.iter().map(|stage| format!("{}..{}", stage.layers.start, stage.layers.end)).collect();
        let first = &stage.operators[0].cut;
        if stage.operators.iter().all(|cut| cut.cut == *first) {
            let _ = writeln!(text, "\nLayers {}: {first}, in all operators.", of.join(", "));
            continue;
        }
        let _ = writeln!(text, "\nLayers {}, by operator:", of.join(", "));
        for cut in &stage.operators {
            let _ = writeln!(text, "{:>24}  {}", cut.operator, cut.cut);
        }
    }
    let _ = writeln!(text, "\nA step takes {} by the cost model of {planner}.", choice.modelled);
    let _ = match (&choice.plan, &choice.refused) {
        (Some(_), _) => writeln!(text, "The trainer can run it: {} in simulation.", choice.simulated),
        (None, reason) => writeln!(
            text,
            "1F1B with its stages takes {} in simulation. The trainer cannot run it: {}.",
            choice.simulated,
            reason.as_deref().unwrap_or("it is not a valid plan")
        ),
    };
    text
}
