//! One direction of a shared memory segment: a ring of entries in order, and slots that are freed in any order.
//! The consumer uses payloads in their slots, without a copy.
#![expect(unsafe_code, reason = "slots are used in place")]

use std::array;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use super::map::{DEPTH, Direction, Ring, SLOTS, SMALL_SLOT, SMALL_SLOTS, Segment, WORDS};
use super::ring_waker::RingWaker;

/// Bytes of the frame header in an entry.
pub(crate) const HEADER: usize = 32;

/// Slot index of an entry without a payload.
const NONE: u64 = u64::MAX;

/// Number of large slots that the consumer may use in place at the same time. The other large slots let the
/// sender continue.
const LARGE_IN_PLACE: usize = 6;
/// The same limit for small slots.
const SMALL_IN_PLACE: usize = 48;

/// Violation of the protocol by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// More entries than the ring can hold.
    Position,
    /// A slot that does not exist, or is still in use by this side.
    Slot,
    /// A payload longer than its slot.
    Length,
}

/// The sending side of a direction.
#[derive(Debug)]
pub(crate) struct Producer {
    segment: Arc<Segment>,
    direction: Direction,
    bell: Arc<RingWaker>,
    tail: u64,
}

impl Producer {
    /// Creates the producer of a direction. `bell` wakes the consumer.
    pub(crate) const fn new(segment: Arc<Segment>, direction: Direction, bell: Arc<RingWaker>) -> Self {
        Self { segment, direction, bell, tail: 0 }
    }

    fn ring(&self) -> &Ring {
        self.segment.ring(self.direction)
    }

    fn free(&self, mut slots: std::ops::Range<usize>) -> Option<usize> {
        let ring = self.ring();
        // The lowest free slot was probably used last, so few slots are in use and they stay in cache.
        slots.find(|&slot| ring.full[slot].0.load(Ordering::Acquire) == 0)
    }

    fn has_entry(&self) -> bool {
        self.tail.wrapping_sub(self.ring().head.0.load(Ordering::Acquire)) < DEPTH as u64
    }

    /// Returns whether a frame of any length would be accepted now. If not, the consumer wakes this side when
    /// it next frees a slot or takes an entry without a payload. There may still be no room then, so ask again.
    pub(crate) fn has_room(&self) -> bool {
        let has = || {
            self.has_entry() && self.free(0..SMALL_SLOTS).is_some() && self.free(SMALL_SLOTS..SLOTS).is_some()
        };
        has() || {
            self.ring().starved.0.store(1, Ordering::Relaxed);
            // Ensures that either the consumer sees this flag, or this side sees the slots that the consumer
            // has freed.
            fence(Ordering::SeqCst);
            has()
        }
    }

    /// Hands over a frame. Returns false, and does nothing, if there is no room.
    pub(crate) fn put(&mut self, header: &[u8; HEADER], payload: &[u8]) -> bool {
        let slots = if payload.len() <= SMALL_SLOT { 0..SMALL_SLOTS } else { SMALL_SLOTS..SLOTS };
        if !self.has_entry() {
            return false;
        }
        let slot = if payload.is_empty() {
            NONE
        } else {
            let Some(slot) = self.free(slots) else { return false };
            self.segment.write(self.direction, slot, payload);
            self.ring().full[slot].0.store(1, Ordering::Relaxed);
            slot as u64
        };
        let ring = self.segment.ring(self.direction);
        let entry = &ring.entries[self.tail as usize % DEPTH].0;
        for (word, bytes) in entry.iter().zip(header.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        entry[WORDS - 1].store(slot, Ordering::Relaxed);
        self.tail = self.tail.wrapping_add(1);
        ring.tail.0.store(self.tail, Ordering::Release);
        // Ensures that either the consumer sees the entry before it sleeps, or this side sees that the consumer
        // sleeps.
        fence(Ordering::SeqCst);
        if ring.asleep.0.load(Ordering::Relaxed) != 0 && ring.asleep.0.swap(0, Ordering::Relaxed) != 0 {
            self.bell.ring();
        }
        true
    }
}

/// State shared by the consumer and its slots.
#[derive(Debug)]
struct Inbound {
    segment: Arc<Segment>,
    direction: Direction,
    /// Wakes the producer.
    bell: Arc<RingWaker>,
    /// Whether each slot is in use by this side. Unlike the flags in shared memory, the peer cannot change
    /// these.
    held: [AtomicBool; SLOTS],
    /// Number of large slots in `held`.
    large: AtomicUsize,
    small: AtomicUsize,
}

impl Inbound {
    const fn count(&self, slot: usize) -> (&AtomicUsize, usize) {
        if slot < SMALL_SLOTS { (&self.small, SMALL_IN_PLACE) } else { (&self.large, LARGE_IN_PLACE) }
    }

