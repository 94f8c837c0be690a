//! What a worker and each of its peers have exchanged, and how the path between them does. Rank 0's stand in
//! its rows of `metrics.jsonl`; other ranks of real networks have them in `peers.jsonl` in their folders, an
//! object a step.

use std::fmt;
use std::path::Path;

use farflung_base::{Bytes, Nanos, PeerId};
use farflung_comm::{PathStats, Stats, Transport};
use serde::{Deserialize, Serialize};

use crate::line_file::LineFile;

/// The file's name.
pub const PEERS: &str = "peers.jsonl";

/// Of one peer. Counts are since this process met it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerCounters {
    /// The number of its endpoint: its rank, but where members come and leave.
    pub peer: u32,
    /// Bytes sent to it, frames and all.
    pub bytes_sent: u64,
    /// Bytes received of it.
    pub bytes_received: u64,
    /// How the path does, where the network measures it.
    #[serde(flatten)]
    pub path: Option<PathCounters>,
}

/// What the system's TCP, and the queues before it, tell of a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PathCounters {
    /// The smoothed round trip in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_s: Option<f64>,
    /// The shortest round trip of the last minutes, in seconds. What is above it is waiting in queues on the
    /// way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_round_trip_s: Option<f64>,
    /// Packets with data that were sent, those sent again included.
    pub packets: u64,
    /// Packets that were sent again.
    pub retransmissions: u64,
    /// Bytes that wait on this machine to be sent.
    pub queued_bytes: u64,
    /// Seconds in which frames waited in this process, for the socket or for the rate of `--up`.
    pub queued_s: f64,
}

impl From<PathStats> for PathCounters {
    fn from(path: PathStats) -> Self {
        let seconds = |time: Nanos| time.as_secs_f64();
        Self {
            round_trip_s: path.round_trip.map(seconds),
            least_round_trip_s: path.least_round_trip.map(seconds),
            packets: path.packets,
            retransmissions: path.retransmissions,
            queued_bytes: path.queued.0,
            queued_s: seconds(path.queued_for),
        }
    }
}

impl PathCounters {
    /// Seconds of the round trip that are waiting in queues.
    #[must_use]
    pub fn queueing_s(&self) -> Option<f64> {
        Some((self.round_trip_s? - self.least_round_trip_s?).max(0.0))
    }

    /// Packets sent again, of 1.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.retransmissions as f64 / self.packets.max(1) as f64
    }
}

/// Times as people read them; `-` for what was not measured.
impl fmt::Display for PathCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |s: Option<f64>| s.map_or_else(|| "-".to_owned(), |s| Nanos::from_secs_f64(s).to_string());
        write!(
            f,
            "round trip {} (least {}, queueing {}), {} of {} packets sent again, queued {} now, {} in all",
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
    /// Of one peer of an endpoint.
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

    /// Of all peers with which the endpoint has exchanged something.
    #[must_use]
    pub fn all(transport: &dyn Transport) -> Vec<Self> {
        let peers = (0..transport.size() as u32).map(PeerId).filter(|&peer| peer != transport.me());
        let all = peers.map(|peer| Self::of(transport, peer));
        all.filter(|peer| peer.bytes_sent + peer.bytes_received > 0).collect()
    }
}

/// A line of `peers.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerCountersLine {
    /// Steps done. A run that goes on from a checkpoint repeats some.
    pub step: u64,
    /// The rank, among those of the step.
    pub rank: u32,
    /// The run's clock in seconds.
    pub time_s: f64,
    /// Its peers.
    pub peers: Vec<PeerCounters>,
}

/// Appends to a rank's file. What cannot be written is warned of and dropped: no run ends for it.
#[derive(Debug, Default)]
pub(crate) struct PeerCountersLog(Option<LineFile>);

impl PeerCountersLog {
    /// A log in this folder; without one, lines are dropped. The file is opened at the first line.
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        Self(folder.map(|folder| LineFile::new(folder.join(PEERS))))
    }

    pub(crate) fn write(&mut self, line: &PeerCountersLine) {
        if let Some(Err(error)) = self.0.as_mut().map(|file| file.append(line)) {
            tracing::warn!(%error, "the counters of peers were not written");
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_comm::Communicator;
    use farflung_comm::memory;

    use super::*;

    #[test]
    fn peers_of_a_network_without_packets_have_bytes_alone() {
        let ends = memory::cluster(3);
        let comms: Vec<_> = ends.iter().map(|end| Communicator::new(end.clone())).collect();
        comms[0].send(farflung_base::Rank(2), 1, &[0; 1000]).unwrap();
        let counters = PeerCounters::all(ends[0].as_ref());
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
            packets: 200,
            retransmissions: 3,
            queued_bytes: 1_000_000,
            queued_s: 1.5,
        };
        let peer = PeerCounters { peer: 1, bytes_sent: 5, bytes_received: 6, path: Some(path) };
        let json = serde_json::to_string(&peer).unwrap();
        assert!(json.contains("\"retransmissions\":3") && !json.contains("path"), "{json}");
        assert_eq!(serde_json::from_str::<PeerCounters>(&json).unwrap(), peer);
        let text = "round trip 40ms (least 30ms, queueing 10ms), 3 of 200 packets sent again, \
                    queued 1 MB now, 1.5s in all";
        assert_eq!(path.to_string(), text);
        assert!((path.loss() - 0.015).abs() < 1e-12);
        let unknown = PathCounters { round_trip_s: None, ..path };
        assert!(unknown.to_string().starts_with("round trip - (least 30ms, queueing -)"), "{unknown}");
    }
}
