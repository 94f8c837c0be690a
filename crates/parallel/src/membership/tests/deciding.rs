//! Tests of how views are decided, message by message.

use super::*;
use crate::membership::{Ballot, ViewFault};

fn ready(number: u32) -> Event {
    Event::Ready(member(number))
}

/// Starts a newcomer's process.
fn newcomer(net: &mut Net, number: u32) {
    net.add(State::newcomer(member(number), Settings::default()));
}

#[test]
fn after_silence_the_earliest_that_is_left_coordinates() {
    let mut net = Net::of(5);
    net.kill(0);
    net.kill(1);
    net.give_up(&[3, 4], &[0, 1]);
    net.settle();
    assert!(net.installed.is_empty(), "the coordinator has given nobody up");
    net.give_up(&[2], &[0, 1]);
    net.settle();
    for survivor in [2, 3, 4] {
        assert_eq!((net.members(survivor), net.view(survivor).epoch), (vec![2, 3, 4], 2));
        assert_eq!(net.view(survivor).parent, first(5).digest());
    }
    assert!(net.states[&id(2)].is_coordinator());
    assert!(!net.states[&id(3)].is_coordinator());
}

#[test]
fn of_two_halves_the_one_with_the_tie_breaker_goes_on() {
    let mut net = Net::of(4);
    for (a, b) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
        net.cut.extend([(id(a), id(b)), (id(b), id(a))]);
    }
    net.give_up(&[0, 1], &[2, 3]);
    net.give_up(&[2, 3], &[0, 1]);
    net.pass(seconds(29));
    assert!(net.stops.is_empty());
    assert_eq!((net.members(0), net.members(1)), (vec![0, 1], vec![0, 1]));
    net.pass(seconds(2));
    let reason = Reason::NoMajority { heard: 2, members: 4, tie_breaker: false };
    assert_eq!(net.stops, BTreeMap::from([(id(2), reason.clone()), (id(3), reason.clone())]));
    assert_eq!(
        reason.to_string(),
        "no majority: this member hears 2 of 4 members, itself included, without the tie-breaker"
    );
}

#[test]
fn a_member_that_is_heard_again_in_time_does_not_stop() {
    let mut net = Net::of(2);
    net.kill(0);
    net.event(1, Event::Silent(id(0)));
    net.pass(seconds(20));
    net.add(State::restored(id(0), net.disks[&id(0)].clone(), Settings::default()).unwrap());
    net.event(1, Event::Heard(id(0)));
    net.pass(seconds(60));
    assert!(net.stops.is_empty() && net.installed.is_empty());
}

#[test]
fn a_late_question_is_asked_for_those_that_are_left() {
    let mut net = Net::of(7);
    net.kill(6);
    net.give_up(&[0], &[6]);
    // The requests for promises are sent but not received when member 5 is lost as well.
    net.kill(5);
    net.give_up(&[0], &[5]);
    net.settle();
    assert_eq!((net.members(0), net.view(0).epoch), (vec![0, 1, 2, 3, 4], 2));
}

#[test]
fn a_late_proposal_is_made_again_without_those_who_fell_silent() {
    let mut net = Net::of(7);
    net.kill(6);
    net.event(0, Event::Silent(id(6)));
    // The promises arrive; the requests for votes are lost.
    while let Some((from, to, message)) = net.queue.pop_front() {
        if !matches!(message, Message::Accept { .. }) {
            net.step(to, Event::Message { from, message });
        }
    }
    assert!(net.states[&id(0)].is_deciding());
    net.kill(5);
    net.event(0, Event::Silent(id(5)));
    net.settle();
    // Member 0 has voted for a view that contains 5. Only 5 and 6 may have voted for it, too. With 0 as
    // tie-breaker these are 3.5 of 7.5 votes, not a majority, so another view may be proposed.
    assert_eq!((net.members(0), net.view(0).epoch), (vec![0, 1, 2, 3, 4], 2));
    assert!(net.installed.iter().all(|(_, view)| !view.has(&id(5))));
}

