//! Coded all-reduces: their results by symbolic execution, and the bytes and the time that they take.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::float_cmp, reason = "these sums are exact")]

use std::collections::VecDeque;
use std::fmt::Write;
use std::ops::Range;

use crate::common::{TRANSPORTS, on_ranks, over};
use farflung_base::{AccessLink, Bandwidth, Link, Rank, Topology};
use farflung_comm::{
    Algorithm, Code, CodedAllReduce as _, CodedBuffer, CodedSlice, Coder, CoderError, CommError, Merge,
    Phase, Program, ReduceOp, coded_all_gather, coded_exchange, coded_exchange_of, coded_ring, cost_coded,
    two_level,
};

fn all(n: usize, program: impl Fn(Rank) -> Program) -> Vec<Program> {
    (0..n as u32).map(|rank| program(Rank(rank))).collect()
}

/// Returns the ranks in groups of at most `size`.
fn groups(n: usize, size: usize) -> Vec<Vec<Rank>> {
    let all: Vec<Rank> = (0..n as u32).map(Rank).collect();
    all.chunks(size).map(<[Rank]>::to_vec).collect()
}

/// Returns the programs of every coded form among `n` ranks, by name.
fn forms(n: usize) -> Vec<(String, Vec<Program>)> {
    let mut found = vec![
        ("exchange".to_owned(), all(n, |r| coded_exchange(r, n))),
        ("ring".to_owned(), all(n, |r| coded_ring(r, n))),
        ("all-gather".to_owned(), all(n, |r| coded_all_gather(r, n))),
    ];
    for size in 1..=n {
        let regions = groups(n, size);
        found.push((format!("regions of {size}"), all(n, |r| two_level(r, &regions))));
    }
    found
}

/// Content of a message: the set of ranks whose values it has, and its code.
type Carried = (u64, Code);

/// Runs coded programs on sets of ranks, given as bits. The result `[rank][block]` is the set of ranks whose
/// values are in the block.
fn execute(programs: &[Program]) -> Vec<Vec<u64>> {
    let n = programs.len();
    let mut state: Vec<Vec<u64>> = (0..n).map(|rank| vec![1 << rank; programs[rank].blocks]).collect();
    let lanes = programs[0].lanes.len();
    let mut wires: Vec<Vec<Vec<VecDeque<Carried>>>> = vec![vec![vec![VecDeque::new(); n]; n]; lanes];
    // By rank: the messages that are available, with the step that made each.
    let mut held: Vec<Vec<Option<(usize, Carried)>>> =
        programs.iter().map(|p| vec![None; p.messages.len()]).collect();
    // By rank and lane: the step, whether its sends are done, and the number of its receives that are done.
    let mut cursor = vec![vec![(0, false, 0); lanes]; n];
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (rank, lane) in (0..n).flat_map(|r| (0..lanes).map(move |l| (r, l))) {
            let (at, begun, received) = &mut cursor[rank][lane];
            let Some(step) = programs[rank].lanes[lane].get(*at).map(|step| &step.coding) else { continue };
            let message = |number: usize| programs[rank].messages[number];
            let use_of = |held: &[Option<(usize, Carried)>], number: usize| {
                let (made, carried) = held[number].expect("a message that was never made");
                assert!(made == *at || made + 1 == *at, "a message of step {made} in step {at}");
                carried
            };
            if !*begun {
                for &number in &step.encode {
                    let carried = (state[rank][message(number).block], message(number).code);
                    held[rank][number] = Some((*at, carried));
                }
                for &(to, number) in &step.sends {
                    wires[lane][rank][to.index()].push_back(use_of(&held[rank], number));
                }
                (*begun, moved) = (true, true);
            }
            while let Some(&(from, number)) = step.recvs.get(*received) {
                let Some(carried) = wires[lane][from.index()][rank].pop_front() else { break };
                assert_eq!(carried.1, message(number).code, "both sides say what a message is");
                held[rank][number] = Some((*at, carried));
                (*received, moved) = (*received + 1, true);
            }
            if *received < step.recvs.len() {
                continue;
            }
            for &(number, merge) in &step.decode {
                let (set, _) = use_of(&held[rank], number);
                let into = &mut state[rank][message(number).block];
                match merge {
                    Merge::Copy => *into = set,
                    Merge::Reduce | Merge::ReduceLeft => {
                        assert_eq!(*into & set, 0, "a rank's values would count twice");
                        *into |= set;
                    }
                }
            }
            (*at, *begun, *received, moved) = (*at + 1, false, 0, true);
        }
    }
    let over = |r: usize| (0..lanes).all(|l| cursor[r][l].0 == programs[r].lanes[l].len());
    assert!((0..n).all(over), "a program is stuck");
    assert!(
        wires.iter().flatten().flatten().all(VecDeque::is_empty),
        "something was sent that nobody received"
    );
    state
}

