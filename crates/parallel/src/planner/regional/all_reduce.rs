//! Closed forms of all-reduce over unequal links, for more ranks than are worth pricing step by step.

use farflung_base::{Algorithm, Bytes, Link, Nanos};

/// The link from each rank of a ring to the next, in ring order.
///
/// A ring's steps wait for the rank itself and for its predecessor: over many steps one takes what the slowest
/// sender needs for its block, or the mean of latency and transfer around the ring, whichever is longer (the
/// greatest cycle mean of the step graph). There are `2 (n - 1)` steps of `bytes / n`.
///
/// Source: Patarasuk and Yuan 2009; Baccelli et al. 1992 for cycle means. With equal links it is theirs,
/// `2 (n - 1) (latency + bytes / n / bandwidth)`. `farflung-comm` prices the steps themselves; the bench
/// `plan-scale` holds the two together up to 64 ranks.
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

/// What the ranks of an exchange of shards have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// Ranks.
    pub ranks: u64,
    /// The slowest link between two of them.
    pub slowest: Link,
    /// The longest time for which an access link or a shared line carries the shards of one of the two phases.
    pub busiest: Nanos,
}

/// Each rank sends a shard to each other rank, reduces its own, and sends that to all: twice the busiest
/// access link or line, or the slowest link, and its latency.
///
/// It is exact where links are equal or one of them decides.
#[must_use]
pub fn direct_time(exchange: Exchange, bytes: Bytes) -> Nanos {
    if exchange.ranks < 2 {
        return Nanos::ZERO;
    }
    let shard = Bytes(bytes.0.div_ceil(exchange.ranks));
    let phase = exchange.slowest.bandwidth.transfer(shard).max(exchange.busiest);
    Nanos(phase.saturating_add(exchange.slowest.latency).0.saturating_mul(2))
}

/// The algorithms that have a closed form here.
pub const CLOSED_FORMS: [Algorithm; 2] = [Algorithm::Ring, Algorithm::Direct];
