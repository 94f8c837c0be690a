//! Programs of collectives: their shape is checked by snapshots, their results by symbolic execution.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::VecDeque;
use std::fmt::Write;

use farflung_base::{AccessLink, Bandwidth, Rank, Topology};
use farflung_comm::{
    Algorithm, AllReduce as _, Merge, Program, binomial_broadcast, binomial_reduce, bruck_all_to_all,
    butterfly, chain_broadcast, chain_exclusive_scan, chain_scan, direct, direct_all_gather,
    direct_all_to_all, direct_gather, direct_reduce_scatter, direct_scatter, dissemination_barrier,
    double_tree, doubling_exclusive_scan, doubling_scan, hierarchical, moshpit, ordered_direct,
    ordered_direct_reduce, ordered_reduce_scatter, ordered_tree_all_reduce, ordered_tree_reduce,
    pairwise_all_to_all, pipelined_ring, regions, ring_all_gather, ring_reduce_scatter,
};

fn all(n: usize, program: impl Fn(Rank) -> Program) -> Vec<Program> {
    (0..n as u32).map(|rank| program(Rank(rank))).collect()
}

/// Contents of blocks in transit, by lane, sender and receiver.
type Wires = Vec<Vec<Vec<VecDeque<Vec<u64>>>>>;

/// Runs the programs on sets of ranks, given as bits. The result `[rank][block]` is the set of ranks whose
/// values are in the block.
fn execute(programs: &[Program], start: impl Fn(usize, usize) -> u64) -> Vec<Vec<u64>> {
    execute_by(programs, start, |merge, into, value| match merge {
        Merge::Copy => *into = value,
        Merge::Reduce | Merge::ReduceLeft => {
            assert_eq!(*into & value, 0, "a rank's values would count twice");
            *into |= value;
        }
    })
}

/// Runs the programs as [`execute`] does, and checks that only neighbouring ranges of ranks are combined, the
/// lower ranks first.
fn execute_in_order(programs: &[Program], start: impl Fn(usize, usize) -> u64) -> Vec<Vec<u64>> {
    execute_by(programs, start, |merge, into, value| {
        let (low, high) = match merge {
            Merge::Copy => return *into = value,
            Merge::Reduce => (*into, value),
            Merge::ReduceLeft => (value, *into),
        };
        assert!(low > 0 && high > 0);
        let highest = low.ilog2();
        assert_eq!(highest + 1, high.trailing_zeros(), "{low:b} before {high:b}");
        *into = low | high;
    })
}

/// Runs the programs; `meet` combines a received value with that of the block.
fn execute_by(
    programs: &[Program],
    start: impl Fn(usize, usize) -> u64,
    meet: impl Fn(Merge, &mut u64, u64),
) -> Vec<Vec<u64>> {
    let n = programs.len();
    let mut state: Vec<Vec<u64>> =
        (0..n).map(|rank| (0..programs[rank].blocks).map(|b| start(rank, b)).collect()).collect();
    let lanes = programs.iter().map(|p| p.lanes.len()).max().unwrap_or(0);
    let mut wires: Wires = vec![vec![vec![VecDeque::new(); n]; n]; lanes];
    // By rank and lane: the step, whether its sends are done, and the number of its receives that are done.
    let mut cursor = vec![vec![(0, false, 0); lanes]; n];
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (rank, lane) in (0..n).flat_map(|r| (0..programs[r].lanes.len()).map(move |l| (r, l))) {
            let (at, sent, received) = &mut cursor[rank][lane];
            let Some(step) = programs[rank].lanes[lane].get(*at) else { continue };
            for (to, range) in step.sends.iter().filter(|_| !*sent) {
                wires[lane][rank][to.index()].push_back(state[rank][range.clone()].to_vec());
                moved = true;
            }
            *sent = true;
            let Some((from, range, merge)) = step.recvs.get(*received) else {
                (*at, *sent, *received) = (*at + 1, false, 0);
                moved = true;
                continue;
            };
            let Some(values) = wires[lane][from.index()][rank].pop_front() else { continue };
            assert_eq!(values.len(), range.len());
            for (into, value) in state[rank][range.clone()].iter_mut().zip(values) {
                meet(*merge, into, value);
            }
            *received += 1;
            moved = true;
        }
    }
    let done = |r: usize| (0..programs[r].lanes.len()).all(|l| cursor[r][l].0 == programs[r].lanes[l].len());
    assert!((0..n).all(done), "a program is stuck");
    let empty = wires.iter().flatten().flatten().all(VecDeque::is_empty);
    assert!(empty, "something was sent that nobody received");
    state
}

