//! Simulation of a swarm under preemptions: peers are lost and replaced, and the swarm rebalances at regular
//! intervals.

use farflung_base::Nanos;

use super::rebalance::{QueuedPeer, bound, rebalance};
use crate::ParallelError;
use crate::seeded_rng::SeededRng;

/// Settings of a simulated swarm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SwarmRun {
    /// Number of stages of the pipeline.
    pub stages: usize,
    /// Number of peers at the start, divided equally over the stages.
    pub peers: u32,
    /// Rates of losses and arrivals.
    pub churn: Churn,
    /// Simulated time.
    pub time: Nanos,
    /// Time between two rebalancings. `None`: no rebalancing.
    pub every: Option<Nanos>,
    /// Time for which a peer that joins or moves does no work, because it downloads weights.
    pub download: Nanos,
}

/// Rates of losses and arrivals. The simulation advances in steps of a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Churn {
    /// Mean time until a peer is lost, in seconds.
    pub lifetime: f64,
    /// Mean time until a lost peer is replaced, in seconds.
    pub absence: f64,
}

/// Result of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Goodput {
    /// Number of tasks through the slowest stage, divided by the number if all peers were perfectly
    /// distributed.
    pub share_of_bound: f64,
    /// [`Goodput::share_of_bound`] of the first hour.
    pub first_hour: f64,
    /// [`Goodput::share_of_bound`] of the last hour.
    pub last_hour: f64,
    /// Number of moves of peers.
    pub moves: u32,
}

/// A peer of the simulation.
#[derive(Clone, Copy)]
struct Peer {
    id: u32,
    rate: f64,
    /// Second from which the peer works.
    from: u64,
}

/// Simulates a swarm second by second. All peers have a rate of 1; new peers join a random stage.
///
/// Losses and arrivals depend only on the seed and on time, so runs with different `every` have the same number
/// of losses and arrivals at each time. Queue lengths follow from the flow, which the slowest stage limits: a
/// stage near its limit has long queues.
///
/// Errors: [`ParallelError::Zero`] for no stages, a time below one second, mean times that are not positive and
/// finite, or less than a second between rebalancings.
pub fn simulate_swarm(run: &SwarmRun, seed: u64) -> Result<Goodput, ParallelError> {
    let zero = |field| Err(ParallelError::Zero { of: "the swarm".to_owned(), field });
    let seconds = run.time.0 / 1_000_000_000;
    if run.stages == 0 {
        return zero("stages");
    }
    if seconds == 0 {
        return zero("time");
    }
    if run.every.is_some_and(|every| every.0 < 1_000_000_000) {
        return zero("every");
    }
    let positive = |time: f64| time.is_finite() && time > 0.0;
    if !positive(run.churn.lifetime) || !positive(run.churn.absence) {
        return zero("churn");
    }
    let mut swarm = Swarm::new(run);
    let (mut done, mut possible) = (Vec::new(), Vec::new());
    let mut draw = SeededRng::new(seed, 4);
    let mut moves = 0;
    for second in 0..seconds {
        swarm.churn(run, second, &mut draw);
        let is_due =
            run.every.is_some_and(|every| second > 0 && second.is_multiple_of(every.0 / 1_000_000_000));
        if is_due {
            moves += u32::from(swarm.rebalance(second, run.download));
        }
        done.push(swarm.slowest(second));
        possible.push(swarm.bound(run.stages));
    }
    let share = |from: usize, to: usize| {
        let (done, possible): (f64, f64) = (done[from..to].iter().sum(), possible[from..to].iter().sum());
        if possible > 0.0 { done / possible } else { 0.0 }
    };
    let (all, hour) = (done.len(), done.len().min(3600));
    Ok(Goodput {
        share_of_bound: share(0, all),
        first_hour: share(0, hour),
        last_hour: share(all - hour, all),
        moves,
    })
}

struct Swarm {
    stages: Vec<Vec<Peer>>,
    next: u32,
    /// Number of lost peers that have not been replaced.
    empty: u32,
}

impl Swarm {
    fn new(run: &SwarmRun) -> Self {
        let mut stages = vec![Vec::new(); run.stages];
        for (id, stage) in (0..run.peers).zip((0..run.stages).cycle()) {
            stages[stage].push(Peer { id, rate: 1.0, from: 0 });
        }
        Self { stages, next: run.peers, empty: 0 }
    }

