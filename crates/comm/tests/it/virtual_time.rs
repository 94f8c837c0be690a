//! The laws of virtual time: closed forms, overlap, shared links, faults, and independence of thread
//! interleaving.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::float_cmp, reason = "these sums are exact")]

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Cluster, on_ranks, over};
use farflung_base::{AccessLink, Bandwidth, Bytes, Link, Nanos, PeerId, Philox, Rank, Topology};
use farflung_comm::simulated::{Faults, LinkNoise, cluster_with};
use farflung_comm::{
    Algorithm, AllReduce as _, CommError, DownReason, ReduceOp, Transport, WaitMode, WireError, cost,
};

fn uniform(n: usize, link: &str) -> Topology {
    Topology::uniform(n, link.parse().unwrap())
}

fn within(got: Nanos, want: f64, tolerance: f64, what: &str) {
    let got = got.as_secs_f64();
    assert!((got - want).abs() <= tolerance * want, "{what}: {got} s, expected {want} s");
}

#[test]
fn all_reduce_takes_its_closed_form_and_its_price() {
    // For each algorithm with eight ranks: the number of latencies, and the number of buffers that each rank
    // sends.
    let forms = [
        (Algorithm::Ring, 14.0, 1.75),
        (Algorithm::RecursiveDoubling, 3.0, 3.0),
        (Algorithm::HalvingDoubling, 6.0, 1.75),
        (Algorithm::Hierarchical, 14.0, 1.75),
        (Algorithm::Direct, 2.0, 1.75),
        (Algorithm::Butterfly, 2.0, 1.75),
        // Moshpit uses a grid of 2 x 4 ranks: rings of 4 ranks, then rings of 2.
        (Algorithm::Moshpit, 8.0, 1.5 + 1.0),
    ];
    let topology = uniform(8, "1gbit,10ms");
    for (algorithm, latencies, buffers) in forms {
        for bytes in [1_000_usize, 10_000_000] {
            let want = latencies * 0.01 + buffers * bytes as f64 * 8e-9;
            let what = format!("{algorithm:?} {bytes}");
            let programs: Vec<_> = (0..8).map(|rank| algorithm.program(Rank(rank), 8)).collect();
            within(cost(&programs, Bytes(bytes as u64), &topology), want, 0.001, &what);
            let times = on_ranks(over(&topology), |comm| {
                let mut x = vec![1.0_f32; bytes / 4];
                comm.all_reduce_by(algorithm.program(comm.rank(), 8), &mut x, ReduceOp::Sum).unwrap();
                assert!(x.iter().all(|&v| v == 8.0));
                comm.now()
            });
            for time in times {
                within(time, want, 0.02, &what);
            }
        }
    }
}

#[test]
fn where_links_are_uneven_the_price_is_what_it_takes() {
    let mut topology = uniform(6, "1gbit,1ms");
    for a in 0..6 {
        let rate = Bandwidth(1_000_000_000 >> (a % 3));
        topology.set_access_link(Rank(a), AccessLink { up: rate, down: rate });
        for b in (0..6).filter(|b| b / 3 != a / 3) {
            topology.set_link(Rank(a), Rank(b), "300mbit,15ms".parse().unwrap());
        }
    }
    for algorithm in Algorithm::ALL {
        let len = 2_000_000;
        let programs = algorithm.programs(len, Bytes(4 * len as u64), &topology);
        let price = cost(&programs, Bytes(4 * len as u64), &topology);
        let times = on_ranks(over(&topology), |comm| {
            let mut x = vec![1.0_f32; len];
            let comm = comm.with_topology(topology.clone()).unwrap().with_algorithm(algorithm);
            comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert!(x.iter().all(|&v| v == 6.0));
            comm.now()
        });
        within(*times.iter().max().unwrap(), price.as_secs_f64(), 0.002, &format!("{algorithm:?}"));
    }
}

#[test]
fn auto_is_the_cheapest_one_on_the_declared_links() {
    let fast = uniform(8, "1gbit,10ms");
    assert_eq!(Algorithm::Auto.resolve(Bytes(1_000), &fast), Algorithm::Direct);
    assert_eq!(Algorithm::Ring.resolve(Bytes(1_000), &fast), Algorithm::Ring);
    for bytes in [1_000, 1_000_000, 100_000_000] {
        let price =
            |a: Algorithm| cost(&a.programs(bytes as usize / 4, Bytes(bytes), &fast), Bytes(bytes), &fast);
        let least = Algorithm::ALL.into_iter().map(price).min().unwrap();
        within(price(Algorithm::Auto), least.as_secs_f64(), 1e-5, "auto");
    }
}

