//! Rate limits of an endpoint: one for all peers together, and one for each. Pure functions of the time.

use farflung_base::{Bandwidth, Nanos, PeerId};

use crate::CommError;

/// Limits of the rate at which an endpoint sends. They count the bytes handed to sockets or streams, without
/// packet headers: those of TCP and IP add 3 to 4% to full packets, those of QUIC, UDP and IP 5%.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Limit for all peers together.
    pub all: Bandwidth,
    /// Limit for each peer.
    pub each: Bandwidth,
}

impl Default for Pace {
    /// No limits.
    fn default() -> Self {
        Self { all: Bandwidth::UNLIMITED, each: Bandwidth::UNLIMITED }
    }
}

impl Pace {
    /// Returns whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        *self != Self::default()
    }

    /// Returns an error for rates that are too low to be of use.
    ///
    /// # Errors
    /// [`CommError::Argument`] for a rate below [`SLOWEST`].
    pub(crate) fn check(&self) -> Result<(), CommError> {
        match [self.all, self.each].into_iter().find(|rate| *rate < SLOWEST) {
            None => Ok(()),
            Some(rate) => {
                let (got, want) = (rate.0 as usize, SLOWEST.0 as usize);
                Err(CommError::Argument { op: "pace", what: "rate in bits per second (minimum)", got, want })
            }
        }
    }
}

/// Lowest rate that can be set: 1000 bytes per second.
pub const SLOWEST: Bandwidth = Bandwidth(8_000);

/// Burst: after a pause, the bytes of this much time at the limited rate, or two quanta if that is more, may be
/// sent at once.
const BURST: Nanos = Nanos::from_millis(10);
/// Quantum: a system call sends at least the bytes of this much time at the limited rate, within the bounds
/// below, or all that is wanted.
const QUANTUM: Nanos = Nanos::from_millis(2);
/// Bounds of the quantum in bytes: the payload of a packet, and 64 KiB.
const LEAST: u64 = 1448;
const MOST: u64 = 64 * 1024;
/// A rate limit, and the time up to which the rate is already used.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    rate: Bandwidth,
    used: Nanos,
}

impl Bucket {
    const fn new(rate: Bandwidth) -> Self {
        Self { rate, used: Nanos::ZERO }
    }

    /// Returns the time that this number of bytes takes at the rate.
    fn time(&self, bytes: u64) -> Nanos {
        Nanos((u128::from(bytes) * 8_000_000_000 / u128::from(self.rate.0.max(1))).min(u128::from(u64::MAX))
            as u64)
    }

    /// Returns the quantum in bytes: nothing is sent until at least this much, or all that is wanted, may be
    /// sent.
    fn quantum(&self) -> u64 {
        ((u128::from(self.rate.0) * u128::from(QUANTUM.0) / 8_000_000_000) as u64).clamp(LEAST, MOST)
    }

    /// Returns the time from which unused rate counts: at most a burst before `now`.
    fn from(&self, now: Nanos) -> Nanos {
        let burst = BURST.max(Nanos(2 * self.time(self.quantum()).0));
        self.used.max(now.saturating_sub(burst))
    }

    /// Returns the number of bytes, of `wanted`, that may be sent now.
    fn admits(&self, now: Nanos, wanted: u64) -> u64 {
        if self.rate == Bandwidth::UNLIMITED {
            return wanted;
        }
        let free = now.saturating_sub(self.from(now));
        let bytes = (u128::from(free.0) * u128::from(self.rate.0) / 8_000_000_000) as u64;
        if bytes < wanted.min(self.quantum()) { 0 } else { bytes.min(wanted) }
    }

    fn spend(&mut self, now: Nanos, bytes: u64) {
        if self.rate != Bandwidth::UNLIMITED {
            self.used = self.from(now).saturating_add(self.time(bytes));
        }
    }

    /// Returns the time until a quantum may be sent.
    fn wait(&self, now: Nanos) -> Nanos {
        if self.rate == Bandwidth::UNLIMITED {
            return Nanos::ZERO;
        }
        let ready = self.from(now).saturating_add(self.time(self.quantum()));
        ready.saturating_sub(now)
    }
}

/// The rate limits of an endpoint, and their use.
#[derive(Debug)]
pub(crate) struct Rates {
    all: Bucket,
    each: Vec<Bucket>,
}

impl Rates {
    /// Creates the limits for a number of peers.
    pub(crate) fn new(pace: Pace, peers: usize) -> Self {
        Self { all: Bucket::new(pace.all), each: vec![Bucket::new(pace.each); peers] }
    }

    /// Sets other limits. What was sent under the old limits no longer counts.
    pub(crate) fn set(&mut self, pace: Pace) {
        *self = Self::new(pace, self.each.len());
    }

    /// Returns the number of bytes, of `wanted`, that may be sent to the peer now.
    pub(crate) fn admits(&self, now: Nanos, peer: PeerId, wanted: u64) -> u64 {
        self.each[peer.index()].admits(now, self.all.admits(now, wanted))
    }

    /// Counts bytes that were sent to the peer.
    pub(crate) fn spend(&mut self, now: Nanos, peer: PeerId, bytes: u64) {
        self.all.spend(now, bytes);
        self.each[peer.index()].spend(now, bytes);
    }

    /// Returns the time until bytes may be sent to the peer.
    pub(crate) fn wait(&self, now: Nanos, peer: PeerId) -> Nanos {
        self.all.wait(now).max(self.each[peer.index()].wait(now))
    }
}

/// The rate limits of an endpoint, for a network that hands over bytes at times of its own.
#[cfg_attr(not(feature = "iroh"), expect(dead_code, reason = "sockets ask the rates directly"))]
pub(crate) trait Budget: std::fmt::Debug + Send + Sync {
    /// Returns whether there is a limit.
    fn is_limited(&self) -> bool;
    /// Returns the number of bytes that may be sent now, and counts them as sent; if none, the time to wait as
    /// an error.
    fn ask(&self, peer: PeerId, wanted: u64) -> Result<u64, Nanos>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_held_whatever_is_asked_for_and_a_pause_gives_no_more_than_a_burst() {
        for rate in [64_000, 20_000_000, 1_000_000_000_u64] {
            for asked in [32, 1000, 262_176, 10_000_000] {
                let mut bucket = Bucket::new(Bandwidth(rate));
                // At the start, the limit behaves as after a pause.
                let begin = Nanos::from_millis(60_000);
                let (mut now, mut sent) = (begin, 0_u64);
                let end = begin.saturating_add(Nanos::from_millis(1_000));
                while now < end {
                    let admitted = bucket.admits(now, asked);
                    assert!(admitted <= asked);
                    bucket.spend(now, admitted);
                    sent += admitted;
                    if admitted == 0 {
                        now = now.saturating_add(bucket.wait(now));
                        assert!(bucket.admits(now, u64::MAX) > 0, "the wait is long enough");
                    }
                }
                let burst = BURST.max(Nanos(2 * bucket.time(bucket.quantum()).0));
                let admissible = rate as f64 / 8.0 * (1.0 + burst.as_secs_f64());
                assert!(sent as f64 <= admissible * 1.001, "{rate} {asked}: {sent} of {admissible}");
                assert!(sent as f64 >= rate as f64 / 8.0 * 0.99, "{rate} {asked}: {sent} of {admissible}");
            }
        }
    }
}
