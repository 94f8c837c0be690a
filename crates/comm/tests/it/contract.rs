//! The contract of every transport: results of collectives do not depend on it.

#![expect(clippy::float_cmp, reason = "these sums are exact")]
#![expect(clippy::cast_possible_wrap, reason = "ranks are small")]

use std::error::Error;
use std::ops::Range;

use crate::common::{TRANSPORTS, on_ranks};
use crate::laws::{Among, LAWS};
use farflung_base::{Bytes, Nanos, PeerId, Rank};
use farflung_comm::{
    Algorithm, Cancel, CodedSlice, CodedValues, Coder, CoderError, CommError, FRAME_BYTES, Merge, Phase,
    ReduceOp, Source, Tag, coded_exchange, coded_ring, pipelined_ring, ring,
};

const ALGORITHMS: [Algorithm; 9] = Algorithm::ALL;

#[test]
fn every_law_holds_over_every_transport_with_the_same_bits() {
    for law in LAWS {
        let mut reference: Option<Vec<u64>> = None;
        for (name, cluster) in TRANSPORTS {
            let switch = Cancel::new();
            let found = on_ranks(cluster(law.ranks), |comm| law.hold(comm, Among::Threads(&switch)).unwrap());
            let broken = found.iter().find(|found| found.broken > 0);
            assert_eq!(broken, None, "{}, over {name}: see that line of laws/mod.rs", law.name);
            let bits = found.iter().map(|found| found.bits).collect();
            assert_eq!(
                reference.get_or_insert_with(|| Vec::clone(&bits)),
                &bits,
                "{}, over {name}",
                law.name
            );
        }
    }
}

#[test]
fn what_a_rank_finds_is_read_as_it_is_said() {
    let found = crate::laws::Found { broken: 2, line: 70, bits: u64::MAX };
    assert_eq!(format!("test a ... {found}").parse(), Ok(found));
    assert!("test a ... ok".parse::<crate::laws::Found>().is_err());
}

#[test]
fn all_reduce_is_exact_for_every_size() {
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 3, 6, 8] {
            let sizes = [0, 1, n - 1, 127, FRAME_BYTES / 4 + 17];
            let ok = on_ranks(cluster(n), |comm| {
                let me = comm.rank().index();
                for algorithm in ALGORITHMS {
                    let comm = comm.clone().with_algorithm(algorithm);
                    for len in sizes {
                        let mut x: Vec<f32> = (0..len).map(|i| ((i % 1000) * (me + 1)) as f32).collect();
                        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        let ranks = n * (n + 1) / 2;
                        assert!(
                            x.iter().enumerate().all(|(i, &v)| v == ((i % 1000) * ranks) as f32),
                            "{len}"
                        );
                        let x: Vec<f64> = (0..len).map(|i| (i * (me + 1)) as f64).collect();
                        let mean = comm.start_all_reduce(x.clone(), ReduceOp::Mean);
                        let max = comm.start_all_reduce(x.clone(), ReduceOp::Max);
                        let min = comm.start_all_reduce(x, ReduceOp::Min);
                        // The operations are waited for in another order than they were started.
                        assert!(min.wait().unwrap().iter().enumerate().all(|(i, &v)| v == i as f64));
                        let mean = mean.wait().unwrap();
                        assert!(mean.iter().enumerate().all(|(i, &v)| v == (i * ranks) as f64 / n as f64));
                        assert!(max.wait().unwrap().iter().enumerate().all(|(i, &v)| v == (i * n) as f64));
                    }
                }
                let mut votes = [1_u64, me as u64];
                comm.all_reduce(&mut votes, ReduceOp::Sum).unwrap();
                votes == [n as u64, (n * (n - 1) / 2) as u64]
            });
            assert!(ok.iter().all(|&ok| ok), "{name} {n}");
        }
    }
}

#[test]
fn the_bits_are_the_same_on_every_rank_and_transport() {
    for algorithm in ALGORITHMS {
        let mut reference: Option<Vec<u32>> = None;
        for (name, cluster) in TRANSPORTS {
            let results = on_ranks(cluster(6), |comm| {
                let me = comm.rank().index();
                let comm = comm.with_algorithm(algorithm);
                let mut x: Vec<f32> = (0..20_003)
                    .map(|i| (i as f32 * 0.37 + me as f32).sin() * 10f32.powi(me as i32 - 3))
                    .collect();
                comm.all_reduce(&mut x, ReduceOp::Mean).unwrap();
                x.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            });
            for bits in results {
                assert!(reference.get_or_insert_with(|| bits.clone()) == &bits, "{name} {algorithm:?}");
            }
        }
    }
}

