//! Tests of shared memory beyond the contract of all transports: how peers agree on it, and which peers cannot.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::float_cmp, reason = "these sums are exact")]

use std::thread;
use std::time::Duration;

use crate::common::{Cluster, free_port, on_ranks, shared_memory_cluster, tcp_by};
use farflung_base::{Nanos, PeerId, Rank};
use farflung_comm::secure::{Identity, JoinSecret, Security};
use farflung_comm::tcp::{self, GateConfig, GrowingNetwork, SharedMemory};
use farflung_comm::{CommError, Communicator, FRAME_BYTES, ReduceOp, Source, Tag, Transport as _};

/// Sums many times, from the start on: most peers switch to shared memory between two of the sums.
fn sums(cluster: Cluster) {
    on_ranks(cluster, |comm| {
        let n = comm.size();
        for round in 0..40 {
            let mut x = vec![(comm.rank().index() + round) as f64; 100_000];
            comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            let want = (n * round + n * (n - 1) / 2) as f64;
            assert!(x.iter().all(|&v| v == want), "round {round}");
        }
    });
}

fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:farflung")).count()
}

#[test]
fn peers_switch_while_they_work_and_one_that_does_not_is_no_hindrance() {
    let master = || format!("127.0.0.1:{}", free_port());
    sums(tcp_by(4, &master(), |config| config.shared_memory = SharedMemory::WherePossible));
    sums(tcp_by(4, &master(), |config| {
        let shares = config.rank != 2;
        config.shared_memory = if shares { SharedMemory::WherePossible } else { SharedMemory::Never };
    }));
    let secret = JoinSecret::generate().unwrap();
    sums(tcp_by(3, &master(), |config| {
        config.security = Security::by_secret(&Identity::generate().unwrap(), &secret);
        config.shared_memory = SharedMemory::WherePossible;
    }));
}

#[test]
fn who_has_to_share_and_cannot_is_told_with_whom() {
    let master = format!("127.0.0.1:{}", free_port());
    let errors: Vec<Option<CommError>> = thread::scope(|scope| {
        let join = |rank: u32| {
            let mut config = tcp::Config::new(rank, 2, &master);
            config.deadline = Duration::from_secs(10);
            config.shared_memory = if rank == 0 { SharedMemory::Always } else { SharedMemory::Never };
            scope.spawn(move || match tcp::join(&config) {
                Err(error) => Some(error),
                // This rank never offers memory. It waits for a message, so that its endpoint stays open until
                // rank 0 gives up.
                Ok(met) => {
                    let comm = Communicator::new(met).with_deadline(Nanos::from_millis(10_000));
                    comm.recv(Rank(0), 1).err()
                }
            })
        };
        let joins: Vec<_> = (0..2).map(join).collect();
        joins.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(matches!(errors[0], Some(CommError::NoSharedMemory { peer: PeerId(1) })), "{errors:?}");
    assert!(matches!(errors[1], Some(CommError::PeerDown { peer: PeerId(0), .. })), "{errors:?}");
}

#[test]
fn frames_that_nobody_takes_do_not_hold_up_others() {
    on_ranks(shared_memory_cluster(2), |comm| {
        let (me, other) = (comm.rank(), Rank(1 - comm.rank().0));
        // Sends more frames than there are slots, in both directions, before any is taken.
        let sends: Vec<_> =
            (0..4).map(|tag| comm.start_send(other, tag, vec![tag as u8; 9 * FRAME_BYTES])).collect();
        let late: Vec<_> =
            (0..100).map(|tag| comm.start_send(other, 100 + tag, vec![me.0 as u8; 5])).collect();
        for tag in (0..100).rev() {
            assert_eq!(comm.recv(other, 100 + tag).unwrap(), [other.0 as u8; 5]);
        }
        for tag in (0..4).rev() {
            let message = comm.recv(other, tag).unwrap();
            assert_eq!((message.len(), message[message.len() - 1]), (9 * FRAME_BYTES, tag as u8));
        }
        for sent in sends.into_iter().chain(late) {
            sent.wait().unwrap();
        }
    });
}

#[test]
fn frames_that_are_kept_stay_as_they_came() {
    let (tag, limit) = (Tag::user(5, 1), Nanos::from_millis(10_000));
    on_ranks(shared_memory_cluster(2), |comm| {
        let transport = comm.transport();
        if comm.rank().0 == 0 {
            for number in 0..60_u8 {
                let mut frame = transport.lease(FRAME_BYTES);
                frame.bytes_mut().fill(number);
                transport.send(PeerId(1), tag, frame, limit).wait().unwrap();
            }
            comm.recv(Rank(1), 9).unwrap();
        } else {
            let mut kept = Vec::new();
            for _ in 0..60 {
                kept.push(transport.recv(Source::Peer(PeerId(0)), tag, limit).wait().unwrap().1);
            }
            comm.send(Rank(0), 9, &[]).unwrap();
            drop(comm);
            // The frames are valid even after the endpoint is gone.
            assert!((0..).zip(&kept).all(|(number, frame)| frame.bytes().iter().all(|&b| b == number)));
        }
    });
}

#[test]
fn members_of_gates_share_memory_as_well() {
    let config = |listen: &str| {
        let mut config = GateConfig::new(listen, "job", Security::unencrypted());
        config.shared_memory = SharedMemory::WherePossible;
        config
    };
    let first = GrowingNetwork::found(&config("127.0.0.1:0")).unwrap();
    let addresses = vec![first.address().to_owned()];
    let second = GrowingNetwork::ask(&config("127.0.0.1:0"), &addresses).unwrap().join().unwrap();
    let peers = [first.transport().me(), second.transport().me()];
    thread::scope(|scope| {
        for gate in [&first, &second] {
            scope.spawn(move || {
                let comm = Communicator::of_members(gate.transport(), &peers, 1).unwrap();
                let comm = comm.with_deadline(Nanos::from_millis(10_000));
                for _ in 0..20 {
                    let mut x = vec![1.0_f32; 200_000];
                    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    assert!(x.iter().all(|&v| v == 2.0));
                }
            });
        }
    });
    // Both endpoints have mapped the memory.
    assert!(mapped() >= 2);
}
