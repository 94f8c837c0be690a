//! The tests of this crate from outside: one program, since each program of tests links all crates anew.

mod bounds;
mod device;
mod edge;
mod feedback;
mod laws;
mod link;
mod lossless;
mod sparse;
mod table;
mod wire;
