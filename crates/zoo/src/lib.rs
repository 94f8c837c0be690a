//! The zoo crate of farflung.
