//! How fast an endpoint sends: a rate in all and one to each peer, as a thread of its own keeps them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};

use super::links::Links;
use crate::memory::real_start;
use crate::rate::{Pace, Rates};

/// Between two looks at sockets that have no room.
const LOOK: Duration = Duration::from_micros(500);

#[derive(Debug)]
struct State {
    rates: Rates,
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
        let state = State { rates: Rates::new(Pace::default(), peers), rung: false, closed: false };
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
        self.lock().rates.set(pace);
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
        let admitted = state.rates.admits(now, peer, wanted as u64);
        if admitted == 0 && wanted > 0 {
            return Ok(0);
        }
        let sent = write(admitted as usize)?;
        state.rates.spend(now, peer, sent as u64);
        Ok(sent)
    }

    /// How long until something may be sent to the peer.
    pub(super) fn wait(&self, peer: PeerId) -> Nanos {
        if !self.is_limited() {
            return Nanos::ZERO;
        }
        let now = self.now();
        self.lock().rates.wait(now, peer)
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
    fn without_a_limit_nothing_is_counted() {
        let pacer = Pacer::new(2);
        assert_eq!(pacer.write(PeerId(1), 1 << 30, Ok).unwrap(), 1 << 30);
        assert_eq!(pacer.wait(PeerId(1)), Nanos::ZERO);
    }
}
