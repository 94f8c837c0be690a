//! Arguments for a planner: a model, the sizes of its step, and the machines.

use std::path::PathBuf;

use farflung::Result;
use farflung::model_shape;
use farflung::parallel::Cluster;
use farflung::train::{PipelineSizes, read_topology};
use farflung::zoo::{ModelSpec, Resize};

/// A model, the sizes of its step, and the machines.
#[derive(Debug, clap::Args)]
pub(super) struct PlannedArgs {
    /// TOML file with devices, links and regions, or the name of a shipped topology: dtfm-1 to dtfm-5, one-box,
    /// lan, home, spot, straggler, two-regions, two-regions-straggler, world-4096.
    #[arg(value_name = "FILE")]
    topology: PathBuf,
    /// Model preset.
    #[arg(long, value_name = "NAME", default_value = "gpt2")]
    pub(super) model: String,
    /// Tokens per sequence; overrides the preset.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Sequences per microbatch.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    batch: u32,
    /// Microbatches per step, over all machines.
    #[arg(
        long,
        short = 'm',
        value_name = "N",
        default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    microbatches: u32,
}

impl PlannedArgs {
    /// Returns the machines and their links.
    ///
    /// Errors: those of [`read_topology`].
    pub(super) fn cluster(&self) -> Result<Cluster> {
        read_topology(&self.topology)
    }

    /// Returns the model's shape.
    ///
    /// Errors: an unknown preset.
    pub(super) fn shape(&self) -> Result<ModelSpec> {
        let context = self.context.map(|n| n as usize);
        Ok(model_shape(&self.model)?.resized(Resize { context, ..Resize::default() })?)
    }

    /// Returns the sizes of a step.
    pub(super) const fn sizes(&self) -> PipelineSizes {
        PipelineSizes { batch: self.batch, microbatches: self.microbatches }
    }
}
