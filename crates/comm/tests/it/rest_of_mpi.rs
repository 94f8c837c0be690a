//! Scans, bitwise and logical operations, located values, user-defined reductions, and the non-blocking form of
//! each collective. All are compared with plain loops over the ranks' inputs.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::{TRANSPORTS, on_ranks};
use farflung_base::{Pending, Rank};
use farflung_comm::{CommError, Communicator, Element, Located, ReduceOp, UserOp, memory};

/// Returns the value of rank `rank` at index `i`.
fn number(rank: usize, i: usize) -> u32 {
    let mixed = (rank as u32 * 31 + i as u32 + 1).wrapping_mul(0x9E37_79B9);
    mixed ^ mixed >> 15
}

/// The function `x -> a x + b` modulo 2^32. Composition of such functions is associative, but does not commute.
type Affine = [u32; 2];

fn affine(rank: usize, i: usize) -> Affine {
    [number(rank, i) | 1, number(rank, i + 7)]
}

fn compose([a, b]: Affine, [c, d]: Affine) -> Affine {
    [a.wrapping_mul(c), a.wrapping_mul(d).wrapping_add(b)]
}

fn composed() -> UserOp<Affine> {
    UserOp::new("composition", compose)
}

/// Reduces the inputs of ranks in rank order, element by element.
fn folded<T: Element>(
    ranks: std::ops::Range<usize>,
    len: usize,
    of: fn(usize, usize) -> T,
    f: impl Fn(T, T) -> T,
) -> Vec<T> {
    let one = |i: usize| ranks.clone().map(|rank| of(rank, i)).reduce(&f).expect("there is a rank");
    (0..len).map(one).collect()
}

fn input<T>(rank: usize, len: usize, of: fn(usize, usize) -> T) -> Vec<T> {
    (0..len).map(|i| of(rank, i)).collect()
}

#[test]
fn scans_are_those_of_one_process() {
    for (name, cluster) in TRANSPORTS {
        for n in 1..=9 {
            on_ranks(cluster(n), |comm| {
                let me = comm.rank().index();
                for len in [0, 1, n - 1, 101, 40_001] {
                    let what = format!("{name}, rank {me} of {n}, {len}");
                    let mut sums = input(me, len, number);
                    comm.scan(&mut sums, ReduceOp::Sum).unwrap();
                    assert_eq!(sums, folded(0..me + 1, len, number, u32::wrapping_add), "{what}");
                    let mut functions = input(me, len, affine);
                    comm.scan(&mut functions, composed()).unwrap();
                    assert_eq!(functions, folded(0..me + 1, len, affine, compose), "{what}");

                    let mut least = input(me, len, number);
                    comm.exclusive_scan(&mut least, ReduceOp::Min).unwrap();
                    let mut functions = input(me, len, affine);
                    comm.exclusive_scan(&mut functions, composed()).unwrap();
                    // The exclusive scan of rank 0 leaves its own values.
                    let before = 0..me.max(1);
                    assert_eq!(least, folded(before.clone(), len, number, u32::min), "{what}");
                    assert_eq!(functions, folded(before, len, affine, compose), "{what}");
                }
            });
        }
    }
}

