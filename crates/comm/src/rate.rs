//! The rates that an endpoint keeps: one to all peers together, and one to each. What they admit is a pure
//! function of the time.

use farflung_base::{Bandwidth, Nanos, PeerId};

use crate::CommError;

/// How fast an endpoint sends. Counted are the bytes that its sockets or streams are given, without the headers
/// of packets: those of TCP and IP add 3 to 4% to full packets, those of QUIC, UDP and IP 5%.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// To all peers together.
    pub all: Bandwidth,
    /// To each of them.
    pub each: Bandwidth,
}

impl Default for Pace {
    /// As fast as the sockets take it.
    fn default() -> Self {
        Self { all: Bandwidth::UNLIMITED, each: Bandwidth::UNLIMITED }
    }
}

impl Pace {
    /// Whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        *self != Self::default()
    }

    /// Refuses rates at which nothing gets through.
    ///
    /// # Errors
    /// [`CommError::Argument`] for a rate below [`SLOWEST`].
    pub(crate) fn check(&self) -> Result<(), CommError> {
        match [self.all, self.each].into_iter().find(|rate| *rate < SLOWEST) {
            None => Ok(()),
            Some(rate) => {
                let (got, want) = (rate.0 as usize, SLOWEST.0 as usize);
                Err(CommError::Argument { op: "pace", what: "bits a second", got, want })
            }
        }
    }
}

/// The slowest rate that is kept: 1000 bytes a second.
pub const SLOWEST: Bandwidth = Bandwidth(8_000);

/// What may be sent at once after a pause.
const BURST: Nanos = Nanos::from_millis(10);
/// What is worth a system call, in time.
const QUANTUM: Nanos = Nanos::from_millis(2);
/// A packet, and the most that is worth waiting for, in bytes.
const LEAST: u64 = 1448;
const MOST: u64 = 64 * 1024;
/// A rate, and until when it is used up.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    rate: Bandwidth,
    used: Nanos,
}

impl Bucket {
    const fn new(rate: Bandwidth) -> Self {
        Self { rate, used: Nanos::ZERO }
    }

    /// The time that so many bytes take.
    fn time(&self, bytes: u64) -> Nanos {
        Nanos((u128::from(bytes) * 8_000_000_000 / u128::from(self.rate.0.max(1))).min(u128::from(u64::MAX))
            as u64)
    }

    /// What is waited for before anything is sent, unless it is less.
    fn quantum(&self) -> u64 {
        ((u128::from(self.rate.0) * u128::from(QUANTUM.0) / 8_000_000_000) as u64).clamp(LEAST, MOST)
    }

    /// From when on the rate counts.
    fn from(&self, now: Nanos) -> Nanos {
        let burst = BURST.max(Nanos(2 * self.time(self.quantum()).0));
        self.used.max(now.saturating_sub(burst))
    }

    /// How many of the bytes may be sent now.
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

    /// How long until something may be sent.
    fn wait(&self, now: Nanos) -> Nanos {
        if self.rate == Bandwidth::UNLIMITED {
            return Nanos::ZERO;
        }
        let ready = self.from(now).saturating_add(self.time(self.quantum()));
        ready.saturating_sub(now)
    }
}

/// The rates of an endpoint, and what of them is used up.
#[derive(Debug)]
pub(crate) struct Rates {
    all: Bucket,
    each: Vec<Bucket>,
}

impl Rates {
    /// For so many peers.
    pub(crate) fn new(pace: Pace, peers: usize) -> Self {
        Self { all: Bucket::new(pace.all), each: vec![Bucket::new(pace.each); peers] }
    }

    /// Other rates from now on; nothing of them is used up.
    pub(crate) fn set(&mut self, pace: Pace) {
        *self = Self::new(pace, self.each.len());
    }

    /// How many of the bytes may be sent to the peer now.
    pub(crate) fn admits(&self, now: Nanos, peer: PeerId, wanted: u64) -> u64 {
        self.each[peer.index()].admits(now, self.all.admits(now, wanted))
    }

    /// So many bytes were sent to the peer.
    pub(crate) fn spend(&mut self, now: Nanos, peer: PeerId, bytes: u64) {
        self.all.spend(now, bytes);
        self.each[peer.index()].spend(now, bytes);
    }

    /// How long until something may be sent to the peer.
    pub(crate) fn wait(&self, now: Nanos, peer: PeerId) -> Nanos {
        self.all.wait(now).max(self.each[peer.index()].wait(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_held_whatever_is_asked_for_and_a_pause_gives_no_more_than_a_burst() {
        for rate in [64_000, 20_000_000, 1_000_000_000_u64] {
            for asked in [32, 1000, 262_176, 10_000_000] {
                let mut bucket = Bucket::new(Bandwidth(rate));
                // It begins as after a pause.
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
