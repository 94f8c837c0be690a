#![doc = include_str!("../README.md")]

pub mod compressor;
pub mod state;
pub mod wire;

pub mod bf16;
pub mod f16;
pub mod identity;
pub mod int8_block;

pub mod error_feedback;
pub mod spec;

mod cast;
mod error;
mod simd;

pub use bf16::Bf16;
pub use compressor::{Compressor, RoundKey};
pub use error::CompressError;
pub use error_feedback::ErrorFeedback;
pub use f16::F16;
pub use identity::F32;
pub use int8_block::Int8Block;
pub use spec::{CodecSpec, names, parse};
pub use state::{State, StateMap, StateValue};
pub use wire::{CodecId, Payload, PayloadRef};
