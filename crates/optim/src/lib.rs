#![doc = include_str!("../README.md")]

mod error;
mod finite;

pub mod schedule;
pub mod transform;

mod chain;
mod preset;

mod outer;
mod scaling;

#[cfg(feature = "sync")]
mod average;
#[cfg(feature = "sync")]
pub mod device_codec;
#[cfg(feature = "sync")]
pub mod sync;

#[cfg(feature = "sync")]
pub use average::{Average, AverageConfig, Averaged, Averaging, agree, loss_scale};
pub use chain::{Chain, ChainBuilder, Prepared, global_norm, sum_of_squares};
pub use error::OptimError;
pub use finite::all_finite;
pub use outer::OuterOptimizer;
pub use preset::{AdamW, Sgd, adamw, diloco_outer, sgd};
pub use scaling::LossScale;
pub use schedule::{Decay, Schedule};
pub use transform::Transform;