#[test]
fn a_wait_costs_the_greater_of_compute_and_communication() {
    let reduce = |compute: u64| {
        let times = on_ranks(over(&uniform(4, "100mbit,20ms")), |comm| {
            let pending = comm.start_all_reduce(vec![1.0_f32; 1 << 20], ReduceOp::Mean);
            comm.advance(Nanos::from_millis(compute));
            pending.wait().unwrap();
            comm.now()
        });
        *times.iter().max().unwrap()
    };
    let alone = reduce(0);
    // Of the six latencies of a pipelined ring, five overlap with transfers.
    within(alone, 0.02 + 1.5 * (4 << 20) as f64 * 8e-8, 0.02, "alone");
    for compute in [50, 300, 523, 700, 2000] {
        within(reduce(compute), alone.as_secs_f64().max(compute as f64 / 1e3), 0.02, "overlapped");
    }
}

#[test]
fn started_together_they_share_the_link() {
    let times = on_ranks(over(&uniform(2, "100mbit,1ms")), |comm| {
        let started: Vec<_> =
            (0..4).map(|_| comm.start_all_reduce(vec![1.0_f32; 250_000], ReduceOp::Sum)).collect();
        for pending in started {
            pending.wait().unwrap();
        }
        comm.now()
    });
    // Four megabytes over one access link. The latencies overlap with other transfers.
    within(times[0], 0.32, 0.02, "four at once");
    assert_eq!(times[0], times[1]);
}

#[test]
fn the_receivers_downlink_is_shared_and_the_far_do_not_hold_up_the_near() {
    let mut topology = uniform(4, "1gbit,1ms");
    topology
        .set_access_link(Rank(0), AccessLink { up: Bandwidth(1_000_000_000), down: Bandwidth(100_000_000) });
    topology.set_link(
        Rank(3),
        Rank(0),
        Link { bandwidth: Bandwidth(1_000_000_000), latency: Nanos::from_millis(500) },
    );
    let times = on_ranks(over(&topology), |comm| {
        if comm.rank().0 > 0 {
            comm.send(Rank(0), 1, &vec![0; 1_000_000]).unwrap();
            return vec![];
        }
        [1, 2, 3]
            .map(|from| {
                comm.recv(Rank(from), 1).unwrap();
                comm.now()
            })
            .to_vec()
    });
    within(times[0][1], 0.161, 0.02, "two near ones");
    within(times[0][2], 0.58, 0.02, "the far one");
}

/// Two regions of two ranks, each with a line of 8 Mbit/s up and 16 Mbit/s down. The access link of rank 1 has
/// 80 Mbit/s, those of the other ranks have 800 Mbit/s.
fn with_lines() -> Topology {
    let mut topology = uniform(4, "800mbit,1ms");
    topology.set_access_link(Rank(1), AccessLink { up: Bandwidth(80_000_000), down: Bandwidth(80_000_000) });
    let line = AccessLink { up: Bandwidth(8_000_000), down: Bandwidth(16_000_000) };
    for region in [[Rank(0), Rank(1)], [Rank(2), Rank(3)]] {
        topology.set_region(&region, line);
    }
    topology
}

#[test]
fn what_leaves_a_region_shares_its_line_and_what_stays_does_not() {
    let times = on_ranks(over(&with_lines()), |comm| {
        let me = comm.rank().0;
        // Each rank of the first region sends 100 kB to its counterpart in the other region, and 100 kB to its
        // neighbour.
        if me < 2 {
            let out = comm.start_send(Rank(me + 2), 1, vec![0; 100_000]);
            comm.send(Rank(1 - me), 2, &vec![0; 100_000]).unwrap();
            out.wait().unwrap();
            comm.recv(Rank(1 - me), 2).unwrap();
        } else {
            comm.recv(Rank(me - 2), 1).unwrap();
        }
        comm.now()
    });
    // Both messages leave over one line of 1 MB/s.
    within(times[2].max(times[3]), 0.201, 0.02, "two messages over one line");
    // Inside a region nothing waits for the line: the 100 kB take the time of the slower access link, after the
    // bytes that leave the region through it.
    assert!(times[0].max(times[1]) < Nanos::from_millis(30), "{times:?}");
}

