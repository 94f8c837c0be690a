//! The parallel crate of farflung.