/// `n` ranks in regions of three; distances between regions are ten times those within.
fn spread(n: usize) -> Topology {
    let mut topology = Topology::uniform(n, "1gbit,1ms".parse().unwrap());
    for a in 0..n as u32 {
        topology.set_access_link(
            Rank(a),
            AccessLink { up: Bandwidth(1 << (20 + a % 3)), down: Bandwidth(1 << 30) },
        );
        for b in (0..n as u32).filter(|b| b / 3 != a / 3) {
            topology.set_link(Rank(a), Rank(b), "100mbit,10ms".parse().unwrap());
        }
    }
    topology
}

/// Returns the ranks in groups of at most `size`.
fn groups(n: usize, size: usize) -> Vec<Vec<Rank>> {
    let all: Vec<Rank> = (0..n as u32).map(Rank).collect();
    all.chunks(size).map(<[Rank]>::to_vec).collect()
}

/// Returns the programs of every all-reduce among `n` ranks.
fn all_reduces(n: usize) -> Vec<(String, Vec<Program>)> {
    let mut found: Vec<_> = Algorithm::ALL
        .into_iter()
        .map(|algorithm| (format!("{algorithm:?}"), all(n, |r| algorithm.program(r, n))))
        .collect();
    let mut add = |name: String, programs| found.push((name, programs));
    for chunks in [1, 3] {
        add(format!("pipelined_ring in {chunks}"), all(n, |r| pipelined_ring(r, n, chunks)));
        add(format!("double_tree in {chunks}"), all(n, |r| double_tree(r, n, chunks)));
        add(format!("direct in {chunks}"), all(n, |r| direct(r, n, chunks)));
        for size in 1..=n {
            let groups = groups(n, size);
            add(format!("hierarchical {size} in {chunks}"), all(n, |r| hierarchical(r, &groups, chunks)));
        }
        // Every second rank reduces nothing.
        let counts: Vec<usize> = (0..n).map(|r| if r % 2 == 0 { 10 + r } else { 0 }).collect();
        add(format!("butterfly in {chunks}"), all(n, |r| butterfly(r, &counts, chunks)));
    }
    for side in (1..=n).filter(|side| n.is_multiple_of(*side)) {
        add(format!("moshpit {side}"), all(n, |r| moshpit(r, &[side, n / side])));
    }
    found
}

