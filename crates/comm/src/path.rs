//! Statistics of the path to a peer, as measured by the network below. Independent of the kind of network.

use farflung_base::{Bytes, Nanos};

/// Statistics of the path to one peer. Counts begin when the connection is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathStats {
    /// Smoothed round-trip time, if measured; the longest if there are several connections.
    pub round_trip: Option<Nanos>,
    /// Shortest round-trip time, if measured: over TCP, of the last minutes; over QUIC, of the measurements
    /// since the connection began.
    pub least_round_trip: Option<Nanos>,
    /// Rate of the path in bytes per second, if known. Over TCP, that at which the data sent last was
    /// confirmed. Over QUIC, the most that its congestion control allows now: one window per round trip. Summed
    /// if there are several connections.
    pub rate: Option<u64>,
    /// Whether the path may carry more than `rate`, because over TCP there was too little to send to fill it.
    pub rate_is_least: bool,
    /// Number of data packets sent, including retransmissions.
    pub packets: u64,
    /// Number of retransmitted packets.
    pub retransmissions: u64,
    /// Bytes that wait to be sent now, in this process and in the system's socket buffers.
    pub queued: Bytes,
    /// Time during which frames waited in this process, for the socket or for the rate limit.
    pub queued_for: Nanos,
}

impl PathStats {
    /// Returns the part of the round-trip time that is spent in queues: the smoothed minus the shortest round
    /// trip. It is too low if the shortest one also waited in queues.
    #[must_use]
    pub fn queueing(&self) -> Option<Nanos> {
        Some(self.round_trip?.saturating_sub(self.least_round_trip?))
    }

    /// Combines the statistics with those of another connection to the same peer, used in parallel.
    #[must_use]
    pub fn merged_with(self, other: Self) -> Self {
        let least = [self.least_round_trip, other.least_round_trip].into_iter().flatten().min();
        Self {
            round_trip: self.round_trip.max(other.round_trip),
            least_round_trip: least,
            rate: [self.rate, other.rate].into_iter().flatten().reduce(u64::saturating_add),
            rate_is_least: self.rate_is_least || other.rate_is_least,
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
            rate: Some(1000),
            rate_is_least: false,
            packets: 10,
            retransmissions: 1,
            queued: Bytes(100),
            queued_for: Nanos(7),
        };
        let other = PathStats { round_trip: Some(Nanos(40)), least_round_trip: Some(Nanos(10)), ..one };
        let both = one.merged_with(other);
        assert_eq!((both.round_trip, both.least_round_trip), (Some(Nanos(50)), Some(Nanos(10))));
        assert_eq!((both.rate, both.rate_is_least), (Some(2000), false));
        assert!(one.merged_with(PathStats { rate_is_least: true, ..other }).rate_is_least);
        assert_eq!((both.packets, both.retransmissions, both.queued), (20, 2, Bytes(200)));
        assert_eq!((both.queued_for, both.queueing()), (Nanos(7), Some(Nanos(40))));
        // A connection without measurements changes nothing.
        assert_eq!(PathStats::default().merged_with(one), one);
        assert_eq!(PathStats::default().queueing(), None);
    }
}
