#![doc = include_str!("../README.md")]

pub mod config;
pub mod tokenizer;

pub mod data;
pub mod weights;

pub mod block;
pub mod generate;
pub mod stage;

pub mod file_kind;
mod json_file;

mod error;

// For all users: a model's configuration, its tokenizer and data, and text generation.
pub use config::{GptConfig, Init, TensorSpec};
pub use data::{Corpus, HoldOut, Offsets, Sampler, Shard, Sharding, Shards, Split};
pub use error::ZooError;
pub use generate::{Sampling, generate};
pub use tokenizer::Tokenizer;

// For users who write their own trainer: a stage is a part of the model with its forward and backward passes.
pub use stage::{ActivationPolicy, Cache, Input, Output, Saved, Slices, Stage};
