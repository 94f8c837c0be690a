//! Kinds of memory, by what it is used for. Predictions and counts list the same kinds in the same order.

use std::ops::{Add, AddAssign};

use crate::Bytes;

/// What the memory of a rank is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum MemoryKind {
    /// Parameters, in all versions that microbatches still need.
    Weights,
    /// Gradients.
    Gradients,
    /// The optimizer's state, and that of the method of synchronisation.
    Optimizer,
    /// Hidden states, logits, and all other tensors of the passes.
    #[default]
    Activations,
    /// Copies of operands that threads keep between matrix products.
    Operands,
    /// Messages, buckets of averages, and the state of codecs of averages and boundaries.
    Messages,
}

impl MemoryKind {
    /// All kinds, in the order in which they are listed.
    pub const ALL: [Self; 6] =
        [Self::Weights, Self::Gradients, Self::Optimizer, Self::Activations, Self::Operands, Self::Messages];

    /// Returns the name, as in the fields of [`MemoryByKind`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Operands => "operands",
            Self::Messages => "messages",
        }
    }
}

/// Bytes by [`MemoryKind`]. Sums that are greater than any number are the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemoryByKind {
    /// See [`MemoryKind::Weights`].
    pub weights: Bytes,
    /// See [`MemoryKind::Gradients`].
    pub gradients: Bytes,
    /// See [`MemoryKind::Optimizer`].
    pub optimizer: Bytes,
    /// See [`MemoryKind::Activations`].
    pub activations: Bytes,
    /// See [`MemoryKind::Operands`].
    pub operands: Bytes,
    /// See [`MemoryKind::Messages`].
    pub messages: Bytes,
}

impl MemoryByKind {
    /// Returns the bytes of a kind.
    #[must_use]
    pub const fn of(&self, kind: MemoryKind) -> Bytes {
        match kind {
            MemoryKind::Weights => self.weights,
            MemoryKind::Gradients => self.gradients,
            MemoryKind::Optimizer => self.optimizer,
            MemoryKind::Activations => self.activations,
            MemoryKind::Operands => self.operands,
            MemoryKind::Messages => self.messages,
        }
    }

    /// Returns the bytes of a kind, to be changed.
    pub const fn of_mut(&mut self, kind: MemoryKind) -> &mut Bytes {
        match kind {
            MemoryKind::Weights => &mut self.weights,
            MemoryKind::Gradients => &mut self.gradients,
            MemoryKind::Optimizer => &mut self.optimizer,
            MemoryKind::Activations => &mut self.activations,
            MemoryKind::Operands => &mut self.operands,
            MemoryKind::Messages => &mut self.messages,
        }
    }

    /// Returns the bytes of all kinds, in the order of [`MemoryKind::ALL`].
    pub fn each(&self) -> impl Iterator<Item = (MemoryKind, Bytes)> + use<> {
        let all = *self;
        MemoryKind::ALL.into_iter().map(move |kind| (kind, all.of(kind)))
    }

    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.each().fold(Bytes(0), |sum, (_, bytes)| Bytes(sum.0.saturating_add(bytes.0)))
    }
}

impl AddAssign for MemoryByKind {
    fn add_assign(&mut self, other: Self) {
        for (kind, bytes) in other.each() {
            let sum = self.of_mut(kind);
            *sum = Bytes(sum.0.saturating_add(bytes.0));
        }
    }
}

impl Add for MemoryByKind {
    type Output = Self;
    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_own_bytes() {
        let mut all = MemoryByKind::default();
        for (bytes, kind) in (1..).zip(MemoryKind::ALL) {
            *all.of_mut(kind) += Bytes(bytes);
        }
        let listed: Vec<_> = all.each().map(|(kind, bytes)| (kind.name(), bytes.0)).collect();
        assert_eq!(
            listed,
            [
                ("weights", 1),
                ("gradients", 2),
                ("optimizer", 3),
                ("activations", 4),
                ("operands", 5),
                ("messages", 6)
            ]
        );
        assert_eq!(((all + all).messages, (all + all).total()), (Bytes(12), Bytes(42)));
        all.operands = Bytes(u64::MAX);
        assert_eq!(((all + all).operands, all.total()), (Bytes(u64::MAX), Bytes(u64::MAX)));
    }
}
