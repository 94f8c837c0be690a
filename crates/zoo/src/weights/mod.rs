//! Parameters on disk: Hugging Face's GPT-2 layout (`config.json`, `model.safetensors` single or in shards),
//! and plain named tensors for everything else a checkpoint holds.
//!
//! Files are untrusted: lengths are checked against the file before anything is allocated, and every error
//! names the file and the tensor or field. Files are written beside, synced, then renamed. It refuses to know
//! models and optimizers.

mod atomic;
mod config_json;
mod dtype;
mod read;
mod tensors;
mod write;

pub use config_json::config_text;
pub use dtype::Dtype;
pub use read::Weights;
pub use tensors::{TensorData, TensorFile, TensorInfo, TensorView, write_tensors, write_tensors_to};
pub use write::{WriteOptions, write};