#[test]
fn a_pipelined_ring_has_the_bits_of_a_plain_one() {
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 3] {
            on_ranks(cluster(n), |comm| {
                let me = comm.rank();
                let values = |i: u32| (i as f32 * 0.37 + me.0 as f32).sin();
                let x: Vec<f32> = (0..400_003).map(values).collect();
                let (mut plain, mut chunked, mut chosen) = (x.clone(), x.clone(), x);
                comm.all_reduce_by(ring(me, n), &mut plain, ReduceOp::Sum).unwrap();
                comm.all_reduce_by(pipelined_ring(me, n, 5), &mut chunked, ReduceOp::Sum).unwrap();
                comm.all_reduce(&mut chosen, ReduceOp::Sum).unwrap();
                assert!(plain == chunked && plain == chosen, "{name} {n}");
            });
        }
    }
}

#[test]
fn the_other_collectives_do_what_they_say() {
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 3, 5] {
            on_ranks(cluster(n), |comm| {
                let me = comm.rank().index();
                for len in [0, 1, 7, 70_001] {
                    let mut x: Vec<f32> = (0..len).map(|i| (i + me) as f32).collect();
                    let shard = comm.reduce_scatter(&mut x, ReduceOp::Sum).unwrap();
                    assert_eq!(shard, comm.shard(len));
                    let sum = |i: usize| (i * n + n * (n - 1) / 2) as f32;
                    assert!(shard.clone().all(|i| x[i] == sum(i)), "{name} {n} {len}");
                    for i in (0..len).filter(|i| !shard.contains(i)) {
                        x[i] = f32::NAN;
                    }
                    comm.all_gather(&mut x).unwrap();
                    assert!(x.iter().enumerate().all(|(i, &v)| v == sum(i)), "{name} {n} {len}");
                }
                for len in [0, 5, 300_000] {
                    let root = Rank((n - 1) as u32);
                    let mut x = vec![me as u64; len];
                    comm.broadcast(&mut x, root).unwrap();
                    assert!(x.iter().all(|&v| v == root.0 as u64));
                }
                comm.barrier().unwrap();
                let all = comm.all_gather_bytes(vec![me as u8; me * FRAME_BYTES / 2]).unwrap();
                for (rank, bytes) in all.iter().enumerate() {
                    assert_eq!(
                        (bytes.len(), bytes.iter().all(|&b| b == rank as u8)),
                        (rank * FRAME_BYTES / 2, true)
                    );
                }
                let out = (0..n).map(|to| vec![me as u8, to as u8]).collect();
                let all = comm.all_to_all_bytes(out).unwrap();
                assert!(all.iter().enumerate().all(|(from, m)| *m == [from as u8, me as u8]));
                // A ring of messages longer than all flow-control windows. All ranks send before they receive.
                let next = Rank(((me + 1) % n) as u32);
                let last = Rank(((me + n - 1) % n) as u32);
                let sent = comm.start_send(next, 9, vec![me as u8; 12 << 20]);
                let got = comm.recv(last, 9).unwrap();
                assert_eq!((got.len(), got[0]), (12 << 20, last.0 as u8));
                sent.wait().unwrap();
            });
        }
    }
}