#[test]
fn every_rank_ends_with_everything_once() {
    for n in 1..=16 {
        let everyone = (1_u64 << n) - 1;
        for (name, programs) in all_reduces(n) {
            let end = execute(&programs, |rank, _| 1 << rank);
            // Blocks without elements need not be reduced.
            let bounds = programs[0].bounds.clone();
            let holds = |b: usize| bounds.as_ref().is_none_or(|bounds| bounds[b + 1] > bounds[b]);
            for blocks in end {
                let whole = blocks.iter().enumerate().all(|(b, &set)| set == everyone || !holds(b));
                assert!(whole, "{name} {n}: {blocks:?}");
            }
        }
        for scatter in [ring_reduce_scatter, direct_reduce_scatter] {
            let scattered = execute(&all(n, |r| scatter(r, n)), |rank, _| 1 << rank);
            assert!((0..n).all(|r| scattered[r][r] == everyone));
        }
        for gather in [ring_all_gather, direct_all_gather] {
            let gathered = execute(&all(n, |r| gather(r, n)), |rank, b| u64::from(rank == b) << b);
            assert!(gathered.iter().all(|blocks| blocks.iter().enumerate().all(|(b, &set)| set == 1 << b)));
        }
        for to_all in [pairwise_all_to_all, direct_all_to_all, bruck_all_to_all] {
            // The block from rank `r` to rank `b` has the value `r * n + b + 1`.
            let ends =
                execute(&all(n, |r| to_all(r, n)), |r, b| if b < n { (r * n + b + 1) as u64 } else { 0 });
            for (rank, blocks) in ends.iter().enumerate() {
                let want: Vec<u64> = (0..n).map(|from| (from * n + rank + 1) as u64).collect();
                assert_eq!(blocks[n..], want, "{n}");
            }
        }
        for root in (0..n as u32).map(Rank) {
            let holds = |rank: usize, _| u64::from(rank == root.index());
            let tree = execute(&all(n, |r| binomial_broadcast(r, n, root)), holds);
            let chain = execute(&all(n, |r| chain_broadcast(r, n, root, 5)), holds);
            assert!(tree.iter().chain(&chain).flatten().all(|&set| set == 1));
            let reduced = execute(&all(n, |r| binomial_reduce(r, n, root)), |rank, _| 1 << rank);
            assert_eq!(reduced[root.index()], [everyone]);
            let own = |rank: usize, b: usize| u64::from(rank == b) << b;
            let gathered = execute(&all(n, |r| direct_gather(r, n, root)), own);
            let each: Vec<u64> = (0..n).map(|b| 1 << b).collect();
            assert_eq!(gathered[root.index()], each);
            let at_root = |rank: usize, b: usize| u64::from(rank == root.index()) << b;
            let scattered = execute(&all(n, |r| direct_scatter(r, n, root)), at_root);
            assert!((0..n).all(|r| scattered[r][r] == 1 << r));
        }
        let _ = execute(&all(n, |r| dissemination_barrier(r, n)), |_, _| 0);
    }
}

