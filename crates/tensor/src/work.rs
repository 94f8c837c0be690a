//! Work of ops: operations and memory traffic.

use std::ops::{AddAssign, Sub};

/// Sums of operations and bytes over several ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Floating-point operations of matrix products.
    pub products: u64,
    /// Floating-point operations of attention: of the pairs of query and key that its mask allows.
    pub attention: u64,
    /// All other floating-point operations.
    pub other: u64,
    /// Bytes of memory traffic with cold caches: see [`Op::bytes`](crate::Op::bytes).
    pub bytes: u64,
}

impl Work {
    /// Returns all floating-point operations: the sum of [`Op::flops`](crate::Op::flops).
    #[must_use]
    pub const fn flops(&self) -> u64 {
        self.products + self.attention + self.other
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, more: Self) {
        self.products = self.products.saturating_add(more.products);
        self.attention = self.attention.saturating_add(more.attention);
        self.other = self.other.saturating_add(more.other);
        self.bytes = self.bytes.saturating_add(more.bytes);
    }
}

impl Sub for Work {
    type Output = Self;

    fn sub(self, less: Self) -> Self {
        Self {
            products: self.products.saturating_sub(less.products),
            attention: self.attention.saturating_sub(less.attention),
            other: self.other.saturating_sub(less.other),
            bytes: self.bytes.saturating_sub(less.bytes),
        }
    }
}