#[test]
fn every_rank_ends_with_everything_once() {
    for n in 1..=12 {
        let everyone = (1_u64 << n) - 1;
        for (name, programs) in forms(n) {
            for blocks in execute(&programs) {
                assert!(blocks.iter().all(|&set| set == everyone), "{name} {n}: {blocks:?}");
            }
        }
        let counts: Vec<usize> = (0..n).map(|r| if r % 2 == 0 { 10 + r } else { 0 }).collect();
        for chunks in [1, 3] {
            for blocks in execute(&all(n, |r| coded_exchange_of(r, &counts, chunks))) {
                let owner = |block: usize| counts[block / chunks];
                assert!(blocks.iter().enumerate().all(|(b, &set)| set == everyone || owner(b) == 0), "{n}");
            }
        }
    }
}

#[test]
fn the_coded_lists_are_pinned() {
    let mut text = String::new();
    for n in [2, 3, 4] {
        for (name, programs) in forms(n) {
            let _ = writeln!(text, "{name} {n}");
            for (rank, program) in programs.iter().enumerate() {
                let _ = writeln!(text, "  r{rank} {program}");
            }
        }
    }
    insta::assert_snapshot!("coded_lists", text);
}

/// Describes a buffer whose codec makes one byte of each value.
fn buffer(len: usize, topology: &Topology) -> CodedBuffer<'_> {
    CodedBuffer { len, payload: &|values| values, topology, regions: None }
}

/// A coder: four bytes per value without loss, or if `lossy`, multiples of 1/4 in one byte.
struct Test {
    lossy: bool,
}

impl Coder for Test {
    fn encode(&mut self, _: Phase, _: Range<usize>, x: &[f32], out: &mut Vec<u8>) -> Result<(), CoderError> {
        if self.lossy {
            out.extend(x.iter().map(|v| (v * 4.0).round() as i8 as u8));
        } else {
            out.extend(x.iter().flat_map(|v| v.to_le_bytes()));
        }
        Ok(())
    }
    fn decode(&mut self, _: Range<usize>, bytes: &[u8], out: &mut [f32]) -> Result<(), CoderError> {
        if bytes.len() != out.len() * if self.lossy { 1 } else { 4 } {
            return Err("length".into());
        }
        if self.lossy {
            out.iter_mut().zip(bytes).for_each(|(v, &b)| *v = f32::from(b.cast_signed()) / 4.0);
        } else {
            let values = bytes.as_chunks::<4>().0;
            out.iter_mut().zip(values).for_each(|(v, &b)| *v = f32::from_le_bytes(b));
        }
        Ok(())
    }
}

fn reduce(
    comm: &farflung_comm::Communicator,
    program: Program,
    x: Vec<f32>,
    op: ReduceOp,
    lossy: bool,
) -> Vec<f32> {
    let values = CodedSlice::new(x, Box::new(Test { lossy }));
    comm.start_all_reduce_coded_by(program, values, op).wait().unwrap().into_parts().0
}

#[test]
fn every_form_sums_over_every_transport_and_all_ranks_have_the_same_bits() {
    for (name, cluster) in TRANSPORTS {
        for n in [1, 2, 5] {
            for (form, programs) in forms(n) {
                let results = on_ranks(cluster(n), |comm| {
                    let me = comm.rank().index();
                    // The buffer's length is not a multiple of 2 or 5.
                    let exact: Vec<f32> = (0..140_003).map(|i| (i % 17 + me) as f32).collect();
                    let odd: Vec<f32> = (0..101).map(|i| ((i * 7 + me) as f32 * 0.61).sin()).collect();
                    let program = || programs[me].clone();
                    let sum = reduce(&comm, program(), exact.clone(), ReduceOp::Sum, false);
                    let mean = reduce(&comm, program(), exact, ReduceOp::Mean, false);
                    let coded = reduce(&comm, program(), odd, ReduceOp::Mean, true);
                    (sum, mean, coded)
                });
                let more = (n * (n - 1) / 2) as f32;
                for (sum, mean, coded) in &results {
                    assert!(
                        sum.iter().enumerate().all(|(i, &v)| v == (n * (i % 17)) as f32 + more),
                        "{name} {form}"
                    );
                    assert!(
                        mean.iter().zip(sum).all(|(m, s)| (m - s / n as f32).abs() < 1e-5),
                        "{name} {form}"
                    );
                    let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(coded), bits(&results[0].2), "{name} {form}");
                }
            }
        }
    }
}

#[test]
fn a_program_for_other_values_and_an_algorithm_without_a_coded_form_are_refused() {
    on_ranks(over(&Topology::uniform(1, Link::FREE)), |comm| {
        let values = CodedSlice::new(vec![0.0; 3], Box::new(Test { lossy: false }));
        let program = coded_exchange_of(Rank(0), &[4], 1);
        let error = comm.start_all_reduce_coded_by(program, values, ReduceOp::Sum).wait().unwrap_err();
        assert!(matches!(error, CommError::Argument { got: 4, want: 3, .. }), "{error}");
        let values = CodedSlice::new(vec![0.0; 3], Box::new(Test { lossy: false }));
        let refused =
            comm.start_all_reduce_coded_by(coded_exchange(Rank(0), 1), values, ReduceOp::Max).wait();
        assert!(matches!(refused, Err(CommError::Unsupported { .. })));
    });
    let topology = Topology::uniform(4, "lan".parse().unwrap());
    let error = Algorithm::DoubleTree.resolve_coded(&buffer(9, &topology)).unwrap_err();
    assert!(
        error.to_string().contains("`double-tree`") && error.to_string().contains("hierarchical"),
        "{error}"
    );
}

