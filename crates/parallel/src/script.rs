//! Scripts: the ops of the ranks of a plan, as data. A rank computes, begins messages and collectives, and
//! waits for them. A script is simulated in virtual time over the links of a topology, which all operations in
//! flight share. The bytes of an operation are an input; collectives, codecs and models are not part of this
//! module.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::operation::{Completion, NetworkSimulator};
use farflung_base::{Bandwidth, Bytes, Nanos, Operation, Rank, Topology};

use crate::ParallelError;

/// One op of a rank in a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScriptOp {
    /// The rank's processor is busy for this time.
    Compute(Nanos),
    /// The rank begins its part of the operation with this index. The operation then proceeds on its own.
    Begin(usize),
    /// The rank waits until its part of the operation is done.
    Await(usize),
}

/// A script: operations, and the ops of each rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Script {
    /// Messages and collectives, referred to by index.
    pub operations: Vec<Operation>,
    /// Actions of each rank, in order.
    pub ranks: Vec<Vec<ScriptOp>>,
}

/// The times of a simulated script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptTimes {
    /// Time of each rank's clock after each of its ops.
    pub ends: Vec<Vec<Nanos>>,
}

impl ScriptTimes {
    /// Returns the time at which the last rank is done.
    #[must_use]
    pub fn makespan(&self) -> Nanos {
        self.ends.iter().filter_map(|ends| ends.last().copied()).max().unwrap_or_default()
    }
}

impl Script {
    /// Simulates the script. All ranks start at time zero with idle links.
    ///
    /// Errors: [`ParallelError::NeverDone`] for a rank that waits for an operation that never ends.
    ///
    /// # Panics
    /// If a rank begins an operation that does not exist or has no part for this rank.
    ///
    /// ```
    /// use farflung_base::{Bytes, Nanos, Rank, Topology, Operation};
    /// use farflung_parallel::script::{ScriptOp, Script};
    ///
    /// let link = "8mbit,1ms".parse()?;
    /// let kilobytes = |n: u64| Operation::message(Rank(0), Rank(1), Bytes(n * 1000), Bytes(1 << 18));
    /// let compute = |ms| ScriptOp::Compute(Nanos::from_millis(ms));
    /// let script = Script {
    ///     operations: vec![kilobytes(10), kilobytes(10)],
    ///     ranks: vec![
    ///         vec![compute(5), ScriptOp::Begin(0), compute(5), ScriptOp::Begin(1)],
    ///         [0, 1].map(ScriptOp::Begin).into_iter()
    ///             .chain([ScriptOp::Await(0), compute(3), ScriptOp::Await(1)]).collect(),
    ///     ],
    /// };
    /// let played = script.simulate(&Topology::uniform(2, link))?;
    /// // The second message waits until the first has left the uplink.
    /// assert_eq!(played.ends[1][2..], [16, 19, 26].map(Nanos::from_millis));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn simulate(&self, topology: &Topology) -> Result<ScriptTimes, ParallelError> {
        self.run(topology, Nanos::MAX).map_err(|Stuck { rank, op }| ParallelError::NeverDone { rank, op })
    }

    /// Simulates the script like [`Script::simulate`], but only up to `limit`. `None` if the last rank is not
    /// done by then, or if a rank waits forever.
    ///
    /// # Panics
    /// The same as for [`Script::simulate`].
    #[must_use]
    pub fn simulate_within(&self, topology: &Topology, limit: Nanos) -> Option<ScriptTimes> {
        self.run(topology, limit).ok().filter(|played| played.makespan() <= limit)
    }

    /// Returns a lower bound on the time of the script: the longest total work of any processor, uplink,
    /// downlink, shared line or pair of ranks. Messages for which the receiver does not wait are not counted.
    ///
    /// # Panics
    /// If a rank begins an operation that does not exist.
    #[must_use]
    pub fn lower_bound(&self, topology: &Topology) -> Nanos {
        let awaited: BTreeSet<(Rank, usize)> = self
            .ops()
            .filter_map(|(rank, op)| match op {
                ScriptOp::Await(operation) => Some((rank, operation)),
                _ => None,
            })
            .collect();
        let mut busy = Busy::new(topology);
        for (rank, op) in self.ops() {
            match op {
                ScriptOp::Compute(time) => busy.processors[rank.index()] += u128::from(time.0),
                ScriptOp::Begin(operation) => {
                    let sides = &self.operations[operation].parts;
                    let steps = sides.get(&rank).into_iter().flat_map(|side| side.lanes.iter().flatten());
                    for &(to, bytes) in steps.flat_map(|step| &step.sends) {
                        if awaited.contains(&(to, operation)) {
                            busy.send(rank, to, bytes);
                        }
                    }
                }
                ScriptOp::Await(_) => {}
            }
        }
        busy.longest()
    }

    fn ops(&self) -> impl Iterator<Item = (Rank, ScriptOp)> + '_ {
        (0..).map(Rank).zip(&self.ranks).flat_map(|(rank, ops)| ops.iter().map(move |&op| (rank, op)))
    }

    fn run(&self, topology: &Topology, limit: Nanos) -> Result<ScriptTimes, Stuck> {
        let mut simulator = NetworkSimulator::new(topology, &self.operations).until(limit);
        let mut done: BTreeMap<(Rank, usize), Nanos> = BTreeMap::new();
        let mut ends: Vec<Vec<Nanos>> = self.ranks.iter().map(|ops| Vec::with_capacity(ops.len())).collect();
        let mut awake: Vec<usize> = (0..self.ranks.len()).rev().collect();
        loop {
            while let Some(i) = awake.pop() {
                let rank = Rank(i as u32);
                let mut clock = ends[i].last().copied().unwrap_or_default();
                while let Some(&op) = self.ranks[i].get(ends[i].len()) {
                    match op {
                        ScriptOp::Compute(time) => clock = clock.saturating_add(time),
                        ScriptOp::Begin(operation) => simulator.begin(operation, rank, clock),
                        ScriptOp::Await(operation) => match done.get(&(rank, operation)) {
                            Some(&at) => clock = clock.max(at),
                            None => break,
                        },
                    }
                    ends[i].push(clock);
                }
            }
            let Some(Completion { operation, rank, at }) = simulator.next_completion() else { break };
            done.insert((rank, operation), at);
            let i = rank.index();
            if self.ranks[i].get(ends[i].len()) == Some(&ScriptOp::Await(operation)) {
                awake.push(i);
            }
        }
        let stuck = ends.iter().zip(&self.ranks).position(|(ends, ops)| ends.len() < ops.len());
        match stuck {
            None => Ok(ScriptTimes { ends }),
            Some(rank) => Err(Stuck { rank: Rank(rank as u32), op: ends[rank].len() }),
        }
    }
}

