//! Finds the order of ranks on a ring. A ring runs at the speed of its slowest link.

/// Maximum number of ranks for which [`bottleneck_ring`] is exact.
pub const EXACT_RANKS: usize = 12;

/// A directed ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    /// Every rank once, starting with rank 0. The last rank sends to the first.
    pub ranks: Vec<usize>,
    /// Cost of the ring's most expensive link.
    pub costliest: u64,
    /// Sum of the costs of the ring's links.
    pub sum: u64,
}

/// Returns the ring whose most expensive link costs least; among these, the one with the least sum of costs.
///
/// Shapes: `costs` is `[n, n]`, from sender to receiver; the two directions may differ. Up to [`EXACT_RANKS`]
/// ranks, the result is exact, by dynamic programming over subsets. With more, it is an upper bound: the best
/// nearest-neighbour ring from any rank, improved by reversing pieces and moving ranks until neither helps.
/// (PCCL minimises only the sum.)
///
/// # Panics
/// If `costs` does not have `n * n` entries, or `n` is 0.
#[must_use]
pub fn bottleneck_ring(costs: &[u64], n: usize) -> Ring {
    assert!(n > 0 && costs.len() == n * n, "{} costs of {n} ranks", costs.len());
    let found = if n <= EXACT_RANKS { exact(costs, n) } else { improved(costs, n) };
    // If both directions cost the same, returns the one whose second rank is lower.
    let mut back = found.ranks.clone();
    back[1..].reverse();
    let back = ring(costs, n, back);
    let key = |ring: &Ring| (ring.costliest, ring.sum, ring.ranks.clone());
    if key(&back) < key(&found) { back } else { found }
}

fn ring(costs: &[u64], n: usize, mut ranks: Vec<usize>) -> Ring {
    let first = ranks.iter().position(|&rank| rank == 0).unwrap_or(0);
    ranks.rotate_left(first);
    let next = ranks.iter().cycle().skip(1);
    let links = ranks.iter().zip(next).filter(|(a, b)| a != b).map(|(&a, &b)| costs[a * n + b]);
    let (costliest, sum) =
        links.fold((0, 0_u64), |(most, sum), cost| (cost.max(most), sum.saturating_add(cost)));
    Ring { ranks, costliest, sum }
}

/// Finds the least limit that admits a ring by binary search, and the shortest ring within it.
fn exact(costs: &[u64], n: usize) -> Ring {
    if n == 1 {
        return ring(costs, n, vec![0]);
    }
    let mut limits: Vec<u64> = (0..n * n).filter(|at| at / n != at % n).map(|at| costs[at]).collect();
    limits.sort_unstable();
    limits.dedup();
    let (mut low, mut high) = (0, limits.len() - 1);
    let mut best = shortest(costs, n, limits[high]).expect("all links are allowed");
    while low < high {
        let middle = usize::midpoint(low, high);
        match shortest(costs, n, limits[middle]) {
            Some(ranks) => (best, high) = (ranks, middle),
            None => low = middle + 1,
        }
    }
    ring(costs, n, best)
}

/// Returns the shortest ring from rank 0 without a link above `limit` (Held and Karp 1962).
fn shortest(costs: &[u64], n: usize, limit: u64) -> Option<Vec<usize>> {
    // Sets contain ranks other than 0; rank `r` is bit `r - 1`.
    let others = n - 1;
    let mut least = vec![u64::MAX; others << others];
    let allowed = |a: usize, b: usize| Some(costs[a * n + b]).filter(|&cost| cost <= limit);
    for last in 0..others {
        least[(1 << last) * others + last] = allowed(0, last + 1).unwrap_or(u64::MAX);
    }
    for set in 1_usize..1 << others {
        for last in (0..others).filter(|last| set & (1 << last) != 0) {
            let so_far = least[set * others + last];
            if so_far == u64::MAX {
                continue;
            }
            for next in (0..others).filter(|next| set & (1 << next) == 0) {
                let Some(cost) = allowed(last + 1, next + 1) else { continue };
                let at = &mut least[(set | 1 << next) * others + next];
                *at = so_far.saturating_add(cost).min(*at);
            }
        }
    }
    let mut set = (1 << others) - 1;
    let total = |last: usize| {
        let so_far = least[set * others + last];
        (so_far != u64::MAX).then_some(so_far)?.checked_add(allowed(last + 1, 0)?)
    };
    let (_, mut last) = (0..others).filter_map(|last| Some((total(last)?, last))).min()?;
    let mut ranks = vec![last + 1];
    while ranks.len() < others {
        let before = set & !(1 << last);
        let of = |node: usize| {
            let so_far = least[before * others + node];
            (so_far != u64::MAX).then_some(so_far)?.checked_add(allowed(node + 1, last + 1)?)
        };
        let found =
            (0..others).filter(|node| before & (1 << node) != 0).filter_map(|node| Some((of(node)?, node)));
        (_, last) = found.min()?;
        set = before;
        ranks.push(last + 1);
    }
    ranks.push(0);
    ranks.reverse();
    Some(ranks)
}

