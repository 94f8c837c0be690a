//! Integration tests of this crate. They are one program, because each test program links all crates again.

mod api;
mod codec;
mod device;
mod map;
mod ops;
mod parity;
mod precision;

use farflung_base as base;
use farflung_tensor as tensor;
