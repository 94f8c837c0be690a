//! The scenarios of torchft's quorum, decided by the rules of this crate.
//!
//! torchft's lighthouse is one process: it forms a quorum of the replicas that ask for one, if they are more
//! than half of those whose heartbeats it gets at that time. Here a view is decided by a majority of the view
//! before. Comments on rows say where the decisions differ.
//!
//! Source: torchft (2026-04), `src/lighthouse.rs`, `quorum_compute` and its tests. Not in the table: a failed
//! commit, after which torchft raises the quorum's number for the same members (tests in `repeating`).

use super::*;

/// A change of the members `0..before`, of which 0 is the tie-breaker.
struct Row {
    name: &'static str,
    before: u32,
    /// Members that have crashed. All others are heard.
    silent: &'static [u32],
    /// Members that ask to leave.
    leaving: &'static [u32],
    /// Newcomers that are ready.
    new: &'static [u32],
    /// Members of each view that is decided, in order.
    views: &'static [&'static [u32]],
}

/// A row without crashes, leaves and newcomers.
const SAME: Row = Row { name: "", before: 0, silent: &[], leaving: &[], new: &[], views: &[] };

const TABLE: &[Row] = &[
    Row {
        // torchft: the same, at once, before all other checks. Here the view stays, so nothing is decided.
        name: "all members of the last quorum are there",
        before: 3,
        ..SAME
    },
    Row {
        // torchft: no quorum while the other one still sends heartbeats: one is not more than half of two.
        name: "one of two, with the tie-breaker",
        before: 2,
        silent: &[1],
        views: &[&[0]],
        ..SAME
    },
    Row {
        // torchft: once the heartbeats of the other one are too old, one of one is a quorum.
        name: "one of two, without the tie-breaker",
        before: 2,
        silent: &[0],
        ..SAME
    },
    Row {
        // torchft: a quorum of the two members that are there, since they are all that send heartbeats.
        name: "two of five: the last quorum and the next have too little overlap",
        before: 5,
        silent: &[2, 3, 4],
        ..SAME
    },
    Row {
        name: "three of five, without the tie-breaker",
        before: 5,
        silent: &[0, 1],
        views: &[&[2, 3, 4]],
        ..SAME
    },
    Row {
        // torchft: each half is a quorum if it reaches a lighthouse that does not get the other's heartbeats.
        name: "the half with the tie-breaker",
        before: 4,
        silent: &[2, 3],
        views: &[&[0, 1]],
        ..SAME
    },
    Row { name: "the half without the tie-breaker", before: 4, silent: &[0, 1], ..SAME },
    Row {
        // torchft: two have asked and one only sends heartbeats: no quorum until `join_timeout` has passed.
        // Here the rules do not know of a newcomer before it is ready, so no member waits for it.
        name: "a newcomer that is not ready",
        before: 2,
        ..SAME
    },
    Row {
        // torchft: the same, if the newcomer asks before `join_timeout` has passed.
        name: "a newcomer that is ready",
        before: 2,
        new: &[5],
        views: &[&[0, 1, 5]],
        ..SAME
    },
    Row {
        // torchft: the same with `shrink_only`. Without it, one quorum both removes and admits.
        name: "one is lost and another comes: the removal first",
        before: 2,
        silent: &[1],
        new: &[5],
        views: &[&[0], &[0, 5]],
        ..SAME
    },
    Row {
        // torchft: a quorum of the member and the three newcomers, because they are all that send heartbeats.
        name: "newcomers do not count for a majority",
        before: 3,
        silent: &[1, 2],
        new: &[5, 6, 7],
        ..SAME
    },
    Row {
        // torchft: admits all at once. Here the old members alone must be a majority of the new view.
        name: "more newcomers than members",
        before: 1,
        new: &[5, 6, 7],
        views: &[&[0, 5], &[0, 5, 6, 7]],
        ..SAME
    },
    Row {
        // torchft: has no message for this. A replica that leaves is lost once its heartbeats are too old.
        name: "a member leaves",
        before: 3,
        leaving: &[2],
        views: &[&[0, 1]],
        ..SAME
    },
    Row {
        name: "a member leaves and another is lost: one view for both, and both that are left vote",
        before: 3,
        silent: &[1],
        leaving: &[2],
        views: &[&[0]],
        ..SAME
    },
    Row {
        name: "a member leaves and a newcomer comes: the removal first",
        before: 3,
        leaving: &[2],
        new: &[5],
        views: &[&[0, 1], &[0, 1, 5]],
        ..SAME
    },
    Row {
        name: "a member that leaves cannot replace lost ones",
        before: 5,
        silent: &[2, 3, 4],
        leaving: &[1],
        ..SAME
    },
];

/// Returns the members of the views that are decided during three commits.
fn decided(row: &Row) -> Vec<BTreeSet<MemberId>> {
    let mut net = Net::of(row.before);
    row.silent.iter().for_each(|&number| net.kill(number));
    for &number in row.new {
        net.add(State::newcomer(member(number), Settings::default()));
    }
    let living: Vec<u32> = (0..row.before).filter(|number| !row.silent.contains(number)).collect();
    net.give_up(&living, row.silent);
    row.leaving.iter().for_each(|&number| net.event(number, Event::Leave(id(number))));
    net.settle();
    for _ in 0..3 {
        for &number in &living {
            row.new.iter().for_each(|&new| net.event(number, Event::Ready(member(new))));
            net.event(number, Event::Admit);
        }
        net.settle();
    }
    let views: BTreeMap<ViewId, View> =
        net.installed.iter().map(|(_, view)| (view.id(), view.clone())).collect();
    views.values().map(View::ids).collect()
}

#[test]
fn the_scenarios_of_torchft() {
    for row in TABLE {
        let expected: Vec<BTreeSet<MemberId>> = row.views.iter().map(|numbers| ids(numbers)).collect();
        assert_eq!(decided(row), expected, "{}", row.name);
    }
}
