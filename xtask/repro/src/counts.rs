//! Counts the parameters of published models.

use anyhow::Result;
use farflung::zoo;

use crate::harness::{Bench, Options, Report, Threshold};

#[path = "../../../crates/zoo/tests/it/published_counts.rs"]
mod published_counts;

pub(crate) const BENCH: Bench = Bench {
    name: "counts",
    claim: "presets have exactly the numbers of parameters of the published models",
    source: "config.json of each model; transformers on its meta device",
    seed: 0,
    run,
};

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    for published_counts::Count { of, counted, published } in published_counts::counts()? {
        let off = counted.abs_diff(published) as f64;
        report.row(&format!("{of}: {counted} parameters, off by"), off, "", Threshold::AtMost(0.0))?;
    }
    Ok(())
}