#[test]
fn the_uneven_and_the_rooted_ones_do_what_they_say() {
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 3, 6] {
            on_ranks(cluster(n), |comm| {
                let me = comm.rank().index();
                let counts: Vec<usize> = (0..n).map(|r| (r * 70_000 + 5 * (n - r)) % 90_001).collect();
                let at = |r: usize| counts[..r].iter().sum::<usize>();
                let len = at(n);
                let mut x: Vec<i64> = (0..len).map(|i| (i + me) as i64).collect();
                let own = comm.reduce_scatter_v(&mut x, &counts, ReduceOp::Sum).unwrap();
                assert_eq!(own, at(me)..at(me) + counts[me]);
                let sum = |i: usize| (i * n + n * (n - 1) / 2) as i64;
                assert!(own.clone().all(|i| x[i] == sum(i)), "{name} {n}");
                x.iter_mut().enumerate().filter(|(i, _)| !own.contains(i)).for_each(|(_, v)| *v = -1);
                comm.all_gather_v(&mut x, &counts).unwrap();
                assert!(x.iter().enumerate().all(|(i, &v)| v == sum(i)), "{name} {n}");

                for root in (0..n as u32).map(Rank) {
                    let mut x = vec![(me + 1) as u16; 1001];
                    comm.reduce(&mut x, ReduceOp::Product, root).unwrap();
                    let product: u16 = (1..=n as u16).product();
                    assert!(comm.rank() != root || x.iter().all(|&v| v == product));
                    let own = vec![me as u8; counts[me]];
                    let gathered = comm.gather(&own, &counts, root).unwrap();
                    assert_eq!(gathered.is_some(), comm.rank() == root);
                    let all: Vec<u8> = (0..n).flat_map(|r| vec![r as u8; counts[r]]).collect();
                    assert!(gathered.is_none_or(|gathered| gathered == all));
                    let from = if comm.rank() == root { &all[..] } else { &[] };
                    assert_eq!(comm.scatter(from, &counts, root).unwrap(), own);
                }

                let out: Vec<u32> = (0..n * 40_000).map(|i| (me * n + i / 40_000) as u32).collect();
                let back = comm.all_to_all(&out).unwrap();
                assert!(
                    back.iter().enumerate().all(|(i, &v)| v as usize == i / 40_000 * n + me),
                    "{name} {n}"
                );
                // Rank `r` sends `10 r + j` elements to rank `j`.
                let sent: Vec<usize> = (0..n).map(|j| 10 * me + j).collect();
                let received: Vec<usize> = (0..n).map(|r| 10 * r + me).collect();
                let out: Vec<i16> = sent.iter().flat_map(|&v| vec![v as i16; v]).collect();
                let want: Vec<i16> = received.iter().flat_map(|&v| vec![v as i16; v]).collect();
                assert_eq!(comm.all_to_all_v(&out, &sent, &received).unwrap(), want);

                // Neighbours form a star, a ring, and pairs.
                let star: Vec<Rank> = if me == 0 { (1..n as u32).map(Rank).collect() } else { vec![Rank(0)] };
                let mut ring = vec![Rank(((me + 1) % n) as u32), Rank(((me + n - 1) % n) as u32)];
                ring.dedup();
                ring.retain(|&r| r != comm.rank());
                for neighbors in [star, ring] {
                    let theirs = comm.neighbor_exchange(&[me as f64; 3], &neighbors).unwrap();
                    let want: Vec<Vec<f64>> = neighbors.iter().map(|r| vec![r.index() as f64; 3]).collect();
                    assert_eq!(theirs, want, "{name} {n}");
                }
                for round in 0..3 {
                    let partner = farflung_comm::shift_one(comm.rank(), n, round);
                    let neighbors: Vec<Rank> = partner.into_iter().collect();
                    let theirs = comm.neighbor_exchange(&[me as u8], &neighbors).unwrap();
                    assert_eq!(theirs, neighbors.iter().map(|r| vec![r.0 as u8]).collect::<Vec<_>>());
                }
                assert!(comm.neighbor_exchange(&[0_u8], &[comm.rank()]).is_err());
                assert!(comm.all_gather_v(&mut [0_u8; 3], &vec![1; n + 1]).is_err());
                assert!(comm.reduce(&mut [0_u8], ReduceOp::Sum, Rank(n as u32)).is_err());
            });
        }
    }
}

#[test]
fn a_split_is_a_communicator_of_its_own() {
    for (name, cluster) in TRANSPORTS {
        let sums = on_ranks(cluster(5), |comm| {
            let me = comm.rank().0;
            let half = comm.split(me % 2, 10 - me).unwrap();
            let mut x = [f64::from(me)];
            let whole = comm.start_all_reduce(x.to_vec(), ReduceOp::Sum);
            half.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(whole.wait().unwrap(), [10.0]);
            (half.rank().0, half.size(), x[0])
        });
        assert_eq!(sums, [(2, 3, 6.0), (1, 2, 4.0), (1, 3, 6.0), (0, 2, 4.0), (0, 3, 6.0)], "{name}");
    }
}