#[test]
fn a_proposal_that_may_have_been_decided_is_made_again_as_it_was() {
    let mut net = Net::of(5);
    net.kill(4);
    net.event(0, Event::Silent(id(4)));
    // Member 1 votes, but its vote is lost; then member 0 crashes. Members 0 and 1 have 2.5 of 5.5 votes, not a
    // majority. If member 4 voted as well, the view was decided, so it must be proposed again.
    while let Some((from, to, message)) = net.queue.pop_front() {
        let is_lost = match message {
            Message::Accept { .. } => to != id(1),
            Message::Accepted { .. } => true,
            _ => false,
        };
        if !is_lost {
            net.step(to, Event::Message { from, message });
        }
    }
    net.kill(0);
    net.give_up(&[1, 2, 3], &[0, 4]);
    net.settle();
    let views: Vec<&View> =
        net.installed.iter().filter(|(who, _)| *who == id(1)).map(|(_, view)| view).collect();
    assert_eq!((views[0].epoch, views[0].ids()), (2, ids(&[0, 1, 2, 3])));
    assert_eq!((views[1].epoch, views[1].ids()), (3, ids(&[1, 2, 3])));
    assert_eq!((net.members(2), net.members(3)), (vec![1, 2, 3], vec![1, 2, 3]));
}

#[test]
fn votes_survive_a_restart() {
    let mut net = Net::of(3);
    net.kill(2);
    net.event(0, Event::Silent(id(2)));
    // Members 0 and 1 vote. Member 0 crashes before the vote of 1 arrives.
    while let Some((from, to, message)) = net.queue.pop_front() {
        if to != id(0) || !matches!(message, Message::Accepted { .. }) {
            net.step(to, Event::Message { from, message });
        }
    }
    let voted = net.disks[&id(1)].accepted.clone().unwrap();
    assert_eq!((voted.view.ids(), voted.ballot), (ids(&[0, 1]), Ballot { number: 1, proposer: id(0) }));
    net.kill(0);
    net.kill(1);
    // Members 1 and 2 restart. Member 2 does not know the view that removes it.
    for number in [1, 2] {
        let kept = net.disks[&id(number)].clone();
        net.add(State::restored(id(number), kept, Settings::default()).unwrap());
    }
    net.give_up(&[1, 2], &[0]);
    net.settle();
    // The view that 0 and 1 may have decided is proposed again and decided: it removes 2. Member 1 has no
    // majority without the tie-breaker, so it waits for 0.
    assert_eq!(net.installed, [(id(1), voted.view.clone())]);
    assert_eq!(net.stops[&id(2)], Reason::Removed { by: voted.view.id() });
    net.add(State::restored(id(0), net.disks[&id(0)].clone(), Settings::default()).unwrap());
    net.event(1, Event::Heard(id(0)));
    net.pass(seconds(10));
    assert_eq!(net.installed[1..], [(id(0), voted.view)]);
    assert_eq!(net.stops.len(), 1);
}

#[test]
fn removals_do_not_wait_for_admissions() {
    let mut net = Net::of(5);
    newcomer(&mut net, 9);
    net.event(0, ready(9));
    net.settle();
    assert!(net.installed.is_empty(), "newcomers wait for a commit");
    net.kill(4);
    net.event(0, Event::Silent(id(4)));
    net.event(0, Event::Admit);
    net.settle();
    assert_eq!((net.members(0), net.view(0).epoch), (vec![0, 1, 2, 3], 2));
    net.event(0, Event::Admit);
    net.settle();
    assert_eq!((net.members(9), net.view(0).epoch), (vec![0, 1, 2, 3, 9], 3));
}

#[test]
fn any_member_passes_newcomers_on() {
    let mut net = Net::of(3);
    newcomer(&mut net, 9);
    net.event(2, ready(9));
    net.event(2, Event::Admit);
    net.settle();
    net.event(0, Event::Admit);
    net.settle();
    for number in [0, 1, 2, 9] {
        assert_eq!(net.members(number), [0, 1, 2, 9]);
    }
    assert_eq!(net.view(9).member(&id(9)).unwrap().joined, 2);
}

#[test]
fn a_newcomer_that_dies_once_admitted_is_removed_by_the_next_view() {
    let mut net = Net::of(2);
    newcomer(&mut net, 8);
    newcomer(&mut net, 9);
    for number in [8, 9] {
        net.event(0, ready(number));
    }
    net.event(0, Event::Admit);
    net.kill(8);
    net.kill(9);
    net.settle();
    assert_eq!(net.members(1), [0, 1, 8, 9]);
    net.give_up(&[0, 1], &[8, 9]);
    net.settle();
    for number in [0, 1] {
        assert_eq!((net.members(number), net.view(number).epoch), (vec![0, 1], 3));
    }
}

