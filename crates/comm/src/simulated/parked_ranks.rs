//! How threads of blocked ranks sleep and are woken. Independent of clocks and events.
//!
//! An event may wake all ranks at once. If all their threads were notified at once, they would compete for the
//! same lock and a few cores. So each thread notifies the next one as soon as it runs itself; then no more
//! threads are about to run than there are cores. A thread waits only until the previous thread runs, not until
//! that thread has done any work.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::endpoint::Wake;

/// State of the sleeping threads of one rank.
#[derive(Debug, Default)]
struct ParkedRank {
    state: Mutex<Ring>,
    wakeup: Condvar,
}

#[derive(Debug, Default)]
struct Ring {
    /// Number of wake-ups so far (`count`), and the reason of the last one (`wake`).
    count: u64,
    wake: Option<Wake>,
    /// Number of threads that sleep here.
    asleep: u32,
    /// Set while sleeping threads have been notified, but none of them has run yet.
    notified: bool,
}

/// Sleep and wake-up of the threads of blocked ranks. Ranks are woken one after the other.
#[derive(Debug)]
pub(super) struct ParkedRanks {
    ranks: Vec<ParkedRank>,
    /// Ranks that are still to be notified.
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<usize>,
    /// Set while a notified rank has not run yet; it will notify the next one.
    under_way: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ParkedRanks {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks: (0..ranks).map(|_| ParkedRank::default()).collect(), queue: Mutex::default() }
    }

    /// Returns the number of wake-ups of a rank so far. Call it before the rank blocks.
    pub(super) fn count(&self, rank: usize) -> u64 {
        lock(&self.ranks[rank].state).count
    }

    /// Wakes these ranks, each with the given reason.
    pub(super) fn ring(&self, woken: &[(usize, Wake)]) {
        let mut asleep = Vec::with_capacity(woken.len());
        for &(rank, wake) in woken {
            let mut ring = lock(&self.ranks[rank].state);
            ring.count += 1;
            ring.wake = Some(wake);
            if ring.asleep > 0 {
                asleep.push(rank);
            }
        }
        if !asleep.is_empty() {
            let mut queue = lock(&self.queue);
            queue.waiting.extend(asleep);
            if !queue.under_way {
                self.notify_next(queue);
            }
        }
    }

    /// Notifies the next rank whose thread sleeps.
    fn notify_next(&self, mut queue: MutexGuard<'_, Queue>) {
        queue.under_way = false;
        while let Some(rank) = queue.waiting.pop_front() {
            let mut ring = lock(&self.ranks[rank].state);
            // Skips ranks that are awake or have been notified already: they would not notify the next one.
            if ring.asleep == 0 || ring.notified {
                continue;
            }
            ring.notified = true;
            queue.under_way = true;
            drop(queue);
            drop(ring);
            self.ranks[rank].wakeup.notify_all();
            return;
        }
    }

    /// Sleeps until the rank has been woken more than `count` times; returns the reason.
    pub(super) fn sleep(&self, rank: usize, count: u64) -> Wake {
        let ParkedRank { state, wakeup: rung } = &self.ranks[rank];
        let mut ring = lock(state);
        while ring.count == count {
            ring.asleep += 1;
            ring = rung.wait(ring).unwrap_or_else(PoisonError::into_inner);
            ring.asleep -= 1;
            if std::mem::take(&mut ring.notified) {
                drop(ring);
                self.notify_next(lock(&self.queue));
                ring = lock(state);
            }
        }
        // Only one thread of a rank gets the reason, such as a deadlock. The other threads return `Moved`,
        // check their state, and sleep again.
        ring.wake.take().unwrap_or(Wake::Moved)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn all_are_woken_though_each_waits_for_the_others_outside() {
        let (n, rounds) = (20, 50);
        let (bells, met, asleep) = (ParkedRanks::new(n), Barrier::new(n), Barrier::new(n + 1));
        thread::scope(|scope| {
            for rank in 0..n {
                let (bells, met, asleep) = (&bells, &met, &asleep);
                scope.spawn(move || {
                    for _ in 0..rounds {
                        let count = bells.count(rank);
                        asleep.wait();
                        assert_eq!(bells.sleep(rank, count), Wake::Moved);
                        met.wait();
                    }
                });
            }
            let all: Vec<_> = (0..n).map(|rank| (rank, Wake::Moved)).collect();
            for _ in 0..rounds {
                asleep.wait();
                bells.ring(&all);
            }
        });
    }

    #[test]
    fn a_bell_that_rang_before_the_sleep_ends_it() {
        let bells = ParkedRanks::new(2);
        let before = bells.count(1);
        bells.ring(&[(1, Wake::Deadlock)]);
        assert_eq!((bells.sleep(1, before), bells.count(1)), (Wake::Deadlock, before + 1));
    }
}
