//! The comm crate of farflung.