#[test]
fn a_newcomer_that_dies_before_is_not_admitted() {
    let mut net = Net::of(2);
    net.event(0, ready(9));
    net.event(0, Event::Silent(id(9)));
    net.event(0, Event::Admit);
    net.settle();
    assert!(net.installed.is_empty());
}

#[test]
fn a_newcomer_whose_decider_died_asks_for_its_view() {
    let mut net = Net::of(2);
    newcomer(&mut net, 9);
    net.event(0, ready(9));
    // Member 0 sends the view to 1 and crashes before it sends it to the newcomer. Member 1 alone is no
    // majority, so it cannot remove 0.
    net.cut.insert((id(0), id(9)));
    net.event(0, Event::Admit);
    net.settle();
    net.kill(0);
    assert_eq!((net.members(1), net.states[&id(9)].view()), (vec![0, 1, 9], None));
    net.event(1, Event::Silent(id(0)));
    net.pass(seconds(5));
    assert_eq!((net.members(1), net.members(9)), (vec![1, 9], vec![1, 9]));
}

#[test]
fn a_machine_that_joins_again_takes_its_old_place() {
    let mut net = Net::of(3);
    net.kill(2);
    // The machine restarts without its votes before its crash is noticed.
    let again = Member::new(id(2), 12);
    net.add(State::newcomer(again, Settings::default()));
    net.event(1, Event::Ready(again));
    for _ in 0..2 {
        net.event(1, Event::Admit);
        net.settle();
        net.event(0, Event::Admit);
        net.settle();
    }
    let view = net.view(0);
    assert_eq!((view.epoch, view.member(&id(2)).map(|m| (m.slot, m.joined))), (3, Some((12, 3))));
    assert_eq!(net.view(2), view);
}

#[test]
fn a_member_that_wakes_is_told_the_view_and_stops() {
    let mut net = Net::of(3);
    // Member 2 is cut off and does not receive the view that removes it.
    net.cut.extend([(id(0), id(2)), (id(1), id(2))]);
    net.give_up(&[0, 1], &[2]);
    net.pass(seconds(60));
    assert_eq!((net.members(0), net.stops.len()), (vec![0, 1], 0));
    net.cut.clear();
    let at = net.view(2).id();
    net.step(id(1), Event::Message { from: id(2), message: Message::Here { at } });
    assert!(matches!(net.queue[0], (_, _, Message::Stale { .. })));
    net.settle();
    let by = net.view(0).id();
    assert_eq!(net.stops, BTreeMap::from([(id(2), Reason::Removed { by })]));
    assert_eq!(net.stops[&id(2)].to_string(), "removed from the run by the view of epoch 2 of incarnation 1");
    // The stopped member ignores all events. Its machine joins as a newcomer.
    net.event(2, Event::Silent(id(0)));
    assert!(net.queue.is_empty());
    let again = Member::new(id(2), 7);
    net.add(State::newcomer(again, Settings::default()));
    net.event(0, Event::Ready(again));
    net.event(0, Event::Admit);
    net.settle();
    assert_eq!((net.members(2), net.view(2).epoch), (vec![0, 1, 2], 3));
}

#[test]
fn whoever_asks_to_leave_leaves_at_the_next_commit() {
    for leaver in [0, 1, 3] {
        let mut net = Net::of(4);
        net.event(leaver, Event::Leave(id(leaver)));
        net.settle();
        assert!(net.installed.is_empty());
        for number in 0..4 {
            net.event(number, Event::Admit);
        }
        net.pass(seconds(1));
        assert_eq!(net.stops, BTreeMap::from([(id(leaver), Reason::Left)]));
        let left: Vec<u32> = (0..4).filter(|&n| n != leaver).collect();
        for &number in &left {
            assert_eq!((net.members(number), net.view(number).epoch), (left.clone(), 2));
        }
    }
}

/// Lets member 0 of three leave. It decides that itself, and the first messages about it are lost.
fn member_0_leaves_unheard() -> Net {
    let mut net = Net::of(3);
    net.event(0, Event::Leave(id(0)));
    net.event(0, Event::Admit);
    while let Some((from, to, message)) = net.queue.pop_front() {
        if !matches!(message, Message::Decided { .. } | Message::Stale { .. }) {
            net.step(to, Event::Message { from, message });
        }
    }
    net
}

