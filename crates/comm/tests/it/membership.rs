//! Membership of communicators, on every transport: survivors agree even if another rank is lost meanwhile, and
//! newcomers join.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::float_cmp, reason = "these sums are exact")]

use std::sync::Arc;

use crate::common::{TRANSPORTS, on_ranks};
use farflung_base::{Nanos, PeerId, Rank, Topology};
use farflung_comm::simulated::{Faults, cluster_with};
use farflung_comm::{CommError, Communicator, ReduceOp, Transport};

const fn ms(millis: u64) -> Nanos {
    Nanos::from_millis(millis)
}

fn sum(comm: &Communicator, own: f64) -> f64 {
    let mut x = [own];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    x[0]
}

/// Five ranks, of which the last is lost. While the others shrink, `second` is lost too. Its link to `deaf` is
/// cut a moment before, so that some ranks have received its messages and another has not. Returns for each
/// rank the size of its first shrunk communicator, and the number of ranks left in the end.
fn lose_two(second: PeerId, deaf: PeerId, at: Nanos) -> Vec<Option<(usize, usize)>> {
    let topology = Topology::uniform(5, "1mbit,5ms".parse().unwrap());
    let faults = Faults::new().at(ms(1)).crash(PeerId(4)).at(at).cut(second, deaf);
    let faults = faults.at(at.saturating_add(ms(2))).crash(second);
    let cluster = cluster_with(&topology, &faults).into_iter().map(|t| t as Arc<dyn Transport>).collect();
    on_ranks(cluster, |comm| {
        let comm = comm.with_deadline(ms(500));
        let lost =
            comm.all_reduce(&mut [1.0_f32; 64], ReduceOp::Sum).and_then(|()| comm.barrier()).unwrap_err();
        if matches!(lost, CommError::Ended { .. }) {
            return None;
        }
        let first = comm.shrink().ok()?;
        let mut left = first.clone();
        while left.all_reduce(&mut [1.0_f32], ReduceOp::Sum).and_then(|()| left.barrier()).is_err() {
            left = left.shrink().ok()?;
        }
        Some((first.size(), left.size()))
    })
}

#[test]
fn survivors_agree_whenever_another_is_lost_among_them() {
    let mut seen = std::collections::BTreeSet::new();
    for (second, deaf) in [(PeerId(0), PeerId(1)), (PeerId(2), PeerId(0)), (PeerId(2), PeerId(3))] {
        for step in 0..30 {
            let at = Nanos::from_micros(5_000 + 1_000 * step);
            let ends = lose_two(second, deaf, at);
            let survivors: Vec<_> =
                (0..4).filter(|&rank| rank != second.index()).map(|rank| ends[rank]).collect();
            assert!(survivors.iter().all(|&end| end == survivors[0]), "{second}, {deaf} at {at}: {ends:?}");
            assert_eq!(survivors[0].unwrap().1, 3, "{second}, {deaf} at {at}: {ends:?}");
            seen.insert(survivors[0].unwrap().0);
        }
    }
    // `second` was lost before the vote in some runs, and in or after it in others.
    assert_eq!(seen, [3, 4].into());
}

#[test]
fn spare_ranks_come_in_and_a_lost_one_makes_room() {
    for (name, cluster) in TRANSPORTS {
        let sums = on_ranks(cluster(4), |comm| {
            let transport = Arc::clone(comm.transport());
            let me = transport.me().0;
            if me >= 2 {
                let first = Communicator::wait_for_admission(&transport, ms(20_000)).unwrap();
                assert_eq!((first.rank().0, first.size()), (me, if me == 2 { 3 } else { 4 }), "{name}");
                if me == 2 {
                    sum(&first, 2.0);
                    let all = first.admit(&[PeerId(3)]).unwrap();
                    return sum(&all, 20.0);
                }
                return sum(&first, 30.0);
            }
            let pair = Communicator::of_first(transport, 2).unwrap().with_deadline(ms(20_000));
            assert_eq!(sum(&pair, 1.0), 2.0);
            let three = pair.admit(&[PeerId(2)]).unwrap();
            assert_eq!((three.rank().0, three.size()), (me, 3), "{name}");
            assert_eq!(sum(&three, 3.0), 8.0, "{name}");
            let all = three.admit(&[PeerId(3)]).unwrap();
            // The old communicator still works.
            assert_eq!(sum(&pair, 5.0), 10.0);
            sum(&all, 1.0)
        });
        assert_eq!(sums, [52.0; 4], "{name}");
    }
}

#[test]
fn a_newcomer_that_does_not_come_costs_its_deadline_and_nothing_else() {
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(3), |comm| {
            let transport = Arc::clone(comm.transport());
            if transport.me().0 == 2 {
                // Not admitted yet: the wait ends at its deadline.
                let late = Communicator::wait_for_admission(&transport, ms(1)).unwrap_err();
                assert!(matches!(late, CommError::Deadline { .. }), "{name}: {late}");
                for rank in [0, 1] {
                    comm.send(Rank(rank), 2, b"gone").unwrap();
                }
                assert_eq!(comm.recv(Rank(0), 1).unwrap(), b"done");
                return;
            }
            let pair = Communicator::of_first(transport, 2).unwrap().with_deadline(ms(400));
            assert_eq!(comm.recv(Rank(2), 2).unwrap(), b"gone");
            let error = pair.admit(&[PeerId(2)]).unwrap_err();
            assert_eq!(error.peer(), Some(PeerId(2)), "{name}: {error}");
            assert_eq!(sum(&pair, 1.0), 2.0, "{name}");
            for wrong in [PeerId(1), PeerId(3)] {
                assert!(matches!(
                    pair.admit(&[wrong]),
                    Err(CommError::Argument {
                        what: "newcomer (must not be a member, and be below the number of endpoints)",
                        ..
                    })
                ));
            }
            if pair.rank().0 == 0 {
                comm.send(Rank(2), 1, b"done").unwrap();
            }
        });
    }
}

#[test]
fn an_aborted_communicator_ends_everywhere_and_names_who_did_it() {
    for (name, cluster) in TRANSPORTS {
        let errors = on_ranks(cluster(3), |comm| {
            if comm.rank().0 == 1 {
                comm.abort();
                return comm.barrier().unwrap_err();
            }
            comm.barrier().unwrap_err()
        });
        assert!(matches!(errors[1], CommError::Poisoned(_)), "{name}");
        assert_eq!([errors[0].peer(), errors[2].peer()], [Some(PeerId(1)); 2], "{name}: {errors:?}");
    }
}
