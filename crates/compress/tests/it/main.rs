//! Integration tests of this crate, in one program, since each test program links all crates again.

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
