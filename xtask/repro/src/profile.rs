//! Compares what layers cost by running them on the counting device with closed forms, and the memory that is
//! predicted from it with what real steps hold.

use anyhow::Result;
use farflung::parallel::Recompute;
use farflung::parallel::pipeline::Method;
use farflung::{TrainConfig, zoo};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::step_peaks::{StepPeaks, step_peaks};
use crate::workers::config;

#[path = "../../../crates/zoo/tests/it/profiles/closed_forms.rs"]
mod closed_forms;

pub(crate) const BENCH: Bench = Bench {
    name: "profile",
    claim: "parameters, operations and bytes of layers, found by running them on a device that only counts, \
            equal the closed forms, and the memory that is predicted from them is what steps hold",
    source: "closed forms of GPT-2's and LLaMA's layers",
    seed: 0,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let shapes = closed_forms::shapes()?;
    let (mut compared, mut differences) = (0_usize, 0_usize);
    for (shape, spec) in &shapes {
        for figure in closed_forms::figures(spec)? {
            compared += 1;
            if figure.profile != figure.closed_form {
                differences += 1;
                let (name, profile, form) = (figure.name, figure.profile, figure.closed_form);
                report.progress(&format!("{shape}: {name}: {profile}, expected {form}"))?;
            }
        }
    }
    report.row("shapes of GPT-2 and LLaMA", shapes.len() as f64, "", Threshold::AtLeast(20.0))?;
    report.row("figures compared with their closed forms", compared as f64, "", Threshold::None)?;
    report.row("figures that differ", differences as f64, "", Threshold::AtMost(0.0))?;
    for model in ["nano", "llama-nano", "llama-baby"] {
        for (plan, config) in plans(report.seed(), model) {
            // The runs with several ranks take the mean of more runs.
            if options.quick && config.workers > 1 {
                continue;
            }
            let StepPeaks { predicted_off, .. } = step_peaks(config)?;
            report.row(
                &format!("{model}, {plan}: relative error of the predicted memory, worst rank"),
                predicted_off.abs(),
                "",
                Threshold::AtMost(0.05),
            )?;
        }
    }
    Ok(())
}

/// Returns plans of different kinds for a model.
fn plans(seed: u64, model: &str) -> [(&'static str, TrainConfig); 3] {
    let one = TrainConfig { model: model.to_owned(), workers: 1, ..config(seed, true) };
    let stages = TrainConfig {
        workers: 2,
        stages: 2,
        schedule: Method::OneFOneB,
        microbatches: Some(4),
        batch: 2,
        ..one.clone()
    };
    let recomputed = TrainConfig { recompute: Recompute::Full, ..one.clone() };
    [("one rank", one), ("one rank, recomputed", recomputed), ("2 stages", stages)]
}