fn improved(costs: &[u64], n: usize) -> Ring {
    let key = |ring: &Ring| (ring.costliest, ring.sum);
    let starts = (0..n).map(|start| ring(costs, n, nearest_neighbours(costs, n, start)));
    let mut best = starts.min_by_key(key).expect("n is not 0");
    loop {
        let found =
            neighbours(&best.ranks).map(|ranks| ring(costs, n, ranks)).find(|found| key(found) < key(&best));
        match found {
            Some(better) => best = better,
            None => return best,
        }
    }
}

fn nearest_neighbours(costs: &[u64], n: usize, start: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..n).filter(|&rank| rank != start).collect();
    let mut ranks = vec![start];
    let mut last = start;
    while let Some(at) = (0..left.len()).min_by_key(|&at| costs[last * n + left[at]]) {
        last = left.remove(at);
        ranks.push(last);
    }
    ranks
}

/// Iterates over the rings with one piece reversed or one rank moved.
fn neighbours(ranks: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let n = ranks.len();
    let pairs = move || (0..n).flat_map(move |from| (0..n).map(move |to| (from, to)));
    let reversed = pairs().filter(|(from, to)| from < to).map(move |(from, to)| {
        let mut ranks = ranks.to_vec();
        ranks[from..=to].reverse();
        ranks
    });
    let moved = pairs().filter(|(from, to)| from != to).map(move |(from, to)| {
        let mut ranks = ranks.to_vec();
        let rank = ranks.remove(from);
        ranks.insert(to, rank);
        ranks
    });
    reversed.chain(moved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    fn by_brute_force(costs: &[u64], n: usize) -> (u64, u64) {
        fn rest(costs: &[u64], n: usize, ranks: &mut Vec<usize>, best: &mut (u64, u64)) {
            if ranks.len() == n {
                let found = ring(costs, n, ranks.clone());
                *best = (*best).min((found.costliest, found.sum));
                return;
            }
            for rank in (0..n).filter(|rank| !ranks.contains(rank)).collect::<Vec<_>>() {
                ranks.push(rank);
                rest(costs, n, ranks, best);
                ranks.pop();
            }
        }
        let mut best = (u64::MAX, u64::MAX);
        rest(costs, n, &mut vec![0], &mut best);
        best
    }

    #[test]
    fn no_ring_is_better() {
        let mut draw = SeededRng::new(8, 0);
        for n in 1..=7 {
            for _ in 0..20 {
                let costs: Vec<u64> = (0..n * n).map(|_| draw.below(15) as u64).collect();
                let found = bottleneck_ring(&costs, n);
                assert_eq!((found.costliest, found.sum), by_brute_force(&costs, n), "{n} {costs:?}");
                let mut ranks = found.ranks.clone();
                ranks.sort_unstable();
                assert_eq!(ranks, (0..n).collect::<Vec<_>>());
                assert_eq!(found.ranks[0], 0);
            }
        }
    }

    /// Bandwidths are 100 along 0-1-2-3, 10 from 3 to 0, and 16 across. The ring 0-1-2-3 has a link of 10;
    /// 0-1-3-2 has none below 16, but a higher sum of costs: 580 instead of 520.
    #[test]
    fn the_slowest_link_counts_before_the_sum() {
        let mut costs = vec![0; 16];
        for (a, b, rate) in [(0, 1, 100), (1, 2, 100), (2, 3, 100), (3, 0, 10), (0, 2, 16), (1, 3, 16)] {
            costs[a * 4 + b] = 4000 / rate;
            costs[b * 4 + a] = 4000 / rate;
        }
        let found = bottleneck_ring(&costs, 4);
        assert_eq!((found.ranks, found.costliest, found.sum), (vec![0, 1, 3, 2], 250, 580));
    }

    #[test]
    fn many_ranks_in_two_regions_cross_twice() {
        let n = 16;
        let region = |rank: usize| rank % 2;
        let cost = |at: usize| if region(at / n) == region(at % n) { 1 } else { 50 };
        let found = bottleneck_ring(&(0..n * n).map(cost).collect::<Vec<_>>(), n);
        assert_eq!((found.costliest, found.sum), (50, 14 + 100));
    }
}
