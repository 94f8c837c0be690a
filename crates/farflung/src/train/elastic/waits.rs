//! Which member waits for which, for the status of the run: by the times of the last steps, and while a step is
//! stopped by silent members, for those.

use std::collections::BTreeMap;
use std::sync::Arc;

use farflung_base::Nanos;
use farflung_parallel::membership::MemberId;
use farflung_parallel::plan::Measured;

use super::arrivals::Arrivals;
use super::status::{MemberStatus, Status};

/// A member waits for the slowest one if that computes for this many times as long in a step.
const LONGER: f64 = 1.1;

/// Time of a microbatch on each member, by its endpoint, as far as they have told it.
#[derive(Debug, Clone, Default)]
pub(super) struct Waits(BTreeMap<u32, Nanos>);

impl Waits {
    /// Notes the times of the ranks with these endpoints.
    pub(super) fn note(&mut self, slots: &[u32], told: &[Measured]) {
        let known = slots.iter().zip(told).filter(|(_, told)| told.microbatch > Nanos::ZERO);
        self.0 = known.map(|(&slot, told)| (slot, told.microbatch)).collect();
    }

    /// Forgets all, since the members have changed.
    pub(super) fn begin_anew(&mut self) {
        self.0.clear();
    }

    /// Returns the member for which each one waits. `shares` has the microbatches of each member in a step, or
    /// numbers in proportion to them, by its endpoint.
    pub(super) fn of(&self, shares: &[(u32, f64)]) -> BTreeMap<u32, u32> {
        let time = |&(slot, share): &(u32, f64)| Some((slot, share * self.0.get(&slot)?.as_secs_f64()));
        let times: Vec<(u32, f64)> = shares.iter().filter_map(time).collect();
        let Some(&(slowest, longest)) = times.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else {
            return BTreeMap::new();
        };
        let waits = times.iter().filter(|(_, time)| time * LONGER < longest);
        waits.map(|&(slot, _)| (slot, slowest)).collect()
    }
}

/// Publishes who waits for members that do not answer, while the rank itself is in the step that they stop.
#[derive(Debug, Clone)]
pub(super) struct StoppedStep {
    /// Where the status is published.
    pub(super) arrivals: Arc<dyn Arrivals>,
    /// The status before the step; `None` if none was published yet.
    pub(super) before: Option<Arc<Status>>,
    /// Ids of the members, each with its endpoint.
    pub(super) members: Vec<(MemberId, u32)>,
}

impl StoppedStep {
    /// Publishes that the members with a part wait for the first of these, which do not answer. If all answer,
    /// publishes the status before the step again.
    pub(super) fn publish(&self, silent: &[MemberId]) {
        let Some(before) = &self.before else { return };
        let mut status = Status::clone(before);
        // The members may have changed since it was published.
        status.members.retain(|member| self.members.iter().any(|(_, slot)| *slot == member.slot));
        let is_silent = |slot| self.members.iter().any(|(id, of)| *of == slot && silent.contains(id));
        let has_part = |member: &MemberStatus| member.replica.is_some() || member.stage.is_some();
        let first = status.members.iter().find(|member| has_part(member) && is_silent(member.slot));
        match first.map(|member| member.slot) {
            Some(first) => {
                for member in &mut status.members {
                    let waits = has_part(member) && !is_silent(member.slot);
                    member.waits_for = waits.then_some(first);
                }
            }
            None if silent.is_empty() => {}
            None => return,
        }
        self.arrivals.publish_status(status);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::arrivals::Newcomer;
    use super::*;

    #[test]
    fn members_wait_for_the_one_that_computes_longest() {
        let of = |ms| Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::ZERO };
        let mut waits = Waits::default();
        waits.note(&[4, 5, 6, 7], &[of(10), of(30), of(29), of(0)]);
        assert_eq!(waits.of(&[(4, 1.0), (5, 1.0), (6, 1.0), (7, 1.0)]), BTreeMap::from([(4, 5)]));
        // By their shares, all take about as long.
        assert!(waits.of(&[(4, 6.0), (5, 2.0), (6, 2.0), (7, 2.0)]).is_empty());
        waits.begin_anew();
        assert!(waits.of(&[(4, 1.0), (5, 1.0)]).is_empty());
    }

    #[derive(Debug, Default)]
    struct Published(Mutex<Vec<Status>>);

    impl Arrivals for Published {
        fn connected(&self, _: Nanos) -> Vec<Newcomer> {
            Vec::new()
        }
        fn publish_status(&self, status: Status) {
            self.0.lock().unwrap().push(status);
        }
    }

    #[test]
    fn all_wait_for_a_member_that_does_not_answer() {
        let member = |slot| MemberStatus {
            slot,
            name: None,
            address: None,
            joined: 1,
            share: 0.25,
            replica: (slot != 7).then_some(slot),
            stage: None,
            answers: slot == 4,
            waits_for: Some(9),
            counters: None,
        };
        let before = Status { members: [4, 5, 6, 7].map(member).to_vec(), step: 8, ..Status::default() };
        let published = Arc::new(Published::default());
        let ids = [4, 5, 6, 7].map(|slot| (MemberId::number(slot), slot)).to_vec();
        let arrivals = Arc::clone(&published) as Arc<dyn Arrivals>;
        let stopped = StoppedStep { arrivals, before: Some(Arc::new(before)), members: ids };
        stopped.publish(&[MemberId::number(6), MemberId::number(5)]);
        // Nobody of them is a member.
        stopped.publish(&[MemberId::number(8)]);
        stopped.publish(&[]);
        let told = published.0.lock().unwrap();
        let waits =
            |status: &Status| status.members.iter().map(|member| member.waits_for).collect::<Vec<_>>();
        // The last member is a spare.
        assert_eq!((told[0].step, waits(&told[0])), (8, vec![Some(5), None, None, None]));
        // All answer again.
        assert_eq!((told.len(), waits(&told[1])), (2, vec![Some(9); 4]));
    }
}
