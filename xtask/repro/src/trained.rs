//! Reads what a run of the command left in its folder: losses, and the weights of its last checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Result of a run.
#[derive(Debug, PartialEq)]
pub(crate) struct Trained {
    /// Loss of each step, as written in the metrics.
    pub(crate) losses: Vec<String>,
    weights: Vec<u8>,
}

impl Trained {
    /// Reads a run's folder.
    ///
    /// Errors: the folder has no metrics or no checkpoint.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let metrics = fs::read_to_string(folder.join("metrics.jsonl"))?;
        let loss = |line: &str| Some(line.split_once("\"train_loss\":")?.1.split(',').next()?.to_owned());
        let losses: Option<Vec<String>> = metrics.lines().map(loss).collect();
        let mut found = Vec::new();
        weights_below(folder, &mut found)?;
        found.sort();
        let weights = fs::read(found.last().context("there is no checkpoint")?)?;
        Ok(Self { losses: losses.context("a line of the metrics has no loss")?, weights })
    }
}

fn weights_below(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            weights_below(&path, found)?;
        } else if path.file_name().is_some_and(|name| name == "model.safetensors") {
            found.push(path);
        }
    }
    Ok(())
}
