//! Times of small operations, computed by hand, and random operations compared with the event-by-event
//! simulator.

use super::event_by_event::EventByEvent;
use super::*;
use crate::{AccessLink, Bandwidth, Link, Philox};

const FRAME: Bytes = Bytes(1_000_000);

fn ms(n: u64) -> Nanos {
    Nanos::from_millis(n)
}

/// Links of 8 Mbit/s and 1 ms: a thousand bytes take a millisecond, plus the latency.
fn topology(ranks: usize) -> Topology {
    Topology::uniform(ranks, "8mbit,1ms".parse().unwrap())
}

#[test]
fn messages_of_one_rank_share_its_uplink_and_those_of_others_do_not_disturb_them() {
    let message = |from, to, bytes| Operation::message(Rank(from), Rank(to), Bytes(bytes), FRAME);
    assert_eq!(isolated_time(&message(0, 1, 5_000), &topology(2)), ms(6));
    let all = [message(0, 1, 5_000), message(0, 2, 5_000), message(3, 2, 2_000)];
    let topology = topology(4);
    let mut simulator = NetworkSimulator::new(&topology, &all);
    for (number, operation) in all.iter().enumerate() {
        operation.parts.keys().for_each(|&rank| simulator.begin(number, rank, ms(10)));
    }
    let mut ends = BTreeMap::new();
    while let Some(Completion { operation, rank, at }) = simulator.next_completion() {
        ends.insert((operation, rank.0), at);
    }
    // A sender has finished as soon as it has begun: it does not wait for delivery.
    assert_eq!(ends[&(0, 0)], ms(10));
    assert_eq!([ends[&(0, 1)], ends[&(1, 2)], ends[&(2, 2)]], [ms(16), ms(21), ms(13)]);
}

#[test]
fn what_leaves_a_region_shares_its_line_and_late_receivers_find_what_came() {
    let mut topology = Topology::uniform(4, "80mbit,1ms".parse().unwrap());
    for pair in [[Rank(0), Rank(1)], [Rank(2), Rank(3)]] {
        topology.set_region(&pair, AccessLink { up: Bandwidth(8_000_000), down: Bandwidth(8_000_000) });
    }
    let all =
        [(0, 2), (1, 3)].map(|(from, to)| Operation::message(Rank(from), Rank(to), Bytes(4_000), FRAME));
    let mut simulator = NetworkSimulator::new(&topology, &all);
    simulator.begin(0, Rank(0), ms(0));
    simulator.begin(1, Rank(1), ms(0));
    simulator.begin(0, Rank(2), ms(0));
    simulator.begin(1, Rank(3), ms(100));
    let ends: BTreeMap<_, _> =
        std::iter::from_fn(|| simulator.next_completion()).map(|end| (end.rank.0, end.at)).collect();
    // A receiver that begins after the arrival finishes at once.
    assert_eq!((ends[&2], ends[&3]), (ms(5), ms(100)));
    // Rank 3 now begins at time 0 too. Its message waits until the region's link is free.
    let both =
        Operation { parts: all.iter().flat_map(|operation| operation.parts.clone()).collect(), frame: FRAME };
    assert_eq!(isolated_time(&both, &topology), ms(9));
}

/// Sends two messages of two pieces each over one uplink.
#[test]
fn messages_leave_in_turns_or_one_after_the_other() {
    let ends = |order| {
        let two = |to| (Rank(to), Bytes(2_000));
        let step = OperationStep { sends: vec![two(1), two(2)], order, receives: Vec::new() };
        let mut operation = Operation::message(Rank(0), Rank(1), Bytes(2_000), Bytes(1_000));
        let other = Operation::message(Rank(0), Rank(2), Bytes(2_000), Bytes(1_000));
        operation.parts.extend(other.parts);
        operation.parts.get_mut(&Rank(0)).unwrap().lanes[0] = vec![step];
        let topology = topology(3);
        let all = [operation];
        let mut simulator = NetworkSimulator::new(&topology, &all);
        all[0].parts.keys().for_each(|&rank| simulator.begin(0, rank, ms(0)));
        std::iter::from_fn(|| simulator.next_completion()).map(|end| end.at).skip(1).collect::<Vec<_>>()
    };
    assert_eq!(ends(SendOrder::RoundRobin), [ms(4), ms(5)]);
    assert_eq!(ends(SendOrder::Sequential), [ms(3), ms(5)]);
}

#[test]
fn sides_that_do_not_fit_never_end() {
    let mut operation = Operation::message(Rank(0), Rank(1), Bytes(10), FRAME);
    operation.parts.remove(&Rank(0));
    assert_eq!(isolated_time(&operation, &topology(2)), Nanos::MAX);
    let moved = Operation::message(Rank(0), Rank(1), Bytes(10), FRAME).among(&[Rank(3), Rank(1)]);
    assert_eq!(moved, Operation::message(Rank(3), Rank(1), Bytes(10), FRAME));
}

