#![doc = include_str!("../README.md")]

pub mod tensor_spec;
pub mod naming;
pub mod spec;
pub mod family;
pub mod tokenizer;
#[cfg(feature = "chat")]
pub mod chat;

pub mod data;
pub mod weights;

mod cut;
pub mod exchange;
pub mod layer;
pub mod generate;
pub mod profile;
pub mod stage;

pub mod file_kind;
mod json_fields;
mod json_file;

mod error;

// For all users: a model's description, its tokenizer and data, and text generation.
pub use cut::{AxisShare, Cut};
pub use data::{
    Batch, Corpus, HoldOut, Objective, Offsets, Sampler, Shard, Sharding, Shards, Split, TextRouter,
    TokenRows,
};
pub use error::ZooError;
pub use exchange::Exchange;
pub use family::{Family, gpt2};
pub use generate::{Continuation, Sampling, generate};
pub use spec::{ModelSpec, Resize};
pub use tensor_spec::{Init, TensorKind, TensorSpec};
pub use tokenizer::Tokenizer;

// For users who write their own trainer: a stage is a part of the model with its forward and backward passes.
pub use layer::{Borders, Targets};
pub use stage::{ActivationPolicy, Cache, Input, Output, Packed, Saved, Slices, Stage};
