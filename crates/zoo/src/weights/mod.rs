//! Parameters on disk: Hugging Face's layout (`config.json`, and `model.safetensors` as one file or in shards),
//! GGUF files, which are read, and named tensors for the other data of a checkpoint.
//!
//! Files are untrusted: lengths are checked against the file's size before memory is allocated, and errors name
//! the file, tensor or field. Files are written to a temporary name, synced, and then renamed.

mod atomic;
mod dtype;
mod config_json;
mod files;
pub(crate) mod gguf;
mod layout;
mod quantized;
mod read;
mod source_file;
mod tensors;
mod token_ids;
mod write;

pub use config_json::{config_from_text, config_text, read_config};
pub use dtype::Dtype;
pub use layout::{StoredLayout, to_stored};
pub use read::{Holds, Weights};
pub use tensors::{
    TensorData, TensorFile, TensorInfo, TensorView, write_f32_tensors, write_tensors, write_tensors_to,
    write_values,
};
pub use token_ids::TokenIds;
pub use write::{WriteOptions, write};