/// Sequence of random numbers.
struct Draw {
    philox: Philox,
    at: u64,
}

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.at += 1;
        self.philox.below(self.at, bound)
    }

    /// Returns a rate from a short list, so that many transfers take equally long or no time.
    fn rate(&mut self) -> Bandwidth {
        [Bandwidth::UNLIMITED, Bandwidth(8_000_000_000), Bandwidth(4_000_000_000), Bandwidth(1_000_000_000)]
            [self.below(4) as usize]
    }

    fn topology(&mut self, ranks: usize) -> Topology {
        let mut topology = Topology::uniform(ranks, Link::FREE);
        for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
            let link = Link { bandwidth: self.rate(), latency: Nanos(self.below(3) * 5) };
            topology.set_link(Rank(from as u32), Rank(to as u32), link);
        }
        for rank in 0..ranks as u32 {
            topology.set_access_link(Rank(rank), AccessLink { up: self.rate(), down: self.rate() });
        }
        if self.below(3) > 0 && ranks > 2 {
            let cut = 1 + self.below(ranks as u64 - 1) as u32;
            let members: Vec<Rank> = (0..cut).map(Rank).collect();
            topology.set_region(&members, AccessLink { up: self.rate(), down: self.rate() });
            if self.below(2) == 0 {
                let others: Vec<Rank> = (cut..ranks as u32).map(Rank).collect();
                topology.set_region(&others, AccessLink { up: self.rate(), down: self.rate() });
            }
        }
        topology
    }

    /// Creates messages between random ranks in random steps. Those of a pair and lane are received in the
    /// order in which they are sent. Some operations never end, because steps wait for each other.
    fn operation(&mut self, ranks: u64) -> Operation {
        let lanes = 1 + self.below(3) as usize;
        let window = 1 + self.below(3) as usize;
        let steps = 1 + self.below(4);
        let empty =
            || RankPart { lanes: vec![vec![OperationStep::default(); steps as usize]; lanes], window };
        let mut sides: BTreeMap<Rank, RankPart> =
            (0..ranks as u32).map(|rank| (Rank(rank), empty())).collect();
        for side in sides.values_mut() {
            for step in side.lanes.iter_mut().flatten() {
                step.order = if self.below(3) == 0 { SendOrder::Sequential } else { SendOrder::RoundRobin };
            }
        }
        for lane in 0..lanes {
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                let (mut sent, mut received) = (0, 0);
                for _ in 0..self.below(4) {
                    sent += self.below(steps - sent);
                    received += self.below(steps - received);
                    let bytes = Bytes([0, 1, 7, 20, 64][self.below(5) as usize]);
                    let side = |rank: u64| Rank(rank as u32);
                    let step = &mut sides.get_mut(&side(from)).unwrap().lanes[lane][sent as usize];
                    step.sends.push((side(to), bytes));
                    let step = &mut sides.get_mut(&side(to)).unwrap().lanes[lane][received as usize];
                    step.receives.push((side(from), bytes));
                }
            }
        }
        Operation { parts: sides, frame: Bytes(1 + self.below(16)) }
    }
}

/// Returns all ends. Each rank begins operation `i + 2` some time after it ended operation `i`.
macro_rules! ends {
    ($simulator:ident, $topology:expr, $operations:expr, $pauses:expr) => {{
        let (operations, pauses): (&[Operation], &[u64]) = ($operations, $pauses);
        let mut simulator = $simulator::new($topology, operations);
        let pause =
            |operation: usize, rank: Rank| Nanos(pauses[(operation * 7 + rank.index()) % pauses.len()]);
        // The first two operations begin at once, so that operations run concurrently.
        for operation in 0..operations.len().min(2) {
            for &rank in operations[operation].parts.keys() {
                simulator.begin(operation, rank, pause(operation, rank));
            }
        }
        let mut ends = Vec::new();
        while let Some(end) = simulator.next_completion() {
            ends.push(end);
            if end.operation + 2 < operations.len() {
                let next = end.operation + 2;
                simulator.begin(next, end.rank, end.at.saturating_add(pause(next, end.rank)));
            }
        }
        ends
    }};
}

#[test]
fn what_is_left_out_changes_no_end() {
    let mut draw = Draw { philox: Philox::new(5, 0), at: 0 };
    let (mut ended, mut stuck) = (0, 0);
    for round in 0..3000 {
        let ranks = 2 + draw.below(4);
        let topology = draw.topology(ranks as usize);
        let operations: Vec<Operation> = (0..=draw.below(5)).map(|_| draw.operation(ranks)).collect();
        let pauses: Vec<u64> = (0..5).map(|_| [0, 0, 3, 8, 40][draw.below(5) as usize]).collect();
        let fast = ends!(NetworkSimulator, &topology, &operations, &pauses);
        let plain = ends!(EventByEvent, &topology, &operations, &pauses);
        assert_eq!(fast, plain, "round {round}: {topology:?} {operations:?}");
        ended += fast.len();
        stuck += operations.len() * ranks as usize - fast.len();
    }
    assert!(ended > 5000 && stuck > 1000, "{ended} {stuck}");
}
