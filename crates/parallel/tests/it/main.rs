//! The tests of this crate from outside: one program, since each program of tests links all crates anew.

mod executor;
mod schedule_laws;
mod schedule_snapshots;
mod schedule_vectors;
mod topology_file;
