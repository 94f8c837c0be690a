//! Integration tests of this crate. They are one program, because every test program links all crates again.

mod executor;
mod schedule_laws;
mod schedule_snapshots;
mod schedule_vectors;
mod steps_as_text;
mod topology_file;
