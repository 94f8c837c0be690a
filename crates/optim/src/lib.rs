#![doc = include_str!("../README.md")]

mod error;
mod finite;

pub mod lr_schedule;
pub mod transform;

mod chain;
pub mod local;

mod outer;
mod scaling;

#[cfg(feature = "sync")]
mod average;
#[cfg(feature = "sync")]
pub mod device_codec;
#[cfg(feature = "sync")]
pub mod sync;

#[cfg(feature = "sync")]
pub use average::{
    Average, AverageConfig, Averaged, Averaging, Coding, MakeCompressor, MakeProtocol, agree, token_weight,
};
pub use chain::{Chain, ChainBuilder, Prepared, global_norm, sum_of_squares};
pub use error::OptimError;
pub use finite::all_finite;
pub use local::{AdamW, OnebitAdam, Sgd, adamw, onebit_adam, qadam, sgd};
pub use lr_schedule::{Decay, LrSchedule};
pub use outer::{OuterOptimizer, diloco_outer};
pub use scaling::LossScale;
pub use transform::Transform;
