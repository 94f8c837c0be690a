//! Exchanges with the owners of parts of a buffer.

use farflung_base::{AccessLink, Bandwidth, Rank, Topology, operation::isolated_time};
use farflung_comm::{ReduceOp, gather_from_owners, owners_operation, scatter_to_owners};

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
