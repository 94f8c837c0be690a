//! Ranks of one run over several networks: shared memory, TCP and QUIC, with the bits of one process.

#![cfg(feature = "iroh")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;
use std::time::Duration;

use crate::common::mixed::{Job, Over};
use crate::common::{memory_cluster, on_ranks};
use farflung_base::{PeerId, Rank};
use farflung_comm::mixed;
use farflung_comm::quic::{Relay, RelayConfig};
use farflung_comm::secure::{Identity, JoinSecret, Security};
use farflung_comm::tcp::Tcp;
use farflung_comm::{CommError, Communicator, ReduceOp, Refusal, Transport};

fn sums(ends: &[Arc<Tcp>]) -> Vec<Vec<u32>> {
    let cluster = ends.iter().map(|end| Arc::clone(end) as Arc<dyn Transport>).collect();
    on_ranks(cluster, |comm| summed(&comm))
}

/// Returns the bits of a sum that depends on the order of additions.
fn summed(comm: &Communicator) -> Vec<u32> {
    let rank = comm.rank().index();
    let mut x: Vec<f32> =
        (0..200_000).map(|i| ((i * 31 + rank * 7) % 1013) as f32 / (rank as f32 + 0.37)).collect();
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    x.iter().map(|v| v.to_bits()).collect()
}

/// Returns the pairs that are connected over QUIC, and checks that both ranks of each pair agree.
fn over_quic(ends: &[Arc<Tcp>]) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for (i, end) in ends.iter().enumerate() {
        for (j, other) in ends.iter().enumerate().skip(i + 1) {
            let over_quic = end.is_over_second_network(PeerId(j as u32));
            assert_eq!(other.is_over_second_network(PeerId(i as u32)), over_quic, "{i} and {j}");
            if over_quic {
                pairs.push((i, j));
            }
        }
    }
    pairs
}

#[test]
fn each_pair_takes_the_network_that_reaches_and_the_bits_are_those_of_memory() {
    let relay = Relay::start(&RelayConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    // Rank 1 does not use TCP; rank 2 reaches others over TCP and is not reached; rank 4 has the relay alone.
    let ways = [Over::Both, Over::Quic, Over::Unreached, Over::Both, Over::Relay];
    let job = Job::new(&ways, Some(&relay));
    let ends: Vec<_> = job.join(|rank| job.by_ticket(rank)).into_iter().map(Result::unwrap).collect();
    let pairs = [(0, 1), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)];
    assert_eq!(over_quic(&ends), pairs);
    let expected = on_ranks(memory_cluster(5), |comm| summed(&comm));
    assert!(sums(&ends) == expected);
    assert!(relay.carried() > 100_000, "{}", relay.carried());
    for end in &ends {
        assert!((0..5).map(PeerId).filter(|&peer| peer != end.me()).all(|peer| end.path(peer).is_some()));
    }
}

#[test]
fn ranks_with_a_secret_and_no_ticket_meet_at_rank_0_over_tcp() {
    let job = Job::new(&[Over::Both, Over::Unreached, Over::Both], None);
    let secret = JoinSecret::generate().unwrap();
    let by_secret = |_| Security::by_secret(&Identity::generate().unwrap(), &secret);
    let ends: Vec<_> = job.join(by_secret).into_iter().map(Result::unwrap).collect();
    // Rank 0 has sent the keys by which the others reach each other.
    assert_eq!(over_quic(&ends), [(1, 2)]);
    assert!(sums(&ends) == on_ranks(memory_cluster(3), |comm| summed(&comm)));
    let alone = Job::new(&[Over::Both, Over::Quic], None);
    let error = mixed::join(&alone.config(1, by_secret(1)).unwrap()).unwrap_err();
    assert!(error.to_string().contains("which a ticket contains"), "{error}");
}

/// Starts a rank that waits 3 s for the others.
fn start(job: &Job<'_>, rank: u32, security: Security) -> Result<(), CommError> {
    let mut config = job.config(rank, security)?;
    config.network.deadline = Duration::from_secs(3);
    mixed::join(&config).map(drop)
}

#[test]
fn a_rank_that_does_not_come_is_named_on_all_and_others_are_refused() {
    let job = Job::new(&[Over::Both, Over::Both, Over::Quic, Over::Both], None);
    let strange = Security::by_secret(&Identity::generate().unwrap(), &JoinSecret::generate().unwrap());
    let fails = |rank: u32, security: Security| start(&job, rank, security).unwrap_err();
    let errors = std::thread::scope(|scope| {
        let (fails, job) = (&fails, &job);
        let ranks = [0, 1, 2].map(|rank| scope.spawn(move || fails(rank, job.by_ticket(rank))));
        let refused = scope.spawn(|| fails(3, strange.clone()));
        let refused = refused.join().unwrap();
        assert!(matches!(refused, CommError::Refused { reason: Refusal::Secret, .. }), "{refused}");
        ranks.map(|rank| rank.join().unwrap())
    });
    for error in errors {
        assert!(matches!(&error, CommError::Missing { ranks, .. } if *ranks == [Rank(3)]), "{error}");
    }
    // Two ranks with one key cannot be told apart over QUIC.
    let job = Job::new(&[Over::Both, Over::Both], None);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| start(&job, 0, job.by_ticket(0)).unwrap_err());
        start(&job, 1, job.by_ticket(0)).unwrap_err()
    });
    assert!(matches!(error, CommError::Refused { reason: Refusal::SameKey, .. }), "{error}");
}
