#![doc = include_str!("../README.md")]

pub mod checkpoint;
pub mod config;
pub mod corpus;
pub mod error;
pub mod launch;
pub mod launch_env;
pub mod metrics;
pub mod run_dir;
pub mod signals;

pub use checkpoint::{Checkpoint, CheckpointWriter, Packing};
pub use config::{TrainArgs, TrainConfig};
pub use error::{Error, Result};
pub use launch::Launch;
pub use launch_env::LaunchEnv;
pub use metrics::{MetricsWriter, StepMetrics};
pub use run_dir::{Existing, RunDir};
pub use signals::{Signal, Stop};
