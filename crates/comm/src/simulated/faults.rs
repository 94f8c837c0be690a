//! What goes wrong in a simulated network, as data. Rules of time alone: nothing here depends on what ranks do.

use std::collections::BTreeMap;

use farflung_base::{Nanos, PeerId, Philox};
use serde::{Deserialize, Serialize};

use crate::control::Listed;

/// What goes wrong in a simulated network, and when.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    timed: Listed<(Nanos, Fault)>,
    weather: Weather,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Fault {
    Crash(PeerId),
    Cut(PeerId, PeerId, Nanos),
    Freeze(PeerId, Nanos),
    Corrupt(PeerId, PeerId),
}

/// What befalls every frame on every link, by chance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weather {
    /// Of the chances.
    pub seed: u64,
    /// A frame is late by less than this.
    pub jitter: Nanos,
    /// Frames in a million that are lost on the way and sent again; what follows waits for them.
    pub loss: u32,
    /// The time after which a lost frame is sent again.
    pub retransmit: Nanos,
}

impl Weather {
    /// By how much the `number`-th frame from one rank to another is late.
    pub(super) fn delay(&self, from: usize, to: usize, number: u64) -> Nanos {
        let chance = Philox::new(self.seed, (from as u64) << 32 | to as u64);
        let mut late = if self.jitter.0 > 0 { chance.below(16 * number, self.jitter.0) } else { 0 };
        // Fifteen losses in a row are as good as a cut.
        let lost = |again: &u64| chance.below(16 * number + again, 1_000_000) < u64::from(self.loss);
        late += (1..16).take_while(lost).count() as u64 * self.retransmit.0;
        Nanos(late)
    }
}

/// A point in time for which a fault is to be named.
#[derive(Debug)]
#[must_use = "name a fault"]
pub struct At(Faults, Nanos);

impl Faults {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The next fault happens at `time`.
    pub const fn at(self, time: Nanos) -> At {
        At(self, time)
    }

    /// Every frame on every link is subject to this.
    #[must_use]
    pub fn weather(self, weather: Weather) -> Self {
        Self { weather, ..self }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Nanos, Fault)> + '_ {
        self.timed.0.iter().copied()
    }
}

/// A span of time: from when, until when.
type Span = (Nanos, Nanos);

/// What [`Faults`] say of links and of ranks that stand still, by those that they befall.
#[derive(Debug)]
pub(super) struct Rules {
    weather: Weather,
    /// By the lesser and the greater of two ranks.
    cuts: BTreeMap<(PeerId, PeerId), Vec<Span>>,
    /// In the order of their beginnings.
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

    /// What befalls every frame.
    pub(super) const fn weather(&self) -> &Weather {
        &self.weather
    }

    /// Whether what departs between the two at `time` is lost.
    pub(super) fn cuts(&self, time: Nanos, a: PeerId, b: PeerId) -> bool {
        let spans = self.cuts.get(&(a.min(b), a.max(b)));
        spans.is_some_and(|spans| spans.iter().any(|&(from, until)| (from..until).contains(&time)))
    }

    /// When a peer does what is due at `time`.
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

    /// The peer ends: its operations fail, and the others learn of it behind the last bytes that it has sent.
    #[must_use]
    pub fn crash(self, peer: PeerId) -> Faults {
        self.with(Fault::Crash(peer))
    }

    /// What departs between the two from then on is lost, both ways, and neither is told.
    #[must_use]
    pub fn cut(self, a: PeerId, b: PeerId) -> Faults {
        self.cut_until(a, b, Nanos::MAX)
    }

    /// What departs between the two from then until `until` is lost.
    #[must_use]
    pub fn cut_until(self, a: PeerId, b: PeerId, until: Nanos) -> Faults {
        self.with(Fault::Cut(a, b, until))
    }

    /// The `island` is cut off from all others of `size` until `until`.
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

    /// The peer stands still until `until`: it sends, receives and notices nothing, and does it all then.
    #[must_use]
    pub fn freeze(self, peer: PeerId, until: Nanos) -> Faults {
        self.with(Fault::Freeze(peer, until))
    }

    /// The first frame that departs from one to the other from then on arrives spoilt: the receiver's checksum
    /// tells, and it takes the sender for lost.
    #[must_use]
    pub fn corrupt(self, from: PeerId, to: PeerId) -> Faults {
        self.with(Fault::Corrupt(from, to))
    }
}
