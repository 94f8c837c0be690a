//! How the path to a peer does, as the network underneath measures it. It knows no network.

use farflung_base::{Bytes, Nanos};

/// What is known of the path to one peer. Counts are since the connection was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathStats {
    /// The smoothed round trip, where one was measured; of several connections the longest.
    pub round_trip: Option<Nanos>,
    /// The shortest round trip of the last minutes, where one was measured.
    pub least_round_trip: Option<Nanos>,
    /// Packets with data that were sent, those that were sent again included.
    pub packets: u64,
    /// Packets that were sent again.
    pub retransmissions: u64,
    /// Bytes that wait here now: in this process, and those that the system has not sent yet.
    pub queued: Bytes,
    /// The time in which frames waited in this process, for the socket or for the rate that is kept.
    pub queued_for: Nanos,
}

impl PathStats {
    /// The part of the round trip that is waiting in queues on the way, as far as the shortest one was free of
    /// it.
    #[must_use]
    pub fn queueing(&self) -> Option<Nanos> {
        Some(self.round_trip?.saturating_sub(self.least_round_trip?))
    }

    /// Adds another connection to the same peer, which is used beside this one.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        let least = [self.least_round_trip, other.least_round_trip].into_iter().flatten().min();
        Self {
            round_trip: self.round_trip.max(other.round_trip),
            least_round_trip: least,
            packets: self.packets + other.packets,
            retransmissions: self.retransmissions + other.retransmissions,
            queued: self.queued + other.queued,
            queued_for: self.queued_for.max(other.queued_for),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_beside_each_other_are_one_path() {
        let one = PathStats {
            round_trip: Some(Nanos(50)),
            least_round_trip: Some(Nanos(20)),
            packets: 10,
            retransmissions: 1,
            queued: Bytes(100),
            queued_for: Nanos(7),
        };
        let other = PathStats { round_trip: Some(Nanos(40)), least_round_trip: Some(Nanos(10)), ..one };
        let both = one.beside(other);
        assert_eq!((both.round_trip, both.least_round_trip), (Some(Nanos(50)), Some(Nanos(10))));
        assert_eq!((both.packets, both.retransmissions, both.queued), (20, 2, Bytes(200)));
        assert_eq!((both.queued_for, both.queueing()), (Nanos(7), Some(Nanos(40))));
        // One that has measured nothing takes nothing away.
        assert_eq!(PathStats::default().beside(one), one);
        assert_eq!(PathStats::default().queueing(), None);
    }
}
