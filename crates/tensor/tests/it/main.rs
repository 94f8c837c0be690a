//! Integration tests of this crate. They are one program, because each test program links all crates again.

mod api;
mod codec;
mod device;
mod map;
mod ops;
#[cfg(feature = "wgpu")]
mod parity;
mod precision;

#[cfg(feature = "wgpu")]
use farflung_base as base;
#[cfg(feature = "wgpu")]
use farflung_tensor as tensor;
