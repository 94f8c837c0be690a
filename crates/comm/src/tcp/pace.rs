//! How fast an endpoint sends: a rate in all and one to each peer, as a thread of its own keeps them. What the
//! rates admit is a pure function of the time.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use farflung_base::{Bandwidth, Nanos, PeerId};

use super::links::Links;
use crate::memory::real_start;

/// What an endpoint may send: bytes that its sockets are given, without the headers of TCP and IP, which add
/// 3 to 4% to full packets.
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
    fn is_limited(&self) -> bool {
        *self != Self::default()
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
/// Between two looks at sockets that have no room.
const LOOK: Duration = Duration::from_micros(500);

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

#[derive(Debug)]
struct State {
    all: Bucket,
    each: Vec<Bucket>,
    /// Something waits to be sent.
    rung: bool,
    closed: bool,
}

/// The rates of an endpoint, and what of them is used up.
#[derive(Debug)]
pub(super) struct Pacer {
    start: Instant,
    limited: AtomicBool,
    state: Mutex<State>,
    moved: Condvar,
}

impl Pacer {
    /// Without limits, for so many peers.
    pub(super) fn new(peers: usize) -> Self {
        let free = Bucket::new(Bandwidth::UNLIMITED);
        let state = State { all: free, each: vec![free; peers], rung: false, closed: false };
        Self {
            start: real_start(),
            limited: AtomicBool::new(false),
            state: Mutex::new(state),
            moved: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time since the endpoint was made.
    pub(super) fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }

    fn is_limited(&self) -> bool {
        self.limited.load(Ordering::Acquire)
    }

    /// Keeps these rates from now on; the first limit starts the thread that sends what waits for them.
    /// `wake` makes threads that wait for the network look again.
    pub(super) fn keep(
        self: &Arc<Self>,
        pace: Pace,
        links: &Arc<Links>,
        wake: impl Fn() + Send + 'static,
    ) -> io::Result<()> {
        let mut state = self.lock();
        state.all = Bucket::new(pace.all);
        state.each.iter_mut().for_each(|bucket| *bucket = Bucket::new(pace.each));
        drop(state);
        if pace.is_limited() && !self.limited.swap(true, Ordering::AcqRel) {
            let (pacer, links) = (Arc::clone(self), Arc::clone(links));
            let named = thread::Builder::new().name("farflung-pace".to_owned());
            named.spawn(move || pacer.send_what_waits(&links, wake))?;
        }
        Ok(())
    }

    /// Ends the thread.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.moved.notify_all();
    }

    /// Has `write` send as many of the bytes to the peer as the rates admit now; it says how many it has sent.
    pub(super) fn write(
        &self,
        peer: PeerId,
        wanted: usize,
        write: impl FnOnce(usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if !self.is_limited() {
            return write(wanted);
        }
        let now = self.now();
        let mut state = self.lock();
        let each = state.each[peer.index()];
        let admitted = each.admits(now, state.all.admits(now, wanted as u64));
        if admitted == 0 && wanted > 0 {
            return Ok(0);
        }
        let sent = write(admitted as usize)?;
        state.all.spend(now, sent as u64);
        state.each[peer.index()].spend(now, sent as u64);
        Ok(sent)
    }

    /// How long until something may be sent to the peer.
    pub(super) fn wait(&self, peer: PeerId) -> Nanos {
        if !self.is_limited() {
            return Nanos::ZERO;
        }
        let (now, state) = (self.now(), self.lock());
        state.all.wait(now).max(state.each[peer.index()].wait(now))
    }

    /// Something waits to be sent.
    pub(super) fn ring(&self) {
        if self.is_limited() {
            self.lock().rung = true;
            self.moved.notify_all();
        }
    }

    /// Sends until this is closed. An operation may be over while its last frame waits for the rates; then
    /// nobody else drives the sockets.
    fn send_what_waits(&self, links: &Links, wake: impl Fn()) {
        let mut turn = 0;
        loop {
            let mut state = self.lock();
            while !state.rung && !state.closed {
                state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.closed {
                return;
            }
            state.rung = false;
            drop(state);
            loop {
                let mut waiting: Vec<_> =
                    links.all().filter(|link| link.is_open() && link.wants_to_write()).collect();
                let soonest = waiting.iter().map(|link| self.wait(link.peer)).min();
                let Some(soonest) = soonest.filter(|_| !self.lock().closed) else { break };
                thread::sleep(Duration::from(soonest).max(LOOK));
                // Each is the first in its turn.
                turn = (turn + 1) % waiting.len();
                waiting.rotate_left(turn);
                for link in waiting {
                    if link.flush() {
                        wake();
                    }
                }
            }
        }
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

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let pacer = Pacer::new(2);
        assert_eq!(pacer.write(PeerId(1), 1 << 30, Ok).unwrap(), 1 << 30);
        assert_eq!(pacer.wait(PeerId(1)), Nanos::ZERO);
    }
}
