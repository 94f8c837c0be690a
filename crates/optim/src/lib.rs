#![doc = include_str!("../README.md")]

mod error;
mod finite;
mod group;
mod norm;
mod per_tensor;

pub mod lr_schedule;
pub mod transform;

mod chain;
pub mod local;

mod outer;
mod scaling;
mod shard;
mod weigh;

#[cfg(feature = "sync")]
mod average;
#[cfg(feature = "sync")]
pub mod device_codec;
#[cfg(feature = "sync")]
mod reduction_order;
#[cfg(feature = "sync")]
mod shard_coder;
#[cfg(feature = "sync")]
mod shard_gather;
#[cfg(feature = "sync")]
mod shard_groups;
#[cfg(feature = "sync")]
mod shard_reduction;
#[cfg(feature = "sync")]
pub mod sync;

// For all users: optimizers and chains, schedules, groups, norms, loss scales and errors.
pub use chain::{Chain, ChainBuilder, Prepared, StateStore};
pub use error::OptimError;
pub use group::{GroupError, GroupRule, Groups, ParamGroup};
pub use local::{
    AdamW, Lookahead, OnebitAdam, Sgd, adamw, onebit_adam, onebit_lamb, qadam, sgd, zero_one_adam,
};
pub use lr_schedule::{Decay, LrSchedule};
pub use norm::{global_norm, sum_of_squares};
pub use outer::{OuterOptimizer, diloco_outer};
pub use scaling::LossScale;
pub use shard::{Shard, ShardPiece};

// For averages over ranks (feature `sync`). The methods of synchronisation are in the module `sync`.
#[cfg(feature = "sync")]
pub use average::{
    ApartHolders, Average, AverageConfig, Averaged, Averaging, Coding, MakeCompressor, MakeProtocol, Shards,
    agree, token_weight,
};
#[cfg(feature = "sync")]
pub use reduction_order::{ReductionOrder, ReductionStep};
#[cfg(feature = "sync")]
pub use shard_coder::ShardCoder;
#[cfg(feature = "sync")]
pub use shard_gather::GatheredRange;
#[cfg(feature = "sync")]
pub use shard_groups::ShardGroups;
#[cfg(feature = "sync")]
pub use shard_reduction::ShardReduction;

// For users who write their own transform or trainer.
pub use chain::AccumulatedUpdate;
pub use finite::all_finite;
pub use per_tensor::{PerTensor, Tensors};
pub use transform::Transform;
pub use weigh::weigh;
