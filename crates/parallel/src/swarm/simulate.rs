//! A swarm under preemptions: stages, peers that are lost and come, and rebalancing every so often.

use farflung_base::Nanos;

use super::rebalance::{QueuedPeer, bound, rebalance};
use crate::ParallelError;
use crate::draw::Draw;

/// What is simulated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SwarmRun {
    /// Stages of the pipeline.
    pub stages: usize,
    /// Peers at the start, shared out equally.
    pub peers: u32,
    /// How they come and go.
    pub churn: Churn,
    /// How long.
    pub time: Nanos,
    /// Time between two rebalancings; `None`: never.
    pub every: Option<Nanos>,
    /// Time without work of a peer that moves: it downloads weights.
    pub download: Nanos,
}

/// How peers come and go, in steps of a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Churn {
    /// Mean time until a peer is lost, in seconds.
    pub lifetime: f64,
    /// Mean time until the place of a lost peer is taken by a new one, in seconds.
    pub absence: f64,
}

/// What it did.
#[derive(Debug, Clone, PartialEq)]
pub struct Goodput {
    /// Tasks through the slowest stage, over those of all peers shared out perfectly.
    pub share_of_bound: f64,
    /// The same, in the first hour.
    pub first_hour: f64,
    /// The same, in the last hour.
    pub last_hour: f64,
    /// Peers that moved.
    pub moves: u32,
}

/// A peer of the run.
#[derive(Clone, Copy)]
struct Peer {
    id: u32,
    rate: f64,
    /// It works from this second on.
    from: u64,
}

/// Simulates a swarm second by second; peers have rates of 1 and come to stages of chance.
///
/// A loss or an arrival depends on the seed and on time alone, so that runs with different `every` see the same
/// trace of how many are lost and come. Queues are those of the flow that the slowest stage lets through: a
/// stage that is near its limit has long ones.
///
/// Errors: [`ParallelError::Zero`] for no stages, no time, mean times that are not positive, or no time between
/// rebalancings.
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
    let mut draw = Draw::new(seed, 4);
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
    /// Places whose peer was lost.
    empty: u32,
}

impl Swarm {
    fn new(run: &SwarmRun) -> Self {
        let mut stages = vec![Vec::new(); run.stages];
        for id in 0..run.peers {
            stages[id as usize % run.stages].push(Peer { id, rate: 1.0, from: 0 });
        }
        Self { stages, next: run.peers, empty: 0 }
    }

    /// Losses and arrivals of a second. The numbers drawn do not depend on who is where.
    fn churn(&mut self, run: &SwarmRun, second: u64, draw: &mut Draw) {
        const FINE: usize = 1 << 40;
        let happens = |mean: f64, draw: &mut Draw| (draw.below(FINE) as f64) < FINE as f64 / mean;
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

    /// The peer with so many lower ids before it is lost.
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

    /// What gets through all stages.
    fn slowest(&self, second: u64) -> f64 {
        self.stages.iter().map(|stage| Self::rate(stage, second)).fold(f64::INFINITY, f64::min)
    }

    fn bound(&self, stages: usize) -> f64 {
        let rates: Vec<f64> = self.stages.iter().flatten().map(|peer| peer.rate).collect();
        bound(&rates, stages)
    }

    /// Moves one peer where that helps.
    fn rebalance(&mut self, second: u64, download: Nanos) -> bool {
        let flow = self.slowest(second);
        // Queues of a stage at a share of its limit; the slowest has the longest.
        let queued = |stage: &Vec<Peer>| -> Vec<QueuedPeer> {
            let rate: f64 = stage.iter().map(|peer| peer.rate).sum();
            let used = if rate > 0.0 { flow / rate } else { 1.0 };
            let each = 1000.0 * used / (1.02 - used.min(1.0)) / stage.len().max(1) as f64;
            stage.iter().map(|peer| QueuedPeer { id: peer.id, queue: each as u64, rate: peer.rate }).collect()
        };
        let mut stages: Vec<Vec<QueuedPeer>> = self.stages.iter().map(queued).collect();
        // A stage without peers has everybody waiting; it has no queue of its own to say so.
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
