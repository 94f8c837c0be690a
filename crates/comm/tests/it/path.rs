//! Statistics of the path to a peer, as reported by transports.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::common::{free_port, memory_cluster, on_ranks, simulated_cluster, tcp_by, tls_cluster};
use farflung_base::{Bandwidth, Nanos, PeerId, Rank};
use farflung_comm::tcp::Pace;

#[test]
fn networks_without_packets_tell_nothing_of_paths() {
    for cluster in [memory_cluster(2), simulated_cluster(2)] {
        assert!(cluster.iter().all(|end| end.path(PeerId(0)).is_none() && end.path(PeerId(1)).is_none()));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn sockets_tell_round_trips_and_packets_of_each_peer_and_none_of_themselves() {
    for streams in [1, 3] {
        let cluster = tcp_by(3, &format!("127.0.0.1:{}", free_port()), |config| config.streams = streams);
        on_ranks(cluster, check_paths);
    }
    on_ranks(tls_cluster(3), check_paths);
}

#[cfg(target_os = "linux")]
#[expect(clippy::needless_pass_by_value, reason = "each rank owns its end")]
fn check_paths(comm: farflung_comm::Communicator) {
    let others = [1, 2].map(|n| (comm.rank().0 + n) % 3);
    for _ in 0..10 {
        for to in others {
            comm.send(Rank(to), 1, &vec![1; 100_000]).unwrap();
        }
        for from in others {
            assert_eq!(comm.recv(Rank(from), 1).unwrap().len(), 100_000);
        }
    }
    comm.barrier().unwrap();
    for peer in others {
        let path = comm.transport().path(PeerId(peer)).unwrap();
        let (last, least) = (path.round_trip.unwrap(), path.least_round_trip.unwrap());
        assert!(least <= last && last < Nanos::from_millis(5_000), "{path:?}");
        assert_eq!(path.queueing(), Some(last.saturating_sub(least)));
        // A packet of the loopback holds at most 64 KiB.
        assert!(path.packets >= 10 * 2 && path.retransmissions <= path.packets, "{path:?}");
        assert_eq!(path.queued.0, 0, "{path:?}");
    }
    assert_eq!(comm.transport().path(PeerId(comm.rank().0)), None);
    comm.barrier().unwrap();
}

#[test]
fn what_waits_for_the_rate_is_queued_to_its_peer_alone() {
    const RATE: Bandwidth = Bandwidth(8_000_000);
    let cluster = tcp_by(3, &format!("127.0.0.1:{}", free_port()), |config| {
        config.pace = Pace { all: RATE, ..Pace::default() };
    });
    on_ranks(cluster, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == Rank(0) {
            let before = comm.transport().path(PeerId(1)).unwrap().queued_for;
            // Takes 200 ms at the rate limit.
            let sent = comm.start_send(Rank(1), 1, vec![7; 200_000]);
            let path = comm.transport().path(PeerId(1)).unwrap();
            assert!((100_000..=201_000).contains(&path.queued.0), "{path:?}");
            sent.wait().unwrap();
            comm.recv(Rank(1), 2).unwrap();
            let path = comm.transport().path(PeerId(1)).unwrap();
            let waited = path.queued_for.saturating_sub(before);
            assert!(path.queued.0 == 0 && waited >= Nanos::from_millis(150), "{path:?}");
            let idle = comm.transport().path(PeerId(2)).unwrap();
            assert!(idle.queued.0 == 0 && idle.queued_for < Nanos::from_millis(100), "{idle:?}");
        } else if comm.rank() == Rank(1) {
            assert_eq!(comm.recv(Rank(0), 1).unwrap().len(), 200_000);
            comm.send(Rank(0), 2, &[1]).unwrap();
        }
        comm.barrier().unwrap();
    });
}
