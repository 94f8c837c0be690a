//! Tests of repeated steps: a step failed although all members are heard, and the next view has the same
//! members.

use super::*;

#[test]
fn once_all_members_ask_the_next_view_has_the_same() {
    let mut net = Net::of(4);
    for member in [0, 1, 2] {
        net.event(member, Event::Repeat);
    }
    net.settle();
    assert!(net.installed.is_empty(), "member 3 has not said anything");
    net.event(3, Event::Repeat);
    net.settle();
    let next = first(4).again(START).unwrap();
    next.follows(&first(4)).unwrap();
    for member in 0..4 {
        assert_eq!(net.view(member).id(), next.id());
        assert_eq!(net.members(member), [0, 1, 2, 3]);
    }
    // The new view clears the requests: no further view follows.
    net.installed.clear();
    net.pass(seconds(60));
    assert!(net.installed.is_empty() && net.stops.is_empty());
}

#[test]
fn whoever_is_silent_is_removed_all_the_same() {
    let mut net = Net::of(3);
    net.kill(2);
    net.event(1, Event::Repeat);
    net.event(0, Event::Repeat);
    net.event(0, Event::Silent(id(2)));
    net.settle();
    assert_eq!((net.members(0), net.members(1), net.view(0).epoch), (vec![0, 1], vec![0, 1], 2));
}

#[test]
fn what_members_ask_is_said_again_where_it_was_lost() {
    let mut net = Net::of(2);
    net.cut.insert((id(1), id(0)));
    net.event(1, Event::Repeat);
    net.event(0, Event::Repeat);
    net.pass(seconds(1));
    assert!(net.installed.is_empty());
    net.cut.clear();
    net.pass(seconds(10));
    assert_eq!((net.view(0).epoch, net.view(1).epoch), (2, 2));
}

#[test]
fn strangers_and_members_of_other_views_do_not_count() {
    let mut net = Net::of(2);
    let at = net.view(0).id();
    net.event(0, Event::Repeat);
    for (from, at) in [(id(9), at), (id(1), ViewId { epoch: 0, ..at })] {
        net.step(id(0), Event::Message { from, message: Message::Repeat { at } });
    }
    net.settle();
    assert_eq!(net.view(0).epoch, 1);
    net.step(id(0), Event::Message { from: id(1), message: Message::Repeat { at } });
    net.settle();
    assert_eq!((net.view(0).epoch, net.view(1).epoch), (2, 2));
}