#[test]
fn a_slow_access_link_does_not_hold_up_the_line_of_its_region() {
    let mut topology = with_lines();
    topology.set_access_link(Rank(1), AccessLink { up: Bandwidth(800_000), down: Bandwidth(80_000_000) });
    let times = on_ranks(over(&topology), |comm| {
        match comm.rank().0 {
            // This message takes 4 s over the rank's uplink of 100 kB/s. Its frames wait for the uplink.
            1 => comm.send(Rank(3), 1, &vec![0; 400_000]).unwrap(),
            0 => {
                comm.advance(Nanos::from_millis(1));
                comm.send(Rank(2), 1, &vec![0; 50_000]).unwrap();
            }
            rank => drop(comm.recv(Rank(rank - 2), 1).unwrap()),
        }
        comm.now()
    });
    // This message waits for at most one frame of the other message, not for its frames that still wait for the
    // uplink.
    assert!(times[2] < Nanos::from_millis(400), "{times:?}");
    within(times[3], 4.0, 0.05, "the slow one");
}

#[test]
fn lines_change_no_bit_and_no_time_from_run_to_run_and_prices_know_them() {
    let first = mixed(over(&with_lines()), None);
    for seed in 0..3 {
        assert!(mixed(over(&with_lines()), Some(seed)) == first, "seed {seed}");
    }
    for algorithm in Algorithm::ALL {
        let bytes = Bytes(400_000);
        let programs = algorithm.programs(100_000, bytes, &with_lines());
        let price = cost(&programs, bytes, &with_lines()).as_secs_f64();
        let times = on_ranks(over(&with_lines()), |comm| {
            let program = programs[comm.rank().index()].clone();
            comm.all_reduce_by(program, &mut vec![1.0_f32; 100_000], ReduceOp::Sum).unwrap();
            comm.now()
        });
        let took = times.into_iter().max().unwrap().as_secs_f64();
        assert!((took / price - 1.0).abs() < 0.02, "{algorithm}: {took} for {price}");
    }
}

/// Runs a mix of operations; returns each rank's clock after each part, and the sums.
fn mixed(cluster: Cluster, seed: Option<u64>) -> Vec<(Vec<Nanos>, Vec<u32>)> {
    on_ranks(cluster, |comm| {
        let me = comm.rank().0;
        let mut clocks = Vec::new();
        let mut sum = vec![me as f32 + 0.1; 70_000];
        for round in 0..6_u64 {
            if let Some(seed) = seed {
                let nap = Philox::new(seed, u64::from(me)).below(round, 3_000);
                std::thread::sleep(Duration::from_micros(nap));
            }
            let big = comm.start_all_reduce(sum.clone(), ReduceOp::Mean);
            comm.advance(Nanos::from_micros(1_000 * u64::from(me) + 77 * round));
            let gathered = comm.start_all_gather_bytes(vec![0; 1000 * me as usize]);
            clocks.push(comm.now());
            gathered.wait().unwrap();
            clocks.push(comm.now());
            sum = big.wait().unwrap();
            clocks.push(comm.now());
            if me.is_multiple_of(2) && me + 1 < comm.size() as u32 {
                comm.send(Rank(me + 1), 5, &vec![1; 40_000]).unwrap();
            } else if me % 2 == 1 {
                comm.recv(Rank(me - 1), 5).unwrap();
            }
            clocks.push(comm.now());
        }
        (clocks, sum.iter().map(|v| v.to_bits()).collect())
    })
}

#[test]
fn times_and_bits_do_not_depend_on_the_threads() {
    let mut topology = uniform(5, "50mbit,3ms");
    topology.set_link(Rank(1), Rank(2), "5mbit,40ms".parse().unwrap());
    let first = mixed(over(&topology), None);
    for seed in 0..12 {
        assert!(mixed(over(&topology), Some(seed)) == first, "seed {seed}");
    }
}

fn faulty(topology: &Topology, faults: &Faults) -> Cluster {
    cluster_with(topology, faults).into_iter().map(|t| t as Arc<dyn Transport>).collect()
}

