//! Networks of 64 ranks and more: all events, clocks, errors and results are equal to those recorded in July
//! 2026 with an older queue, in which an event checked all ranks. A change of the queue must not change them.
//! (`logs` also contains the texts of errors: it was recorded anew when these were reworded, while all other
//! values stayed equal.)

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write;

use farflung_base::{Link, Nanos, PeerId, Philox, Rank, Topology};
use farflung_comm::simulated::{Faults, LinkNoise, record};
use farflung_comm::{CommError, Communicator, ReduceOp};

/// Operations of a rank. They may depend only on the rank's number and on the data that it receives.
type Work = fn(&Communicator, &mut Log);

/// Log of a rank's results.
struct Log(String);

impl Log {
    fn note<T>(&mut self, comm: &Communicator, what: Result<T, CommError>, crc: impl Fn(&T) -> u32) {
        match what {
            Ok(value) => writeln!(self.0, "{} {:08x}", comm.now(), crc(&value)),
            Err(error) => writeln!(self.0, "{} {error}", comm.now()),
        }
        .unwrap();
    }
}

/// Number of events, latest clock, and checksums of all events and of all logs.
#[derive(Debug, PartialEq, Eq)]
struct Trace {
    events: usize,
    last: Nanos,
    recording: u32,
    logs: u32,
}

