#![doc = include_str!("../README.md")]

mod error;
pub mod schedule;
pub mod transform;
mod chain;
mod outer;
#[cfg(feature = "sync")]
mod average;

#[cfg(feature = "sync")]
pub use average::{Average, AverageConfig, Averaging};
pub use chain::{Chain, ChainBuilder, Prepared};
pub use error::OptimError;
pub use outer::OuterOptimizer;
pub use schedule::{Decay, Schedule};
pub use transform::Transform;
