//! Cancelled operations end at once, on every transport. The other ranks learn which rank cancelled, and all
//! can continue.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::float_cmp, reason = "these sums are exact")]

use std::sync::Barrier;
use std::time::Duration;

use crate::common::{TRANSPORTS, on_ranks, over};
use farflung_base::{Nanos, PeerId, Rank, Topology};
use farflung_comm::{Algorithm, Cancel, CommError, Communicator, FRAME_BYTES, ReduceOp, Tag, WINDOW};

/// A pause in which the other thread normally falls asleep in its wait. The result does not depend on it.
const A_MOMENT: Duration = Duration::from_millis(20);

fn sum(comm: &Communicator, value: f64) -> f64 {
    let mut x = [value; 100];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    x[99]
}

#[test]
fn a_blocked_receive_is_cancelled_by_another_thread_and_its_message_goes_to_the_next() {
    for (name, cluster) in TRANSPORTS {
        let cancel = Cancel::new();
        on_ranks(cluster(3), |comm| {
            if comm.rank().0 == 1 {
                std::thread::sleep(A_MOMENT);
                cancel.cancel();
                comm.send(Rank(0), 4, b"late").unwrap();
            }
            if comm.rank().0 == 0 {
                let cancellable = comm.clone().with_cancel(&cancel);
                let one = cancellable.recv(Rank(1), 4).unwrap_err();
                assert!(matches!(one, CommError::Cancelled { op: "recv" }), "{name}: {one}");
                // The switch stays on.
                let any = cancellable.recv_any(&[Rank(1), Rank(2)], 4).unwrap_err();
                assert!(matches!(any, CommError::Cancelled { op: "recv_any" }), "{name}: {any}");
                assert_eq!(comm.recv(Rank(1), 4).unwrap(), b"late", "{name}");
            }
            // Cancelled messages do not end the communicator.
            assert_eq!(sum(&comm, 1.0), 3.0, "{name}");
        });
    }
}

#[test]
fn a_collective_is_cancelled_by_another_thread_and_all_go_on_under_a_new_epoch() {
    for (name, cluster) in TRANSPORTS {
        let cancel = Cancel::new();
        let started = Barrier::new(2);
        on_ranks(cluster(3), |comm| {
            let me = comm.rank().0;
            let mut x = vec![1.0_f32; 200_000];
            if me == 2 {
                // Cancels while the other ranks wait in their collectives, and this rank has not started its
                // own.
                started.wait();
                std::thread::sleep(A_MOMENT);
                cancel.cancel();
                while comm.check().is_ok() {
                    let late = comm.all_reduce(&mut x, ReduceOp::Sum).unwrap_err();
                    assert!(matches!(late, CommError::CancelledBy { peer: PeerId(0), .. }), "{name}: {late}");
                }
            } else if me == 0 {
                started.wait();
                let cancellable = comm.clone().with_cancel(&cancel);
                let error = cancellable.all_reduce(&mut x, ReduceOp::Sum).unwrap_err();
                assert!(matches!(error, CommError::Cancelled { op: "all_reduce" }), "{name}: {error}");
            } else {
                let error = comm.start_all_reduce(x.clone(), ReduceOp::Sum).wait().unwrap_err();
                assert!(matches!(error, CommError::CancelledBy { peer: PeerId(0), .. }), "{name}: {error}");
                x.fill(f32::NAN);
            }
            assert!(x.iter().all(|v| v.is_nan()), "{name}: something half-reduced");
            let again = comm.barrier().unwrap_err();
            assert!(matches!(&again, CommError::Poisoned(_)) && again.is_cancelled(), "{name}: {again}");
            let left = comm.shrink().unwrap();
            assert_eq!((left.size(), left.rank().0), (3, me), "{name}");
            assert_eq!(sum(&left, f64::from(me)), 3.0, "{name}");
        });
    }
}

#[test]
fn an_abort_ends_what_this_ranks_own_threads_wait_for_though_nobody_else_is_there() {
    for (name, cluster) in TRANSPORTS {
        let over = Barrier::new(2);
        on_ranks(cluster(2), |comm| {
            if comm.rank().0 == 0 {
                std::thread::scope(|scope| {
                    let waits = scope.spawn(|| comm.barrier().unwrap_err());
                    let other = scope.spawn(|| {
                        std::thread::sleep(A_MOMENT);
                        comm.abort();
                    });
                    other.join().unwrap();
                    let error = waits.join().unwrap();
                    assert!(error.is_cancelled(), "{name}: {error}");
                });
            }
            // The other rank takes part in no collective and sends no message until this barrier.
            over.wait();
            if comm.rank().0 == 1 {
                // One barrier may still succeed, with messages that were sent before the cancellation.
                let error = std::iter::from_fn(|| Some(comm.barrier())).find_map(Result::err).unwrap();
                assert!(matches!(error, CommError::CancelledBy { peer: PeerId(0), .. }), "{name}: {error}");
            }
            assert_eq!(sum(&comm.shrink().unwrap(), 1.0), 2.0, "{name}");
        });
    }
}

