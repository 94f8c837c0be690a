//! SWARM's adaptive rebalancing: a peer of the stage with the lowest load moves to the stage with the highest.

/// Load and rate that a peer publishes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueuedPeer {
    /// Number of the peer, unique over all stages.
    pub id: u32,
    /// Number of tasks waiting for the peer.
    pub queue: u64,
    /// Tasks per second.
    pub rate: f64,
}

/// A move of a peer to another stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration {
    /// Number of the peer.
    pub peer: u32,
    /// Present stage of the peer.
    pub from: usize,
    /// New stage of the peer, whose weights the peer downloads.
    pub to: usize,
}

/// Returns at most one move, from the stage with the lowest load to the stage with the highest. The load of a
/// stage is the sum of its queue lengths; if equal, the lower stage is taken. The peer with the shortest queue
/// moves; if equal, the one with the lower number.
///
/// Returns `None` if a stage would be left without peers. Otherwise the peer moves in two cases: the rate of
/// the slower of the two stages increases; or that rate does not decrease and the longer of the two waits (load
/// / rate) falls below three quarters of its value. Without that margin, peers would move back and forth for a
/// difference of one queue entry. Source: Ryabinin et al. 2023, "SWARM", algorithm 2. We did not have the text
/// of that algorithm, and the released code does not contain it: the conditions are ours.
#[must_use]
pub fn rebalance(stages: &[Vec<QueuedPeer>]) -> Option<Migration> {
    let load = |stage: usize| stages[stage].iter().map(|peer| peer.queue).sum::<u64>();
    let from = (0..stages.len()).min_by_key(|&stage| load(stage))?;
    let to = (0..stages.len()).rev().max_by_key(|&stage| load(stage))?;
    if from == to || stages[from].len() < 2 {
        return None;
    }
    let moved = stages[from].iter().min_by_key(|peer| (peer.queue, peer.id))?;
    let rate = |stage: usize| stages[stage].iter().map(|peer| peer.rate).sum::<f64>();
    let before = [rate(from), rate(to)];
    let after = [before[0] - moved.rate, before[1] + moved.rate];
    let slower = |rates: [f64; 2]| rates[0].min(rates[1]);
    let wait = |rates: [f64; 2]| (load(from) as f64 / rates[0]).max(load(to) as f64 / rates[1]);
    let gains = slower(after) > slower(before);
    let relieves = slower(after) >= slower(before) && wait(after) < MARGIN * wait(before);
    (gains || relieves).then_some(Migration { peer: moved.id, from, to })
}

/// If a move does not increase the lower rate, the longer wait must fall below this fraction of its value. The
/// figure is Petals' balance quality.
const MARGIN: f64 = 0.75;

/// Returns the highest possible rate of the slowest stage, by trying all assignments of peers to stages.
///
/// Usable up to about 12 peers: there are `stages ^ peers` assignments.
#[must_use]
pub fn optimum(rates: &[f64], stages: usize) -> f64 {
    fn assign(rates: &[f64], sums: &mut [f64]) -> f64 {
        let Some((&rate, rest)) = rates.split_first() else {
            return sums.iter().copied().fold(f64::INFINITY, f64::min);
        };
        let mut best = 0.0_f64;
        for stage in 0..sums.len() {
            sums[stage] += rate;
            best = best.max(assign(rest, sums));
            sums[stage] -= rate;
        }
        best
    }
    if stages == 0 { 0.0 } else { assign(rates, &mut vec![0.0; stages]) }
}

/// Returns an upper bound of [`optimum`]: the sum of all rates divided by the number of stages.
#[must_use]
pub fn bound(rates: &[f64], stages: usize) -> f64 {
    rates.iter().sum::<f64>() / stages.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(queues: &[(u32, u64)]) -> Vec<QueuedPeer> {
        queues.iter().map(|&(id, queue)| QueuedPeer { id, queue, rate: 1.0 }).collect()
    }

    #[test]
    fn the_least_loaded_stage_gives_to_the_most_loaded() {
        // The loads are 7, 1 and 9.
        let stages = [peers(&[(0, 4), (1, 3)]), peers(&[(2, 0), (3, 1)]), peers(&[(4, 9)])];
        assert_eq!(rebalance(&stages), Some(Migration { peer: 2, from: 1, to: 2 }));
        // Waits of 10 / 5 and 12 / 4 would become 10 / 4 and 12 / 5: 2.5 is not below three quarters of 3.
        let five = peers(&[(0, 2), (1, 2), (2, 2), (3, 2), (4, 2)]);
        assert_eq!(rebalance(&[five, peers(&[(5, 3), (6, 3), (7, 3), (8, 3)])]), None);
        assert_eq!(rebalance(&[peers(&[(0, 0)]), peers(&[(1, 9)])]), None);
        assert_eq!(rebalance(&[]), None);
        assert_eq!(rebalance(&[peers(&[(0, 3)])]), None);
    }

    #[test]
    fn repeated_moves_end_and_come_near_the_optimum() {
        let rates = [4.0, 3.0, 2.0, 2.0, 1.0, 1.0];
        assert!((optimum(&rates, 3) - 4.0).abs() < 1e-12 && (bound(&rates, 3) - 13.0 / 3.0).abs() < 1e-12);
        assert!((optimum(&[8.0, 1.0, 1.0, 1.0, 1.0], 3) - 2.0).abs() < 1e-12);
        // All peers but two start on the first stage.
        let mut stages: Vec<Vec<QueuedPeer>> = vec![Vec::new(); 3];
        for (id, &rate) in (0..).zip(&rates) {
            stages[(id as usize).saturating_sub(3).min(2)].push(QueuedPeer { id, queue: 0, rate });
        }
        let mut moves = 0;
        loop {
            for stage in &mut stages {
                let sum: f64 = stage.iter().map(|peer| peer.rate).sum();
                for peer in stage {
                    peer.queue = (1000.0 * peer.rate / (sum * sum)) as u64;
                }
            }
            let Some(Migration { peer, from, to }) = rebalance(&stages) else { break };
            let at = stages[from].iter().position(|p| p.id == peer).unwrap();
            let moved = stages[from].remove(at);
            stages[to].push(moved);
            moves += 1;
            assert!(moves < 20, "moves do not end");
        }
        let slowest =
            stages.iter().map(|stage| stage.iter().map(|p| p.rate).sum::<f64>()).fold(9.0, f64::min);
        assert!(moves > 0 && slowest >= 3.0, "{slowest} after {moves} moves");
    }
}