/// A rank that waits forever, and the op at which it waits.
struct Stuck {
    rank: Rank,
    op: usize,
}

/// Total work of processors, in nanoseconds, and of links, in bytes.
struct Busy<'a> {
    topology: &'a Topology,
    processors: Vec<u128>,
    up: Vec<u64>,
    down: Vec<u64>,
    region_up: Vec<u64>,
    region_down: Vec<u64>,
    pairs: BTreeMap<(Rank, Rank), u64>,
}

impl<'a> Busy<'a> {
    fn new(topology: &'a Topology) -> Self {
        let (ranks, regions) = (topology.size(), topology.regions());
        Self {
            topology,
            processors: vec![0; ranks],
            up: vec![0; ranks],
            down: vec![0; ranks],
            region_up: vec![0; regions],
            region_down: vec![0; regions],
            pairs: BTreeMap::new(),
        }
    }

    fn send(&mut self, from: Rank, to: Rank, bytes: Bytes) {
        if from == to {
            return;
        }
        let add = |sum: &mut u64| *sum = sum.saturating_add(bytes.0);
        add(&mut self.up[from.index()]);
        add(&mut self.down[to.index()]);
        add(self.pairs.entry((from, to)).or_default());
        if self.topology.leaves_region(from, to) {
            let region = |rank| self.topology.region(rank);
            if let Some(out) = region(from) {
                add(&mut self.region_up[out]);
            }
            if let Some(into) = region(to) {
                add(&mut self.region_down[into]);
            }
        }
    }

    /// Returns the longest time for which any processor or link is busy.
    fn longest(&self) -> Nanos {
        let port = |rank: usize| self.topology.access_link(Rank(rank as u32));
        let line = |region: usize| self.topology.region_access_link(region);
        let each = |sums: &[u64], rate: &dyn Fn(usize) -> Bandwidth| {
            let times = sums.iter().enumerate().map(|(at, &bytes)| rate(at).transfer(Bytes(bytes)));
            times.max().unwrap_or_default()
        };
        let pair = |(&(from, to), &bytes): (&(Rank, Rank), &u64)| {
            self.topology.link(from, to).bandwidth.transfer(Bytes(bytes))
        };
        let computes =
            self.processors.iter().max().map_or(0, |&time| u64::try_from(time).unwrap_or(u64::MAX));
        [
            Nanos(computes),
            each(&self.up, &|rank| port(rank).up),
            each(&self.down, &|rank| port(rank).down),
            each(&self.region_up, &|region| line(region).up),
            each(&self.region_down, &|region| line(region).down),
            self.pairs.iter().map(pair).max().unwrap_or_default(),
        ]
        .into_iter()
        .max()
        .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::{AccessLink, Philox};

    use super::*;

    fn ms(n: u64) -> Nanos {
        Nanos::from_millis(n)
    }

    #[test]
    fn operations_that_overlap_share_links_and_computations_hide_them() {
        let topology = Topology::uniform(3, "8mbit,1ms".parse().unwrap());
        let message = |from, to| Operation::message(Rank(from), Rank(to), Bytes(4_000), Bytes(1 << 18));
        let script = Script {
            operations: vec![message(0, 1), message(2, 1)],
            ranks: vec![
                vec![ScriptOp::Begin(0)],
                vec![
                    ScriptOp::Begin(0),
                    ScriptOp::Begin(1),
                    ScriptOp::Compute(ms(2)),
                    ScriptOp::Await(0),
                    ScriptOp::Await(1),
                ],
                vec![ScriptOp::Compute(ms(1)), ScriptOp::Begin(1)],
            ],
        };
        let played = script.simulate(&topology).unwrap();
        // Both messages arrive over one downlink.
        assert_eq!(played.ends[1], [0, 0, 2, 5, 9].map(ms));
        assert_eq!(played.makespan(), ms(9));
    }

    #[test]
    fn who_waits_for_nothing_is_named() {
        let topology = Topology::uniform(2, "8mbit,1ms".parse().unwrap());
        let operations = vec![Operation::message(Rank(0), Rank(1), Bytes(1), Bytes(1))];
        let ranks = vec![Vec::new(), vec![ScriptOp::Compute(ms(1)), ScriptOp::Begin(0), ScriptOp::Await(0)]];
        let refused = Script { operations, ranks }.simulate(&topology).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "rank 1 waits at op 2 of its script for an operation that never ends"
        );
        assert_eq!(refused, ParallelError::NeverDone { rank: Rank(1), op: 2 });
    }

