//! Measured round trips to other members, from pings and their answers. A member counts as silent only after
//! two round trips: a slow link is not a dead one.

use std::collections::{BTreeMap, VecDeque};

use farflung_base::Nanos;
use farflung_parallel::membership::MemberId;

/// Weight of a new round trip in the moving average: one part in this many, as TCP has it (RFC 6298).
const NEW: u64 = 8;
/// Number of pings whose answers count. While a member is missed, others are asked again every 0.8 s.
const REMEMBERED: usize = 16;

/// Round trips to other members.
#[derive(Debug, Clone, Default)]
pub(super) struct RoundTrips {
    /// Times of the newest pings. Nobody can answer one that was never sent.
    asked: VecDeque<Nanos>,
    averages: BTreeMap<MemberId, Nanos>,
}

impl RoundTrips {
    /// Notes that pings are sent at this time.
    pub(super) fn ask(&mut self, now: Nanos) {
        if self.asked.len() == REMEMBERED {
            self.asked.pop_front();
        }
        self.asked.push_back(now);
    }

    /// Notes the answer of a member to the ping of the time `asked`.
    pub(super) fn answered(&mut self, id: MemberId, asked: Nanos, now: Nanos) {
        if !self.asked.contains(&asked) {
            return;
        }
        let took = now.saturating_sub(asked);
        let average = self.averages.entry(id).or_insert(took);
        *average = Nanos(average.0 - average.0 / NEW + took.0 / NEW);
    }

    /// Forgets the members that are not connected any more.
    pub(super) fn keep(&mut self, connected: &[MemberId]) {
        self.averages.retain(|id, _| connected.contains(id));
    }

    /// Returns the longest round trip to any of these members; zero if none is known.
    pub(super) fn longest<'a>(&self, of: impl IntoIterator<Item = &'a MemberId>) -> Nanos {
        of.into_iter().filter_map(|id| self.averages.get(id)).copied().max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Nanos = Nanos::from_millis;

    #[test]
    fn the_longest_average_of_answers_to_pings_counts() {
        let (near, far, other) = (MemberId::number(1), MemberId::number(2), MemberId::number(3));
        let mut trips = RoundTrips::default();
        // Nobody was asked.
        trips.answered(far, MS(0), MS(9_000));
        assert_eq!(trips.longest([&near, &far]), Nanos::ZERO);
        trips.ask(MS(1_000));
        trips.answered(near, MS(1_000), MS(1_010));
        trips.answered(far, MS(1_000), MS(1_600));
        assert_eq!(trips.longest([&near, &far]), MS(600));
        assert_eq!(trips.longest([&near, &other]), MS(10));
        // Others are asked, too. An answer to a ping of another time is a lie.
        trips.ask(MS(2_000));
        trips.ask(MS(2_001));
        trips.answered(near, MS(1), MS(2_001));
        assert_eq!(trips.longest([&near]), MS(10));
        // One long round trip changes little.
        trips.answered(near, MS(2_000), MS(2_090));
        assert_eq!(trips.longest([&near]), MS(20));
        (0..REMEMBERED as u64).for_each(|n| trips.ask(MS(3_000 + n)));
        trips.answered(near, MS(2_000), MS(9_000));
        assert_eq!((trips.longest([&near]), trips.asked.len()), (MS(20), REMEMBERED));
        trips.keep(&[near]);
        assert_eq!(trips.longest([&near, &far]), MS(20));
    }
}