#[test]
fn reductions_of_ones_own_keep_the_order_of_ranks() {
    for (name, cluster) in TRANSPORTS {
        for n in 1..=9 {
            on_ranks(cluster(n), |comm| {
                let me = comm.rank().index();
                for len in [0, 1, n - 1, 101, 70_001] {
                    let what = format!("{name}, rank {me} of {n}, {len}");
                    let own = input(me, len, affine);
                    let all = folded(0..n, len, affine, compose);
                    let mut x = own.clone();
                    comm.all_reduce(&mut x, composed()).unwrap();
                    assert_eq!(x, all, "{what}");
                    let mut x = own.clone();
                    let shard = comm.reduce_scatter(&mut x, composed()).unwrap();
                    assert_eq!(x[shard.clone()], all[shard], "{what}");
                    let mut counts: Vec<usize> = (0..n).map(|r| len / n * (r % 2)).collect();
                    counts[n - 1] += len - counts.iter().sum::<usize>();
                    let mut x = own.clone();
                    let shard = comm.reduce_scatter_v(&mut x, &counts, composed()).unwrap();
                    assert_eq!(x[shard.clone()], all[shard], "{what}");
                    let roots = if len > 101 { n - 1..n } else { 0..n };
                    for root in roots.map(|root| Rank(root as u32)) {
                        let mut x = own.clone();
                        comm.reduce(&mut x, composed(), root).unwrap();
                        assert!(comm.rank() != root || x == all, "{what}");
                    }
                    // A reduction that commutes runs by the communicator's own algorithm.
                    let mut x = input(me, len, number);
                    let odd = UserOp::commutative("product of odd", |a: u32, b| (a | 1).wrapping_mul(b | 1));
                    comm.all_reduce(&mut x, odd).unwrap();
                    let odd = folded(0..n, len, number, |a, b| (a | 1).wrapping_mul(b | 1));
                    assert_eq!(x, odd, "{what}");
                }
            });
        }
    }
}

#[test]
fn bits_truths_and_places_are_those_of_one_process() {
    /// Returns one of a few values, so that many inputs are equal and some are zero.
    fn few(rank: usize, i: usize) -> u32 {
        number(rank, i) % 3
    }
    fn place(rank: usize, i: usize) -> Located<i64, u64> {
        Located { value: i64::from(few(rank, i)) - 1, place: 100 + rank as u64 }
    }
    type Of = fn(u32, u32) -> u32;
    let ops: [(ReduceOp, Of); 6] = [
        (ReduceOp::And, |a, b| a & b),
        (ReduceOp::Or, |a, b| a | b),
        (ReduceOp::Xor, |a, b| a ^ b),
        (ReduceOp::LogicalAnd, |a, b| u32::from(a > 0 && b > 0)),
        (ReduceOp::LogicalOr, |a, b| u32::from(a > 0 || b > 0)),
        (ReduceOp::LogicalXor, |a, b| u32::from((a > 0) != (b > 0))),
    ];
    for (name, cluster) in TRANSPORTS {
        for n in 1..=9 {
            on_ranks(cluster(n), |comm| {
                let me = comm.rank().index();
                for len in [0, 1, n - 1, 101] {
                    for (op, f) in ops {
                        let what = format!("{name}, {op}, rank {me} of {n}, {len}");
                        let all = folded(0..n, len, few, f);
                        let mut x = input(me, len, few);
                        comm.all_reduce(&mut x, op).unwrap();
                        assert_eq!(x, all, "{what}");
                        let root = Rank((len % n) as u32);
                        let mut x = input(me, len, few);
                        comm.reduce(&mut x, op, root).unwrap();
                        assert!(comm.rank() != root || x == all, "{what}");
                        let mut x = input(me, len, few);
                        comm.scan(&mut x, op).unwrap();
                        assert_eq!(x, folded(0..me + 1, len, few, f), "{what}");
                    }
                    for (op, sign) in [(ReduceOp::Max, -1), (ReduceOp::Min, 1)] {
                        let mut x = input(me, len, place);
                        comm.all_reduce(&mut x, op).unwrap();
                        for (i, found) in x.into_iter().enumerate() {
                            let all = (0..n).map(|rank| place(rank, i));
                            let best = all.min_by_key(|at| (sign * at.value, at.place));
                            assert_eq!(Some(found), best, "{name}, {op}, rank {me} of {n}, {i}");
                        }
                    }
                }
            });
        }
    }
}

/// Polls a non-blocking collective until it is complete, on transports that make progress in the background.
fn tested<T>(pending: Pending<T>) -> T {
    for _ in 0..5000 {
        if pending.is_ready() {
            break;
        }
        thread::sleep(Duration::from_millis(2));
    }
    assert!(pending.is_ready());
    pending.wait()
}

