//! What a collective costs in the alpha-beta model: a message of `b` bytes takes latency + b / bandwidth, every rank
//! sends one and receives one at a time, and reducing is free. It moves nothing and knows no transport.
//!
//! `comm` prices the exact step lists that it runs; what is here are the closed forms of the literature (Thakur et al.
//! 2005, "Optimization of collective communication operations in MPICH"; Patarasuk and Yuan 2009 for the ring), which
//! planning needs, and the two schedules on an uneven [`Topology`].

use std::fmt;
use std::str::FromStr;

use farflung_base::{Bytes, Link, Nanos, Rank, Topology};

/// What a collective leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// Every rank has the reduction of all.
    AllReduce,
    /// Every rank has its n-th of the reduction of all.
    ReduceScatter,
    /// Every rank has the n-ths of all.
    AllGather,
    /// Every rank has what the root had.
    Broadcast,
}

/// How a collective is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Neighbour to neighbour in n chunks: most latency, and each link carries the least that is possible.
    Ring,
    /// Recursive halving and doubling (Rabenseifner): 2 lg n messages. Ranks above the largest power of two are
    /// folded into a partner before, and served after.
    HalvingDoubling,
}

impl Algorithm {
    /// All algorithms, in the order in which ties are broken.
    pub const ALL: [Self; 2] = [Self::Ring, Self::HalvingDoubling];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ring => "ring",
            Self::HalvingDoubling => "halving-doubling",
        })
    }
}

impl FromStr for Algorithm {
    type Err = crate::ParallelError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|a| a.to_string() == text);
        known.ok_or_else(|| crate::ParallelError::NotBuilt { what: format!("collective algorithm `{text}`") })
    }
}

/// `bytes * num / den`, rounded up.
fn part(bytes: Bytes, num: u64, den: u64) -> u128 {
    (u128::from(bytes.0) * u128::from(num)).div_ceil(u128::from(den))
}

/// The closed form in a flat network: `n` ranks, every pair joined by `link`, `bytes` the whole vector.
///
/// | algorithm | all-reduce | reduce-scatter, all-gather | broadcast |
/// |-|-|-|-|
/// | ring | 2(n-1)α + 2(n-1)/n Mβ | half of it | 2(n-1)α + 2(n-1)/n Mβ (a chain, n chunks) |
/// | halving-doubling | 2 lg n α + 2(n-1)/n Mβ | half of it | as all-reduce (scatter, then all-gather) |
///
/// Where n is not a power of two, halving-doubling runs on the largest one below and folds the rest: one more message
/// of M before and one after for all-reduce; in reduce-scatter the one after, in all-gather the one before is of M/n;
/// a broadcast only has the one after.
#[must_use]
pub fn price(collective: Collective, algorithm: Algorithm, n: u32, bytes: Bytes, link: Link) -> Nanos {
    if n < 2 {
        return Nanos::ZERO;
    }
    let passes = match collective {
        Collective::AllReduce | Collective::Broadcast => 2,
        Collective::ReduceScatter | Collective::AllGather => 1,
    };
    let n = u64::from(n);
    let (messages, volume) = match algorithm {
        Algorithm::Ring => (passes * (n - 1), part(bytes, passes * (n - 1), n)),
        Algorithm::HalvingDoubling => {
            let core = 1 << n.ilog2();
            let (extra, folded) = match collective {
                _ if core == n => (0, 0),
                Collective::AllReduce => (2, u128::from(bytes.0) * 2),
                Collective::ReduceScatter | Collective::AllGather => {
                    (2, u128::from(bytes.0) + part(bytes, 1, n))
                }
                Collective::Broadcast => (1, u128::from(bytes.0)),
            };
            let lg = u64::from(n.ilog2());
            (passes * lg + extra, part(bytes, passes * (core - 1), core) + folded)
        }
    };
    let volume = Bytes(u64::try_from(volume).unwrap_or(u64::MAX));
    Nanos(link.latency.0.saturating_mul(messages)).saturating_add(link.bandwidth.transfer(volume))
}

