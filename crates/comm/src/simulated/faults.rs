//! What goes wrong in a simulated network, as data.

use farflung_base::{Nanos, PeerId};

/// What goes wrong in a simulated network, and when.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults(Vec<(Nanos, Fault)>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Crash(PeerId),
    Cut(PeerId, PeerId),
}

/// A point in time for which a fault is to be named.
#[derive(Debug)]
#[must_use = "name a fault"]
pub struct At(Faults, Nanos);

impl Faults {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The next fault happens at `time`.
    pub const fn at(self, time: Nanos) -> At {
        At(self, time)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Nanos, Fault)> + '_ {
        self.0.iter().copied()
    }

    /// Whether what departs between the two at `time` is lost.
    pub(super) fn cuts(&self, time: Nanos, a: PeerId, b: PeerId) -> bool {
        self.iter().any(|(from, fault)| {
            matches!(fault, Fault::Cut(x, y) if time >= from && ((x, y) == (a, b) || (x, y) == (b, a)))
        })
    }
}

impl At {
    /// The peer ends: its operations fail, and the others learn of it behind the last bytes that it has sent.
    #[must_use]
    pub fn crash(mut self, peer: PeerId) -> Faults {
        self.0.0.push((self.1, Fault::Crash(peer)));
        self.0
    }

    /// What departs between the two from then on is lost, both ways, and neither is told.
    #[must_use]
    pub fn cut(mut self, a: PeerId, b: PeerId) -> Faults {
        self.0.0.push((self.1, Fault::Cut(a, b)));
        self.0
    }
}