#[test]
fn a_crash_in_the_middle_names_the_peer_and_no_result_is_half() {
    for at in [0, 10, 60, 130, 300, 400] {
        let faults = Faults::new().at(Nanos::from_millis(at)).crash(PeerId(2));
        let ends = on_ranks(faulty(&uniform(4, "100mbit,20ms"), &faults), |comm| {
            let mut x = vec![1.0_f32; 1 << 20];
            let result = comm.all_reduce(&mut x, ReduceOp::Sum);
            assert!(x.iter().all(|v| if result.is_ok() { *v == 4.0 } else { v.is_nan() }));
            (result.err(), comm.now())
        });
        for (rank, (error, time)) in ends.iter().enumerate() {
            match error {
                Some(error) if rank == 2 => assert!(matches!(error, CommError::Ended { .. }), "{error}"),
                Some(error) => assert_eq!(error.peer(), Some(PeerId(2)), "at {at} ms, rank {rank}: {error}"),
                // A rank that needs no more data from the lost peer ends with the complete sum.
                None => assert!(at == 400 && rank < 2, "at {at} ms, rank {rank}"),
            }
            assert!(*time < Nanos::from_millis(at + 700), "at {at} ms, rank {rank}: {time}");
        }
        let told = |e: &CommError| matches!(e, CommError::PeerDown { reason: DownReason::Crashed, .. });
        assert!(ends[3].0.as_ref().is_some_and(told), "{ends:?}");
    }
}

#[test]
fn a_cut_link_is_found_at_the_deadline_in_virtual_time() {
    let faults = Faults::new().at(Nanos::from_millis(30)).cut(PeerId(0), PeerId(1));
    let errors = on_ranks(faulty(&uniform(3, "100mbit,20ms"), &faults), |comm| {
        let comm = comm.with_deadline(Nanos::from_millis(2_000));
        let error = comm.all_reduce(&mut vec![1.0_f32; 1 << 18], ReduceOp::Sum).unwrap_err();
        (error, comm.now())
    });
    assert!(
        errors.iter().any(|(e, _)| matches!(e, CommError::Deadline { peer: PeerId(0), .. })),
        "{errors:?}"
    );
    assert!(errors.iter().all(|(_, time)| *time <= Nanos::from_millis(2_100)), "{errors:?}");
}

/// Returns the time at which each of four ranks has all-reduced 400 kB over 100 Mbit/s and 20 ms, and its
/// error.
fn under(faults: &Faults) -> Vec<(Nanos, Option<CommError>)> {
    on_ranks(faulty(&uniform(4, "100mbit,20ms"), faults), |comm| {
        let comm = comm.with_deadline(Nanos::from_millis(2_000));
        let mut x = vec![1.0_f32; 100_000];
        let error = comm.all_reduce(&mut x, ReduceOp::Sum).err();
        assert!(x.iter().all(|v| if error.is_none() { *v == 4.0 } else { v.is_nan() }));
        (comm.now(), error)
    })
}

#[test]
fn bad_weather_delays_and_loses_nothing() {
    let ms = Nanos::from_millis;
    // Six steps, each of 8 ms of transfer and 20 ms of latency.
    assert!(under(&Faults::new()).iter().all(|(time, _)| (ms(168)..ms(169)).contains(time)));
    let jitter = LinkNoise { seed: 1, jitter: ms(10), ..LinkNoise::default() };
    let late = under(&Faults::new().weather(jitter));
    assert!(
        late.iter().all(|(time, error)| error.is_none() && (ms(172)..ms(228)).contains(time)),
        "{late:?}"
    );
    let lossy = LinkNoise { seed: 1, loss: 300_000, retransmit: ms(200), ..LinkNoise::default() };
    let late = under(&Faults::new().weather(lossy));
    assert!(late.iter().all(|(time, error)| error.is_none() && *time > ms(368)), "{late:?}");
    assert_eq!(format!("{late:?}"), format!("{:?}", under(&Faults::new().weather(lossy))));
}

#[test]
fn a_freeze_ends_and_a_partition_does_not_lose_what_comes_after() {
    let ms = Nanos::from_millis;
    let frozen = under(&Faults::new().at(ms(50)).freeze(PeerId(1), ms(500)));
    assert!(frozen.iter().all(|(time, error)| error.is_none() && *time > ms(500)), "{frozen:?}");
    assert!(frozen.iter().all(|(time, _)| *time < ms(700)), "{frozen:?}");
    // No frame departs between 5 and 20 ms, so a partition in that time loses nothing.
    let island = [PeerId(0), PeerId(1)];
    let healed = under(&Faults::new().at(ms(5)).partition(&island, 4, ms(20)));
    assert!(healed.iter().all(|(_, error)| error.is_none()), "{healed:?}");
    let parted = under(&Faults::new().at(ms(5)).partition(&island, 4, Nanos::MAX));
    assert!(parted.iter().all(|(time, error)| error.is_some() && *time <= ms(2_100)), "{parted:?}");
}