#[test]
fn a_message_that_is_cancelled_half_way_leaves_its_tag_to_the_next() {
    // Longer than the flow-control window, so that the message is not sent completely as long as the receiver
    // takes no frame.
    const LONG: usize = (WINDOW + 5) * FRAME_BYTES;
    // Simulated links are left out: they have no flow-control window, so all frames would be sent at once.
    for (name, cluster) in TRANSPORTS.into_iter().filter(|(name, _)| *name != "simulated") {
        let cancel = Cancel::new();
        on_ranks(cluster(2), |comm| {
            let cancellable = comm.clone().with_cancel(&cancel);
            if comm.rank().0 == 0 {
                let sent = cancellable.start_send(Rank(1), 7, vec![1; LONG]);
                cancel.cancel();
                let error = sent.wait().unwrap_err();
                assert!(matches!(error, CommError::Cancelled { op: "send" }), "{name}: {error}");
                comm.send(Rank(1), 8, b"cancelled").unwrap();
                comm.send(Rank(1), 7, b"whole").unwrap();
            } else {
                assert_eq!(comm.recv(Rank(0), 8).unwrap(), b"cancelled");
                let error = comm.recv(Rank(0), 7).unwrap_err();
                assert!(matches!(error, CommError::CancelledBy { peer: PeerId(0), .. }), "{name}: {error}");
                assert_eq!(comm.recv(Rank(0), 7).unwrap(), b"whole", "{name}");
            }
            assert_eq!(sum(&comm, 1.0), 2.0, "{name}");
        });
    }
}

#[test]
fn the_rest_of_a_message_that_nobody_wanted_any_more_is_dropped() {
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(2), |comm| {
            if comm.rank().0 == 0 {
                // Sends the frames of a message one by one, with a pause in the middle.
                let (transport, limit) = (comm.transport(), Nanos::from_millis(20_000));
                let send = |len| {
                    transport.send(PeerId(1), Tag::user(0, 7), transport.lease(len), limit).wait().unwrap();
                };
                send(FRAME_BYTES);
                comm.send(Rank(1), 8, b"begun").unwrap();
                assert_eq!(comm.recv(Rank(1), 8).unwrap(), b"dropped");
                send(FRAME_BYTES);
                send(5);
                comm.send(Rank(1), 7, b"next").unwrap();
            } else {
                let first = comm.start_recv(Rank(0), 7);
                assert_eq!(comm.recv(Rank(0), 8).unwrap(), b"begun");
                drop(first);
                // This receive drops the rest of the first message; it is cancelled too, so the next receive
                // drops what is left.
                drop(comm.start_recv_any(&[Rank(0)], 7));
                comm.send(Rank(0), 8, b"dropped").unwrap();
                let mut next = comm.recv(Rank(0), 7).unwrap();
                if name != "simulated" && next.len() == 2 * FRAME_BYTES + 5 {
                    // The cancelled receive had taken no frame, so the next receive got the whole message.
                    next = comm.recv(Rank(0), 7).unwrap();
                }
                assert_eq!(next, b"next", "{name}");
            }
            assert_eq!(sum(&comm, 1.0), 2.0, "{name}");
        });
    }
}

#[test]
fn at_whatever_moment_one_of_eight_cancels_all_know_by_whom_in_the_time_of_a_way_and_go_on() {
    let topology = Topology::uniform(8, "100mbit,20ms".parse().unwrap());
    for algorithm in Algorithm::ALL {
        for moment in [0, 1, 20, 21, 45, 70, 101, 160, 230] {
            let moment = Nanos::from_millis(moment);
            let run = || {
                on_ranks(over(&topology), |comm| {
                    let me = comm.rank().0;
                    let comm = comm.with_algorithm(algorithm);
                    let cancel = Cancel::new();
                    let mut result = if me == 5 {
                        let cancellable = comm.clone().with_cancel(&cancel);
                        let started = cancellable.start_all_reduce(vec![1.0_f32; 40_000], ReduceOp::Sum);
                        comm.advance(moment);
                        cancel.cancel();
                        started.wait()
                    } else {
                        comm.start_all_reduce(vec![1.0_f32; 40_000], ReduceOp::Sum).wait()
                    };
                    assert!(result.iter().flatten().all(|&v| v == 8.0), "{algorithm:?} {moment}");
                    // A rank that had completed its collective before the cancellation gets the error in the
                    // next one.
                    while result.is_ok() {
                        result = comm.start_all_reduce(vec![1.0_f32; 40_000], ReduceOp::Sum).wait();
                    }
                    let end = comm.now();
                    let error = result.unwrap_err();
                    if me == 5 {
                        assert!(matches!(error, CommError::Cancelled { .. }), "{algorithm:?}: {error}");
                    } else {
                        assert_eq!(error.peer(), Some(PeerId(5)), "{algorithm:?}: {error}");
                        // The notice arrives after the frames that were on their way already.
                        let late = end.saturating_sub(moment.max(Nanos::from_millis(1)));
                        assert!(late <= Nanos::from_millis(140), "{algorithm:?} {moment}: {late}");
                    }
                    let left = comm.shrink().unwrap();
                    assert_eq!((left.size(), sum(&left, 1.0)), (8, 8.0), "{algorithm:?} {moment}");
                    end
                })
            };
            assert_eq!(run(), run(), "{algorithm:?} {moment}");
        }
    }
}
