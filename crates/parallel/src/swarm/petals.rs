//! Petals' rules: which run of blocks a new server holds, and when a server moves.

use crate::draw::Draw;

/// A server: the blocks that it holds, and its rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServerRate {
    /// Its first block.
    pub start: usize,
    /// How many it holds.
    pub blocks: usize,
    /// Requests a second through one block.
    pub rate: f64,
}

impl ServerRate {
    /// The rate of a server from what was measured.
    ///
    /// `forward`: blocks a second, shared by the blocks of a request, which enters at a random one. `network`:
    /// bits a second of the slower direction, over `hidden` values of 16 bits; a fifth of it through a relay.
    /// Source: Petals, `throughput.py`.
    #[must_use]
    pub fn measured(forward: f64, blocks: usize, network: f64, hidden: usize, is_relayed: bool) -> f64 {
        let network = network / (hidden as f64 * 16.0) * if is_relayed { 0.2 } else { 1.0 };
        (forward / f64::midpoint(blocks as f64, 1.0)).min(network)
    }
}

/// The first block of the run of `count` blocks that is served worst: rates of the run, sorted, compared one by
/// one; ties to the lower block.
///
/// # Panics
/// If `count` is 0 or more than there are blocks.
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

/// The rate through each block.
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

/// Below this, two rates are the same.
const SAME: f64 = 1e-3;

/// Whether a server should move, where it would be followed by all others until nobody moves: if the least rate
/// of a block would then be so much higher that the present one is below `quality` (0.75) of it.
///
/// No if its own blocks would be served by nobody else, or its best place is the one that it has. The others
/// move in random order, by the seed. Source: Petals, `block_selection.py`.
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
    let mut draw = Draw::new(seed, 3);
    let mut order: Vec<usize> = (0..servers.len()).filter(|&other| other != own).collect();
    // Equal servers may pass a place around for ever: as many rounds as there are servers settle all that
    // gains.
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
        // Blocks 0 and 1 have three servers, 2 and 3 have one slow one.
        let skewed = [server(0, 4.0), server(0, 4.0), server(0, 4.0), server(2, 1.0)];
        assert!(should_rebalance(&skewed, 0, 4, 0.75, 1));
        // Moving away would leave a hole.
        assert!(!should_rebalance(&skewed, 3, 4, 0.75, 1));
        // Equal servers stay, so that no two change places for ever.
        let even = [server(0, 4.0), server(0, 4.0), server(2, 4.0), server(2, 4.0)];
        assert!((0..4).all(|own| !should_rebalance(&even, own, 4, 0.75, 1)));
        // A gain of a tenth is not worth a move.
        let nearly = [server(0, 5.0), server(0, 5.0), server(2, 4.0), server(2, 5.0)];
        assert!((0..4).all(|own| !should_rebalance(&nearly, own, 4, 0.75, 1)));
        assert!(!should_rebalance(&even, 9, 4, 0.75, 1));
    }
}
