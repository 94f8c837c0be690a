//! What members offer to a newcomer while they train: a copy of the state after a certain step, and records
//! from which the steps since can be replayed. Pure data, without clock or network.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;
use farflung_parallel::membership::MemberId;
use serde::{Deserialize, Serialize};

use super::blobs::Label;

/// Number of the newest records that a member lists after each step, so that a lost message leaves no gap.
pub(super) const LISTED: usize = 16;
/// Maximum number of records of a member that are remembered.
const REMEMBERED: usize = 4096;

/// A copy of the state that a member offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Offer {
    /// Number of steps done when it was copied.
    pub(super) step: u64,
    /// Name and length of the copy.
    pub(super) label: Label,
}

/// The record of a step that a member offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Logged {
    /// Number of the step.
    pub(super) step: u64,
    /// Name and length of the record.
    pub(super) label: Label,
}

/// How fast records grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Growth {
    /// Bytes of a record.
    pub(super) bytes: u64,
    /// Time of a step; `None` before it was measured.
    pub(super) every: Option<Nanos>,
}

/// A blob with the members that offer it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Offered<T> {
    pub(super) what: T,
    pub(super) holders: BTreeSet<MemberId>,
}

/// The offers of all members.
#[derive(Debug, Clone, Default)]
pub(super) struct Offers {
    copies: BTreeMap<MemberId, Offer>,
    growth: Option<Growth>,
    records: BTreeMap<MemberId, BTreeMap<u64, Label>>,
}

impl Offers {
    /// Notes a member's copy of the state.
    pub(super) fn offer(&mut self, from: MemberId, offer: Offer, growth: Growth) {
        self.copies.insert(from, offer);
        self.growth = Some(growth);
    }

    /// Notes a member's records.
    pub(super) fn log(&mut self, from: MemberId, logged: &[Logged]) {
        let records = self.records.entry(from).or_default();
        records.extend(logged.iter().map(|logged| (logged.step, logged.label)));
        while records.len() > REMEMBERED {
            records.pop_first();
        }
    }

    /// Forgets the offers of members that are not connected any more.
    pub(super) fn keep(&mut self, connected: &[MemberId]) {
        self.copies.retain(|id, _| connected.contains(id));
        self.records.retain(|id, _| connected.contains(id));
    }

    /// Forgets all copies of the state.
    pub(super) fn forget_copies(&mut self) {
        self.copies.clear();
    }

    /// Returns how fast records grow, as last told.
    pub(super) const fn growth(&self) -> Option<Growth> {
        self.growth
    }

    /// Returns the copy of the state that most members offer; of several, the newest.
    pub(super) fn best(&self) -> Option<Offered<Offer>> {
        let mut holders: BTreeMap<Offer, BTreeSet<MemberId>> = BTreeMap::new();
        for (&id, &offer) in &self.copies {
            holders.entry(offer).or_default().insert(id);
        }
        let best = holders.into_iter().max_by_key(|(offer, holders)| (holders.len(), offer.step));
        best.map(|(what, holders)| Offered { what, holders })
    }

    /// Returns the records of the steps that follow `step` without a gap. Of differing records of a step, the
    /// one that most members offer.
    pub(super) fn after(&self, step: u64) -> Vec<Offered<Logged>> {
        (step + 1..).map_while(|step| self.record(step)).collect()
    }

    fn record(&self, step: u64) -> Option<Offered<Logged>> {
        let mut holders: BTreeMap<Label, BTreeSet<MemberId>> = BTreeMap::new();
        for (&id, records) in &self.records {
            if let Some(&label) = records.get(&step) {
                holders.entry(label).or_default().insert(id);
            }
        }
        let (label, holders) = holders.into_iter().max_by_key(|(_, holders)| holders.len())?;
        Some(Offered { what: Logged { step, label }, holders })
    }

    /// Returns the newest step with a record.
    pub(super) fn newest(&self) -> Option<u64> {
        self.records.values().filter_map(|records| records.last_key_value()).map(|(&step, _)| step).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(n: u8) -> Label {
        Label { root: [n; 32], len: u64::from(n) }
    }

    const GROWTH: Growth = Growth { bytes: 10, every: None };

    #[test]
    fn the_copy_of_most_members_is_taken() {
        let mut offers = Offers::default();
        assert_eq!(offers.best(), None);
        for (member, step, root) in [(0, 4, 1), (1, 4, 1), (2, 5, 2)] {
            offers.offer(MemberId::number(member), Offer { step, label: label(root) }, GROWTH);
        }
        let best = offers.best().unwrap();
        assert_eq!((best.what.step, best.holders.len()), (4, 2));
        // After the loss of one of them, the newest one of equally many is taken.
        offers.keep(&[MemberId::number(1), MemberId::number(2)]);
        assert_eq!(offers.best().unwrap().what.step, 5);
        offers.forget_copies();
        assert_eq!(offers.best(), None);
    }

    #[test]
    fn records_follow_without_a_gap() {
        let mut offers = Offers::default();
        let logged = |step, root| Logged { step, label: label(root) };
        offers.log(MemberId::number(0), &[logged(5, 5), logged(6, 6), logged(8, 8)]);
        offers.log(MemberId::number(1), &[logged(6, 6), logged(7, 9)]);
        offers.log(MemberId::number(2), &[logged(7, 7)]);
        offers.log(MemberId::number(3), &[logged(7, 7)]);
        let after = |step| offers.after(step).iter().map(|record| record.what.step).collect::<Vec<_>>();
        assert_eq!((after(4), after(3)), (vec![5, 6, 7, 8], vec![]));
        assert_eq!(offers.newest(), Some(8));
        let records = offers.after(4);
        assert_eq!(
            (records[1].holders.len(), records[2].holders.len(), records[2].what.label),
            (2, 2, label(7))
        );
        offers.keep(&[MemberId::number(0)]);
        assert_eq!(offers.after(4).len(), 2);
    }

    #[test]
    fn a_member_makes_no_one_remember_without_limit() {
        let mut offers = Offers::default();
        for step in 0..2 * REMEMBERED as u64 {
            offers.log(MemberId::number(0), &[Logged { step, label: label(1) }]);
        }
        assert_eq!(offers.records[&MemberId::number(0)].len(), REMEMBERED);
    }
}
