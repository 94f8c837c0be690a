//! Which members to remove where pairs of members do not hear each other, although the coordinator hears both.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::{MemberId, Settings, View};

/// What a member has said about others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Suspicion {
    /// Whom it has given up, and since when it says so.
    since: BTreeMap<MemberId, Nanos>,
    /// When it last said so.
    said: Nanos,
}

impl Suspicion {
    /// Takes up what the member says now. Whom it has named before keeps its time.
    pub(super) fn update(&mut self, silent: &BTreeSet<MemberId>, now: Nanos) {
        self.since.retain(|id, _| silent.contains(id));
        for id in silent {
            self.since.entry(*id).or_insert(now);
        }
        self.said = now;
    }

    /// Whom it has given up since when; nobody where it has not repeated that for three of its slowest waits.
    pub(super) fn silent(
        &self,
        now: Nanos,
        settings: &Settings,
    ) -> impl Iterator<Item = (&MemberId, &Nanos)> {
        let forgotten = self.said.saturating_add(Nanos(settings.slowest_resend.0.saturating_mul(3)));
        self.since.iter().filter(move |_| now < forgotten)
    }
}

/// Members to remove so that of those left every pair hears each other: again and again the one in most
/// broken pairs, ties to the one that joined last, never `spared`.
///
/// `broken` are pairs of members of the view, in any order.
pub(super) fn cover(
    view: &View,
    mut broken: BTreeSet<(MemberId, MemberId)>,
    spared: &MemberId,
) -> BTreeSet<MemberId> {
    let mut removed = BTreeSet::new();
    while !broken.is_empty() {
        let pairs_of = |id: &MemberId| broken.iter().filter(|(a, b)| a == id || b == id).count();
        // The last of equals: members are sorted by when they joined.
        let worst =
            view.members.iter().map(|member| member.id).filter(|id| id != spared).max_by_key(pairs_of);
        let Some(worst) = worst.filter(|id| pairs_of(id) > 0) else { break };
        broken.retain(|(a, b)| *a != worst && *b != worst);
        removed.insert(worst);
    }
    removed
}