/// Bytes that one rank sends for an all-reduce of `bytes` over `n` ranks: 2(n-1)/n of them, rounded up.
///
/// It is what both algorithms send where n is a power of two, and the least that any can.
#[must_use]
pub fn all_reduce_bytes(n: u32, bytes: Bytes) -> Bytes {
    let n = u64::from(n.max(1));
    Bytes(u64::try_from(part(bytes, 2 * (n - 1), n)).unwrap_or(u64::MAX))
}

/// Time of an all-reduce over the ranks of `order` on an uneven network: the schedule is walked message by message.
///
/// A ring sends to the next of `order`; of big messages the slowest hop sets the pace, latencies add up around the
/// ring. A message runs at [`Topology::rate`].
///
/// # Panics
/// If a rank of `order` is not in the topology.
#[must_use]
pub fn all_reduce_over(algorithm: Algorithm, order: &[Rank], bytes: Bytes, topology: &Topology) -> Nanos {
    let mut walk = Walk { topology, ready: vec![Nanos::ZERO; order.len()] };
    let n = order.len();
    match algorithm {
        _ if n < 2 => {}
        Algorithm::Ring => {
            let chunk = Bytes(bytes.0.div_ceil(n as u64));
            for _ in 0..2 * (n - 1) {
                walk.round(order, chunk, |i| Some((i + 1) % n));
            }
        }
        Algorithm::HalvingDoubling => {
            let core = 1 << n.ilog2();
            let fold_in = |i: usize| i.checked_sub(core);
            let fold_out = |i: usize| (i + core < n && i < core).then_some(i + core);
            if core < n {
                walk.round(order, bytes, fold_in);
            }
            let lg = n.ilog2();
            for bit in (0..lg).chain((0..lg).rev()) {
                // Halving: half of the vector to the neighbour, a quarter at distance 2, ...; doubling goes back.
                let share = Bytes(bytes.0.div_ceil(2 << bit));
                walk.round(order, share, |i| (i < core).then_some(i ^ (1 << bit)));
            }
            if core < n {
                walk.round(order, bytes, fold_out);
            }
        }
    }
    walk.ready.into_iter().max().unwrap_or_default()
}

/// When each position of the order is done with the rounds so far.
struct Walk<'a> {
    topology: &'a Topology,
    ready: Vec<Nanos>,
}

impl Walk<'_> {
    /// Every position sends `bytes` to the position that `to` names; its next round starts when its own message has
    /// left and the one for it has arrived.
    fn round(&mut self, order: &[Rank], bytes: Bytes, to: impl Fn(usize) -> Option<usize>) {
        let mut next = self.ready.clone();
        for (i, &from) in order.iter().enumerate() {
            if let Some(j) = to(i) {
                let left = self.ready[i].saturating_add(self.topology.rate(from, order[j]).transfer(bytes));
                let arrived = left.saturating_add(self.topology.link(from, order[j]).latency);
                next[i] = next[i].max(left);
                next[j] = next[j].max(arrived);
            }
        }
        self.ready = next;
    }
}

