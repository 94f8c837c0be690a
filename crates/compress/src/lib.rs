#![doc = include_str!("../README.md")]

pub mod compressor;
pub mod state;
pub mod wire;

pub mod f32;
pub mod f16;
pub mod bf16;

pub mod block;
pub mod int;
pub mod uint;
pub mod sign;
pub mod minifloat;
pub mod natural;
pub mod min_max;
pub mod codebook;

pub mod sparse;
pub mod dct;

pub mod error_feedback;
pub mod momentum_correction;
pub mod lossless;
pub mod link;
pub mod protocol;
pub mod spec;
pub mod average;
pub mod device;
pub mod mutate;

mod cast;
mod chunked;
mod error;
mod low_rank;
mod magnitude;
#[cfg(test)]
mod means;
mod two_phase_buffer;
mod noise;
mod norm;
mod pack;
mod round_key;
mod scale;
mod simd;
mod staging;
mod threads;
mod values;

// For all users: a codec by name, its payloads, and their errors.
pub use average::AverageSpec;
pub use compressor::{Compressor, Memoryless};
pub use error::CompressError;
pub use protocol::{MatrixShape, PowerSgd, Protocol, ProtocolSpec};
pub use round_key::RoundKey;
pub use spec::{CodecSpec, names, parse};
pub use state::{HeldBytes, State, StateMap, StateValue};

// For users who combine codecs in code instead of by name: the codecs as types.
pub use bf16::Bf16;
pub use chunked::{Chunked, Chunks};
pub use codebook::Codebook;
pub use dct::Dct;
pub use error_feedback::ErrorFeedback;
pub use f16::F16;
pub use f32::F32;
pub use int::{Int2, Int3, Int4, Int8};
pub use lossless::{Lossless, Packing};
pub use min_max::MinMaxUint8;
pub use minifloat::{E3M0, E4M3, E5M2};
pub use momentum_correction::MomentumCorrection;
pub use natural::Natural;
pub use sign::Sign;
pub use sparse::{Amount, IndexCoding, Mask, Masked, Pattern, Select, Sparse};
pub use uint::{Uint2, Uint3, Uint4, Uint8};

// For users who write and test their own codec: the payload's header, and damaged payloads.
pub use mutate::mutate;
pub use wire::{CodecId, Payload, PayloadRef};
