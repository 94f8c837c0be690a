#![doc = include_str!("../README.md")]

mod arrays;
mod blocks;
mod error;
mod layout;
mod medium;
mod store;
mod stream;

pub use arrays::{Arrays, LateArrays, checksum};
pub use error::StoreError;
pub use layout::{BLOCK, Layout};
pub use medium::{DirectFile, Medium};
pub use store::{Generation, Store};
pub use stream::Stream;