    /// Applies the losses and arrivals of a second. The numbers drawn do not depend on which peer is in which
    /// stage.
    fn churn(&mut self, run: &SwarmRun, second: u64, draw: &mut SeededRng) {
        const FINE: usize = 1 << 40;
        let happens = |mean: f64, draw: &mut SeededRng| (draw.below(FINE) as f64) < FINE as f64 / mean;
        let alive: usize = self.stages.iter().map(Vec::len).sum();
        for _ in 0..alive {
            let (lost, who) = (happens(run.churn.lifetime, draw), draw.below(alive));
            if lost {
                self.lose(who);
            }
        }
        for _ in 0..self.empty {
            let (comes, stage) = (happens(run.churn.absence, draw), draw.below(run.stages));
            if comes {
                self.empty -= 1;
                let from = second + run.download.0 / 1_000_000_000;
                self.stages[stage].push(Peer { id: self.next, rate: 1.0, from });
                self.next += 1;
            }
        }
    }

    /// Removes the peer with this index in the order of ids.
    fn lose(&mut self, which: usize) {
        let mut ids: Vec<u32> = self.stages.iter().flatten().map(|peer| peer.id).collect();
        ids.sort_unstable();
        if let Some(&id) = ids.get(which % ids.len().max(1)) {
            self.stages.iter_mut().for_each(|stage| stage.retain(|peer| peer.id != id));
            self.empty += 1;
        }
    }

    fn rate(stage: &[Peer], second: u64) -> f64 {
        stage.iter().filter(|peer| peer.from <= second).map(|peer| peer.rate).sum()
    }

    /// Returns the rate of the slowest stage.
    fn slowest(&self, second: u64) -> f64 {
        self.stages.iter().map(|stage| Self::rate(stage, second)).fold(f64::INFINITY, f64::min)
    }

    fn bound(&self, stages: usize) -> f64 {
        let rates: Vec<f64> = self.stages.iter().flatten().map(|peer| peer.rate).collect();
        bound(&rates, stages)
    }

    /// Moves one peer if that helps. Returns whether one moved.
    fn rebalance(&mut self, second: u64, download: Nanos) -> bool {
        let flow = self.slowest(second);
        // The queue length follows from the share of the stage's rate that is in use; the slowest stage has the
        // longest queues.
        let queued = |stage: &Vec<Peer>| -> Vec<QueuedPeer> {
            let rate: f64 = stage.iter().map(|peer| peer.rate).sum();
            let used = if rate > 0.0 { flow / rate } else { 1.0 };
            let each = 1000.0 * used / (1.02 - used.min(1.0)) / stage.len().max(1) as f64;
            stage.iter().map(|peer| QueuedPeer { id: peer.id, queue: each as u64, rate: peer.rate }).collect()
        };
        let mut stages: Vec<Vec<QueuedPeer>> = self.stages.iter().map(queued).collect();
        // A stage without peers has no queue, so it gets a placeholder peer with a very long one.
        if let Some(empty) = stages.iter().position(Vec::is_empty) {
            stages[empty].push(QueuedPeer { id: u32::MAX, queue: u64::MAX / 1024, rate: 0.0 });
        }
        let Some(migration) = rebalance(&stages) else { return false };
        let from = &mut self.stages[migration.from];
        let Some(at) = from.iter().position(|peer| peer.id == migration.peer) else { return false };
        let peer = from.remove(at);
        self.stages[migration.to].push(Peer { from: second + download.0 / 1_000_000_000, ..peer });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(every: Option<u64>) -> SwarmRun {
        SwarmRun {
            stages: 8,
            peers: 80,
            churn: Churn { lifetime: 7200.0, absence: 1200.0 },
            time: Nanos(6 * 3600 * 1_000_000_000),
            every: every.map(|seconds| Nanos(seconds * 1_000_000_000)),
            download: Nanos(30_000_000_000),
        }
    }

    #[test]
    fn rebalancing_helps_and_more_often_helps_more() {
        let of = |every| simulate_swarm(&run(every), 1).unwrap();
        let (never, seldom, often) = (of(None), of(Some(300)), of(Some(60)));
        assert!(often.share_of_bound > seldom.share_of_bound, "{often:?} {seldom:?}");
        assert!(seldom.share_of_bound > never.share_of_bound, "{seldom:?} {never:?}");
        assert_eq!((never.moves, of(Some(60))), (0, often));
    }

    #[test]
    fn without_churn_nothing_moves_and_nothing_is_lost() {
        let calm = SwarmRun { churn: Churn { lifetime: 1e12, absence: 1.0 }, ..run(Some(60)) };
        let seen = simulate_swarm(&calm, 1).unwrap();
        assert!((seen.share_of_bound - 1.0).abs() < 1e-12 && seen.moves == 0, "{seen:?}");
        assert!(simulate_swarm(&SwarmRun { stages: 0, ..calm }, 1).is_err());
        assert!(simulate_swarm(&SwarmRun { every: Some(Nanos(1)), ..calm }, 1).is_err());
    }
}