/// For each of eight ranks: the time at which an all-reduce by `algorithm` under `faults` ended, its error, and
/// whether the remaining ranks could continue after a shrink.
fn survive(algorithm: Algorithm, faults: &Faults, lost: &[u32]) -> Vec<(Nanos, Option<CommError>, bool)> {
    let deadline = Nanos::from_millis(2_000);
    on_ranks(faulty(&uniform(8, "100mbit,20ms"), faults), |comm| {
        let comm = comm.with_deadline(deadline).with_algorithm(algorithm);
        let mut x = vec![1.0_f32; 50_000];
        let error = comm.all_reduce(&mut x, ReduceOp::Sum).err();
        assert!(x.iter().all(|v| if error.is_none() { *v == 8.0 } else { v.is_nan() }));
        let time = comm.now();
        if lost.contains(&comm.rank().0) {
            // The lost rank still takes part here, so that the others wait for it.
            let _ = comm.barrier();
            return (time, error, false);
        }
        let again = comm.shrink().and_then(|left| {
            let mut y = [1_u32; 5];
            left.all_reduce(&mut y, ReduceOp::Sum).map(|()| y[0] as usize == left.size())
        });
        (time, error, again.unwrap_or(false))
    })
}

#[test]
fn a_silent_rank_is_named_by_all_and_the_others_go_on_without_it() {
    for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Direct, Algorithm::DoubleTree] {
        for at in [0, 25, 60, 110] {
            let faults =
                Faults::new().at(Nanos::from_millis(at)).freeze(PeerId(3), Nanos::from_millis(60_000));
            let ends = survive(algorithm, &faults, &[3]);
            for (rank, (time, error, again)) in ends.iter().enumerate().filter(|(rank, _)| *rank != 3) {
                let what = format!("{algorithm:?} at {at}, rank {rank}: {error:?} at {time}");
                match error {
                    Some(error) => assert_eq!(error.peer(), Some(PeerId(3)), "{what}"),
                    // A rank that needed no more data from the lost rank succeeds.
                    None => assert!(*time < Nanos::from_millis(2_000), "{what}"),
                }
                assert!(*time <= Nanos::from_millis(2_050), "{what}");
                let all_failed = ends.iter().all(|(_, error, _)| error.is_some());
                assert!(*again || !all_failed, "{what}");
            }
        }
    }
}

/// Messages along a chain: a rank that waits for a rank that itself waits reports the silent one, even if the
/// ranks in between wait in another group.
#[test]
fn whoever_waits_behind_another_names_the_silent_one() {
    for mixed in [false, true] {
        let said = on_ranks(over(&uniform(4, "1gbit,10ms")), |comm| {
            let comm = comm.with_deadline(Nanos::from_millis(2_000));
            let pair = comm.split(comm.rank().0 / 2, comm.rank().0).unwrap();
            let error = match comm.rank().0 {
                0 => comm.recv(Rank(1), 0).map(|_| ()),
                1 => comm.recv(Rank(2), 0).map(|_| ()),
                2 if mixed => pair.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
                2 => comm.recv(Rank(3), 0).map(|_| ()),
                _ => {
                    comm.advance(Nanos::from_millis(10_000));
                    return None;
                }
            };
            error.unwrap_err().peer()
        });
        assert_eq!(said, [Some(PeerId(3)), Some(PeerId(3)), Some(PeerId(3)), None], "mixed: {mixed}");
    }
}

#[test]
fn a_cut_link_is_named_by_one_of_its_ends() {
    for at in [0, 30, 70, 150] {
        let faults = Faults::new().at(Nanos::from_millis(at)).cut(PeerId(4), PeerId(5));
        let ends = survive(Algorithm::Ring, &faults, &[]);
        assert!(ends.iter().any(|(_, error, _)| error.is_some()), "at {at}");
        for (rank, (time, error, _)) in ends.iter().enumerate() {
            let what = format!("at {at}, rank {rank}: {error:?} at {time}");
            // A rank that needed no more data from the other end succeeds.
            let named = error.as_ref().map(CommError::peer);
            assert!([None, Some(Some(PeerId(4))), Some(Some(PeerId(5)))].contains(&named), "{what}");
            assert!(*time <= Nanos::from_millis(2_050), "{what}");
        }
    }
}