/// The cheaper algorithm for messages of these sizes on this topology, ranks in their order; ties go to the ring.
#[must_use]
pub fn cheapest(messages: &[Bytes], topology: &Topology) -> Algorithm {
    let order: Vec<Rank> = (0..topology.size() as u32).map(Rank).collect();
    let total = |algorithm: Algorithm| {
        messages
            .iter()
            .fold(Nanos::ZERO, |t, &m| t.saturating_add(all_reduce_over(algorithm, &order, m, topology)))
    };
    Algorithm::ALL.into_iter().min_by_key(|&a| total(a)).expect("there are algorithms")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(t: Nanos, expected: f64) {
        assert!((t.as_secs_f64() - expected).abs() < 0.005 * expected.max(0.1), "{t} is not {expected}s");
    }

    /// 10 ms, 1 Gb/s, 8 ranks: the table of the facts.
    #[test]
    fn the_table() {
        let link: Link = "1gbit,10ms".parse().unwrap();
        let t = |a, m| price(Collective::AllReduce, a, 8, Bytes(m), link);
        for (bytes, ring, halving) in
            [(1_000, 0.140, 0.060), (1_000_000, 0.154, 0.074), (100_000_000, 1.54, 1.46)]
        {
            seconds(t(Algorithm::Ring, bytes), ring);
            seconds(t(Algorithm::HalvingDoubling, bytes), halving);
        }
        let half = |c| price(c, Algorithm::Ring, 8, Bytes(1_000_000), link);
        seconds(half(Collective::ReduceScatter), 0.077);
        assert_eq!(half(Collective::AllGather), half(Collective::ReduceScatter));
        seconds(half(Collective::Broadcast), 0.154);
        assert_eq!(price(Collective::AllReduce, Algorithm::Ring, 1, Bytes(9), link), Nanos::ZERO);
        assert_eq!(all_reduce_bytes(4, Bytes(1 << 22)), Bytes(6_291_456));
    }

    /// n = 6: two ranks are folded, which costs two more latencies and twice the vector.
    #[test]
    fn folding() {
        let link: Link = "8gbit,1ms".parse().unwrap();
        let t = price(Collective::AllReduce, Algorithm::HalvingDoubling, 6, Bytes(4_000_000), link);
        assert_eq!(t, Nanos(6_000_000 + (6_000_000 + 8_000_000)));
    }

    #[test]
    fn a_slow_hop_sets_the_pace_of_a_ring_and_latencies_add_up() {
        let n = 8_u64;
        let order: Vec<Rank> = (0..n as u32).map(Rank).collect();
        let mut topology = Topology::uniform(8, "8gbit,1ns".parse().unwrap());
        topology.set_link(Rank(2), Rank(3), "8mbit,1ns".parse().unwrap());
        // 14 chunks of 1 kB cross the slow hop at 1 ms each, one after the other.
        let t = all_reduce_over(Algorithm::Ring, &order, Bytes(8_000), &topology);
        assert!(t >= Nanos::from_millis(14) && t < Nanos::from_micros(14_100), "{t}");
        // One far hop of 100 ms among hops of 5 ms: a chunk's path crosses it twice, not fourteen times.
        let mut topology = Topology::uniform(8, "unlimited,5ms".parse().unwrap());
        topology.set_link(Rank(2), Rank(3), "unlimited,100ms".parse().unwrap());
        let t = all_reduce_over(Algorithm::Ring, &order, Bytes(8), &topology);
        assert_eq!(t, Nanos::from_millis(2 * 100 + 12 * 5));
    }

    proptest! {
        /// On an even network the walk and the closed form are one, up to the rounding of chunks.
        #[test]
        fn walking_equals_the_closed_form(n in 1_u32..20, kb in 1_u64..4000, mbit in 1_u64..1000, ms in 0_u64..50) {
            let link = Link { bandwidth: farflung_base::Bandwidth(mbit * 1_000_000), latency: Nanos::from_millis(ms) };
            let topology = Topology::uniform(n as usize, link);
            let order: Vec<Rank> = (0..n).map(Rank).collect();
            for algorithm in Algorithm::ALL {
                let walked = all_reduce_over(algorithm, &order, Bytes(kb * 1000), &topology).0;
                let closed = price(Collective::AllReduce, algorithm, n, Bytes(kb * 1000), link).0;
                let slack = u64::from(2 * n + 4) * link.bandwidth.transfer(Bytes(1)).0 + 64;
                prop_assert!(walked.abs_diff(closed) <= slack, "{algorithm}: {walked} {closed}");
            }
        }
    }
}
