//! The step lists: their shape by snapshot, their truth by symbolic execution.

use std::collections::VecDeque;
use std::fmt::Write;

use farflung_base::Rank;
use farflung_comm::{
    Merge, Program, binomial_broadcast, chain_broadcast, dissemination_barrier, halving_doubling, ring,
    ring_all_gather, ring_reduce_scatter,
};

fn all(n: usize, program: impl Fn(Rank) -> Program) -> Vec<Program> {
    (0..n as u32).map(|rank| program(Rank(rank))).collect()
}

/// Runs the programs on sets of ranks as bits: afterwards `[rank][block]` says whose values are in there.
fn execute(programs: &[Program], start: impl Fn(usize, usize) -> u64) -> Vec<Vec<u64>> {
    let n = programs.len();
    let mut state: Vec<Vec<u64>> =
        (0..n).map(|rank| (0..programs[rank].blocks).map(|b| start(rank, b)).collect()).collect();
    let mut wires = vec![vec![VecDeque::new(); n]; n];
    let mut cursor = vec![(0, false); n];
    loop {
        let mut moved = false;
        for rank in 0..n {
            let Some(step) = programs[rank].steps.get(cursor[rank].0) else { continue };
            if let (Some((to, range)), false) = (&step.send, cursor[rank].1) {
                if let Some((_, into, _)) = &step.recv {
                    assert!(range.is_empty() || range.end <= into.start || into.end <= range.start, "{step}");
                }
                wires[rank][to.index()].push_back(state[rank][range.clone()].to_vec());
                moved = true;
            }
            cursor[rank].1 = true;
            if let Some((from, range, merge)) = &step.recv {
                let Some(values) = wires[from.index()][rank].pop_front() else { continue };
                assert_eq!(values.len(), range.len());
                for (into, value) in state[rank][range.clone()].iter_mut().zip(values) {
                    match merge {
                        Merge::Copy => *into = value,
                        Merge::Reduce => {
                            assert_eq!(*into & value, 0, "a rank's values would count twice");
                            *into |= value;
                        }
                    }
                }
            }
            cursor[rank] = (cursor[rank].0 + 1, false);
            moved = true;
        }
        if !moved {
            break;
        }
    }
    assert!((0..n).all(|r| cursor[r].0 == programs[r].steps.len()), "a program is stuck");
    assert!(wires.iter().flatten().all(VecDeque::is_empty), "something was sent that nobody received");
    state
}

#[test]
fn every_rank_ends_with_everything_once() {
    for n in 1..=16 {
        let everyone = (1_u64 << n) - 1;
        for programs in [all(n, |r| ring(r, n)), all(n, |r| halving_doubling(r, n))] {
            let end = execute(&programs, |rank, _| 1 << rank);
            assert!(end.iter().flatten().all(|&set| set == everyone), "{n}: {end:?}");
        }
        let scattered = execute(&all(n, |r| ring_reduce_scatter(r, n)), |rank, _| 1 << rank);
        assert!((0..n).all(|r| scattered[r][r] == everyone));
        let gathered = execute(&all(n, |r| ring_all_gather(r, n)), |rank, b| u64::from(rank == b) << b);
        assert!(gathered.iter().all(|blocks| blocks.iter().enumerate().all(|(b, &set)| set == 1 << b)));
        for root in (0..n as u32).map(Rank) {
            let holds = |rank: usize, _| u64::from(rank == root.index());
            let tree = execute(&all(n, |r| binomial_broadcast(r, n, root)), holds);
            let chain = execute(&all(n, |r| chain_broadcast(r, n, root, 5)), holds);
            assert!(tree.iter().chain(&chain).flatten().all(|&set| set == 1));
        }
        let _ = execute(&all(n, |r| dissemination_barrier(r, n)), |_, _| 0);
    }
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
        print("ring", n, all(n, |r| ring(r, n)));
        print("halving_doubling", n, all(n, |r| halving_doubling(r, n)));
    }
    for n in [2, 3, 5, 8] {
        print("binomial_broadcast from 1", n, all(n, |r| binomial_broadcast(r, n, Rank(1))));
        print("chain_broadcast from 1 in 3", n, all(n, |r| chain_broadcast(r, n, Rank(1), 3)));
        print("dissemination_barrier", n, all(n, |r| dissemination_barrier(r, n)));
    }
    insta::assert_snapshot!("step_lists", text);
}