#[test]
fn a_member_that_leaves_stays_until_one_that_remains_knows() {
    let mut net = member_0_leaves_unheard();
    assert!(net.stops.is_empty() && net.installed.is_empty());
    net.pass(seconds(1));
    assert_eq!(net.stops, BTreeMap::from([(id(0), Reason::Left)]));
    assert_eq!((net.members(1), net.members(2)), (vec![1, 2], vec![1, 2]));
}

#[test]
fn a_member_that_leaves_does_not_wait_for_ever() {
    let mut net = member_0_leaves_unheard();
    net.kill(1);
    net.kill(2);
    net.pass(seconds(7));
    assert!(net.stops.is_empty());
    net.pass(seconds(2));
    assert_eq!(net.stops, BTreeMap::from([(id(0), Reason::Left)]));
}

#[test]
fn a_removed_member_passes_the_view_on_if_only_those_outside_of_it_know_it() {
    // Member 0 decides that 0 and 2 leave, tells 2, and crashes.
    let mut net = Net::of(3);
    net.event(0, Event::Leave(id(0)));
    net.event(2, Event::Leave(id(2)));
    net.settle();
    net.event(0, Event::Admit);
    while let Some((from, to, message)) = net.queue.pop_front() {
        if to == id(2) || !matches!(message, Message::Decided { .. }) {
            net.step(to, Event::Message { from, message });
        }
        if net.states[&id(2)].departure.is_some() {
            break;
        }
    }
    net.queue.clear();
    net.kill(0);
    net.pass(seconds(1));
    assert_eq!(net.members(1), [1]);
    assert_eq!(net.stops, BTreeMap::from([(id(2), Reason::Left)]));
}

#[test]
fn the_last_member_leaves_alone() {
    let mut net = Net::of(1);
    net.event(0, Event::Leave(id(0)));
    assert_eq!(net.stops, BTreeMap::from([(id(0), Reason::Left)]));
}

#[test]
fn of_members_that_do_not_hear_each_other_one_is_removed_after_the_grace() {
    // Member 0 hears all members. The pairs (1, 2) and (2, 3) do not hear each other. Without 2, all pairs do.
    let mut net = Net::of(5);
    for (a, b) in [(1, 2), (2, 3)] {
        net.cut.extend([(id(a), id(b)), (id(b), id(a))]);
        net.give_up(&[a], &[b]);
        net.give_up(&[b], &[a]);
    }
    net.pass(seconds(9));
    assert!(net.installed.is_empty());
    net.pass(seconds(3));
    assert_eq!((net.members(0), net.members(4)), (vec![0, 1, 3, 4], vec![0, 1, 3, 4]));
    // Member 2 hears 0 and 4, so it learns that it is removed.
    assert!(matches!(net.stops[&id(2)], Reason::Removed { .. }));
}

#[test]
fn a_ring_of_broken_pairs_keeps_as_many_as_can_hear_each_other() {
    // Members 1..=5 form a ring in which neighbours do not hear each other. At most two of them can remain.
    let mut net = Net::of(6);
    for a in 1..=5 {
        let b = a % 5 + 1;
        net.cut.extend([(id(a), id(b)), (id(b), id(a))]);
        net.give_up(&[a], &[b]);
        net.give_up(&[b], &[a]);
    }
    net.pass(seconds(30));
    let left = net.members(0);
    assert_eq!((left[0], left.len()), (0, 3), "{left:?}");
    for &a in &left {
        assert!(left.iter().all(|&b| !net.cut.contains(&(id(a), id(b)))), "{left:?}");
    }
}

#[test]
fn who_hears_each_other_again_within_the_grace_stays() {
    let mut net = Net::of(3);
    net.give_up(&[1], &[2]);
    net.pass(seconds(8));
    net.event(1, Event::Heard(id(2)));
    net.pass(seconds(60));
    assert!(net.installed.is_empty());
}

#[test]
fn a_list_that_a_later_one_has_overtaken_removes_nobody() {
    let mut net = Net::of(3);
    net.event(1, Event::Silent(id(2)));
    net.event(1, Event::Heard(id(2)));
    // The empty list arrives first.
    net.queue.make_contiguous().reverse();
    net.pass(seconds(60));
    assert!(net.installed.is_empty());
}

#[test]
fn a_member_that_restarts_is_believed_though_it_counts_its_lists_anew() {
    let mut net = Net::of(4);
    net.cut.extend([(id(1), id(2)), (id(2), id(1))]);
    for _ in 0..5 {
        net.event(1, Event::Silent(id(3)));
        net.event(1, Event::Heard(id(3)));
        net.settle();
    }
    net.kill(1);
    let kept = net.disks[&id(1)].clone();
    net.add(State::restored(id(1), kept, Settings::default()).unwrap());
    net.event(1, Event::Tick);
    net.settle();
    net.event(1, Event::Silent(id(2)));
    net.pass(seconds(12));
    assert_eq!(net.members(0), [0, 1, 3]);
}

