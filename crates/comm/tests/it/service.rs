//! Services: messages are answered as they arrive, whatever else the rank does.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::{Arc, Mutex};

use crate::common::{TRANSPORTS, on_ranks, over};
use farflung_base::{Nanos, PeerId, Rank, Topology};
use farflung_comm::simulated::{Faults, cluster_with};
use farflung_comm::{Answer, Communicator, Question, Service, ServiceTags};

const TAGS: ServiceTags = ServiceTags { ask: 1, answer: 2 };

/// Adds up the first bytes of its messages, and sends the sum so far to the sender.
#[derive(Default)]
struct Adder {
    sum: u64,
    asked: Vec<(Rank, Nanos)>,
}

impl Service for Adder {
    fn receive(&mut self, Question { from, at, bytes }: Question) -> Vec<Answer> {
        self.sum += u64::from(bytes[0]);
        self.asked.push((from, at));
        vec![Answer::new(from, [self.sum.to_le_bytes().to_vec(), bytes].concat())]
    }
}

fn ask(comm: &Communicator, first: u8, len: usize) -> u64 {
    let answer = comm.start_recv(Rank(0), TAGS.answer);
    comm.send(Rank(0), TAGS.ask, &vec![first; len]).unwrap();
    let answer = answer.wait().unwrap();
    assert_eq!(answer[8..], vec![first; len]);
    u64::from_le_bytes(answer[..8].try_into().unwrap())
}

/// Each rank sends 20 requests, of 1 byte and of 600,000 bytes (three frames) in turn.
fn all_ask(comm: &Communicator) -> u64 {
    let adder = Arc::new(Mutex::new(Adder::default()));
    let serving = (comm.rank() == Rank(0)).then(|| comm.start_service(TAGS, &adder));
    let mut last = 0;
    for round in 0..20 {
        let sum = ask(comm, 1 + comm.rank().0 as u8, [1, 600_000][round % 2]);
        assert!(sum > last);
        last = sum;
    }
    comm.barrier().unwrap();
    drop(serving);
    let adder = adder.lock().unwrap();
    adder.sum
}

#[test]
fn every_rank_is_answered_over_every_transport() {
    for (name, make) in TRANSPORTS {
        assert_eq!(on_ranks(make(3), |comm| all_ask(&comm))[0], 20 * (1 + 2 + 3), "{name}");
    }
}

#[test]
fn answers_leave_when_messages_arrive_though_the_rank_computes() {
    let topology = Topology::uniform(3, "100mbit,10ms".parse().unwrap());
    let run = || {
        on_ranks(over(&topology), |comm| {
            let adder = Arc::new(Mutex::new(Adder::default()));
            let serving = (comm.rank() == Rank(0)).then(|| comm.start_service(TAGS, &adder));
            let mut answered = Vec::new();
            match comm.rank().0 {
                0 => comm.advance(Nanos::from_millis(1000)),
                rank => {
                    comm.advance(Nanos::from_millis(u64::from(100 / rank)));
                    for _ in 0..3 {
                        answered.push((ask(&comm, 1, 100), comm.now()));
                    }
                }
            }
            comm.barrier().unwrap();
            drop(serving);
            let adder = adder.lock().unwrap();
            (answered, adder.asked.clone())
        })
    };
    let ranks = run();
    assert_eq!(ranks, run());
    let trip = |at: Nanos| (at.as_secs_f64() * 1e3 * 10.0).round() / 10.0;
    // 100 bytes and the headers of their frames take about 10 us each way.
    let times: Vec<f64> = ranks[1].0.iter().map(|(_, at)| trip(*at)).collect();
    assert_eq!(times, [120.0, 140.0, 160.1]);
    let sums: Vec<u64> = ranks[2].0.iter().map(|(sum, _)| *sum).collect();
    assert_eq!(sums, [1, 2, 3]);
    let sums: Vec<u64> = ranks[1].0.iter().map(|(sum, _)| *sum).collect();
    assert_eq!(sums, [4, 5, 6]);
    let asked = &ranks[0].1;
    assert!(asked.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{asked:?}");
}

#[test]
fn the_others_are_answered_when_one_is_lost() {
    let topology = Topology::uniform(3, "100mbit,10ms".parse().unwrap());
    let faults = Faults::new().at(Nanos::from_millis(50)).crash(PeerId(2));
    let cluster = cluster_with(&topology, &faults).into_iter().map(|t| t as _).collect();
    let ranks = on_ranks(cluster, |comm| {
        let adder = Arc::new(Mutex::new(Adder::default()));
        let serving = (comm.rank() == Rank(0)).then(|| comm.start_service(TAGS, &adder));
        let mut sums = Vec::new();
        if comm.rank() == Rank(1) {
            sums = (0..10).map(|_| ask(&comm, 1, 10)).collect();
            comm.send(Rank(0), 3, b"done").unwrap();
        } else if comm.rank() == Rank(0) {
            comm.recv(Rank(1), 3).unwrap();
        } else {
            let answer = comm.start_recv(Rank(0), TAGS.answer);
            comm.send(Rank(0), TAGS.ask, &[5]).unwrap();
            answer.wait().unwrap();
            comm.recv(Rank(1), 3).unwrap_err();
        }
        drop(serving);
        sums
    });
    assert_eq!(ranks[1].last(), Some(&15));
}

/// Forwards every message to rank 1.
struct Herald;
impl Service for Herald {
    fn receive(&mut self, asked: Question) -> Vec<Answer> {
        vec![Answer::new(Rank(1), asked.bytes)]
    }
}

#[test]
fn a_rank_that_asks_itself_and_computes_on_has_told_the_others() {
    let topology = Topology::uniform(2, "10gbit,1us".parse().unwrap());
    for _ in 0..20 {
        let heard = on_ranks(over(&topology), |comm| {
            let herald = Arc::new(Mutex::new(Herald));
            let serving = (comm.rank() == Rank(0)).then(|| comm.start_service(TAGS, &herald));
            let mut heard = Nanos::ZERO;
            comm.advance(Nanos::from_millis(1));
            if comm.rank() == Rank(0) {
                comm.start_send(Rank(0), TAGS.ask, vec![1]).wait().unwrap();
                comm.advance(Nanos::from_millis(1000));
            } else {
                comm.recv(Rank(0), TAGS.answer).unwrap();
                heard = comm.now();
            }
            comm.barrier().unwrap();
            drop(serving);
            heard
        });
        assert!(heard[1] < Nanos::from_millis(2), "{heard:?}");
    }
}

/// Passes a number to the next rank's service until it has been around all ranks; then sends it to rank 0.
struct Passes {
    me: u32,
    ranks: u32,
}

impl Service for Passes {
    fn receive(&mut self, asked: Question) -> Vec<Answer> {
        let count = asked.bytes[0] + 1;
        let next = Rank((self.me + 1) % self.ranks);
        if u32::from(count) > self.ranks {
            return vec![Answer::new(Rank(0), vec![count])];
        }
        vec![Answer::to_service(next, vec![count])]
    }
}

#[test]
fn a_service_asks_the_services_of_others() {
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(4), |comm| {
            let service = Arc::new(Mutex::new(Passes { me: comm.rank().0, ranks: 4 }));
            let serving = comm.start_service(ServiceTags { ask: 5, answer: 6 }, &service);
            comm.barrier().unwrap();
            if comm.rank().0 == 0 {
                comm.send(Rank(0), 5, &[0]).unwrap();
                assert_eq!(comm.recv(Rank(0), 6).unwrap(), [5], "{name}");
            }
            comm.barrier().unwrap();
            drop(serving);
        });
    }
}