    /// Wakes the producer if it waits for a slot or entry.
    fn wake_producer(&self) {
        let starved = &self.segment.ring(self.direction).starved.0;
        // Ensures that either the producer sees the freed slot or entry, or this side sees that the producer
        // waits.
        fence(Ordering::SeqCst);
        if starved.load(Ordering::Relaxed) != 0 && starved.swap(0, Ordering::Relaxed) != 0 {
            self.bell.ring();
        }
    }
}

/// The next entry of the ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) header: [u8; HEADER],
    slot: Option<usize>,
}

/// The receiving side of a direction.
#[derive(Debug)]
pub(crate) struct Consumer {
    inbound: Arc<Inbound>,
    head: u64,
}

impl Consumer {
    /// Creates the consumer of a direction. `bell` wakes the producer.
    pub(crate) fn new(segment: Arc<Segment>, direction: Direction, bell: Arc<RingWaker>) -> Self {
        let held = array::from_fn(|_| AtomicBool::new(false));
        let (large, small) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { inbound: Arc::new(Inbound { segment, direction, bell, held, large, small }), head: 0 }
    }

    fn ring(&self) -> &Ring {
        self.inbound.segment.ring(self.inbound.direction)
    }

    /// Returns whether there is an entry.
    pub(crate) fn has_more(&self) -> bool {
        self.ring().tail.0.load(Ordering::Acquire) != self.head
    }

    /// Announces that this side is about to block. Returns false if an entry has arrived: then this side must
    /// not block.
    pub(crate) fn sleep(&self) -> bool {
        self.ring().asleep.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let sleeps = !self.has_more();
        if !sleeps {
            self.wake();
        }
        sleeps
    }

    /// Announces that this side no longer blocks.
    pub(crate) fn wake(&self) {
        self.ring().asleep.0.store(0, Ordering::Relaxed);
    }

    /// Returns the next entry, if there is one.
    ///
    /// # Errors
    /// If the peer has violated the protocol.
    pub(crate) fn peek(&self) -> Result<Option<Entry>, Fault> {
        let ring = self.ring();
        let waiting = ring.tail.0.load(Ordering::Acquire).wrapping_sub(self.head);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > DEPTH as u64 {
            return Err(Fault::Position);
        }
        let words = &ring.entries[self.head as usize % DEPTH].0;
        let mut header = [0; HEADER];
        for (bytes, word) in header.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        let slot = match words[WORDS - 1].load(Ordering::Relaxed) {
            NONE => None,
            slot if slot < SLOTS as u64 => Some(slot as usize),
            _ => return Err(Fault::Slot),
        };
        Ok(Some(Entry { header, slot }))
    }

    /// Returns whether the payload of an entry may be used in place. If not, the producer needs its slot soon.
    pub(crate) fn can_stay(&self, entry: &Entry) -> bool {
        entry.slot.is_none_or(|slot| {
            let (count, most) = self.inbound.count(slot);
            count.load(Ordering::Relaxed) < most
        })
    }

