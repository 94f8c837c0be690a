//! repro.
fn main() {}
