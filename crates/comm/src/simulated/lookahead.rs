//! How far events may run ahead of running ranks. A rank's floor is the earliest time at which it can still
//! cause an event; a distance is the least delay after which another rank can notice it. Independent of the
//! events. [`super::world`] explains why the bound is correct.

use std::collections::BTreeSet;

use farflung_base::{Nanos, Rank, Topology};

/// Minimum delay from each sender to each receiver; `None` if the queue must be strict: events are processed
/// only while all ranks are blocked.
pub(super) type Distances = Option<Vec<Vec<Nanos>>>;

/// Returns the least sum of latencies on any path between two ranks, or on any cycle for a rank and itself.
/// Returns `None` if a sum is 0, and if regions share lines: a send of one rank can then delay another rank's
/// at once, so the queue must be strict: it may process events only while all ranks are blocked.
pub(super) fn distances(topology: &Topology) -> Distances {
    if topology.regions() > 0 {
        return None;
    }
    let n = topology.size();
    let latency = |a: usize, b: usize| {
        if a == b { Nanos::MAX } else { topology.link(Rank(a as u32), Rank(b as u32)).latency }
    };
    let mut all: Vec<Vec<Nanos>> = (0..n).map(|a| (0..n).map(|b| latency(a, b)).collect()).collect();
    for via in 0..n {
        let onward = all[via].clone();
        for row in &mut all {
            let there = row[via];
            for (distance, &rest) in row.iter_mut().zip(&onward) {
                *distance = there.saturating_add(rest).min(*distance);
            }
        }
    }
    all.iter().flatten().all(|&d| d > Nanos::ZERO).then_some(all)
}

/// Reason why an event must wait: until the least floor of `group` is later than `above`. (A rank's floor is
/// the earliest time at which it can still cause an event.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Obstacle {
    pub(super) group: usize,
    pub(super) above: Nanos,
}

/// Floors of all running ranks: the earliest times at which they can still cause events. Ranks with equal links
/// form a group: one group if all links are equal, one per region, or in the worst case one per rank.
#[derive(Debug)]
pub(super) struct Lookahead {
    /// Group of each rank.
    group: Vec<usize>,
    /// Minimum delay from any rank of a group to a receiver, by receiver and group.
    distance: Vec<Nanos>,
    /// Floors of the running ranks of each group.
    running: Vec<BTreeSet<(Nanos, usize)>>,
    /// Minimum floor of each group; [`Nanos::MAX`] if none of its ranks runs.
    least: Vec<Nanos>,
    /// Floor of each rank; `None` if it does not run.
    floor: Vec<Option<Nanos>>,
    /// Groups whose least floor has risen since the last call of `next_risen`.
    risen: BTreeSet<usize>,
}

impl Lookahead {
    /// Creates the groups; no rank is running.
    pub(super) fn new(distances: &[Vec<Nanos>]) -> Self {
        let n = distances.len();
        let mut first: Vec<usize> = Vec::new();
        let mut group = Vec::with_capacity(n);
        for (rank, row) in distances.iter().enumerate() {
            let alike = |&other: &usize| {
                let same = |(to, (a, b)): (usize, (&Nanos, &Nanos))| to == rank || to == other || a == b;
                row.iter().zip(&distances[other]).enumerate().all(same)
            };
            group.push(first.iter().position(alike).unwrap_or(first.len()));
            if group[rank] == first.len() {
                first.push(rank);
            }
        }
        let groups = first.len();
        let mut distance = vec![Nanos::MAX; n * groups];
        for (from, row) in distances.iter().enumerate() {
            for (to, &far) in row.iter().enumerate() {
                let least = &mut distance[to * groups + group[from]];
                *least = far.min(*least);
            }
        }
        Self {
            group,
            distance,
            running: vec![BTreeSet::new(); groups],
            least: vec![Nanos::MAX; groups],
            floor: vec![None; n],
            risen: BTreeSet::new(),
        }
    }

    /// Returns the number of groups.
    pub(super) fn groups(&self) -> usize {
        self.least.len()
    }

