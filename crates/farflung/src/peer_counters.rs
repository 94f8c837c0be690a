//! Counts what a worker and each of its peers have exchanged, and records measurements of the network path
//! between them. A rank that writes `metrics.jsonl` (rank 0, or each member of `farflung host`) has its
//! counters in the rows of that file. On real networks, the other ranks write theirs to `peers.jsonl` in their
//! folders, one JSON object per step.

use std::fmt;
use std::path::Path;

use farflung_base::{Bytes, Nanos, PeerId};
use farflung_comm::{Communicator, PathStats, Stats, Transport};
use serde::{Deserialize, Serialize};

use crate::line_file::LineFile;

/// The file's name.
pub const PEERS: &str = "peers.jsonl";

/// Counters for one peer, since this process met it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerCounters {
    /// The number of the peer's endpoint. It equals the peer's rank unless members may join and leave.
    pub peer: u32,
    /// Bytes sent to the peer, including frame headers.
    pub bytes_sent: u64,
    /// Bytes received from the peer, including frame headers.
    pub bytes_received: u64,
    /// Measurements of the path, if the network provides them.
    #[serde(flatten)]
    pub path: Option<PathCounters>,
}

/// Measurements of a path by the system's TCP or by QUIC, and by this process's send queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PathCounters {
    /// Smoothed round-trip time in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_s: Option<f64>,
    /// Shortest round-trip time in seconds: over TCP, of the last minutes; over QUIC, of the measurements since
    /// the connection began. Time above it is spent in queues along the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_round_trip_s: Option<f64>,
    /// Bytes per second, if known. Over TCP, the rate at which the data sent last was confirmed. Over QUIC, the
    /// most that its congestion control allows now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Whether the path may carry more than `rate`, because there was too little to send to fill it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rate_is_least: bool,
    /// Number of data packets sent, including retransmissions.
    pub packets: u64,
    /// Number of retransmitted packets.
    pub retransmissions: u64,
    /// Bytes on this machine that wait to be sent.
    pub queued_bytes: u64,
    /// Seconds for which frames waited in this process, for the socket or because of the rate of `--up`.
    pub queued_s: f64,
}

impl From<PathStats> for PathCounters {
    fn from(path: PathStats) -> Self {
        let seconds = |time: Nanos| time.as_secs_f64();
        Self {
            round_trip_s: path.round_trip.map(seconds),
            least_round_trip_s: path.least_round_trip.map(seconds),
            rate: path.rate,
            rate_is_least: path.rate_is_least,
            packets: path.packets,
            retransmissions: path.retransmissions,
            queued_bytes: path.queued.0,
            queued_s: seconds(path.queued_for),
        }
    }
}

impl PathCounters {
    /// Returns the part of the round-trip time that is spent in queues, in seconds.
    #[must_use]
    pub fn queueing_s(&self) -> Option<f64> {
        Some((self.round_trip_s? - self.least_round_trip_s?).max(0.0))
    }

    /// Returns the fraction of packets that were retransmitted.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.retransmissions as f64 / self.packets.max(1) as f64
    }
}

/// Formats times with units; `-` stands for a value that was not measured.
impl fmt::Display for PathCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |s: Option<f64>| s.map_or_else(|| "-".to_owned(), |s| Nanos::from_secs_f64(s).to_string());
        let least = if self.rate_is_least { "at least " } else { "" };
        let rate = self.rate.map_or_else(String::new, |rate| format!(", {least}{}/s", Bytes(rate)));
        write!(
            f,
            "round trip {} (minimum {}, queueing {}){rate}, {} of {} packets sent again, queued {} now, {} in \
             total",
            time(self.round_trip_s),
            time(self.least_round_trip_s),
            time(self.queueing_s()),
            self.retransmissions,
            self.packets,
            Bytes(self.queued_bytes),
            time(Some(self.queued_s)),
        )
    }
}