    /// Removes the entry returned by `peek`, with `len` bytes of payload.
    ///
    /// # Errors
    /// If the slot is too short, or still in use by this side.
    pub(crate) fn take(&mut self, entry: &Entry, len: usize) -> Result<Option<Slot>, Fault> {
        let slot = match entry.slot {
            None if len > 0 => return Err(Fault::Length),
            None => None,
            Some(index) => {
                let inbound = &self.inbound;
                if len > inbound.segment.slot(inbound.direction, index).1 {
                    return Err(Fault::Length);
                }
                if inbound.held[index].swap(true, Ordering::Acquire) {
                    return Err(Fault::Slot);
                }
                inbound.count(index).0.fetch_add(1, Ordering::Relaxed);
                Some(Slot { inbound: Arc::clone(inbound), index: index as u32 })
            }
        };
        self.head = self.head.wrapping_add(1);
        self.ring().head.0.store(self.head, Ordering::Release);
        if slot.is_none() {
            self.inbound.wake_producer();
        }
        Ok(slot)
    }
}

/// A slot in use. Dropping it returns it to the producer.
pub(crate) struct Slot {
    inbound: Arc<Inbound>,
    index: u32,
}

impl Slot {
    /// Returns the first `len` bytes.
    ///
    /// # Panics
    /// If the slot is shorter.
    pub(crate) fn bytes(&self, len: usize) -> &[u8] {
        let (at, most) = self.inbound.segment.slot(self.inbound.direction, self.index as usize);
        assert!(len <= most, "the slot has only {most} bytes");
        // SAFETY: the bytes lie within the mapping, which `inbound` keeps. `held` makes this the only `Slot` of
        // its index, and the producer does not write to a full slot. A peer that violates this is a process of
        // the same user, which could write anywhere in this process anyway; any bytes are valid.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), len) }
    }