#[test]
fn scans_and_ordered_reductions_keep_the_order_of_ranks() {
    for n in 1..=17 {
        let everyone = (1_u64 << n) - 1;
        let own = |rank: usize, _| 1_u64 << rank;
        for programs in [
            all(n, |r| doubling_scan(r, n)),
            all(n, |r| chain_scan(r, n, 1)),
            all(n, |r| chain_scan(r, n, 5)),
        ] {
            for (rank, blocks) in execute_in_order(&programs, own).iter().enumerate() {
                assert!(blocks.iter().all(|&set| set == (2 << rank) - 1), "{n}: {blocks:?}");
            }
        }
        let exclusive = [
            all(n, |r| doubling_exclusive_scan(r, n)),
            all(n, |r| chain_exclusive_scan(r, n, 1)),
            all(n, |r| chain_exclusive_scan(r, n, 5)),
        ];
        for programs in exclusive {
            for (rank, blocks) in execute_in_order(&programs, own).iter().enumerate() {
                let before = if rank == 0 { 1 } else { (1 << rank) - 1 };
                assert!(blocks.iter().all(|&set| set == before), "{n}: {blocks:?}");
            }
        }
        for programs in [all(n, |r| ordered_tree_all_reduce(r, n)), all(n, |r| ordered_direct(r, n))] {
            let ends = execute_in_order(&programs, own);
            assert!(ends.iter().flatten().all(|&set| set == everyone), "{n}: {ends:?}");
        }
        let scattered = execute_in_order(&all(n, |r| ordered_reduce_scatter(r, n)), own);
        assert!((0..n).all(|r| scattered[r][r] == everyone));
        for root in (0..n as u32).map(Rank) {
            let programs =
                [all(n, |r| ordered_tree_reduce(r, n, root)), all(n, |r| ordered_direct_reduce(r, n, root))];
            for programs in programs {
                let ends = execute_in_order(&programs, own);
                assert!(ends[root.index()].iter().all(|&set| set == everyone), "{n} to {root}: {ends:?}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "before")]
fn a_tree_that_folds_far_ranks_together_is_found_out() {
    let _ = execute_in_order(&all(4, |r| binomial_reduce(r, 4, Rank(0))), |rank, _| 1 << rank);
}

#[test]
fn the_lists_are_pinned() {
    let mut text = String::new();
    let mut print = |name: &str, n: usize, programs: Vec<Program>| {
        let _ = writeln!(text, "{name} {n}");
        for (rank, program) in programs.iter().enumerate() {
            let _ = writeln!(text, "  r{rank} {program}");
        }
    };
    for n in 2..=8 {
        for algorithm in Algorithm::ALL {
            print(&format!("{algorithm:?}"), n, all(n, |r| algorithm.program(r, n)));
        }
        print("pipelined_ring in 2", n, all(n, |r| pipelined_ring(r, n, 2)));
        let threes = groups(n, 3);
        print("hierarchical in threes", n, all(n, |r| hierarchical(r, &threes, 1)));
        let counts: Vec<usize> = (0..n).map(|r| 12 * (n - 1 - r)).collect();
        print("butterfly", n, all(n, |r| butterfly(r, &counts, 2)));
    }
    for n in [2, 3, 5, 8] {
        print("binomial_broadcast from 1", n, all(n, |r| binomial_broadcast(r, n, Rank(1))));
        print("binomial_reduce to 1", n, all(n, |r| binomial_reduce(r, n, Rank(1))));
        print("chain_broadcast from 1 in 3", n, all(n, |r| chain_broadcast(r, n, Rank(1), 3)));
        print("dissemination_barrier", n, all(n, |r| dissemination_barrier(r, n)));
        print("direct_gather to 1", n, all(n, |r| direct_gather(r, n, Rank(1))));
        print("pairwise_all_to_all", n, all(n, |r| pairwise_all_to_all(r, n)));
        print("bruck_all_to_all", n, all(n, |r| bruck_all_to_all(r, n)));
    }
    for n in [2, 3, 5, 8] {
        print("doubling_scan", n, all(n, |r| doubling_scan(r, n)));
        print("chain_scan in 3", n, all(n, |r| chain_scan(r, n, 3)));
        print("doubling_exclusive_scan", n, all(n, |r| doubling_exclusive_scan(r, n)));
        print("chain_exclusive_scan in 3", n, all(n, |r| chain_exclusive_scan(r, n, 3)));
        print("ordered_tree_all_reduce", n, all(n, |r| ordered_tree_all_reduce(r, n)));
        print("ordered_direct", n, all(n, |r| ordered_direct(r, n)));
        print("ordered_tree_reduce to 1", n, all(n, |r| ordered_tree_reduce(r, n, Rank(1))));
        print("ordered_direct_reduce to 1", n, all(n, |r| ordered_direct_reduce(r, n, Rank(1))));
    }
    insta::assert_snapshot!("step_lists", text);
}

#[test]
fn regions_are_those_that_are_near_each_other() {
    assert_eq!(regions(&spread(7)), groups(7, 3));
    let flat = Topology::uniform(5, "1gbit,1ms".parse().unwrap());
    assert_eq!(regions(&flat), groups(5, 5));
    // Here regions follow from bandwidth alone: of links (`by_links`), or of access links that regions share
    // (`by_lines`). A slow access link of one rank does not make a region.
    let mut by_links = Topology::uniform(6, "1gbit,1ms".parse().unwrap());
    for (a, b) in (0..6).flat_map(|a| (0..6).map(move |b| (a, b))).filter(|(a, b)| a / 3 != b / 3) {
        by_links.set_link(Rank(a), Rank(b), "100mbit,1ms".parse().unwrap());
    }
    let mut by_lines = Topology::uniform(6, "1gbit,1ms".parse().unwrap());
    by_lines.set_region(&groups(6, 3)[0], AccessLink { up: Bandwidth(50_000_000), down: Bandwidth(1 << 40) });
    for mut topology in [by_links, by_lines] {
        topology.set_access_link(Rank(1), AccessLink { up: Bandwidth(1000), down: Bandwidth(1000) });
        assert_eq!(regions(&topology), groups(6, 3));
    }
    for n in 1..=8 {
        let len = 1 << 20;
        for algorithm in Algorithm::ALL {
            let programs = algorithm.programs(len, farflung_base::Bytes(4 << 20), &spread(n));
            let everyone = (1_u64 << n) - 1;
            for (rank, blocks) in execute(&programs, |rank, _| 1 << rank).iter().enumerate() {
                let holds = |b: usize| !programs[rank].elements(&(b..b + 1), len).is_empty();
                let whole = blocks.iter().enumerate().all(|(b, &set)| set == everyone || !holds(b));
                assert!(whole, "{algorithm:?} {n}: {blocks:?}");
            }
        }
    }
}
