//! What the ranks of a plan do, as data: computations, and messages and collectives that they begin and wait
//! for. Played in virtual time over the links of a topology, where all that is on its way shares them. What an
//! operation sends is an input: nothing here knows collectives, codecs or models.

use std::collections::BTreeMap;

use farflung_base::operation::{Finished, NetworkSimulator};
use farflung_base::{Nanos, Operation, Rank, Topology};

use crate::ParallelError;

/// One thing that a rank does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Its processor is busy for so long.
    Compute(Nanos),
    /// It begins its side of an operation, by number, which goes on by itself.
    Begin(usize),
    /// It waits until its side of an operation is done.
    Await(usize),
}

/// What ranks do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Script {
    /// Messages and collectives, by number.
    pub operations: Vec<Operation>,
    /// What each rank does, in order.
    pub ranks: Vec<Vec<Act>>,
}

/// When ranks did what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Played {
    /// Each rank's clock after each of its acts.
    pub ends: Vec<Vec<Nanos>>,
}

impl Played {
    /// When the last rank is done.
    #[must_use]
    pub fn makespan(&self) -> Nanos {
        self.ends.iter().filter_map(|ends| ends.last().copied()).max().unwrap_or_default()
    }
}

impl Script {
    /// Plays the script from a common start on idle links.
    ///
    /// Errors: [`ParallelError::NeverDone`] for a rank that waits for what does not end.
    ///
    /// # Panics
    /// If a rank begins an operation that does not exist or that it has no side in.
    ///
    /// ```
    /// use farflung_base::{Bytes, Nanos, Rank, Topology, Operation};
    /// use farflung_parallel::script::{Act, Script};
    ///
    /// let link = "8mbit,1ms".parse()?;
    /// let kilobytes = |n: u64| Operation::message(Rank(0), Rank(1), Bytes(n * 1000), Bytes(1 << 18));
    /// let compute = |ms| Act::Compute(Nanos::from_millis(ms));
    /// let script = Script {
    ///     operations: vec![kilobytes(10), kilobytes(10)],
    ///     ranks: vec![
    ///         vec![compute(5), Act::Begin(0), compute(5), Act::Begin(1)],
    ///         vec![Act::Begin(0), Act::Begin(1), Act::Await(0), compute(3), Act::Await(1)],
    ///     ],
    /// };
    /// let played = script.play(&Topology::uniform(2, link))?;
    /// // The second message waits until the first has left the uplink.
    /// assert_eq!(played.ends[1][2..], [16, 19, 26].map(Nanos::from_millis));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn play(&self, topology: &Topology) -> Result<Played, ParallelError> {
        let mut simulator = NetworkSimulator::new(topology, &self.operations);
        let mut done: BTreeMap<(Rank, usize), Nanos> = BTreeMap::new();
        let mut ends: Vec<Vec<Nanos>> =
            self.ranks.iter().map(|acts| Vec::with_capacity(acts.len())).collect();
        let mut awake: Vec<usize> = (0..self.ranks.len()).rev().collect();
        loop {
            while let Some(i) = awake.pop() {
                let rank = Rank(i as u32);
                let mut clock = ends[i].last().copied().unwrap_or_default();
                while let Some(&act) = self.ranks[i].get(ends[i].len()) {
                    match act {
                        Act::Compute(time) => clock = clock.saturating_add(time),
                        Act::Begin(operation) => simulator.begin(operation, rank, clock),
                        Act::Await(operation) => match done.get(&(rank, operation)) {
                            Some(&at) => clock = clock.max(at),
                            None => break,
                        },
                    }
                    ends[i].push(clock);
                }
            }
            let Some(Finished { operation, rank, at }) = simulator.next_end() else { break };
            done.insert((rank, operation), at);
            let i = rank.index();
            if self.ranks[i].get(ends[i].len()) == Some(&Act::Await(operation)) {
                awake.push(i);
            }
        }
        let stuck = ends.iter().zip(&self.ranks).position(|(ends, acts)| ends.len() < acts.len());
        match stuck {
            None => Ok(Played { ends }),
            Some(rank) => Err(ParallelError::NeverDone { rank: Rank(rank as u32), act: ends[rank].len() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::Bytes;

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
                vec![Act::Begin(0)],
                vec![Act::Begin(0), Act::Begin(1), Act::Compute(ms(2)), Act::Await(0), Act::Await(1)],
                vec![Act::Compute(ms(1)), Act::Begin(1)],
            ],
        };
        let played = script.play(&topology).unwrap();
        // Both come in over one downlink.
        assert_eq!(played.ends[1], [0, 0, 2, 5, 9].map(ms));
        assert_eq!(played.makespan(), ms(9));
    }

    #[test]
    fn who_waits_for_nothing_is_named() {
        let topology = Topology::uniform(2, "8mbit,1ms".parse().unwrap());
        let operations = vec![Operation::message(Rank(0), Rank(1), Bytes(1), Bytes(1))];
        let ranks = vec![Vec::new(), vec![Act::Compute(ms(1)), Act::Begin(0), Act::Await(0)]];
        let refused = Script { operations, ranks }.play(&topology).unwrap_err();
        assert_eq!(refused, ParallelError::NeverDone { rank: Rank(1), act: 2 });
    }
}