fn trace(topology: &Topology, faults: &Faults, deadline: u64, work: Work) -> Trace {
    let (ranks, recorder) = record(topology, faults);
    let seen: Vec<(Nanos, String)> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|transport| {
                scope.spawn(move || {
                    let comm = Communicator::new(transport).with_deadline(Nanos::from_millis(deadline));
                    let mut log = Log(String::new());
                    work(&comm, &mut log);
                    for (op, algorithm, counter) in comm.counters() {
                        writeln!(log.0, "{op} {algorithm:?} {counter:?}").unwrap();
                    }
                    (comm.now(), log.0)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let recording = recorder.finish();
    let text = seen.iter().fold(String::new(), |all, (clock, log)| format!("{all}{clock}\n{log}"));
    Trace {
        events: recording.events().len(),
        last: seen.iter().map(|(clock, _)| *clock).max().unwrap(),
        recording: crc32fast::hash(&recording.encode()),
        logs: crc32fast::hash(text.as_bytes()),
    }
}

fn floats(values: &[f32]) -> u32 {
    crc32fast::hash(bytemuck::cast_slice(values))
}

fn messages(all: &[Vec<u8>]) -> u32 {
    crc32fast::hash(&all.concat())
}

/// Reductions that run while the ranks compute, exchanges, and rings of messages at the same time.
fn collectives(comm: &Communicator, log: &mut Log) {
    let (me, n) = (comm.rank().0, comm.size() as u32);
    let own = Philox::new(11, u64::from(me));
    let mut x: Vec<f32> = (0..1_500).map(|i| own.uniform(i)).collect();
    for round in 0..2 {
        let started = comm.start_all_reduce(x.clone(), ReduceOp::Mean);
        comm.advance(Nanos::from_micros(own.below(round, 9_000)));
        let gathered = comm.start_all_gather_bytes(vec![me as u8; 1 + (me % 7) as usize]);
        comm.advance(Nanos::from_micros(own.below(10 + round, 900)));
        let sent = comm.start_send(Rank((me + 3) % n), 7, vec![me as u8; 40_000]);
        log.note(comm, comm.recv(Rank((me + n - 3) % n), 7), |bytes| crc32fast::hash(bytes));
        log.note(comm, sent.wait(), |()| 0);
        comm.advance(Nanos::from_micros(own.below(20 + round, 30_000)));
        log.note(comm, gathered.wait(), |all| messages(all));
        let reduced = started.wait();
        if let Ok(sum) = &reduced {
            x.clone_from(sum);
        }
        log.note(comm, reduced, |sum| floats(sum));
    }
    log.note(comm, comm.barrier(), |()| 1);
    // A communicator for each half of the ranks; one half starts late.
    let half = comm.split(me % 2, n - me).unwrap();
    if me % 2 == 1 {
        comm.advance(Nanos::from_millis(40));
    }
    let mut y = vec![me as f32; 33];
    log.note(comm, half.all_reduce(&mut y, ReduceOp::Sum).map(|()| y), |sum| floats(sum));
}

/// Runs collectives until one fails, and then again among the surviving ranks.
fn survivors(comm: &Communicator, log: &mut Log) {
    let own = Philox::new(12, u64::from(comm.rank().0));
    let mut now = comm.clone();
    for round in 0..3 {
        let x: Vec<f32> = (0..200).map(|i| own.uniform(1000 * round + i)).collect();
        let started = now.start_all_reduce(x, ReduceOp::Sum);
        now.advance(Nanos::from_micros(own.below(round, 25_000)));
        log.note(&now, now.all_gather_bytes(vec![1; 3]), |all| messages(all));
        let result = started.wait();
        let failed = result.is_err();
        log.note(&now, result, |sum| floats(sum));
        if failed || now.check().is_err() {
            let shrunk = now.shrink();
            log.note(&now, shrunk.as_ref().map(Communicator::size).map_err(Clone::clone), |&size| {
                size as u32
            });
            let Ok(shrunk) = shrunk else { return };
            now = shrunk;
        }
    }
}

/// Four regions with short links inside, and long, unequal links between them.
fn regions(n: usize) -> Topology {
    let mut topology = Topology::uniform(n, "200mbit,1ms".parse().unwrap());
    let far = [[0, 25, 70, 110], [30, 0, 55, 90], [70, 60, 0, 140], [100, 95, 150, 0]];
    let region = |rank: usize| rank * 4 / n;
    for (a, b) in (0..n).flat_map(|a| (0..n).map(move |b| (a, b))).filter(|&(a, b)| region(a) != region(b)) {
        let latency = Nanos::from_millis(far[region(a)][region(b)]);
        let bandwidth = "30mbit,1ms".parse::<Link>().unwrap().bandwidth;
        topology.set_link(Rank(a as u32), Rank(b as u32), Link { bandwidth, latency });
    }
    topology
}

/// A topology in which each link has its own random latency, from 0.5 ms to 60.5 ms.
fn unlike(n: usize) -> Topology {
    let rng = Philox::new(21, 5);
    let mut topology = Topology::uniform(n, "100mbit,1ms".parse().unwrap());
    for (i, (a, b)) in (0..n).flat_map(|a| (0..n).map(move |b| (a, b))).enumerate() {
        let latency = Nanos::from_micros(500 + rng.below(i as u64, 60_000));
        let bandwidth = "40mbit,1ms".parse::<Link>().unwrap().bandwidth;
        topology.set_link(Rank(a as u32), Rank(b as u32), Link { bandwidth, latency });
    }
    topology
}

#[test]
fn equal_links() {
    let topology = Topology::uniform(64, "100mbit,5ms".parse().unwrap());
    let expected =
        Trace { events: 33_728, last: Nanos(1_655_075_120), recording: 0x9afe_1623, logs: 0x6edd_d261 };
    assert_eq!(trace(&topology, &Faults::new(), 20_000, collectives), expected);
}

#[test]
fn regions_in_bad_weather() {
    let weather = LinkNoise {
        seed: 5,
        jitter: Nanos::from_micros(800),
        loss: 2_000,
        retransmit: Nanos::from_millis(35),
    };
    let expected =
        Trace { events: 42_532, last: Nanos(3_138_264_437), recording: 0x9331_2bdb, logs: 0x74cb_1115 };
    assert_eq!(trace(&regions(72), &Faults::new().weather(weather), 20_000, collectives), expected);
}

#[test]
fn unlike_links_of_which_some_fail() {
    let ms = Nanos::from_millis;
    let faults = Faults::new()
        .at(ms(210))
        .crash(PeerId(17))
        .at(ms(120))
        .freeze(PeerId(40), ms(260))
        .at(ms(150))
        .cut_until(PeerId(3), PeerId(50), ms(190))
        .at(ms(5_000))
        .corrupt(PeerId(8), PeerId(60));
    let expected =
        Trace { events: 50_826, last: Nanos(6_465_043_720), recording: 0xd449_b854, logs: 0xb31e_f32e };
    assert_eq!(trace(&unlike(66), &faults, 3_000, survivors), expected);
}

#[test]
fn a_latency_of_zero() {
    let mut topology = regions(64);
    topology.set_link(Rank(9), Rank(22), Link::FREE);
    let faults = Faults::new().at(Nanos::from_millis(400)).crash(PeerId(30));
    let expected =
        Trace { events: 44_547, last: Nanos(2_153_954_246), recording: 0xba5c_b6a5, logs: 0x8fad_4329 };
    assert_eq!(trace(&topology, &faults, 3_000, survivors), expected);
}