    /// Ranks that compute and begin messages in random order, and wait for all their messages.
    fn random(philox: &Philox, at: u64) -> (Script, Topology) {
        let mut draws = at * 1000..;
        let mut draw = |below: u64| philox.below(draws.next().unwrap(), below);
        let count = 2 + draw(4) as u32;
        let mut topology = Topology::uniform(count as usize, "8mbit,1ms".parse().unwrap());
        let rate = |n: u64| Bandwidth((1 + n) * 2_000_000);
        for rank in (0..count).map(Rank) {
            topology.set_access_link(rank, AccessLink { up: rate(draw(8)), down: rate(draw(8)) });
        }
        if draw(2) == 0 {
            topology.set_region(&[Rank(0)], AccessLink { up: rate(draw(8)), down: rate(draw(8)) });
        }
        let mut script = Script { operations: Vec::new(), ranks: vec![Vec::new(); count as usize] };
        let mut awaits = script.ranks.clone();
        for number in 0..=draw(12) as usize {
            let (from, step) = (draw(u64::from(count)) as u32, 1 + draw(u64::from(count) - 1) as u32);
            let to = (from + step) % count;
            let bytes = Bytes(draw(20_000));
            script.operations.push(Operation::message(Rank(from), Rank(to), bytes, Bytes(3_000)));
            for rank in [from, to] {
                let ops = &mut script.ranks[rank as usize];
                ops.insert(draw(ops.len() as u64 + 1) as usize, ScriptOp::Compute(Nanos(draw(5_000_000))));
                ops.insert(draw(ops.len() as u64 + 1) as usize, ScriptOp::Begin(number));
            }
            awaits[to as usize].push(ScriptOp::Await(number));
        }
        script.ranks.iter_mut().zip(awaits).for_each(|(ops, more)| ops.extend(more));
        (script, topology)
    }

    #[test]
    fn no_play_is_shorter_than_the_bound_and_a_limit_cuts_just_what_is_longer() {
        let philox = Philox::new(7, 0);
        let mut tight = 0;
        for at in 0..500 {
            let (script, topology) = random(&philox, at);
            let played = script.simulate(&topology).unwrap();
            let (least, takes) = (script.lower_bound(&topology), played.makespan());
            assert!(least <= takes, "{at}: {least} of {takes}");
            tight += u32::from(least.0 * 10 >= takes.0 * 8);
            assert_eq!(script.simulate_within(&topology, takes).as_ref(), Some(&played), "{at}");
            assert_eq!(script.simulate_within(&topology, Nanos(takes.0 - 1)), None, "{at}");
        }
        assert!(tight > 100, "{tight} of 500 bounds are within a fifth");
    }

    #[test]
    fn the_bound_of_one_message_is_the_message_and_what_nobody_awaits_does_not_count() {
        let topology = Topology::uniform(2, "8mbit,1ms".parse().unwrap());
        let operations = vec![Operation::message(Rank(0), Rank(1), Bytes(4_000), Bytes(1 << 18))];
        let waits = vec![vec![ScriptOp::Begin(0)], vec![ScriptOp::Begin(0), ScriptOp::Await(0)]];
        let script = Script { operations, ranks: waits };
        assert_eq!(script.lower_bound(&topology), ms(4));
        let forgets = Script { ranks: vec![vec![ScriptOp::Begin(0)], vec![ScriptOp::Begin(0)]], ..script };
        assert_eq!(
            (forgets.lower_bound(&topology), forgets.simulate(&topology).unwrap().makespan()),
            (ms(0), ms(0))
        );
    }
}
