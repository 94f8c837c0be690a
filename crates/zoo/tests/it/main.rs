//! The tests of this crate from outside: one program, since each program of tests links all crates anew.

mod data;
mod keeping;
mod model;
mod pytorch;
mod slices;
mod weights;
