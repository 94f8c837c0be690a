//! The tensor crate of farflung.
