#![doc = include_str!("../README.md")]

pub mod config;
pub mod tokenizer;

pub mod data;
pub mod weights;

pub mod block;
pub mod generate;
pub mod stage;

mod error;

pub use config::{GptConfig, Init, TensorSpec};
pub use data::{Corpus, HoldOut, Offsets, Sampler, Shard, Sharding, Shards, Split};
pub use error::ZooError;
pub use generate::{Sampling, generate};
pub use stage::{ActivationPolicy, Cache, Input, Output, Saved, Slices, Stage};
pub use tokenizer::Tokenizer;
