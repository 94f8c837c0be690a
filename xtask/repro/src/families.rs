//! Compares models of each family with `transformers`: whole, in two stages, and on two ranks that divide their
//! width.

use std::path::Path;

use anyhow::{Result, anyhow};
use farflung::{tensor, zoo};

use crate::harness::{Bench, Options, Report, Threshold};

#[path = "../../../crates/zoo/tests/it/families/comparison.rs"]
mod comparison;

pub(crate) const BENCH: Bench = Bench {
    name: "families",
    claim: "models of each family have the logits, losses, gradients, AdamW steps and greedy text of \
            transformers, whole, in 2 stages and on 2 ranks that divide their width",
    source: "transformers 5.24 with torch 2.15, on tiny models with random weights",
    seed: 0,
    run,
};

/// The folder of the models and the expected values.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/zoo/tests/fixtures/families");

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    for name in comparison::FAMILIES.into_iter().chain([comparison::PREFIX]) {
        let folder = Path::new(FIXTURES).join(name);
        let mut compared = vec![
            ("one process", comparison::distances(&folder, &[])),
            ("2 stages", comparison::distances(&folder, &[1])),
        ];
        if name != comparison::UNDIVIDED {
            compared.push(("2 ranks of a tensor axis", comparison::distances_of_pieces(&folder)));
        }
        for (stages, found) in compared {
            for comparison::Distance { what, at, off, mark } in found.map_err(|error| anyhow!(error))? {
                let at = if off > 0.0 { format!(", farthest at {at}") } else { String::new() };
                let metric = format!("{name}, {stages}: {what}{at}");
                report.row(&metric, off, "", Threshold::AtMost(mark))?;
            }
        }
    }
    Ok(())
}