/// Two regions of four ranks: 1 Gbit/s and 1 ms inside, 50 Mbit/s and 30 ms for each pair between them.
fn two_regions() -> Topology {
    let mut topology = Topology::uniform(8, "1gbit,1ms".parse().unwrap());
    for (a, b) in (0..8).flat_map(|a| (0..8).map(move |b| (a, b))).filter(|(a, b)| a / 4 != b / 4) {
        topology.set_link(Rank(a), Rank(b), "50mbit,30ms".parse().unwrap());
    }
    topology
}

/// The same regions, with one shared line of 50 Mbit/s between them.
fn one_line() -> Topology {
    let mut topology = Topology::uniform(8, "1gbit,1ms".parse().unwrap());
    for (a, b) in (0..8).flat_map(|a| (0..8).map(move |b| (a, b))).filter(|(a, b)| a / 4 != b / 4) {
        topology.set_link(Rank(a), Rank(b), "1gbit,30ms".parse().unwrap());
    }
    for region in groups(8, 4) {
        topology.set_region(&region, AccessLink { up: Bandwidth(50_000_000), down: Bandwidth(50_000_000) });
    }
    topology
}

/// Four ranks with uplinks of 10, 20, 40 and 80 Mbit/s.
fn uneven() -> Topology {
    let mut topology = Topology::uniform(4, "1gbit,5ms".parse().unwrap());
    for rank in 0..4 {
        let port = Bandwidth(10_000_000 << rank);
        topology.set_access_link(Rank(rank), AccessLink { up: port, down: port });
    }
    topology
}

#[test]
fn every_form_takes_its_price() {
    let len = 300_000;
    for (name, topology) in [("regions", two_regions()), ("one line", one_line()), ("uneven", uneven())] {
        for form in Algorithm::CODED {
            let price = form.coded_cost(&buffer(len, &topology)).unwrap().as_secs_f64();
            let times = on_ranks(over(&topology), |comm| {
                let program = form.coded_program(comm.rank(), &buffer(len, &topology)).unwrap();
                reduce(&comm, program, vec![1.0; len], ReduceOp::Sum, true);
                comm.now()
            });
            let took = times.into_iter().max().unwrap().as_secs_f64();
            assert!((took / price - 1.0).abs() < 0.01, "{form} in {name}: {took} for {price}");
        }
    }
}

#[test]
fn the_choice_is_the_cheapest_that_does_not_lose_at_each_hop() {
    let equal = || Topology::uniform(5, "100mbit,5ms".parse().unwrap());
    for (topology, len, want) in [
        (one_line(), 1_000_000, Algorithm::Hierarchical),
        (uneven(), 1_000_000, Algorithm::Butterfly),
        // In chunks: while one is scattered, another is gathered.
        (equal(), 1_000_000, Algorithm::Butterfly),
        (equal(), 60_000, Algorithm::Direct),
        // All-gather takes one latency only, but sends more bytes.
        (equal(), 10_000, Algorithm::AllGather),
    ] {
        let price = |form: Algorithm| form.coded_cost(&buffer(len, &topology)).unwrap();
        assert_eq!(Algorithm::Auto.resolve_coded(&buffer(len, &topology)).unwrap(), want);
        for form in Algorithm::CODED.into_iter().filter(|form| *form != Algorithm::Ring) {
            assert!(price(want) <= price(form), "{want} {form}");
        }
        assert_eq!(price(Algorithm::Auto), price(want));
    }
}

#[test]
fn regions_can_be_given_instead_of_found() {
    let halves = vec![vec![Rank(0), Rank(2)], vec![Rank(1), Rank(3)]];
    on_ranks(over(&Topology::uniform(4, "lan".parse().unwrap())), |comm| {
        assert!(comm.clone().with_regions(vec![vec![Rank(0)], vec![Rank(0), Rank(2), Rank(3)]]).is_err());
        let comm = comm.with_regions(halves.clone()).unwrap().with_algorithm(Algorithm::Hierarchical);
        let buffer = comm.coded_buffer(100, &|values| values);
        let program = Algorithm::Hierarchical.coded_program(comm.rank(), &buffer).unwrap();
        assert_eq!(program, two_level(comm.rank(), &halves));
        // Uncoded values use these regions too: the first partner is in the rank's own half.
        let mut x = [comm.rank().0 as f32; 8];
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert!(x.iter().all(|&v| (v - 6.0).abs() < f32::EPSILON));
    });
}

#[test]
fn a_program_that_does_not_fit_costs_for_ever() {
    let programs = vec![coded_exchange(Rank(0), 3), coded_ring(Rank(1), 3), coded_ring(Rank(2), 3)];
    let topology = Topology::uniform(3, "lan".parse().unwrap());
    assert_eq!(cost_coded(&programs, 100, &|n| n, &topology), farflung_base::Nanos::MAX);
}