/// A coder that rounds to multiples of 1/4, without error feedback.
struct Quarters;

impl Coder for Quarters {
    fn encode(&mut self, _: Phase, _: Range<usize>, x: &[f32], out: &mut Vec<u8>) -> Result<(), CoderError> {
        out.extend(x.iter().map(|v| (v * 4.0).round() as i8 as u8));
        Ok(())
    }
    fn decode(&mut self, range: Range<usize>, bytes: &[u8], out: &mut [f32]) -> Result<(), CoderError> {
        if bytes.len() != range.len() || range.len() != out.len() {
            return Err("length".into());
        }
        out.iter_mut().zip(bytes).for_each(|(v, &b)| *v = f32::from(b as i8) / 4.0);
        Ok(())
    }
}

/// Values of another type, which are encoded to the same bytes as those of [`Quarters`].
struct Elsewhere(Vec<i32>);

impl CodedValues for Elsewhere {
    fn count(&self) -> usize {
        self.0.len()
    }
    fn encode(&mut self, _: Phase, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        // The values are in twentieths; they are encoded in quarters.
        out.extend(self.0[range].iter().map(|v| (f64::from(*v) / 5.0).round() as i8 as u8));
        Ok(())
    }
    fn decode(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError> {
        for (v, &b) in self.0[range].iter_mut().zip(bytes) {
            let (old, new) = (*v, i32::from(b as i8) * 5);
            *v = if merge == Merge::Reduce { old + new } else { new };
        }
        Ok(())
    }
    fn encode_plain(&mut self, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        out.extend(self.0[range].iter().flat_map(|&v| (v as f32 / 20.0).to_le_bytes()));
        Ok(())
    }
    fn decode_plain(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError> {
        for (v, &bytes) in self.0[range].iter_mut().zip(bytes.as_chunks::<4>().0) {
            let new = (f32::from_le_bytes(bytes) * 20.0).round() as i32;
            *v = if merge == Merge::Reduce { *v + new } else { new };
        }
        Ok(())
    }
    fn divide(&mut self, range: Range<usize>, by: usize) -> Result<(), CoderError> {
        self.0[range].iter_mut().for_each(|v| *v /= by as i32);
        Ok(())
    }
}

#[test]
fn ranks_of_a_coded_all_reduce_may_hold_their_values_anywhere() {
    for (name, cluster) in TRANSPORTS {
        let results = on_ranks(cluster(4), |comm| {
            let value = |i: usize| (i % 7) as i32 * 20 + comm.rank().0 as i32 * 6;
            if comm.rank().0 == 1 {
                let x = (0..1001).map(|i| value(i) as f32 / 20.0).collect();
                let coder = Box::new(Quarters);
                return comm.start_all_reduce_coded(x, ReduceOp::Mean, coder).wait().unwrap().0;
            }
            let x = Elsewhere((0..1001).map(value).collect());
            let Elsewhere(x) = comm
                .start_all_reduce_coded_by(coded_exchange(comm.rank(), 4), x, ReduceOp::Mean)
                .wait()
                .unwrap();
            x.iter().map(|&v| v as f32 / 20.0).collect()
        });
        assert!(results.iter().all(|x| *x == results[0]), "{name}");
        assert!(
            results[0].iter().enumerate().all(|(i, v)| (v - (i % 7) as f32 - 0.5).abs() < 0.26),
            "{name}"
        );
    }
}

#[test]
fn a_coded_all_reduce_travels_as_the_coders_bytes() {
    for (name, cluster) in TRANSPORTS {
        let results = on_ranks(cluster(4), |comm| {
            let x = (0..1001).map(|i| (i % 7) as f32 + comm.rank().0 as f32 * 0.3).collect();
            let coder = Box::new(Quarters);
            // A network may have sent its own messages before.
            let before = comm.stats().sent.payload.0 as usize;
            let (x, _) = comm.start_all_reduce_coded(x, ReduceOp::Mean, coder).wait().unwrap();
            // Sends the shards of three ranks, and one result to three ranks, in one byte per element.
            let expected = 1001 - comm.shard(1001).len() + 3 * comm.shard(1001).len();
            assert_eq!(comm.stats().sent.payload.0 as usize - before, expected, "{name}");
            x
        });
        assert!(results.iter().all(|x| *x == results[0]));
        // 0, 0.3, 0.6 and 0.9 are encoded as 0, 0.25, 0.5 and 1. Their mean 0.4375 is encoded as 0.5.
        assert!(results[0].iter().enumerate().all(|(i, &v)| v == (i % 7) as f32 + 0.5), "{name}");
    }
}

#[test]
fn a_ring_that_encodes_at_each_hop_sums_what_the_codec_keeps_and_loses_at_each_hop() {
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 5] {
            let results = on_ranks(cluster(n), |comm| {
                let share = |i: usize| (i % 3) as f32 + comm.rank().0 as f32 * 0.25;
                let exact: Vec<f32> = (0..103).map(share).collect();
                let reduce = |data: Vec<f32>, op| {
                    let values = CodedSlice::new(data, Box::new(Quarters));
                    let program = coded_ring(comm.rank(), n);
                    comm.start_all_reduce_coded_by(program, values, op).wait().unwrap().into_parts().0
                };
                let sum = reduce(exact, ReduceOp::Sum);
                // 0.1 is rounded to 0, again at each hop.
                let mean = reduce(vec![0.1; 9], ReduceOp::Mean);
                (sum, mean)
            });
            assert!(results.iter().all(|x| *x == results[0]), "{name}");
            let offset = (0..n).map(|rank| rank as f32 * 0.25).sum::<f32>();
            let sum = |i: usize| (n * (i % 3)) as f32 + offset;
            assert_eq!(results[0].0, (0..103).map(sum).collect::<Vec<_>>(), "{name}, {n} ranks");
            assert_eq!(results[0].1, [0.0; 9], "{name}, {n} ranks");
        }
    }
}

