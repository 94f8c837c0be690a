//! The tests of this crate from outside: one program, since each program of tests links all crates anew.

mod api;
mod codec;
mod device;
mod map;
mod ops;
mod parity;
mod precision;

use farflung_base as base;
use farflung_tensor as tensor;