    /// Returns the first `len` bytes for writing.
    ///
    /// # Panics
    /// If the slot is shorter.
    pub(crate) fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        let (at, most) = self.inbound.segment.slot(self.inbound.direction, self.index as usize);
        assert!(len <= most, "the slot has only {most} bytes");
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.index)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let (inbound, index) = (&*self.inbound, self.index as usize);
        inbound.count(index).0.fetch_sub(1, Ordering::Relaxed);
        inbound.held[index].store(false, Ordering::Release);
        inbound.segment.ring(inbound.direction).full[index].0.store(0, Ordering::Release);
        inbound.wake_producer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Direction = Direction::MakerToGuest;

    fn ends() -> (Arc<Segment>, Producer, Consumer) {
        let segment = Arc::new(Segment::new().unwrap().0);
        let bell = || Arc::new(RingWaker::new().unwrap());
        let producer = Producer::new(Arc::clone(&segment), TO, bell());
        let consumer = Consumer::new(Arc::clone(&segment), TO, bell());
        (segment, producer, consumer)
    }

    fn next(consumer: &mut Consumer, len: usize) -> Option<Slot> {
        let entry = consumer.peek().unwrap().unwrap();
        assert_eq!(entry.header[0] as usize, len % 256);
        consumer.take(&entry, len).unwrap()
    }

    #[test]
    fn frames_come_in_order_and_slots_go_back_in_any() {
        let (_, mut producer, mut consumer) = ends();
        for round in 0..3 * DEPTH {
            let lengths = [0, 1, SMALL_SLOT, SMALL_SLOT + 1, crate::FRAME_BYTES];
            for len in lengths {
                assert!(producer.put(&[len as u8; HEADER], &vec![round as u8; len]));
            }
            let mut slots: Vec<_> = lengths.iter().map(|&len| (next(&mut consumer, len), len)).collect();
            assert!(consumer.peek().unwrap().is_none());
            slots.rotate_left(round % 5);
            for (slot, len) in slots {
                let found = slot.as_ref().map_or(&[][..], |slot| slot.bytes(len));
                assert_eq!((found.len(), found.iter().all(|&b| b == round as u8)), (len, true));
            }
        }
    }

    #[test]
    fn a_full_ring_takes_no_more_until_something_goes_back_and_then_rings() {
        let (_, mut producer, mut consumer) = ends();
        let frame = vec![7; SMALL_SLOT + 1];
        let taken = (0..1_000_000).take_while(|_| producer.put(&[1; HEADER], &frame)).count();
        assert_eq!(taken, SLOTS - SMALL_SLOTS);
        assert!(!producer.has_room());
        let in_place = (0..taken).take_while(|_| consumer.can_stay(&consumer.peek().unwrap().unwrap()));
        assert_eq!(in_place.count(), taken);
        let slots: Vec<Slot> =
            (0..LARGE_IN_PLACE).filter_map(|_| next(&mut consumer, frame.len() - 4096)).collect();
        assert!(!consumer.can_stay(&consumer.peek().unwrap().unwrap()));
        let rings = |consumer: &Consumer| rustix::io::read(&*consumer.inbound.bell, &mut [0; 8]).is_ok();
        assert!(!rings(&consumer));
        drop(slots);
        assert!(rings(&consumer) && producer.has_room());
        // Entries without a payload need no slots: they are limited by the ring.
        let mut empty = 0;
        while producer.put(&[0; HEADER], &[]) {
            empty += 1;
        }
        assert_eq!(empty, DEPTH - (taken - LARGE_IN_PLACE));
        assert!(!producer.has_room());
    }

    #[test]
    fn a_peer_that_lies_is_found_out() {
        let lie = |lie: &dyn Fn(&Ring)| {
            let (segment, mut producer, consumer) = ends();
            assert!(producer.put(&[1; HEADER], &[1]));
            lie(segment.ring(TO));
            (segment, producer, consumer)
        };
        let (.., consumer) = lie(&|ring| ring.tail.0.store(DEPTH as u64 + 1, Ordering::Relaxed));
        assert_eq!(consumer.peek().unwrap_err(), Fault::Position);
        let (.., consumer) = lie(&|ring| ring.tail.0.store(u64::MAX, Ordering::Relaxed));
        assert_eq!(consumer.peek().unwrap_err(), Fault::Position);
        let slot = |at: u64| move |ring: &Ring| ring.entries[0].0[WORDS - 1].store(at, Ordering::Relaxed);
        let (.., consumer) = lie(&slot(SLOTS as u64));
        assert_eq!(consumer.peek().unwrap_err(), Fault::Slot);
        let (.., mut consumer) = lie(&slot(NONE));
        let entry = consumer.peek().unwrap().unwrap();
        assert_eq!(consumer.take(&entry, 1).unwrap_err(), Fault::Length);
        let (.., mut consumer) = lie(&slot(3));
        let entry = consumer.peek().unwrap().unwrap();
        assert_eq!(consumer.take(&entry, SMALL_SLOT + 1).unwrap_err(), Fault::Length);
        // Two `Slot`s of one index would be two mutable references to the same memory.
        let (segment, mut producer, mut consumer) = lie(&|_| {});
        let entry = consumer.peek().unwrap().unwrap();
        let held = consumer.take(&entry, 1).unwrap();
        segment.ring(TO).full[0].0.store(0, Ordering::Relaxed);
        assert!(producer.put(&[1; HEADER], &[2]));
        let entry = consumer.peek().unwrap().unwrap();
        assert_eq!(consumer.take(&entry, 1).unwrap_err(), Fault::Slot);
        drop(held);
    }

    #[test]
    fn whoever_sleeps_is_rung_up_once() {
        let (_, mut producer, mut consumer) = ends();
        assert!(consumer.sleep());
        for _ in 0..3 {
            assert!(producer.put(&[0; HEADER], &[]));
        }
        let mut rung = [0; 8];
        rustix::io::read(&*producer.bell, &mut rung).unwrap();
        assert_eq!(u64::from_ne_bytes(rung), 1);
        assert!(!consumer.sleep());
        for _ in 0..3 {
            next(&mut consumer, 0);
        }
        assert!(consumer.sleep());
    }
}
