//! Integration tests of this crate. They are one program, because each test program links all crates again.

mod api;
mod attention;
mod codec;
mod device;
mod expect;
mod key_ranges;
mod map;
mod masks;
mod norm;
mod ops;
#[cfg(feature = "wgpu")]
mod parity;
mod pieces;
mod positions;
mod precision;
mod rows;
mod sparse;
mod swiglu;

#[cfg(feature = "wgpu")]
use farflung_base as base;
#[cfg(feature = "wgpu")]
use farflung_tensor as tensor;
