//! Exchanges with the owners of parts of a buffer.

use farflung_base::{AccessLink, Bandwidth, Bytes, Rank, Topology, operation::isolated_time};
use farflung_comm::{
    ReduceOp, gather_from_owners, owners_operation, scatter_to_owners, uneven_all_to_all_operation,
};

use crate::common::{TRANSPORTS, on_ranks, over};

/// A value whose sums over ranks depend on their order in the last bits.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729) % 1013) as f32 / 997.0 + 1e-3 * rank as f32
}

/// Elements are added in rank order, whichever rank owns them and over every transport: no bit differs. Ranks
/// that own nothing take part too.
#[test]
fn sums_do_not_depend_on_who_owns_what() {
    let len = 70_001;
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 3, 5] {
            let mut ranks = vec![len / n; n];
            ranks[n - 1] += len % n;
            let mut one = vec![0; n];
            one[n / 2] = len;
            let mut uneven = vec![0; n];
            (uneven[0], uneven[n - 1]) = (0, len);
            if n > 2 {
                (uneven[1], uneven[n - 1]) = (17, len - 17);
            }
            for counts in [ranks, one, uneven] {
                on_ranks(cluster(n), |comm| {
                    let me = comm.rank().index();
                    let own: Vec<f32> = (0..len).map(|i| value(me, i)).collect();
                    let summed = comm.start_reduce_scatter_in_order(own, &counts, ReduceOp::Mean);
                    let summed = summed.wait().unwrap();
                    let in_order = |i| (1..n).fold(value(0, i), |sum, r| sum + value(r, i)) / n as f32;
                    let start = counts[..me].iter().sum::<usize>();
                    for (i, sum) in summed.iter().enumerate().skip(start).take(counts[me]) {
                        assert_eq!(sum.to_bits(), in_order(i).to_bits(), "{name} {counts:?} {i}");
                    }
                    let all = comm.start_gather_from_owners(summed, &counts).wait().unwrap();
                    assert!((0..len).all(|i| all[i].to_bits() == in_order(i).to_bits()), "{name} {counts:?}");
                });
            }
        }
    }
}

#[test]
fn wrong_counts_are_refused() {
    on_ranks(TRANSPORTS[0].1(2), |comm| {
        for counts in [&[3, 3][..], &[4], &[usize::MAX, 6]] {
            assert!(comm.start_gather_from_owners(vec![0.0_f32; 5], counts).wait().is_err());
            let summed = comm.start_reduce_scatter_in_order(vec![0.0_f32; 5], counts, ReduceOp::Sum);
            assert!(summed.wait().is_err());
        }
    });
}

/// Owner `i` of a share `p` of `P` values sends `P - p`, then `(N - 1) p`; virtual time is the price.
#[test]
fn owners_take_the_time_of_what_they_send() {
    let topology = Topology::uniform(4, "1gbit,10ms".parse().unwrap());
    for counts in [[250_000; 4], [500_000, 300_000, 200_000, 0], [9_000_000, 0, 0, 1_000_000]] {
        let most = *counts.iter().max().unwrap();
        let forms = [(scatter_to_owners as fn(_, &[usize]) -> _, 3 * most), (gather_from_owners, 3 * most)];
        for (number, (program, floats)) in forms.into_iter().enumerate() {
            let price = isolated_time(&owners_operation(program, &counts, 4), &topology).as_secs_f64();
            let form = 0.01 + floats as f64 * 32e-9;
            assert!((price / form - 1.0).abs() < 0.01, "{counts:?} {number}: {price} s, not {form}");
            let times = on_ranks(over(&topology), |comm| {
                let values = vec![1.0_f32; counts.iter().sum()];
                let begun = match number {
                    0 => comm.start_reduce_scatter_in_order(values, &counts, ReduceOp::Mean),
                    _ => comm.start_gather_from_owners(values, &counts),
                };
                begun.wait().unwrap();
                comm.now().as_secs_f64()
            });
            let last = times.into_iter().fold(0.0, f64::max);
            assert!((last / price - 1.0).abs() < 0.01, "{counts:?} {number}: {last} s, priced {price}");
        }
    }
}

/// Numbers of elements that ranks send each other, of which some are none: values, and virtual time as the
/// price.
#[test]
fn uneven_parts_reach_all_ranks_in_one_latency() {
    let sent = |from: usize, to: usize| [40_000, 0, 7, 90_000][(from + 2 * to) % 4];
    let value = |from: usize, to: usize| (10 * from + to) as u8;
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(3), |comm| {
            let me = comm.rank().index();
            let of = |to| vec![value(me, to); sent(me, to)];
            let data: Vec<u8> = (0..3).flat_map(of).collect();
            let counts = |count: &dyn Fn(usize) -> usize| (0..3).map(count).collect::<Vec<_>>();
            let [out, into] = [counts(&|to| sent(me, to)), counts(&|from| sent(from, me))];
            let found = comm.start_uneven_all_to_all(&data, &out, &into).wait().unwrap();
            let want: Vec<u8> = (0..3).flat_map(|from| vec![value(from, me); sent(from, me)]).collect();
            assert!(found == want, "{name}");
        });
    }
    let topology = Topology::uniform(3, "8mbit,10ms".parse().unwrap());
    let operation = uneven_all_to_all_operation(3, |from, to| Bytes(sent(from, to) as u64));
    let price = isolated_time(&operation, &topology).as_secs_f64();
    let times = on_ranks(over(&topology), |comm| {
        let me = comm.rank().index();
        let counts = |count: &dyn Fn(usize) -> usize| (0..3).map(count).collect::<Vec<_>>();
        let [out, into] = [counts(&|to| sent(me, to)), counts(&|from| sent(from, me))];
        let data = vec![1_u8; out.iter().sum()];
        comm.start_uneven_all_to_all(&data, &out, &into).wait().unwrap();
        comm.now().as_secs_f64()
    });
    let last = times.into_iter().fold(0.0, f64::max);
    assert!((last / price - 1.0).abs() < 0.01, "{last} s, priced {price}");
}

/// Ranks whose uplinks are slower than their downlinks send side by side, not one after the other in rank
/// order.
#[test]
fn slow_uplinks_are_used_at_the_same_time() {
    let mut topology = Topology::uniform(4, "1gbit,1ms".parse().unwrap());
    for rank in (0..4).map(Rank) {
        topology
            .set_access_link(rank, AccessLink { up: Bandwidth(100_000_000), down: Bandwidth(1_000_000_000) });
    }
    let counts = [2_500_000; 4];
    let form = 3.0 * 2.5e6 * 32.0 / 1e8;
    let price = isolated_time(&owners_operation(scatter_to_owners, &counts, 4), &topology).as_secs_f64();
    let times = on_ranks(over(&topology), |comm| {
        let values = vec![1.0_f32; counts.iter().sum()];
        comm.start_reduce_scatter_in_order(values, &counts, ReduceOp::Mean).wait().unwrap();
        comm.now().as_secs_f64()
    });
    let last = times.into_iter().fold(0.0, f64::max);
    assert!((price / form - 1.0).abs() < 0.02 && (last / form - 1.0).abs() < 0.05, "{form} {price} {last}");
}