/// Starts each collective in the same order on all ranks, waits for them in reverse order, and compares the
/// results with the blocking forms.
fn every_started_one(comm: &Communicator, len: usize, ask: bool) {
    let (n, me) = (comm.size(), comm.rank().index());
    let root = Rank((n / 2) as u32);
    let own = || input(me, len, affine);
    let counts: Vec<usize> = (0..n).map(|rank| (len * (rank + 1)) % 53).collect();
    let all: usize = counts.iter().sum();
    let (even, odd) = (input(me, len * n, number), input(me, all, affine));
    let sent: Vec<usize> = (0..n).map(|rank| (len * (me + rank)) % 41).collect();
    let out = input(me, sent.iter().sum(), number);
    let mut near: Vec<Rank> = [1, n - 1].map(|step| Rank(((me + step) % n) as u32)).into();
    near.dedup();
    near.retain(|&rank| rank != comm.rank());
    let bytes = || (0..n).map(|to| vec![me as u8; to]).collect::<Vec<_>>();

    let all_reduce = comm.start_all_reduce(own(), composed());
    let program = farflung_comm::ordered_direct(comm.rank(), n);
    let by_program = comm.start_all_reduce_by(program, own(), composed());
    let reduce_scatter = comm.start_reduce_scatter(own(), composed());
    let reduce_scatter_v = comm.start_reduce_scatter_v(odd.clone(), &counts, composed());
    let all_gather = comm.start_all_gather(own());
    let all_gather_v = comm.start_all_gather_v(odd.clone(), &counts);
    let broadcast = comm.start_broadcast(own(), root);
    let reduce = comm.start_reduce(own(), composed(), root);
    let scan = comm.start_scan(own(), composed());
    let exclusive_scan = comm.start_exclusive_scan(own(), composed());
    let gather = comm.start_gather(&odd[..counts[me]], &counts, root);
    let scatter = comm.start_scatter(&odd, &counts, root);
    let all_to_all = comm.start_all_to_all(&even);
    let all_to_all_v = comm.start_all_to_all_v(&out, &sent, &sent);
    let neighbors = comm.start_neighbor_exchange(&even, &near);
    let to_all = comm.start_all_to_all_bytes(bytes());
    let barrier = comm.start_barrier();

    macro_rules! ended {
        ($($pending:ident)*) => {
            $(let $pending = if ask { tested($pending) } else { $pending.wait() }.unwrap();)*
        };
    }
    ended!(barrier to_all neighbors all_to_all_v all_to_all scatter gather exclusive_scan scan reduce broadcast);
    ended!(all_gather_v all_gather reduce_scatter_v reduce_scatter by_program all_reduce);
    let () = barrier;

    let in_place = |f: &dyn Fn(&mut [Affine]) -> Result<(), CommError>| {
        let mut x = own();
        f(&mut x).unwrap();
        x
    };
    let same = in_place(&|x| comm.all_reduce(x, composed()));
    assert_eq!((&all_reduce, &by_program), (&same, &same));
    let shard = comm.shard(len);
    assert_eq!(reduce_scatter[shard.clone()], same[shard]);
    let mut x = odd.clone();
    let shard = comm.reduce_scatter_v(&mut x, &counts, composed()).unwrap();
    assert_eq!(reduce_scatter_v[shard.clone()], x[shard]);
    assert_eq!(all_gather, in_place(&|x| comm.all_gather(x)));
    let mut x = odd.clone();
    comm.all_gather_v(&mut x, &counts).unwrap();
    assert_eq!(all_gather_v, x);
    assert_eq!(broadcast, input(root.index(), len, affine));
    assert!(comm.rank() != root || reduce == same);
    assert_eq!(scan, in_place(&|x| comm.scan(x, composed())));
    assert_eq!(exclusive_scan, in_place(&|x| comm.exclusive_scan(x, composed())));
    assert_eq!(gather, comm.gather(&odd[..counts[me]], &counts, root).unwrap());
    assert_eq!(scatter, comm.scatter(&odd, &counts, root).unwrap());
    assert_eq!(all_to_all, comm.all_to_all(&even).unwrap());
    assert_eq!(all_to_all_v, comm.all_to_all_v(&out, &sent, &sent).unwrap());
    assert_eq!(neighbors, comm.neighbor_exchange(&even, &near).unwrap());
    assert_eq!(to_all, comm.all_to_all_bytes(bytes()).unwrap());
}

