//! farflung.