#[test]
fn a_failing_coder_fails_everywhere() {
    struct Broken;
    impl Coder for Broken {
        fn encode(
            &mut self,
            _: Phase,
            _: Range<usize>,
            _: &[f32],
            _: &mut Vec<u8>,
        ) -> Result<(), CoderError> {
            Err("out of order".into())
        }
        fn decode(&mut self, _: Range<usize>, _: &[u8], _: &mut [f32]) -> Result<(), CoderError> {
            Ok(())
        }
    }
    for (name, cluster) in TRANSPORTS {
        let errors = on_ranks(cluster(3), |comm| {
            let coder: Box<dyn Coder> =
                if comm.rank().0 == 1 { Box::new(Broken) } else { Box::new(Quarters) };
            let result = comm.start_all_reduce_coded(vec![1.0; 10], ReduceOp::Sum, coder).wait();
            result.map(|_| ()).unwrap_err()
        });
        assert!(errors[1].source().is_some_and(|e| e.to_string() == "out of order"), "{name}");
        assert_eq!([errors[0].peer(), errors[2].peer()], [Some(PeerId(1)); 2], "{name}: {errors:?}");
    }
}

#[test]
fn frames_of_any_of_a_set_and_cancellation() {
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(3), |comm| {
            let transport = comm.transport();
            let (tag, limit) = (Tag::user(77, 1), Nanos::from_millis(5000));
            if comm.rank().0 == 0 {
                // The receive is dropped before a frame was sent, so the next receive gets the frame.
                drop(transport.recv(Source::Peer(PeerId(1)), tag, limit));
            }
            comm.barrier().unwrap();
            if comm.rank().0 == 0 {
                let mut seen = Vec::new();
                for _ in 0..2 {
                    let any = Source::Any(vec![PeerId(1), PeerId(2)]);
                    let (peer, frame) = transport.recv(any, tag, limit).wait().unwrap();
                    assert_eq!(frame.bytes(), [peer.0 as u8; 5]);
                    seen.push(peer.0);
                }
                seen.sort_unstable();
                assert_eq!(seen, [1, 2], "{name}");
                let short = Nanos::from_millis(20);
                let none = transport.recv(Source::Peer(PeerId(2)), tag, short).wait();
                let error = none.unwrap_err();
                assert!(matches!(error, CommError::Deadline { peer: PeerId(2), .. }), "{name}: {error}");
            } else {
                let mut frame = transport.lease(5);
                frame.bytes_mut().fill(transport.me().0 as u8);
                transport.send(PeerId(0), tag, frame, limit).wait().unwrap();
            }
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn a_cancelled_collective_ends_its_communicator_everywhere() {
    for (name, cluster) in TRANSPORTS {
        let errors = on_ranks(cluster(2), |comm| {
            let started = comm.start_all_reduce(vec![1.0_f32; 100_000], ReduceOp::Sum);
            if comm.rank().0 == 1 {
                drop(comm.start_all_reduce(vec![1.0_f32; 3], ReduceOp::Sum));
                drop(started);
                return comm.barrier().unwrap_err();
            }
            let first = started.wait().err();
            first.unwrap_or_else(|| comm.barrier().unwrap_err())
        });
        assert!(matches!(errors[1], CommError::Poisoned(_)), "{name}: {errors:?}");
        assert_eq!(errors[0].peer(), Some(PeerId(1)), "{name}: {errors:?}");
    }
}

#[test]
fn a_pending_result_can_be_awaited_where_time_is_real() {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Wake, Waker};

    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    for (name, cluster) in TRANSPORTS.into_iter().filter(|(name, _)| *name != "simulated") {
        on_ranks(cluster(3), |comm| {
            let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
            let mut pending = comm.start_all_reduce(vec![2.0_f32; 1 << 20], ReduceOp::Sum);
            let x = loop {
                match Pin::new(&mut pending).poll(&mut Context::from_waker(&waker)) {
                    Poll::Ready(x) => break x.unwrap(),
                    Poll::Pending => std::thread::park(),
                }
            };
            assert!(x.iter().all(|&v| v == 6.0), "{name}");
        });
    }
}

#[test]
fn one_of_several_messages_is_received_and_a_lost_rank_is_passed_over() {
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(3), |comm| match comm.rank().0 {
            0 => {
                // Rank 1 sends only after a message from rank 0, so the message of rank 2 arrives first; it has
                // two frames.
                let (from, long) = comm.recv_any(&[Rank(1), Rank(2)], 5).unwrap();
                assert_eq!((from, long.len()), (Rank(2), 300_000), "{name}");
                comm.send(Rank(1), 6, b"now").unwrap();
                let second = comm.start_recv_any(&[Rank(2), Rank(1)], 5).wait().unwrap();
                assert_eq!(second, (Rank(1), b"last".to_vec()), "{name}");
                let lost = comm.recv_any(&[Rank(1), Rank(2)], 5).unwrap_err();
                assert!(matches!(lost, CommError::PeerDown { op: "recv_any", .. }), "{name}: {lost}");
                assert!(comm.recv_any(&[], 5).is_err());
            }
            1 => {
                comm.recv(Rank(0), 6).unwrap();
                comm.send(Rank(0), 5, b"last").unwrap();
            }
            _ => comm.send(Rank(0), 5, &vec![2; 300_000]).unwrap(),
        });
    }
}

