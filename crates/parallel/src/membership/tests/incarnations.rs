//! Tests of a run that is started again while the older one may still be in progress.

use super::*;

/// Restarts the run from a checkpoint on member 0, as incarnation 2.
fn start_again(net: &mut Net, former: &[u32]) {
    net.states.remove(&id(0));
    let view = View::first(ViewId { incarnation: 2, epoch: 5 }, &[Member::new(id(0), 0)], START).unwrap();
    net.add(State::again(id(0), view, ids(former), Settings::default()).unwrap());
    net.event(0, Event::Tick);
}

#[test]
fn a_host_that_starts_again_is_refused_while_the_others_have_a_majority() {
    for is_known_silent in [true, false] {
        let mut net = Net::of(3);
        if is_known_silent {
            net.kill(0);
            net.give_up(&[1, 2], &[0]);
            net.settle();
            assert_eq!(net.members(1), [1, 2]);
            net.add(State::first(id(0), first(3), Settings::default()).unwrap());
        }
        start_again(&mut net, &[1, 2]);
        net.settle();
        let older = net.view(1).id();
        assert_eq!(net.stops, BTreeMap::from([(id(0), Reason::StillRuns { older })]));
        let says = net.stops[&id(0)].to_string();
        assert!(
            says.contains("the run is still in progress in epoch") && says.contains("incarnation 1"),
            "{says}"
        );
    }
}

#[test]
fn one_member_alone_does_not_refuse_a_host_that_starts_again() {
    let mut net = Net::of(3);
    net.kill(1);
    // Member 2 has not noticed that 1 is dead and rejects the new incarnation. It is not a majority, so the
    // host continues.
    start_again(&mut net, &[1, 2]);
    net.pass(seconds(5));
    assert!(net.stops.is_empty());
    net.event(2, Event::Silent(id(1)));
    // Member 2 waits for 1 as long as any member without a majority.
    net.pass(seconds(29));
    assert!(net.stops.is_empty());
    net.pass(seconds(10));
    assert_eq!(net.stops, BTreeMap::from([(id(2), Reason::Superseded { incarnation: 2 })]));
}

/// Returns a view of incarnation `incarnation` and epoch 5 with these members.
fn again(incarnation: u64, members: &[Member]) -> View {
    View::first(ViewId { incarnation, epoch: 5 }, members, START).unwrap()
}

/// Tells a member that a peer rejects its incarnation, in which the peer has this view.
fn reject(net: &mut Net, to: u32, from: u32, view: &View) {
    net.event(to, Event::Message { from: id(from), message: Message::Stale { view: view.clone() } });
}

#[test]
fn a_host_asks_members_that_the_older_run_admitted_later() {
    let mut net = Net::of(2);
    net.kill(0);
    // Without the tie-breaker, member 1 waits for a vote of 0. It admits 2 to 4 when 0 is back.
    net.add(State::restored(id(0), net.disks[&id(0)].clone(), Settings::default()).unwrap());
    for _ in 0..2 {
        for number in 2..5 {
            if !net.states.contains_key(&id(number)) {
                net.add(State::newcomer(member(number), Settings::default()));
            }
            net.event(0, Event::Ready(member(number)));
        }
        net.event(0, Event::Admit);
        net.settle();
    }
    assert_eq!(net.members(1), [0, 1, 2, 3, 4]);
    // The checkpoint of 0 names only 1. It alone is no majority of the five.
    start_again(&mut net, &[1]);
    net.pass(seconds(1));
    assert_eq!(net.stops, BTreeMap::from([(id(0), Reason::StillRuns { older: net.view(1).id() })]));
}

#[test]
fn those_that_joined_the_host_stop_too() {
    let mut net = Net::of(4);
    net.kill(0);
    let joined = again(2, &[member(8), member(9), Member::new(id(0), 10)]);
    let former = ids(&[1, 2, 3]);
    net.add(State::again(id(0), joined.clone(), former, Settings::default()).unwrap());
    for number in [8, 9] {
        net.add(State::first(id(number), joined.clone(), Settings::default()).unwrap());
    }
    // Only 0 knows the former members. If it told nobody, 8 and 9 would continue without it.
    net.event(0, Event::Tick);
    net.pass(seconds(1));
    let reason = Reason::StillRuns { older: net.view(1).id() };
    assert_eq!(net.stops, [0, 8, 9].map(|number| (id(number), reason.clone())).into());
}

#[test]
fn rejections_by_one_incarnation_do_not_hide_those_by_an_older_one() {
    let mut net = Net::default();
    let me = Member::new(id(0), 20);
    net.add(State::again(id(0), again(3, &[me]), ids(&[1, 2]), Settings::default()).unwrap());
    let second = again(2, &[4, 5, 6].map(member));
    for (from, view) in [(4, &second), (1, &first(3)), (2, &first(3))] {
        assert!(net.stops.is_empty());
        reject(&mut net, 0, from, view);
    }
    assert_eq!(net.stops, BTreeMap::from([(id(0), Reason::StillRuns { older: first(3).id() })]));
}

#[test]
fn rejections_count_together_only_if_they_are_recent() {
    // Each entry: seconds between the rejections by two of three members, and whether the host stops.
    for (between, stops) in [(15, true), (17, false)] {
        let mut net = Net::default();
        let me = Member::new(id(0), 20);
        net.add(State::again(id(0), again(2, &[me]), ids(&[1, 2]), Settings::default()).unwrap());
        reject(&mut net, 0, 1, &first(3));
        net.pass(seconds(between));
        reject(&mut net, 0, 2, &first(3));
        assert_eq!(net.stops.len(), usize::from(stops), "{between} s");
    }
}

#[test]
fn a_member_whose_link_was_broken_does_not_stop_for_a_host_that_starts_again() {
    let mut net = Net::of(4);
    net.kill(0);
    net.give_up(&[3], &[1, 2]);
    start_again(&mut net, &[3]);
    net.pass(seconds(20));
    assert!(net.stops.is_empty(), "3 waits for 1 and 2");
    for number in [1, 2] {
        net.event(3, Event::Heard(id(number)));
    }
    net.pass(seconds(60));
    assert_eq!(net.stops, BTreeMap::from([(id(0), Reason::StillRuns { older: first(4).id() })]));
}

#[test]
fn a_member_does_not_wait_for_machines_that_ask_to_join_anew() {
    let mut net = Net::of(3);
    net.kill(0);
    net.kill(2);
    net.event(1, Event::Silent(id(0)));
    // The machine of 2 has lost its votes. Together with the old 2, member 1 would be a majority.
    net.event(1, Event::Ready(Member::new(id(2), 12)));
    net.pass(seconds(31));
    let reason = Reason::NoMajority { heard: 1, members: 3, tie_breaker: false };
    assert_eq!(net.stops, BTreeMap::from([(id(1), reason)]));
}

#[test]
fn members_of_other_views_say_nothing_about_older_incarnations() {
    let mut net = Net::default();
    let me = Member::new(id(0), 20);
    net.add(State::again(id(0), again(3, &[me]), ids(&[]), Settings::default()).unwrap());
    let at = net.view(0).id();
    for view in [first(3), again(4, &[member(4)])] {
        net.event(0, Event::Message { from: id(1), message: Message::Older { at, view } });
    }
    net.pass(seconds(20));
    assert!(net.queue.is_empty() && net.stops.is_empty());
}