    /// Sets the floor of a running rank, or `None` if it does not run.
    pub(super) fn set(&mut self, rank: usize, floor: Option<Nanos>) {
        if self.floor[rank] == floor {
            return;
        }
        let group = self.group[rank];
        let running = &mut self.running[group];
        if let Some(before) = std::mem::replace(&mut self.floor[rank], floor) {
            running.remove(&(before, rank));
        }
        running.extend(floor.map(|floor| (floor, rank)));
        let least = running.first().map_or(Nanos::MAX, |&(floor, _)| floor);
        if least > std::mem::replace(&mut self.least[group], least) {
            self.risen.insert(group);
        }
    }

    /// Returns a group whose least floor has risen since the last call, and that floor.
    pub(super) fn next_risen(&mut self) -> Option<(usize, Nanos)> {
        let group = self.risen.pop_first()?;
        Some((group, self.least[group]))
    }

    /// Returns the obstacle to an event of `rank` at `time`: a group with a running rank that can still cause
    /// an event at `rank` that is not later.
    pub(super) fn obstacle(&self, rank: usize, time: Nanos) -> Option<Obstacle> {
        let groups = self.groups();
        let distance = &self.distance[rank * groups..][..groups];
        let before = |(least, far): (&Nanos, &Nanos)| least.saturating_add(*far) <= time;
        let group = self.least.iter().zip(distance).position(before)?;
        Some(Obstacle { group, above: Nanos(time.0 - distance[group].0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    #[test]
    fn distances_go_by_the_shortest_way_and_round_a_cycle() {
        let mut topology = Topology::uniform(3, "1mbit,10ms".parse().unwrap());
        topology.set_link(Rank(0), Rank(1), "1mbit,50ms".parse().unwrap());
        let row = |row: [u64; 3]| row.map(ms).to_vec();
        assert_eq!(distances(&topology), Some(vec![row([20, 20, 10]), row([10, 20, 10]), row([10, 10, 20])]));
    }

    #[test]
    fn ranks_with_equal_links_are_a_group() {
        let groups = |topology: &Topology| Lookahead::new(&distances(topology).unwrap()).group;
        let mut topology = Topology::uniform(6, "1mbit,10ms".parse().unwrap());
        assert_eq!(groups(&topology), [0; 6]);
        for (a, b) in (0..6).flat_map(|a| (0..6).map(move |b| (a, b))).filter(|(a, b)| a / 3 != b / 3) {
            topology.set_link(Rank(a), Rank(b), "1mbit,15ms".parse().unwrap());
        }
        assert_eq!(groups(&topology), [0, 0, 0, 1, 1, 1]);
        for (a, b) in (0..6).flat_map(|a| (0..6).map(move |b| (a, b))) {
            let latency = Nanos::from_micros(10_000 + 100 * u64::from(6 * a + b));
            topology.set_link(Rank(a), Rank(b), farflung_base::Link { latency, ..farflung_base::Link::FREE });
        }
        assert_eq!(groups(&topology), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn what_keeps_an_event_back_is_gone_when_the_floor_is_above() {
        let topology = Topology::uniform(3, "1mbit,10ms".parse().unwrap());
        let mut lookahead = Lookahead::new(&distances(&topology).unwrap());
        assert_eq!(lookahead.obstacle(0, ms(1_000)), None);
        lookahead.set(1, Some(ms(5)));
        lookahead.set(2, Some(ms(7)));
        assert_eq!(lookahead.obstacle(0, Nanos(ms(15).0 - 1)), None);
        let found = Obstacle { group: 0, above: ms(5) };
        assert_eq!((lookahead.obstacle(0, ms(15)), lookahead.next_risen()), (Some(found), None));
        lookahead.set(1, Some(ms(6)));
        assert_eq!((lookahead.obstacle(0, ms(15)), lookahead.next_risen()), (None, Some((0, ms(6)))));
        lookahead.set(1, None);
        assert_eq!((lookahead.next_risen(), lookahead.next_risen()), (Some((0, ms(7))), None));
        lookahead.set(2, None);
        assert_eq!(lookahead.next_risen(), Some((0, Nanos::MAX)));
    }
}
