//! The faults that are injected into members.

use farflung::base::{Nanos, PeerId};
use farflung::comm::simulated::Faults;

#[derive(Debug, Clone, Copy)]
pub(super) enum InjectedFault {
    Kill,
    Freeze,
    Cut,
}

impl InjectedFault {
    pub(super) const ALL: [Self; 3] = [Self::Kill, Self::Freeze, Self::Cut];

    /// Returns the fault, injected at the time `at` into one of `members` members.
    pub(super) fn on(self, member: u32, members: usize, at: Nanos) -> Faults {
        let (faults, peer) = (Faults::new().at(at), PeerId(member));
        match self {
            Self::Kill => faults.crash(peer),
            Self::Freeze => faults.freeze(peer, Nanos::MAX),
            Self::Cut => faults.partition(&[peer], members, Nanos::MAX),
        }
    }
}