#[test]
fn what_is_not_a_view_is_reported_and_ignored() {
    let mut state = State::first(id(1), first(3), Settings::default()).unwrap();
    let next = first(3).without(&ids(&[2]), START).unwrap();
    let bad = View { tie_breaker: id(1), ..next.clone() };
    let ballot = Ballot { number: 1, proposer: id(0) };
    let at = first(3).id();
    let other = View { weights: START.plan, ..first(3) };
    for (message, fault) in [
        (Message::Accept { at, ballot, view: bad.clone() }, ViewFault::TieBreaker(id(1))),
        (Message::Decided { view: bad }, ViewFault::TieBreaker(id(1))),
        (Message::Decided { view: View { members: Vec::new(), ..next.clone() } }, ViewFault::Empty),
        (Message::Decided { view: other }, ViewFault::Another(at)),
    ] {
        let before = state.clone();
        let actions = state.step(Event::Message { from: id(0), message }, Nanos(5));
        assert_eq!(actions[0], Action::Fault { peer: id(0), fault });
        assert_eq!((state.view(), state.durable()), (before.view(), before.durable()));
    }
    // A ballot whose proposer is not the sender is not answered.
    let forged = Message::Prepare { at, ballot: Ballot { number: 9, proposer: id(2) } };
    assert_eq!(state.step(Event::Message { from: id(0), message: forged }, Nanos(6)), []);
    // A sender that is not in the view is not answered.
    let message = Message::Prepare { at, ballot: Ballot { number: 9, proposer: id(9) } };
    assert_eq!(state.step(Event::Message { from: id(9), message }, Nanos(7)), []);
    assert_eq!(state.durable().unwrap().promised, None);
}

#[test]
fn a_vote_is_kept_before_it_is_sent() {
    let mut state = State::first(id(1), first(3), Settings::default()).unwrap();
    let at = first(3).id();
    let ballot = Ballot { number: 3, proposer: id(0) };
    let view = first(3).without(&ids(&[2]), START).unwrap();
    for message in [Message::Prepare { at, ballot }, Message::Accept { at, ballot, view }] {
        let actions = state.step(Event::Message { from: id(0), message }, Nanos::ZERO);
        assert_eq!(actions[0], Action::Persist(state.durable().unwrap().clone()));
        assert!(matches!(actions[1], Action::Send { .. }));
    }
    // A lower ballot is rejected; the answer contains the promised ballot.
    let low = Ballot { number: 2, proposer: id(2) };
    let actions =
        state.step(Event::Message { from: id(2), message: Message::Prepare { at, ballot: low } }, Nanos(1));
    let message = Message::Refused { at, ballot: low, promised: ballot };
    assert_eq!(actions, [Action::Send { to: id(2), message }]);
}

#[test]
fn newcomers_do_not_ask_each_other_without_end() {
    let at = ViewId { incarnation: 0, epoch: 0 };
    let mut newcomer = State::newcomer(member(9), Settings::default());
    let message = Message::Here { at };
    assert_eq!(newcomer.step(Event::Message { from: id(8), message: message.clone() }, Nanos::ZERO), []);
    let asked = Message::Leaving { at: first(2).id() };
    let actions = newcomer.step(Event::Message { from: id(0), message: asked }, Nanos::ZERO);
    assert_eq!(actions, [Action::Send { to: id(0), message }]);
}

#[test]
fn members_that_answer_are_not_removed_for_members_that_do_not() {
    // Member 0 wrongly considers 1 and 2 lost. Members 3 and 4 are dead, and 0 has not noticed.
    let mut net = Net::of(5);
    net.kill(3);
    net.kill(4);
    net.give_up(&[0], &[1, 2]);
    net.pass(seconds(2));
    assert!(net.installed.is_empty(), "a view of 0, 3 and 4 could not go on");
    net.event(0, Event::Heard(id(1)));
    net.event(0, Event::Heard(id(2)));
    net.give_up(&[0, 1, 2], &[3, 4]);
    net.pass(seconds(2));
    assert_eq!((net.members(1), net.view(1).epoch), (vec![0, 1, 2], 2));
}
