//! The backends. Each interprets the same closed set of ops.

pub mod cpu;
