//! The farflung binary.
fn main() {}