#[test]
fn a_spoilt_frame_is_told_with_its_sender() {
    let spoilt = under(&Faults::new().at(Nanos::from_millis(60)).corrupt(PeerId(1), PeerId(2)));
    let told = |e: &CommError| {
        matches!(
            e,
            CommError::PeerDown { peer: PeerId(1), reason: DownReason::Protocol(WireError::Checksum), .. }
        )
    };
    assert!(spoilt[2].1.as_ref().is_some_and(told), "{spoilt:?}");
    assert!(
        spoilt.iter().all(|(time, error)| error.is_some() && *time < Nanos::from_millis(300)),
        "{spoilt:?}"
    );
}

#[test]
fn a_deadlock_without_deadlines_is_told_and_does_not_hang() {
    let errors = on_ranks(over(&uniform(3, "100mbit,20ms")), |comm| {
        let next = Rank((comm.rank().0 + 1) % 3);
        comm.clone().with_deadline(Nanos::MAX).recv(next, 0).unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        let next = PeerId((rank as u32 + 1) % 3);
        assert!(matches!(error, CommError::Deadlock { peer, .. } if *peer == next), "{error}");
    }
}

#[test]
fn what_has_arrived_is_a_matter_of_the_clock_alone() {
    for (latency, nap) in [("1gbit,10ms", 0), ("1gbit,10ms", 1), ("1gbit,0ms", 2)] {
        let first = on_ranks(over(&uniform(3, latency)), |comm| {
            let me = comm.rank().0;
            if me > 0 {
                // By virtual time rank 1 sends at 20 ms and 22 ms, and rank 2 at 5 ms, whichever thread is
                // faster.
                std::thread::sleep(Duration::from_millis(u64::from((me + nap) % 3) * 3));
                comm.advance(Nanos::from_millis(if me == 1 { 20 } else { 5 }));
                comm.send(Rank(0), 0, &vec![me as u8; 300_000]).unwrap();
                comm.advance(Nanos::from_millis(2));
                comm.send(Rank(0), 1, b"").unwrap();
                return Vec::new();
            }
            let mut seen = Vec::new();
            let (mut one, mut two) = (comm.start_recv(Rank(1), 0), comm.start_recv(Rank(2), 0));
            let mut late = comm.start_recv(Rank(1), 1);
            comm.advance(Nanos::from_millis(4));
            seen.push(comm.first(&mut [&mut one, &mut two], WaitMode::Now));
            seen.push(comm.first(&mut [&mut one, &mut two], WaitMode::UntilOne));
            assert_eq!(two.wait().unwrap(), vec![2; 300_000]);
            seen.push(comm.first(&mut [&mut late, &mut one], WaitMode::Now));
            let waited = comm.now();
            comm.advance(Nanos::from_millis(60).saturating_sub(waited));
            // Both messages have arrived: the index of the first one in the list is returned.
            seen.push(comm.first(&mut [&mut late, &mut one], WaitMode::Now));
            assert_eq!(comm.now(), Nanos::from_millis(60), "to look takes no time");
            assert_eq!((one.wait().unwrap(), late.wait().unwrap()), (vec![1; 300_000], Vec::new()));
            seen.push(comm.first::<()>(&mut [], WaitMode::UntilOne));
            seen
        });
        assert_eq!(first[0], [None, Some(1), None, Some(0), None], "{latency} {nap}");
    }
}

#[test]
fn a_look_ends_with_the_first_arrival_or_with_its_time() {
    let looks = on_ranks(over(&uniform(2, "1gbit,1ms")), |comm| {
        if comm.rank().0 == 1 {
            comm.advance(Nanos::from_millis(20));
            comm.send(Rank(0), 0, b"late").unwrap();
            return Vec::new();
        }
        let mut late = comm.start_recv(Rank(1), 0);
        let mut look = |millis| {
            let first = comm.first(&mut [&mut late], WaitMode::Within(Nanos::from_millis(millis)));
            (first, comm.now().0 / 1_000_000)
        };
        vec![look(5), look(0), look(10), look(100)]
    });
    // The clock moves to the time of an arrival only when the rank waits for it.
    assert_eq!(looks[0], [(None, 5), (None, 5), (None, 15), (Some(0), 15)]);
}
