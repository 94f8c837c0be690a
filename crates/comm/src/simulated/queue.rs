//! The queue of events in the order in which they may be processed. Each is checked again only when something
//! relevant has changed. Independent of links and of the state of ranks.
//!
//! An event belongs to one *lane*: a rank's departures, its landings, events of the rank itself, or its
//! deadline. Events of one lane are processed in the order of their keys, so only the first of each lane is
//! checked. The check either lets the event be processed or sets the lane aside: until the least floor of a
//! group of ranks is high enough, or until the lane's own rank reports a change. Each operation takes time
//! logarithmic in the number of lanes and events.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use farflung_base::Nanos;

use super::lookahead::Obstacle;

/// Sort key of an event: events are ordered by time, kind, sender and sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) time: Nanos,
    pub(super) kind: Kind,
    pub(super) from: usize,
    /// Number of the frame among those of its sender: frames that depart at the same time keep the order in
    /// which they were sent.
    pub(super) sequence: u64,
}

/// Kind of an event. Events of the same time are processed in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Crash,
    Depart,
    /// A frame leaves its sender's uplink, in a network in which regions share lines.
    Cross,
    /// A frame reaches the receiver's region, in a network in which regions share lines.
    Enter,
    Land,
    Arrive,
    /// The deadline of a rank; processed after all arrivals of the same time.
    Deadline,
}

/// Sequence of events that must be processed in order: those of one part of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    pub(super) rank: usize,
    pub(super) kind: LaneKind,
}

/// The part of a rank that an event concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LaneKind {
    /// The rank's uplink: departures of frames, and `Cross` events.
    Uplink,
    /// The rank's downlink: landings of frames, and `Enter` events.
    Downlink,
    /// The rank itself: arrivals and its crash.
    Itself,
    /// The end of the rank's wait.
    Deadline,
}

const LANES: usize = 4;

impl Lane {
    pub(super) const fn new(rank: usize, what: LaneKind) -> Self {
        Self { rank, kind: what }
    }

    const fn index(self) -> usize {
        self.rank * LANES + self.kind as usize
    }
}

/// State of a lane: which check its first event needs, or for what it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LaneState {
    /// The lane is empty.
    Idle,
    /// The first event, with this key, must be checked.
    Ready(Key),
    /// The first event waits until the least floor of a group of ranks is high enough.
    Behind(Obstacle),
    /// The first event waits until the state of the lane's rank has changed.
    Held,
}

/// Keys in order, each with the index of its event in the store.
type Events = BinaryHeap<Reverse<(Key, u32)>>;

/// Queue of events, divided into lanes. Only the first event of each lane can be the next one.
pub(super) struct Queue<E> {
    lanes: Vec<(Events, LaneState)>,
    /// The events, which are too large to be moved around in a heap.
    store: Vec<Option<E>>,
    /// Indices of `store` that are free.
    free: Vec<u32>,
    ready: BTreeSet<(Key, Lane)>,
    /// By group: lanes whose first event waits until the group's least floor is later than this time.
    behind: Vec<BTreeSet<(Nanos, Lane)>>,
}

impl<E> Queue<E> {
    pub(super) fn new(ranks: usize, groups: usize) -> Self {
        Self {
            lanes: (0..ranks * LANES).map(|_| (BinaryHeap::new(), LaneState::Idle)).collect(),
            store: Vec::new(),
            free: Vec::new(),
            ready: BTreeSet::new(),
            behind: vec![BTreeSet::new(); groups],
        }
    }

    fn set_state(&mut self, lane: Lane, place: LaneState) {
        let before = std::mem::replace(&mut self.lanes[lane.index()].1, place);
        if before == place {
            return;
        }
        match before {
            LaneState::Ready(key) => {
                self.ready.remove(&(key, lane));
            }
            LaneState::Behind(Obstacle { group, above }) => {
                self.behind[group].remove(&(above, lane));
            }
            LaneState::Idle | LaneState::Held => {}
        }
        match place {
            LaneState::Ready(key) => {
                self.ready.insert((key, lane));
            }
            LaneState::Behind(Obstacle { group, above }) => {
                self.behind[group].insert((above, lane));
            }
            LaneState::Idle | LaneState::Held => {}
        }
    }

    /// Marks the first event of a lane, if there is one, to be checked.
    pub(super) fn recheck(&mut self, lane: Lane) {
        let place = self.head(lane).map_or(LaneState::Idle, LaneState::Ready);
        self.set_state(lane, place);
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
            self.recheck(lane);
        }
    }

    /// Returns the key of a lane's first event.
    pub(super) fn head(&self, lane: Lane) -> Option<Key> {
        self.lanes[lane.index()].0.peek().map(|Reverse((key, _))| *key)
    }

    /// Returns the first event that must be checked.
    pub(super) fn first(&self) -> Option<(Key, Lane)> {
        self.ready.first().copied()
    }

    /// Removes and returns the first event of a lane. The caller processes it.
    pub(super) fn pop(&mut self, lane: Lane) -> Option<E> {
        let Reverse((_, at)) = self.lanes[lane.index()].0.pop()?;
        self.recheck(lane);
        self.free.push(at);
        self.store[at as usize].take()
    }

    /// Drops all events of a lane.
    pub(super) fn clear(&mut self, lane: Lane) {
        while self.pop(lane).is_some() {}
    }

    /// Sets a lane aside until its rank has changed.
    pub(super) fn hold(&mut self, lane: Lane) {
        self.set_state(lane, LaneState::Held);
    }

    /// Sets a lane aside until a floor is high enough.
    pub(super) fn set_behind(&mut self, lane: Lane, obstacle: Obstacle) {
        self.set_state(lane, LaneState::Behind(obstacle));
    }

    /// Called when the least floor of a group has risen: lanes that waited for a lower one must be checked
    /// again.
    pub(super) fn release(&mut self, group: usize, floor: Nanos) {
        while let Some(&(above, lane)) = self.behind[group].first()
            && above < floor
        {
            self.recheck(lane);
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
        let (a, b) = (Lane::new(0, LaneKind::Itself), Lane::new(1, LaneKind::Uplink));
        for (lane, time) in [(a, 5), (a, 3), (a, 9), (b, 4)] {
            queue.push(lane, key(time, 7), time);
        }
        assert_eq!((queue.first(), queue.head(b)), (Some((key(3, 7), a)), Some(key(4, 7))));
        queue.hold(a);
        assert_eq!(queue.first(), Some((key(4, 7), b)));
        queue.set_behind(b, Obstacle { group: 1, above: Nanos(2) });
        assert_eq!(queue.first(), None);
        // A new event that sorts before the first event of a held lane makes the lane ready. A new event that
        // sorts after it does not.
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