#[test]
fn what_operations_do_is_counted_by_name_and_algorithm() {
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(2), |comm| {
            let comm = comm.with_algorithm(Algorithm::Auto);
            let mut x = vec![1_u32; 1000];
            comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            comm.start_all_reduce(x, ReduceOp::Sum).wait().unwrap();
            comm.barrier().unwrap();
            let counters = comm.counters();
            let [(reduce, by, counter), (barrier, None, empty)] = &counters[..] else {
                panic!("{name}: {counters:?}")
            };
            assert_eq!((*reduce, *barrier), ("all_reduce", "barrier"));
            assert_eq!(*by, Some(comm.algorithm(Bytes(4000))), "{name}");
            assert_eq!((counter.calls, counter.failed), (2, 0));
            assert_eq!((counter.sent, counter.received, empty.sent), (Bytes(8000), Bytes(8000), Bytes(0)));
            let waited = counter.waited.values().map(|time| time.0).sum::<u64>();
            assert!(waited <= counter.took.0, "{name}: {counter:?}");
            if name == "simulated" {
                // In virtual time, all of the operation's time is spent waiting.
                let peer = PeerId(1 - comm.rank().0);
                assert_eq!(counter.slowest(), Some((peer, counter.took)), "{counter:?}");
            }
        });
    }
}