#[test]
fn each_collective_has_a_form_that_does_not_block() {
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 3, 5] {
            for len in [0, 1, 40_001] {
                // Simulated ranks make progress only while they wait.
                let ask = name != "simulated" && len == 1;
                on_ranks(cluster(n), |comm| every_started_one(&comm, len, ask));
            }
        }
    }
}

#[test]
fn a_reduction_that_panics_fails_on_all_ranks_and_names_itself() {
    for (name, cluster) in TRANSPORTS {
        let errors = on_ranks(cluster(3), |comm| {
            let me = comm.rank();
            let strict = UserOp::new("strict", move |a: u32, b| {
                assert!(me != Rank(1), "rank 1 cannot");
                a + b
            });
            let mut x = [1_u32; 10];
            let error = comm.scan(&mut x, strict).and_then(|()| comm.barrier());
            let poisoned = comm.barrier().is_err();
            (error.unwrap_err(), poisoned, x)
        });
        let (first, ..) = &errors[1];
        assert_eq!(first.to_string(), "scan: the reduction `strict` panicked", "{name}");
        assert!(errors.iter().all(|(_, poisoned, _)| *poisoned), "{name}: {errors:?}");
        assert_eq!(errors[1].2, [u32::MAX; 10], "what was half reduced is not handed out");
    }
}

#[test]
fn ranks_whose_reductions_differ_are_told_so() {
    let refused = |op: fn(Rank) -> UserOp<[u16; 2]>| {
        on_ranks(crate::common::memory_cluster(2), |comm| {
            comm.all_reduce(&mut [[1, 2]], op(comm.rank())).unwrap_err()
        })
    };
    let by_name = |rank| UserOp::new(["left", "right"][usize::from(rank == Rank(1))], |a: [u16; 2], _| a);
    assert!(refused(by_name).iter().any(|error| matches!(error, CommError::Mismatch { .. })));
    let by_order = |rank| {
        let f = |a: [u16; 2], _| a;
        if rank == Rank(0) { UserOp::new("left", f) } else { UserOp::commutative("left", f) }
    };
    assert!(refused(by_order).iter().any(|error| matches!(error, CommError::Mismatch { .. })));
    // The ranks have the same number of scalars, but in arrays of different lengths.
    let errors = on_ranks(crate::common::memory_cluster(2), |comm| match comm.rank() {
        Rank(0) => comm.all_reduce(&mut [[1_u8; 4]; 3], ReduceOp::Sum),
        _ => comm.all_reduce(&mut [[1_u8; 3]; 4], ReduceOp::Sum),
    });
    assert!(errors.iter().any(|error| matches!(error, Err(CommError::Mismatch { .. }))), "{errors:?}");
}

#[test]
fn what_is_not_defined_is_refused_before_anything_is_sent() {
    let comm = Communicator::new(Arc::clone(&memory::cluster(2)[0]) as _);
    let said = |result: Result<(), CommError>| result.unwrap_err().to_string();
    assert_eq!(said(comm.scan(&mut [1.0_f32], ReduceOp::Mean)), "scan: mean is not defined for f32");
    let text = "exclusive_scan: mean is not defined for f64";
    assert_eq!(
        comm.start_exclusive_scan(vec![1.0_f64], ReduceOp::Mean).wait().unwrap_err().to_string(),
        text
    );
    assert_eq!(
        said(comm.all_reduce(&mut [[1.0_f32; 2]], ReduceOp::Or)),
        "all_reduce: or is not defined for f32"
    );
    let mut places = [Located { value: 1_i32, place: 0 }];
    let text = "reduce: product is not defined for located i32";
    assert_eq!(said(comm.reduce(&mut places, ReduceOp::Product, Rank(0))), text);
    comm.check().unwrap();
}
