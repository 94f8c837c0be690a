//! `farflung diff`: compares two runs.

use std::path::PathBuf;

use farflung::diff::{Difference, compare};
use farflung::{Error, Result};

/// Compare two runs step by step and print the first step and field that differ.
///
/// Losses, tokens and digests of the parameters (`train --digest-every`) are compared to the bit. The exit code
/// is 0 if the runs are equal over the steps that both have, 1 if they differ.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  farflung diff runs/nano-1 runs/nano-2")]
pub(crate) struct DiffCommand {
    /// Folder of a run, or its metrics.jsonl.
    #[arg(value_name = "RUN")]
    left: PathBuf,
    /// The run to compare it with.
    #[arg(value_name = "RUN")]
    right: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl DiffCommand {
    pub(super) fn run(self) -> Result<()> {
        let found = compare(&self.left, &self.right)?;
        if self.json {
            super::print(&format!("{}\n", serde_json::json!(found)))?;
        }
        match found.difference {
            Some(Difference { step, field, left, right }) => Err(Error::Differ { step, field, left, right }),
            None if self.json => Ok(()),
            None => super::print(&format!("the same over {} steps\n", found.equal_steps)),
        }
    }
}
