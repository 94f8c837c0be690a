//! Petals' rules: which consecutive blocks a new server holds, and when a server moves.

use crate::seeded_rng::SeededRng;

/// A server: its blocks and its rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServerRate {
    /// Index of the server's first block.
    pub start: usize,
    /// Number of consecutive blocks.
    pub blocks: usize,
    /// Requests per second through one block.
    pub rate: f64,
}

impl ServerRate {
    /// Returns the rate of a server from measurements.
    ///
    /// `forward` is the number of blocks per second. A request enters at a random block of the server, so it
    /// uses `(blocks + 1) / 2` blocks on average. `network` is the bandwidth of the slower direction in bits
    /// per second; a request carries `hidden` values of 16 bits. Through a relay, a fifth of the bandwidth is
    /// used. Source: Petals, `throughput.py`.
    #[must_use]
    pub fn measured(forward: f64, blocks: usize, network: f64, hidden: usize, is_relayed: bool) -> f64 {
        let network = network / (hidden as f64 * 16.0) * if is_relayed { 0.2 } else { 1.0 };
        (forward / f64::midpoint(blocks as f64, 1.0)).min(network)
    }
}

/// Returns the start of the `count` consecutive blocks that are served worst. The rates of each range are
/// sorted and compared lexicographically; if equal, the lower start is returned.
///
/// # Panics
/// If `count` is 0 or exceeds the number of blocks.
#[must_use]
pub fn best_start(rates: &[f64], count: usize) -> usize {
    assert!(count > 0 && count <= rates.len(), "{count} of {} blocks", rates.len());
    let sorted = |start: usize| {
        let mut run = rates[start..start + count].to_vec();
        run.sort_by(f64::total_cmp);
        run
    };
    let before =
        |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a.total_cmp(b)).find(|order| order.is_ne());
    let mut best = 0;
    for start in 1..=rates.len() - count {
        if before(&sorted(start), &sorted(best)) == Some(std::cmp::Ordering::Less) {
            best = start;
        }
    }
    best
}

/// Returns the total rate through each block.
fn through(servers: &[ServerRate], blocks: usize) -> Vec<f64> {
    let mut rates = vec![0.0; blocks];
    for server in servers {
        for rate in rates.iter_mut().skip(server.start).take(server.blocks) {
            *rate += server.rate;
        }
    }
    rates
}

fn least(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(f64::INFINITY, f64::min)
}

/// Tolerance, relative to a rate, that keeps servers from moving for equal rates. Petals' `eps`.
const SAME: f64 = 1e-3;

/// Returns whether a server should move. The rule simulates the move of this server, and then moves of the
/// other servers until none moves. The server should move if the lowest rate of any block is now below
/// `quality` (0.75) times the lowest rate after these moves.
///
/// Returns false if no other server serves some of its blocks, or if it is already at its best place. The other
/// servers move in an order drawn from the seed. Source: Petals, `block_selection.py`.
#[must_use]
pub fn should_rebalance(servers: &[ServerRate], own: usize, blocks: usize, quality: f64, seed: u64) -> bool {
    let Some(server) =
        servers.get(own).copied().filter(|server| server.blocks <= blocks && server.blocks > 0)
    else {
        return false;
    };
    let mut rates = through(servers, blocks);
    let now = least(&rates);
    let add = |rates: &mut [f64], server: &ServerRate, by: f64| {
        rates.iter_mut().skip(server.start).take(server.blocks).for_each(|rate| *rate += by);
    };
    add(&mut rates, &server, -server.rate * (1.0 + SAME));
    if now > 0.0 && least(&rates) <= 0.0 {
        return false;
    }
    let start = best_start(&rates, server.blocks);
    if start == server.start {
        return false;
    }
    let mut servers = servers.to_vec();
    servers[own].start = start;
    let mut rates = through(&servers, blocks);
    let mut draw = SeededRng::new(seed, 3);
    let mut order: Vec<usize> = (0..servers.len()).filter(|&other| other != own).collect();
    // Equal servers could exchange places forever, so the number of rounds is limited to the number of servers.
    for _ in 0..servers.len() {
        draw.shuffle(&mut order);
        let mut has_moved = false;
        for &other in &order {
            let server = servers[other];
            add(&mut rates, &server, -server.rate * (1.0 + SAME));
            let start = best_start(&rates, server.blocks.clamp(1, blocks));
            add(&mut rates, &server, server.rate * SAME);
            has_moved |= start != server.start;
            servers[other].start = start;
            add(&mut rates, &servers[other], server.rate);
        }
        if !has_moved {
            break;
        }
    }
    let then = least(&through(&servers, blocks));
    then > now && now / then < quality - SAME
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_server_goes_where_blocks_are_served_worst() {
        assert_eq!(best_start(&[0.0; 6], 3), 0);
        assert_eq!(best_start(&[5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 2.0, 2.0], 3), 3);
        assert_eq!(best_start(&[3.0, 3.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], 2), 2);
        assert_eq!(best_start(&[10.0, 10.0, 4.0, 4.0, 4.0, 9.0, 9.0, 9.0], 3), 2);
        assert_eq!(best_start(&[2.0; 5], 2), 0);
    }

    #[test]
    fn rates_are_the_published_ones() {
        let rate = ServerRate::measured(2000.0, 10, 1e8, 8192, false);
        assert!((rate - 2000.0 / 5.5).abs() < 1e-9, "{rate}");
        let network = ServerRate::measured(1e9, 10, 1e8, 8192, false);
        assert!((network - 762.939).abs() < 1e-3, "{network}");
        assert!((ServerRate::measured(1e9, 10, 1e8, 8192, true) - network / 5.0).abs() < 1e-9);
    }

    #[test]
    fn a_server_moves_only_for_a_clear_gain() {
        let server = |start, rate| ServerRate { start, blocks: 2, rate };
        // Blocks 0 and 1 have three fast servers, blocks 2 and 3 have one slow server.
        let skewed = [server(0, 4.0), server(0, 4.0), server(0, 4.0), server(2, 1.0)];
        assert!(should_rebalance(&skewed, 0, 4, 0.75, 1));
        // If this server moved, its blocks would have no server.
        assert!(!should_rebalance(&skewed, 3, 4, 0.75, 1));
        // Equal servers stay where they are. Otherwise two of them could exchange places forever.
        let even = [server(0, 4.0), server(0, 4.0), server(2, 4.0), server(2, 4.0)];
        assert!((0..4).all(|own| !should_rebalance(&even, own, 4, 0.75, 1)));
        // The lowest rate would rise by less than a third, which is not enough for a move.
        let nearly = [server(0, 5.0), server(0, 5.0), server(2, 4.0), server(2, 5.0)];
        assert!((0..4).all(|own| !should_rebalance(&nearly, own, 4, 0.75, 1)));
        assert!(!should_rebalance(&even, 9, 4, 0.75, 1));
    }
}
