#![doc = include_str!("../README.md")]

pub mod checkpoint;
pub mod config;
pub mod error;
pub mod metrics;
pub mod run_dir;
pub mod signals;

pub use checkpoint::{Checkpoint, CheckpointWriter, Packing};
pub use config::{TrainArgs, TrainConfig};
pub use error::{Error, Result};
pub use metrics::{MetricsWriter, StepMetrics};
pub use run_dir::{Existing, RunDir};
pub use signals::{Signal, Stop};
