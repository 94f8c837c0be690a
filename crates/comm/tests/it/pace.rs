//! Rate limits of an endpoint: the rate is never exceeded, nearly reached, and results are the same bit for
//! bit.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::thread;
use std::time::Duration;

use crate::common::{Cluster, free_port, on_ranks, tcp_by, tcp_cluster};
use farflung_base::{Bandwidth, Nanos, Rank};
use farflung_comm::secure::{Identity, JoinSecret, Security};
use farflung_comm::tcp::Pace;
use farflung_comm::{CommError, ReduceOp, Transport as _};

/// 5 MB per second.
const RATE: Bandwidth = Bandwidth(40_000_000);
const BYTES: usize = 2_000_000;

/// A cluster whose endpoints all have the same rate limits.
fn paced(n: usize, security: &Security, pace: Pace) -> Cluster {
    tcp_by(n, &format!("127.0.0.1:{}", free_port()), |config| {
        config.pace = pace;
        config.security = security.clone();
    })
}

fn all() -> Pace {
    Pace { all: RATE, ..Pace::default() }
}

/// Returns whether a transfer of this number of bytes took as long as the rate requires, and not much longer.
fn took(bytes: usize, took: Nanos) -> bool {
    let least = (bytes as f64 * 8.0 / RATE.0 as f64) - 0.011;
    (least..2.0 * least + 0.5).contains(&took.as_secs_f64())
}

#[test]
fn a_message_takes_the_time_of_its_rate_also_where_its_sender_turns_away() {
    let secret = JoinSecret::generate().unwrap();
    for security in [Security::unencrypted(), Security::by_secret(&Identity::generate().unwrap(), &secret)] {
        on_ranks(paced(2, &security, all()), |comm| {
            let other = Rank(1 - comm.rank().0);
            comm.barrier().unwrap();
            let start = comm.now();
            if comm.rank() == Rank(0) {
                comm.send(other, 1, &vec![7; BYTES]).unwrap();
                // The last frame waits for the rate; this rank does nothing that would poll its sockets.
                thread::sleep(Duration::from_millis(900));
            } else {
                let got = comm.recv(other, 1).unwrap();
                let time = comm.now().saturating_sub(start);
                assert!(got == vec![7; BYTES] && took(BYTES, time), "{time}");
            }
        });
    }
}

#[test]
fn an_all_reduce_takes_what_its_ranks_send_over_the_rate_and_has_its_bits() {
    let sum = |cluster| {
        on_ranks(cluster, |comm| {
            let mut x: Vec<f32> =
                (0..BYTES / 4).map(|i| (i as f32 * 0.37 + comm.rank().0 as f32).sin()).collect();
            comm.barrier().unwrap();
            let start = comm.now();
            comm.all_reduce(&mut x, ReduceOp::Mean).unwrap();
            (comm.now().saturating_sub(start), x.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
        })
    };
    let (free, slow) = (sum(tcp_cluster(2)), sum(paced(2, &Security::unencrypted(), all())));
    for ((fast, bits), (slow, same)) in free.iter().zip(&slow) {
        // In an all-reduce of two ranks, each sends one buffer.
        assert!(bits == same && fast < slow && took(BYTES, *slow), "{fast} {slow}");
    }
}

#[test]
fn a_rate_to_each_peer_is_not_shared_and_one_in_all_is() {
    for (pace, sent) in [(Pace { each: RATE, ..Pace::default() }, BYTES), (all(), 2 * BYTES)] {
        on_ranks(paced(3, &Security::unencrypted(), pace), |comm| {
            comm.barrier().unwrap();
            let start = comm.now();
            if comm.rank() == Rank(0) {
                let both = [1, 2].map(|to| comm.start_send(Rank(to), 1, vec![7; BYTES]));
                for one in both {
                    one.wait().unwrap();
                }
            } else {
                comm.recv(Rank(0), 1).unwrap();
            }
            comm.barrier().unwrap();
            let time = comm.now().saturating_sub(start);
            assert!(took(sent, time), "{time}");
        });
    }
}

#[test]
fn a_rate_that_nothing_gets_through_is_refused() {
    let slow = Pace { all: Bandwidth(100), ..Pace::default() };
    let error = tcp_error(slow);
    assert!(
        matches!(error, CommError::Argument { what: "rate in bits per second (minimum)", got: 100, .. }),
        "{error}"
    );
}

fn tcp_error(pace: Pace) -> CommError {
    let mut config = farflung_comm::tcp::Config::new(0, 1, "127.0.0.1:0");
    config.pace = pace;
    farflung_comm::tcp::join(&config).map(|end| end.me()).unwrap_err()
}
