//! Limits how fast an endpoint sends: a rate in total and one per peer. A thread sends the frames that wait.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use farflung_base::{Nanos, PeerId};

use crate::memory::real_start;
use crate::rate::{Budget, Pace, Rates};

#[derive(Debug)]
struct State {
    rates: Rates,
    /// Whether bytes wait to be sent.
    rung: bool,
    closed: bool,
}

/// The rates of an endpoint, and how much of them is used.
#[derive(Debug)]
pub(super) struct Pacer {
    start: Instant,
    limited: AtomicBool,
    state: Mutex<State>,
    moved: Condvar,
}

impl Pacer {
    /// Creates a pacer without limits, for `peers` peers.
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

    /// Returns the time since the endpoint was created.
    pub(super) fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }

    fn is_limited(&self) -> bool {
        self.limited.load(Ordering::Acquire)
    }

    /// Sets the rates. The first limit starts a thread that runs `send`, which sends the frames that wait for
    /// the rates.
    pub(super) fn keep(
        self: &Arc<Self>,
        pace: Pace,
        send: impl FnOnce(&Self) + Send + 'static,
    ) -> io::Result<()> {
        self.lock().rates.set(pace);
        if pace.is_limited() && !self.limited.swap(true, Ordering::AcqRel) {
            let pacer = Arc::clone(self);
            let named = thread::Builder::new().name("farflung-pace".to_owned());
            named.spawn(move || send(&pacer))?;
        }
        Ok(())
    }

    /// Makes the thread end that sends waiting frames, if there is one.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.moved.notify_all();
    }

    /// Calls `write` with the number of bytes to the peer that the rates allow now, at most `wanted`. `write`
    /// returns how many it has sent. Returns 0 without a call if the rates allow none.
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

    /// Returns the time until something may be sent to the peer.
    pub(super) fn wait(&self, peer: PeerId) -> Nanos {
        if !self.is_limited() {
            return Nanos::ZERO;
        }
        let now = self.now();
        self.lock().rates.wait(now, peer)
    }

    /// Wakes the thread, because bytes wait to be sent.
    pub(super) fn ring(&self) {
        if self.is_limited() {
            self.lock().rung = true;
            self.moved.notify_all();
        }
    }

    /// Blocks until bytes wait to be sent; returns false once the pacer is closed.
    pub(super) fn wait_for_work(&self) -> bool {
        let mut state = self.lock();
        while !state.rung && !state.closed {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.rung = false;
        !state.closed
    }

    /// Returns whether the pacer is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

impl Budget for Pacer {
    fn is_limited(&self) -> bool {
        Self::is_limited(self)
    }
    fn ask(&self, peer: PeerId, wanted: u64) -> Result<u64, Nanos> {
        if !Self::is_limited(self) {
            return Ok(wanted);
        }
        let now = self.now();
        let mut state = self.lock();
        match state.rates.admits(now, peer, wanted) {
            0 if wanted > 0 => Err(state.rates.wait(now, peer)),
            bytes => {
                state.rates.spend(now, peer, bytes);
                Ok(bytes)
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
