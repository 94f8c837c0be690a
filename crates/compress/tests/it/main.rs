//! Integration tests of this crate, in one program, since each test program links all crates again. Only
//! `hostile.rs` is a program of its own, because it replaces the allocator.

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
