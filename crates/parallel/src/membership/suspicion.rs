//! Choice of the members to remove when pairs of members do not hear each other, although the coordinator hears
//! both.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::{MemberId, Settings, View};

/// The reports of one member about members from which it does not hear.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Suspicion {
    /// Members that the reporting member considers lost, with the time of the first report about each.
    since: BTreeMap<MemberId, Nanos>,
    /// Number of the member's last report.
    number: u64,
    /// Time of the member's last report.
    said: Nanos,
}

impl Suspicion {
    /// Records a report. Members that were in the previous report keep their time. A report that a later one
    /// has overtaken has no effect, unless the later one is too old to count.
    pub(super) fn update(
        &mut self,
        number: u64,
        silent: &BTreeSet<MemberId>,
        now: Nanos,
        settings: &Settings,
    ) {
        if number <= self.number && now < self.forgotten(settings) {
            return;
        }
        self.number = number;
        self.since.retain(|id, _| silent.contains(id));
        for id in silent {
            self.since.entry(*id).or_insert(now);
        }
        self.said = now;
    }

    /// Returns the reported members with the times of their first reports. Returns none if the last report is
    /// older than three times `slowest_resend`.
    pub(super) fn silent(
        &self,
        now: Nanos,
        settings: &Settings,
    ) -> impl Iterator<Item = (&MemberId, &Nanos)> {
        let forgotten = self.forgotten(settings);
        self.since.iter().filter(move |_| now < forgotten)
    }

    /// Returns the time from which on the last report does not count any more.
    fn forgotten(&self, settings: &Settings) -> Nanos {
        self.said.saturating_add(Nanos(settings.slowest_resend.0.saturating_mul(3)))
    }
}

/// Returns members to remove so that all remaining pairs hear each other. Greedy: repeatedly removes the member
/// in the most broken pairs; if equal, the one that joined last. Never removes `spared`.
///
/// `broken` contains pairs of members of the view, in any order.
pub(super) fn cover(
    view: &View,
    mut broken: BTreeSet<(MemberId, MemberId)>,
    spared: &MemberId,
) -> BTreeSet<MemberId> {
    let mut removed = BTreeSet::new();
    while !broken.is_empty() {
        let pairs_of = |id: &MemberId| broken.iter().filter(|(a, b)| a == id || b == id).count();
        // `max_by_key` returns the last maximum, and members are sorted by when they joined.
        let worst =
            view.members.iter().map(|member| member.id).filter(|id| id != spared).max_by_key(pairs_of);
        let Some(worst) = worst.filter(|id| pairs_of(id) > 0) else { break };
        broken.retain(|(a, b)| *a != worst && *b != worst);
        removed.insert(worst);
    }
    removed
}
