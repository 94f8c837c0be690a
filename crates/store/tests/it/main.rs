//! Integration tests of this crate, in one program.

mod failures;
mod files;