impl PeerCounters {
    /// Returns the counters of an endpoint for one peer.
    #[must_use]
    pub fn of(transport: &dyn Transport, peer: PeerId) -> Self {
        let Stats { sent, received } = transport.traffic(peer);
        Self {
            peer: peer.0,
            bytes_sent: sent.wire.0,
            bytes_received: received.wire.0,
            path: transport.path(peer).map(PathCounters::from),
        }
    }

    /// Returns the counters for all other ranks with which this one has exchanged bytes, in the order of their
    /// endpoints. Peers that have left the run are not among them.
    #[must_use]
    pub fn all(comm: &Communicator) -> Vec<Self> {
        let transport = comm.transport().as_ref();
        let mut peers = comm.members().to_vec();
        peers.sort_unstable();
        let all = peers.into_iter().filter(|&peer| peer != transport.me());
        let all = all.map(|peer| Self::of(transport, peer));
        all.filter(|peer| peer.bytes_sent + peer.bytes_received > 0).collect()
    }
}

/// A line of `peers.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerCountersLine {
    /// Number of steps done. A run that continues from a checkpoint repeats some steps.
    pub step: u64,
    /// The rank among the ranks of the step.
    pub rank: u32,
    /// The run's clock in seconds.
    pub time_s: f64,
    /// Counters for each peer.
    pub peers: Vec<PeerCounters>,
}

/// Appends to a rank's file. Lines that cannot be written are
/// dropped, with a warning.
#[derive(Debug, Default)]
pub(crate) struct PeerCountersLog(Option<LineFile>);

impl PeerCountersLog {
    /// Makes a log in this folder; without a folder, lines are dropped. The file is opened at the first line.
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        Self(folder.map(|folder| LineFile::new(folder.join(PEERS))))
    }

    pub(crate) fn write(&mut self, line: &PeerCountersLine) {
        if let Some(file) = &mut self.0 {
            file.append(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_comm::memory;

    use super::*;

    #[test]
    fn peers_of_a_network_without_packets_have_bytes_alone() {
        let ends = memory::cluster(3);
        let comms: Vec<_> = ends.iter().map(|end| Communicator::new(end.clone())).collect();
        comms[0].send(farflung_base::Rank(2), 1, &[0; 1000]).unwrap();
        let counters = PeerCounters::all(&comms[0]);
        let [peer] = counters[..] else { unreachable!("one was sent to: {counters:?}") };
        assert!(peer.peer == 2 && peer.bytes_sent >= 1000 && peer.bytes_received == 0 && peer.path.is_none());
        let json = serde_json::to_string(&peer).unwrap();
        assert_eq!(json, format!("{{\"peer\":2,\"bytes_sent\":{},\"bytes_received\":0}}", peer.bytes_sent));
        assert_eq!(serde_json::from_str::<PeerCounters>(&json).unwrap(), peer);
    }

    #[test]
    fn a_path_reads_back_and_says_what_is_not_known() {
        let path = PathCounters {
            round_trip_s: Some(0.04),
            least_round_trip_s: Some(0.03),
            rate: Some(12_500_000),
            rate_is_least: false,
            packets: 200,
            retransmissions: 3,
            queued_bytes: 1_000_000,
            queued_s: 1.5,
        };
        let peer = PeerCounters { peer: 1, bytes_sent: 5, bytes_received: 6, path: Some(path) };
        let json = serde_json::to_string(&peer).unwrap();
        assert!(json.contains("\"retransmissions\":3") && !json.contains("path"), "{json}");
        assert_eq!(serde_json::from_str::<PeerCounters>(&json).unwrap(), peer);
        let text = "round trip 40ms (minimum 30ms, queueing 10ms), 12.5 MB/s, 3 of 200 packets sent \
                    again, queued 1 MB now, 1.5s in total";
        assert_eq!(path.to_string(), text);
        assert!((path.loss() - 0.015).abs() < 1e-12);
        let unknown = PathCounters { round_trip_s: None, rate: None, ..path };
        assert!(
            unknown.to_string().starts_with("round trip - (minimum 30ms, queueing -), 3 of"),
            "{unknown}"
        );
    }
}
