//! Compares models of each family with `transformers`, in one process's part and in two stages.

use std::path::Path;

use anyhow::{Result, anyhow};
use farflung::{tensor, zoo};

use crate::harness::{Bench, Options, Report, Threshold};

#[path = "../../../crates/zoo/tests/it/families/comparison.rs"]
mod comparison;

pub(crate) const BENCH: Bench = Bench {
    name: "families",
    claim: "models of each family have the logits, losses, gradients, AdamW steps and greedy text of \
            transformers, whole and in 2 stages",
    source: "transformers 5.24 with torch 2.15, on tiny models with random weights",
    seed: 0,
    run,
};

/// The folder of the models and the expected values.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/zoo/tests/fixtures/families");

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    for name in comparison::FAMILIES {
        for (stages, cuts) in [("one process", &[][..]), ("2 stages", &[1])] {
            let found = comparison::distances(&Path::new(FIXTURES).join(name), cuts);
            for comparison::Distance { what, at, off, mark } in found.map_err(|error| anyhow!(error))? {
                let at = if off > 0.0 { format!(", farthest at {at}") } else { String::new() };
                let metric = format!("{name}, {stages}: {what}{at}");
                report.row(&metric, off, "", Threshold::AtMost(mark))?;
            }
        }
    }
    Ok(())
}
