//! The optim crate of farflung.
