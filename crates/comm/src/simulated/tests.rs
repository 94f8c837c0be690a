//! Tests that the queue with lookahead gives the same times and bits as the strict one, however threads
//! interleave.

use std::sync::Arc;
use std::time::Duration;

use farflung_base::{Link, Nanos, PeerId, Philox, Rank, Topology};

use super::lookahead::{Distances, distances};
use super::{Faults, LinkNoise, build};
use crate::{CommError, Communicator, ReduceOp};

/// Results of a rank: its clock after each part, its errors, and a checksum of its values.
type Seen = (Vec<Nanos>, Vec<String>, u32);

/// Runs the ranks. `seed` determines their operations, `nap` only how their threads interleave.
fn run(topology: &Topology, faults: &Faults, distances: Distances, seed: u64, nap: Option<u64>) -> Vec<Seen> {
    let n = topology.size();
    let (ranks, _) = build(topology, faults, distances);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|transport| {
                scope.spawn(move || {
                    let comm =
                        Communicator::new(transport).with_deadline(Nanos::from_millis(50 + 30 * (seed % 6)));
                    rank(&comm, n, seed, nap)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn rank(comm: &Communicator, n: usize, seed: u64, nap: Option<u64>) -> Seen {
    let me = comm.rank().0;
    let shared = Philox::new(seed, 99);
    let own = Philox::new(seed, u64::from(me));
    let pause = |round: u64| {
        if let Some(nap) = nap {
            match Philox::new(nap, u64::from(me)).below(round, 4) {
                0 => std::thread::yield_now(),
                1 => std::thread::sleep(Duration::from_micros(Philox::new(nap, 7).below(round, 900))),
                _ => {}
            }
        }
    };
    let (mut clocks, mut said) = (Vec::new(), Vec::new());
    let mut sum = vec![me as f32 + 0.1; 20_000];
    for round in 0..8 {
        let mut note = |what: Result<(), CommError>| {
            said.extend(what.err().map(|e| e.to_string()));
            clocks.push(comm.now());
        };
        let started = comm.start_all_reduce(sum.clone(), ReduceOp::Mean);
        pause(3 * round);
        comm.advance(Nanos::from_micros(own.below(round, 30_000)));
        pause(3 * round + 1);
        match shared.below(round, 5) {
            // A ring of messages: at any time only some ranks wait.
            0 => {
                let (next, last) = ((me + 1) % n as u32, (me + n as u32 - 1) % n as u32);
                let sent = comm.start_send(Rank(next), 1, vec![1; 50_000]);
                note(comm.recv(Rank(last), 1).map(|_| ()));
                note(sent.wait());
            }
            1 => note(comm.start_all_gather_bytes(vec![0; 1000 * me as usize]).wait().map(|_| ())),
            2 => note(comm.barrier()),
            // A receive that is cancelled while it waits.
            3 => drop(comm.start_recv(Rank((me + 1) % n as u32), 77)),
            // This time is so long that the started operation may pass its deadline.
            _ => comm.advance(Nanos::from_micros(own.below(50 + round, 250_000))),
        }
        pause(3 * round + 2);
        comm.advance(Nanos::from_micros(own.below(100 + round, 3_000)));
        let result = started.wait();
        note(result.as_ref().map(|_| ()).map_err(Clone::clone));
        if let Ok(reduced) = result {
            sum = reduced;
        }
    }
    clocks.push(comm.now());
    (clocks, said, crc32fast::hash(bytemuck::cast_slice(&sum)))
}

/// Returns a topology of links with latencies from `least` microseconds to 40 ms more.
fn topology(seed: u64, n: usize, least: u64) -> Topology {
    let rng = Philox::new(seed, 5);
    let mut topology = Topology::uniform(n, "50mbit,3ms".parse().unwrap());
    for (i, (a, b)) in (0..n as u32).flat_map(|a| (0..n as u32).map(move |b| (a, b))).enumerate() {
        let latency = Nanos::from_micros(least + rng.below(i as u64, 40_000));
        let link: Link = "20mbit,1ms".parse().unwrap();
        topology.set_link(Rank(a), Rank(b), Link { latency, ..link });
    }
    topology
}

#[test]
fn lookahead_changes_no_time_and_no_bit() {
    for seed in 0..40 {
        let n = 2 + seed as usize % 4;
        let topology = topology(seed, n, if seed % 3 == 0 { 10_000 } else { 1 });
        let faults = match seed % 4 {
            0 => Faults::new().at(Nanos::from_millis(40 + 7 * seed)).crash(PeerId(1)),
            1 => Faults::new().at(Nanos::from_millis(50)).cut(PeerId(0), PeerId(1)),
            2 => Faults::new()
                .at(Nanos::from_millis(30 + seed))
                .freeze(PeerId(0), Nanos::from_millis(100))
                .at(Nanos::from_millis(160))
                .corrupt(PeerId(1), PeerId(0)),
            _ => Faults::new().weather(LinkNoise {
                seed,
                jitter: Nanos::from_millis(7),
                loss: 50_000,
                retransmit: Nanos::from_millis(20),
            }),
        };
        let strict = run(&topology, &faults, None, seed, None);
        for nap in 0..6 {
            let distances = distances(&topology);
            assert!(distances.is_some());
            let seen = run(&topology, &faults, distances, seed, (nap > 0).then_some(100 * seed + nap));
            assert!(seen == strict, "seed {seed}, nap {nap}:\n{seen:?}\n{strict:?}");
        }
    }
}

#[test]
fn what_was_started_may_fail_before_the_clock_of_the_rank_that_runs() {
    let topology = Topology::uniform(2, "1gbit,40ms".parse().unwrap());
    let ms = Nanos::from_millis;
    std::thread::scope(|scope| {
        let [first, second] =
            <[_; 2]>::try_from(build(&topology, &Faults::new(), distances(&topology)).0).unwrap();
        scope.spawn(move || {
            let comm = Communicator::new(first).with_deadline(ms(50));
            let started = comm.start_all_reduce(vec![1.0_f32; 2], ReduceOp::Sum);
            comm.advance(ms(500));
            // Gives the other rank real time in which it would run too far ahead if the queue allowed it.
            std::thread::sleep(Duration::from_millis(20));
            assert!(matches!(started.wait(), Err(CommError::Deadline { .. })));
        });
        let comm = Communicator::new(second).with_deadline(ms(200));
        comm.advance(ms(30));
        let error = comm.all_reduce(&mut [1.0_f32; 2], ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        assert!((ms(90)..ms(91)).contains(&comm.now()), "{}", comm.now());
    });
}

#[test]
fn a_latency_of_zero_is_left_to_the_strict_queue() {
    let mut topology = topology(1, 4, 1);
    topology.set_link(Rank(2), Rank(3), Link::FREE);
    assert_eq!(distances(&topology), None);
    let first = run(&topology, &Faults::new(), None, 1, None);
    for nap in 0..6 {
        assert!(run(&topology, &Faults::new(), None, 1, Some(nap)) == first, "nap {nap}");
    }
}

#[test]
fn ranks_within_a_latency_of_each_other_run_at_the_same_time() {
    // All ranks must be in the real barrier at once, with slightly different virtual clocks.
    let topology = Topology::uniform(4, "100mbit,20ms".parse().unwrap());
    let met = Arc::new(std::sync::Barrier::new(4));
    let (ranks, _) = build(&topology, &Faults::new(), distances(&topology));
    std::thread::scope(|scope| {
        for transport in ranks {
            let met = Arc::clone(&met);
            scope.spawn(move || {
                let comm = Communicator::new(transport);
                for _ in 0..10 {
                    let sizes = vec![0; 7 * comm.rank().index()];
                    comm.all_gather_bytes(sizes).unwrap();
                    met.wait();
                    comm.advance(Nanos::from_micros(300 * u64::from(comm.rank().0)));
                    met.wait();
                }
            });
        }
    });
}
