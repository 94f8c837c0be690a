//! Events in the order in which they may happen, each looked at only when something has changed for it. It
//! depends on no rank's state and on no link.
//!
//! An event belongs to one *lane*: a rank's departures, its landings, what happens to the rank itself, or its
//! deadline. Those of one lane happen in the order of their keys, so only the first of each lane is looked at.
//! Looking at it either lets it happen, or puts the lane aside: until the least floor of a group of ranks is
//! high enough, or until the lane's own rank says that it has changed. Each of that takes a time logarithmic in
//! the number of lanes and events.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use farflung_base::Nanos;

use super::lookahead::Obstacle;

/// The order of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) time: Nanos,
    pub(super) kind: Kind,
    pub(super) from: usize,
    /// Of what the sender has sent: what departs at one time goes out in the order in which it was sent.
    pub(super) sequence: u64,
}

/// What happens, in the order of one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Crash,
    Depart,
    /// Goes out over the line of a region.
    Cross,
    /// Comes in over the line of a region.
    Enter,
    Land,
    Arrive,
    /// After everything that arrives at that time.
    Deadline,
}

/// Where an event waits for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    pub(super) rank: usize,
    pub(super) what: What,
}

/// What of a rank an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    /// Its uplink: departures.
    Up,
    /// Its downlink: landings.
    Down,
    /// Itself: arrivals and its crash.
    Itself,
    /// Until when it waits.
    Deadline,
}

const LANES: usize = 4;

impl Lane {
    pub(super) const fn new(rank: usize, what: What) -> Self {
        Self { rank, what }
    }

    const fn index(self) -> usize {
        self.rank * LANES + self.what as usize
    }
}

/// Where a lane stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It is empty.
    Idle,
    /// Its first event, of this key, is to be looked at.
    Ready(Key),
    /// Until a group's least floor is high enough.
    Behind(Obstacle),
    /// Until its rank has changed.
    Held,
}

/// Keys in order, each with its event's place in the store.
type Events = BinaryHeap<Reverse<(Key, u32)>>;

/// Events by lanes.
pub(super) struct Queue<E> {
    lanes: Vec<(Events, Place)>,
    /// The events themselves, which are larger than a heap should move about.
    store: Vec<Option<E>>,
    /// Places of `store` that are empty.
    free: Vec<u32>,
    ready: BTreeSet<(Key, Lane)>,
    /// By group: lanes whose first event waits for a floor above that time.
    behind: Vec<BTreeSet<(Nanos, Lane)>>,
}

impl<E> Queue<E> {
    pub(super) fn new(ranks: usize, groups: usize) -> Self {
        Self {
            lanes: (0..ranks * LANES).map(|_| (BinaryHeap::new(), Place::Idle)).collect(),
            store: Vec::new(),
            free: Vec::new(),
            ready: BTreeSet::new(),
            behind: vec![BTreeSet::new(); groups],
        }
    }

    fn put(&mut self, lane: Lane, place: Place) {
        let before = std::mem::replace(&mut self.lanes[lane.index()].1, place);
        if before == place {
            return;
        }
        match before {
            Place::Ready(key) => {
                self.ready.remove(&(key, lane));
            }
            Place::Behind(Obstacle { group, above }) => {
                self.behind[group].remove(&(above, lane));
            }
            Place::Idle | Place::Held => {}
        }
        match place {
            Place::Ready(key) => {
                self.ready.insert((key, lane));
            }
            Place::Behind(Obstacle { group, above }) => {
                self.behind[group].insert((above, lane));
            }
            Place::Idle | Place::Held => {}
        }
    }

    /// The first event of a lane is to be looked at, if it has one: its rank has changed.
    pub(super) fn look(&mut self, lane: Lane) {
        let place = self.head(lane).map_or(Place::Idle, Place::Ready);
        self.put(lane, place);
    }

    /// Adds an event.
    pub(super) fn push(&mut self, lane: Lane, key: Key, event: E) {
        let at = self.free.pop().unwrap_or_else(|| {
            self.store.push(None);
            self.store.len() as u32 - 1
        });
        self.store[at as usize] = Some(event);
        self.lanes[lane.index()].0.push(Reverse((key, at)));
        if self.head(lane) == Some(key) {
            self.look(lane);
        }
    }

    /// The key of a lane's first event.
    pub(super) fn head(&self, lane: Lane) -> Option<Key> {
        self.lanes[lane.index()].0.peek().map(|Reverse((key, _))| *key)
    }

    /// The first event that is to be looked at.
    pub(super) fn first(&self) -> Option<(Key, Lane)> {
        self.ready.first().copied()
    }

    /// Takes a lane's first event: it happens.
    pub(super) fn pop(&mut self, lane: Lane) -> Option<E> {
        let Reverse((_, at)) = self.lanes[lane.index()].0.pop()?;
        self.look(lane);
        self.free.push(at);
        self.store[at as usize].take()
    }

    /// Drops a lane's events.
    pub(super) fn clear(&mut self, lane: Lane) {
        while self.pop(lane).is_some() {}
    }

    /// Keeps a lane back until its rank has changed.
    pub(super) fn hold(&mut self, lane: Lane) {
        self.put(lane, Place::Held);
    }

    /// Keeps a lane back until a floor is high enough.
    pub(super) fn set_behind(&mut self, lane: Lane, obstacle: Obstacle) {
        self.put(lane, Place::Behind(obstacle));
    }

    /// The smallest floor of a group has risen: ranks that waited for a smaller one are checked again.
    pub(super) fn release(&mut self, group: usize, floor: Nanos) {
        while let Some(&(above, lane)) = self.behind[group].first()
            && above < floor
        {
            self.look(lane);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn key(time: u64, from: usize) -> Key {
        Key { time: Nanos(time), kind: Kind::Arrive, from, sequence: 0 }
    }

    #[test]
    fn the_first_event_of_each_lane_is_looked_at_when_something_has_changed() {
        let mut queue = Queue::new(2, 2);
        let (a, b) = (Lane::new(0, What::Itself), Lane::new(1, What::Up));
        for (lane, time) in [(a, 5), (a, 3), (a, 9), (b, 4)] {
            queue.push(lane, key(time, 7), time);
        }
        assert_eq!((queue.first(), queue.head(b)), (Some((key(3, 7), a)), Some(key(4, 7))));
        queue.hold(a);
        assert_eq!(queue.first(), Some((key(4, 7), b)));
        queue.set_behind(b, Obstacle { group: 1, above: Nanos(2) });
        assert_eq!(queue.first(), None);
        // What comes before the head is looked at; what comes behind it is not.
        queue.push(a, key(4, 7), 4);
        assert_eq!(queue.first(), None);
        queue.push(a, key(1, 7), 1);
        assert_eq!((queue.first(), queue.pop(a)), (Some((key(1, 7), a)), Some(1)));
        assert_eq!((queue.pop(a), queue.pop(a), queue.first()), (Some(3), Some(4), Some((key(5, 7), a))));
        queue.clear(a);
        queue.release(0, Nanos::MAX);
        queue.release(1, Nanos(2));
        assert_eq!((queue.first(), queue.head(a)), (None, None));
        queue.release(1, Nanos(3));
        assert_eq!((queue.first(), queue.pop(b)), (Some((key(4, 7), b)), Some(4)));
        assert_eq!((queue.first(), queue.pop(b)), (None, None));
    }
}
