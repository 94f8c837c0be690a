//! The shortest path that visits every node once, with both ends free (an open travelling-salesman path).

/// A path that visits every node once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// Sum of the path's edges.
    pub length: u64,
    /// Every node once, in the order of the path. Of the two directions, the one that starts at the lower node.
    pub nodes: Vec<usize>,
}

/// Maximum number of nodes for which [`shortest_path`] is exact.
pub const EXACT_NODES: usize = 13;

/// Returns the shortest path over all `n` nodes.
///
/// Shapes: `edges` is `[n, n]`, symmetric. Up to [`EXACT_NODES`] nodes, the result is exact, by dynamic
/// programming over subsets (Held and Karp 1962). With more, it is an upper bound: the best nearest-neighbour
/// path from any node, improved by reversing pieces and moving nodes until neither helps.
///
/// # Panics
/// If `edges` does not have `n * n` entries, or `n` is 0.
#[must_use]
pub fn shortest_path(edges: &[u64], n: usize) -> Path {
    assert!(n > 0 && edges.len() == n * n, "{} edges of {n} nodes", edges.len());
    let mut nodes = if n <= EXACT_NODES { exact(edges, n) } else { improved(edges, n) };
    if nodes[0] > nodes[n - 1] {
        nodes.reverse();
    }
    Path { length: length(edges, n, &nodes), nodes }
}

fn length(edges: &[u64], n: usize, nodes: &[usize]) -> u64 {
    nodes.windows(2).map(|pair| edges[pair[0] * n + pair[1]]).fold(0, u64::saturating_add)
}

/// Finds the exact path. `shortest[set][last]`: length of the shortest path over `set` that ends at `last`.
fn exact(edges: &[u64], n: usize) -> Vec<usize> {
    let mut shortest = vec![u64::MAX; n << n];
    for node in 0..n {
        shortest[(1 << node) * n + node] = 0;
    }
    for set in 1_usize..1 << n {
        for last in members(set) {
            let so_far = shortest[set * n + last];
            for next in members(!set & ((1 << n) - 1)) {
                let longer = so_far.saturating_add(edges[last * n + next]);
                let at = &mut shortest[(set | 1 << next) * n + next];
                *at = longer.min(*at);
            }
        }
    }
    let mut set = (1 << n) - 1;
    let mut last = (0..n).min_by_key(|&last| shortest[set * n + last]).expect("n is not 0");
    let mut nodes = vec![last];
    while nodes.len() < n {
        let before = set & !(1 << last);
        let of = |node: usize| shortest[before * n + node].saturating_add(edges[node * n + last]);
        last = members(before).min_by_key(|&node| of(node)).expect("nodes are left");
        set = before;
        nodes.push(last);
    }
    nodes
}

fn members(set: usize) -> impl Iterator<Item = usize> {
    let mut left = set;
    std::iter::from_fn(move || {
        (left != 0).then(|| {
            let node = left.trailing_zeros() as usize;
            left &= left - 1;
            node
        })
    })
}

fn improved(edges: &[u64], n: usize) -> Vec<usize> {
    let mut best = (0..n)
        .map(|start| nearest_neighbours(edges, n, start))
        .min_by_key(|nodes| length(edges, n, nodes))
        .expect("n is not 0");
    let mut shortest = length(edges, n, &best);
    while let Some((shorter, nodes)) = better(edges, n, &best, shortest) {
        (shortest, best) = (shorter, nodes);
    }
    best
}

fn nearest_neighbours(edges: &[u64], n: usize, start: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..n).filter(|&node| node != start).collect();
    let mut nodes = vec![start];
    let mut last = start;
    while let Some(at) = (0..left.len()).min_by_key(|&at| edges[last * n + left[at]]) {
        last = left.remove(at);
        nodes.push(last);
    }
    nodes
}

/// Returns the first shorter path with a piece reversed or a node moved, if there is one.
fn better(edges: &[u64], n: usize, nodes: &[usize], shortest: u64) -> Option<(u64, Vec<usize>)> {
    for from in 0..n {
        for to in from + 1..n {
            let mut reversed = nodes.to_vec();
            reversed[from..=to].reverse();
            let found = length(edges, n, &reversed);
            if found < shortest {
                return Some((found, reversed));
            }
        }
    }
    for from in 0..n {
        for to in (0..n).filter(|&to| to != from) {
            let mut moved = nodes.to_vec();
            let node = moved.remove(from);
            moved.insert(to, node);
            let found = length(edges, n, &moved);
            if found < shortest {
                return Some((found, moved));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_brute_force(edges: &[u64], n: usize) -> u64 {
        fn rest(edges: &[u64], n: usize, last: usize, used: usize) -> u64 {
            if used == (1 << n) - 1 {
                return 0;
            }
            let free = (0..n).filter(|node| used & (1 << node) == 0);
            free.map(|node| edges[last * n + node] + rest(edges, n, node, used | 1 << node))
                .min()
                .unwrap_or(0)
        }
        (0..n).map(|start| rest(edges, n, start, 1 << start)).min().unwrap_or(0)
    }

    fn symmetric(all: &[u64], n: usize) -> Vec<u64> {
        (0..n * n).map(|i| all[(i / n).min(i % n) * n + (i / n).max(i % n)]).collect()
    }

    proptest! {
        #[test]
        fn no_order_is_shorter(n in 1_usize..7, all in prop::collection::vec(0_u64..30, 49)) {
            let edges = symmetric(&all, n);
            let path = shortest_path(&edges, n);
            prop_assert_eq!(path.length, by_brute_force(&edges, n));
            prop_assert_eq!(path.length, length(&edges, n, &path.nodes));
        }

        #[test]
        fn beyond_exact_sizes_points_on_a_line_are_visited_in_order(
            keys in prop::collection::vec(0_u64..1000, 20)
        ) {
            let edges: Vec<u64> = keys.iter().flat_map(|a| keys.iter().map(move |b| a.abs_diff(*b))).collect();
            let path = shortest_path(&edges, 20);
            let span = keys.iter().max().unwrap() - keys.iter().min().unwrap();
            prop_assert_eq!(path.length, span);
            let mut nodes = path.nodes;
            nodes.sort_unstable();
            prop_assert_eq!(nodes, (0..20).collect::<Vec<_>>());
        }
    }
}
