//! The compress crate of farflung.
