//! What members offer to a newcomer while they train: a copy of the state after a certain step, and records
//! from which the steps since can be replayed. With local steps, a record is that of a round, and the first
//! member also offers its optimizer. Pure data, without clock or network.

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

/// The record of a step, or of a round of local steps, that a member offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Logged {
    /// Number of steps done before it.
    pub(super) after: u64,
    /// Number of steps done after it.
    pub(super) step: u64,
    /// Name and length of the record.
    pub(super) label: Label,
}

/// How fast records grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Growth {
    /// Bytes of a record.
    pub(super) bytes: u64,
    /// Time of a step or round; `None` before it was measured.
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
    /// Records by the number of steps done before them.
    records: BTreeMap<MemberId, BTreeMap<u64, Logged>>,
    /// Optimizers of members.
    optimizers: BTreeMap<MemberId, Offer>,
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
        records.extend(logged.iter().map(|logged| (logged.after, *logged)));
        while records.len() > REMEMBERED {
            records.pop_first();
        }
    }

    /// Notes a member's optimizer.
    pub(super) fn offer_optimizer(&mut self, from: MemberId, offer: Offer) {
        self.optimizers.insert(from, offer);
    }

    /// Forgets the offers of members that are not connected any more.
    pub(super) fn keep(&mut self, connected: &[MemberId]) {
        self.copies.retain(|id, _| connected.contains(id));
        self.records.retain(|id, _| connected.contains(id));
        self.optimizers.retain(|id, _| connected.contains(id));
    }

    /// Forgets the offers of a member that has dropped what it offered.
    pub(super) fn forget(&mut self, from: &MemberId) {
        self.copies.remove(from);
        self.records.remove(from);
        self.optimizers.remove(from);
    }

    /// Returns whether no member offers anything.
    pub(super) fn is_empty(&self) -> bool {
        self.copies.is_empty() && self.records.is_empty()
    }

    /// Forgets all copies of the state.
    pub(super) fn forget_copies(&mut self) {
        self.copies.clear();
    }

    /// Returns how fast records grow, as last told.
    pub(super) const fn growth(&self) -> Option<Growth> {
        self.growth
    }

    /// Returns the copy of the state that most members offer; of several that equally many offer, the newest.
    pub(super) fn best(&self) -> Option<Offered<Offer>> {
        let mut holders: BTreeMap<Offer, BTreeSet<MemberId>> = BTreeMap::new();
        for (&id, &offer) in &self.copies {
            holders.entry(offer).or_default().insert(id);
        }
        let best = holders.into_iter().max_by_key(|(offer, holders)| (holders.len(), offer.step));
        best.map(|(what, holders)| Offered { what, holders })
    }

    /// Returns the members that offer this copy of the state.
    pub(super) fn holders(&self, offer: Offer) -> BTreeSet<MemberId> {
        self.copies.iter().filter(|(_, copy)| **copy == offer).map(|(&id, _)| id).collect()
    }

    /// Returns the records that follow `step` without a gap. If members offer different records of a step, the
    /// one that most members offer is returned.
    pub(super) fn after(&self, step: u64) -> impl Iterator<Item = Offered<Logged>> {
        let first = self.record_after(step);
        std::iter::successors(first, |record| self.record_after(record.what.step))
    }

    /// Forgets the records of steps up to `step`.
    pub(super) fn forget_records(&mut self, step: u64) {
        for records in self.records.values_mut() {
            *records = records.split_off(&step);
        }
    }

    fn record_after(&self, step: u64) -> Option<Offered<Logged>> {
        let mut holders: BTreeMap<Logged, BTreeSet<MemberId>> = BTreeMap::new();
        for (&id, records) in &self.records {
            if let Some(&logged) = records.get(&step).filter(|logged| logged.step > step) {
                holders.entry(logged).or_default().insert(id);
            }
        }
        let (what, holders) = holders.into_iter().max_by_key(|(_, holders)| holders.len())?;
        Some(Offered { what, holders })
    }

    /// Returns the newest step with a record.
    pub(super) fn newest(&self) -> Option<u64> {
        let newest = |records: &BTreeMap<u64, Logged>| Some(records.last_key_value()?.1.step);
        self.records.values().filter_map(newest).max()
    }

    /// Returns the optimizer that members have after `step` steps; of several, that of the first member by id.
    pub(super) fn optimizer(&self, step: u64) -> Option<Offered<Offer>> {
        let (&id, &what) = self.optimizers.iter().find(|(_, offer)| offer.step == step)?;
        Some(Offered { what, holders: [id].into() })
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
        // The other one can still be fetched from the member that has it.
        let holders = |step, root| offers.holders(Offer { step, label: label(root) });
        assert_eq!((holders(4, 1), holders(4, 2)), ([MemberId::number(1)].into(), [].into()));
        offers.forget_copies();
        assert_eq!(offers.best(), None);
    }

    #[test]
    fn records_follow_without_a_gap() {
        let mut offers = Offers::default();
        let logged = |step, root| Logged { after: step - 1, step, label: label(root) };
        offers.log(MemberId::number(0), &[logged(5, 5), logged(6, 6), logged(8, 8)]);
        offers.log(MemberId::number(1), &[logged(6, 6), logged(7, 9)]);
        offers.log(MemberId::number(2), &[logged(7, 7)]);
        offers.log(MemberId::number(3), &[logged(7, 7)]);
        let after = |step| offers.after(step).map(|record| record.what.step).collect::<Vec<_>>();
        assert_eq!((after(4), after(3)), (vec![5, 6, 7, 8], vec![]));
        assert_eq!(offers.newest(), Some(8));
        let records: Vec<_> = offers.after(4).collect();
        assert_eq!(
            (records[1].holders.len(), records[2].holders.len(), records[2].what.label),
            (2, 2, label(7))
        );
        offers.keep(&[MemberId::number(0)]);
        assert_eq!(offers.after(4).count(), 2);
        offers.forget_records(5);
        assert_eq!((offers.after(4).count(), offers.after(5).count(), offers.newest()), (0, 1, Some(8)));
    }

    #[test]
    fn rounds_follow_each_other_by_the_steps_between_them() {
        let mut offers = Offers::default();
        let logged = |after, step| Logged { after, step, label: label(step as u8) };
        offers.log(MemberId::number(0), &[logged(4, 8), logged(8, 12), logged(16, 20)]);
        // A record that leads nowhere is not followed.
        offers.log(MemberId::number(1), &[logged(12, 12)]);
        let after = |step| offers.after(step).map(|record| record.what.step).collect::<Vec<_>>();
        assert_eq!((after(4), after(5), after(16)), (vec![8, 12], vec![], vec![20]));
        assert_eq!(offers.newest(), Some(20));
        offers.offer_optimizer(MemberId::number(2), Offer { step: 8, label: label(1) });
        offers.offer_optimizer(MemberId::number(2), Offer { step: 12, label: label(2) });
        assert_eq!(offers.optimizer(8), None);
        let found = offers.optimizer(12).unwrap();
        assert_eq!((found.what.label, found.holders), (label(2), [MemberId::number(2)].into()));
        offers.keep(&[MemberId::number(0)]);
        assert_eq!(offers.optimizer(12), None);
    }

    #[test]
    fn a_member_makes_no_one_remember_without_limit() {
        let mut offers = Offers::default();
        for step in 0..2 * REMEMBERED as u64 {
            offers.log(MemberId::number(0), &[Logged { after: step, step: step + 1, label: label(1) }]);
        }
        assert_eq!(offers.records[&MemberId::number(0)].len(), REMEMBERED);
    }
}
