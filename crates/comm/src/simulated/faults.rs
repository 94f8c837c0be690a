//! Faults of a simulated network, as data: crashes, cuts and freezes at given times, the corruption of the next
//! frame after a given time, and random delay and loss of frames.

use std::collections::BTreeMap;

use farflung_base::{Nanos, PeerId, Philox};
use serde::{Deserialize, Serialize};

use crate::control::BoundedVec;

/// The faults of a simulated network, and their times.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    timed: BoundedVec<(Nanos, Fault)>,
    weather: LinkNoise,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Fault {
    Crash(PeerId),
    Cut(PeerId, PeerId, Nanos),
    Freeze(PeerId, Nanos),
    Corrupt(PeerId, PeerId),
}

/// Random delay and loss of the frames on every link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkNoise {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Upper bound of the random delay of a frame.
    pub jitter: Nanos,
    /// Number of frames in a million that are lost and sent again; later frames wait for them.
    pub loss: u32,
    /// Time after which a lost frame is sent again.
    pub retransmit: Nanos,
}

impl LinkNoise {
    /// Returns the delay of the `number`-th frame from one rank to another.
    pub(super) fn delay(&self, from: usize, to: usize, number: u64) -> Nanos {
        let chance = Philox::new(self.seed, (from as u64) << 32 | to as u64);
        let mut late = if self.jitter.0 > 0 { chance.below(16 * number, self.jitter.0) } else { 0 };
        // At most 15 losses of a frame in a row are counted, because with more losses the link is practically
        // cut.
        let lost = |again: &u64| chance.below(16 * number + again, 1_000_000) < u64::from(self.loss);
        late += (1..16).take_while(lost).count() as u64 * self.retransmit.0;
        Nanos(late)
    }
}

/// Builder of a fault: the faults so far, and the time of the next one.
#[derive(Debug)]
#[must_use = "call a method that adds a fault at this time"]
pub struct At(Faults, Nanos);

impl Faults {
    /// Creates an empty list of faults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the time of the next fault.
    pub const fn at(self, time: Nanos) -> At {
        At(self, time)
    }

    /// Sets the random delay and loss of all frames on all links.
    #[must_use]
    pub fn weather(self, weather: LinkNoise) -> Self {
        Self { weather, ..self }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Nanos, Fault)> + '_ {
        self.timed.0.iter().copied()
    }
}

/// A span of time: its begin and its end.
type Span = (Nanos, Nanos);

/// Cuts and freezes of [`Faults`], by the ranks that they concern.
#[derive(Debug)]
pub(super) struct Rules {
    weather: LinkNoise,
    /// Cuts by pair of ranks, the lesser rank first.
    cuts: BTreeMap<(PeerId, PeerId), Vec<Span>>,
    /// Freezes by rank, in the order of their begins.
    freezes: BTreeMap<PeerId, Vec<Span>>,
}

impl Rules {
    pub(super) fn new(faults: &Faults) -> Self {
        let (mut cuts, mut freezes) = (BTreeMap::new(), BTreeMap::new());
        for (from, fault) in faults.iter() {
            match fault {
                Fault::Cut(a, b, until) => {
                    cuts.entry((a.min(b), a.max(b))).or_insert_with(Vec::new).push((from, until));
                }
                Fault::Freeze(peer, until) => {
                    freezes.entry(peer).or_insert_with(Vec::new).push((from, until));
                }
                Fault::Crash(_) | Fault::Corrupt(..) => {}
            }
        }
        Self { weather: faults.weather, cuts, freezes }
    }

    /// Returns the random delay and loss of frames.
    pub(super) const fn weather(&self) -> &LinkNoise {
        &self.weather
    }

    /// Returns whether a frame that departs between the two at `time` is lost.
    pub(super) fn cuts(&self, time: Nanos, a: PeerId, b: PeerId) -> bool {
        let spans = self.cuts.get(&(a.min(b), a.max(b)));
        spans.is_some_and(|spans| spans.iter().any(|&(from, until)| (from..until).contains(&time)))
    }

    /// Returns when an action of `peer` that is due at `time` happens: at the end of its freeze, if it is
    /// frozen.
    pub(super) fn thaw(&self, peer: PeerId, time: Nanos) -> Nanos {
        let Some(spans) = self.freezes.get(&peer) else { return time };
        spans.iter().fold(
            time,
            |time, &(from, until)| {
                if (from..until).contains(&time) { until } else { time }
            },
        )
    }
}

impl At {
    fn with(mut self, fault: Fault) -> Faults {
        self.0.timed.0.push((self.1, fault));
        self.0.timed.0.sort_by_key(|&(time, _)| time);
        self.0
    }

    /// Ends the peer: its operations fail, and other ranks notice it after the last bytes that it sent.
    #[must_use]
    pub fn crash(self, peer: PeerId) -> Faults {
        self.with(Fault::Crash(peer))
    }

    /// Drops all frames that depart between the two from now on, in both directions. Neither side is notified.
    #[must_use]
    pub fn cut(self, a: PeerId, b: PeerId) -> Faults {
        self.cut_until(a, b, Nanos::MAX)
    }

    /// Drops all frames that depart between the two from now until `until`.
    #[must_use]
    pub fn cut_until(self, a: PeerId, b: PeerId, until: Nanos) -> Faults {
        self.with(Fault::Cut(a, b, until))
    }

    /// Cuts the ranks of `island` off from all others of `size` until `until`.
    #[must_use]
    pub fn partition(self, island: &[PeerId], size: usize, until: Nanos) -> Faults {
        let At(mut faults, time) = self;
        for &inside in island {
            for outside in (0..size as u32).map(PeerId).filter(|peer| !island.contains(peer)) {
                faults = faults.at(time).cut_until(inside, outside, until);
            }
        }
        faults
    }

    /// Freezes the peer until `until`: it sends, receives and notices nothing, and does all of that at the end.
    #[must_use]
    pub fn freeze(self, peer: PeerId, until: Nanos) -> Faults {
        self.with(Fault::Freeze(peer, until))
    }

    /// Corrupts the next frame that departs from one to the other. The receiver's checksum shows it, and the
    /// receiver takes the sender for lost.
    #[must_use]
    pub fn corrupt(self, from: PeerId, to: PeerId) -> Faults {
        self.with(Fault::Corrupt(from, to))
    }
}
