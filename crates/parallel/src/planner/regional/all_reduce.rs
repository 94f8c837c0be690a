//! Closed forms of all-reduce over unequal links, for more ranks than can be simulated step by step.

use farflung_base::{Algorithm, Bytes, Link, Nanos};

/// Returns the time of a ring all-reduce. `links` has the link from each rank of the ring to the next, in ring
/// order.
///
/// Each step of a rank waits for the rank itself and for its predecessor. Over many steps, a step takes the
/// longer of two times (the greatest cycle mean of the step graph): the transfer of a block by the slowest
/// sender, or the mean of latency plus transfer around the ring. There are `2 (n - 1)` steps of `bytes / n`.
///
/// Source: Patarasuk and Yuan 2009; Baccelli et al. 1992 for cycle means. With equal links it equals their
/// formula, `2 (n - 1) (latency + bytes / n / bandwidth)`. `farflung-comm` simulates the steps themselves; the
/// bench `plan-scale` compares the two for up to 64 ranks.
///
/// ```
/// use farflung_base::{Bytes, Link, Nanos};
/// use farflung_parallel::planner::regional::ring_time;
///
/// // 10 ms and 1 Gbit/s, 8 ranks, 100 MB: 14 steps of 10 ms and 12.5 MB.
/// let links: Vec<Link> = vec!["1gbit,10ms".parse()?; 8];
/// assert_eq!(ring_time(&links, Bytes(100_000_000)), Nanos::from_millis(14 * 110));
/// # Ok::<(), farflung_base::topology::ParseLinkError>(())
/// ```
#[must_use]
pub fn ring_time(links: &[Link], bytes: Bytes) -> Nanos {
    let n = links.len() as u64;
    if n < 2 {
        return Nanos::ZERO;
    }
    let block = Bytes(bytes.0.div_ceil(n));
    let slowest = links.iter().map(|link| link.bandwidth.transfer(block).0).max().unwrap_or(0);
    let around = links.iter().fold(0, |sum: u64, link| sum.saturating_add(link.time(block).0));
    Nanos(slowest.max(around / n).saturating_mul(2 * (n - 1)))
}

/// The network properties that determine the time of a direct exchange of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// Number of ranks.
    pub ranks: u64,
    /// Lowest bandwidth and highest latency between two of the ranks.
    pub slowest: Link,
    /// Longest time for which an access link or a shared line is busy with the shards of one of the two phases.
    pub busiest: Nanos,
}

/// Returns the time of a direct all-reduce: each rank sends a shard to every other rank, reduces its own shard,
/// and sends the result to all. Each of the two phases takes the latency plus the longer of two times: that of
/// the busiest access link or line, and that of one shard over the slowest link.
///
/// Exact if links are equal or one of them dominates.
#[must_use]
pub fn direct_time(exchange: Exchange, bytes: Bytes) -> Nanos {
    if exchange.ranks < 2 {
        return Nanos::ZERO;
    }
    let shard = Bytes(bytes.0.div_ceil(exchange.ranks));
    let phase = exchange.slowest.bandwidth.transfer(shard).max(exchange.busiest);
    Nanos(phase.saturating_add(exchange.slowest.latency).0.saturating_mul(2))
}

/// Algorithms that have a closed form here.
pub const CLOSED_FORMS: [Algorithm; 2] = [Algorithm::Ring, Algorithm::Direct];
