//! Tests of digests and message sizes.

use super::*;
use crate::membership::{Accepted, Ballot};

#[test]
fn the_digest_is_of_every_field() {
    let view = first(3).with(&[member(7)], START).unwrap();
    // Pinned, because members of different versions must compute equal digests. Computed with Python's `blake3`
    // over the documented bytes.
    assert_eq!(first(2).digest().to_string()[..16], *"4b723bfa8bb5358d");
    let changes: [&dyn Fn(&mut View); 10] = [
        &|view| view.epoch += 1,
        &|view| view.incarnation += 1,
        &|view| view.parent = START.plan,
        &|view| view.weights = START.plan,
        &|view| view.plan = START.weights,
        &|view| view.tie_breaker = id(1),
        &|view| view.members[0].id = id(8),
        &|view| view.members[0].slot = 8,
        &|view| view.members[0].joined = 8,
        &|view| view.members.truncate(3),
    ];
    let mut digests = BTreeSet::from([view.digest()]);
    for change in changes {
        let mut other = view.clone();
        change(&mut other);
        assert!(digests.insert(other.digest()), "{other:?}");
    }
}

#[test]
fn messages_are_read_back_and_their_sizes_are_bounded() {
    let view = first(3);
    let at = view.id();
    let ballot = Ballot { number: u64::MAX, proposer: id(1) };
    let next = view.without(&ids(&[2]), START).unwrap();
    let accepted = Some(Accepted { ballot, view: next.clone() });
    let silent = ids(&[0, 2]);
    let messages = [
        Message::Here { at },
        Message::Prepare { at, ballot },
        Message::Promised { at, ballot, accepted },
        Message::Refused { at, ballot, promised: ballot },
        Message::Accept { at, ballot, view: next.clone() },
        Message::Accepted { at, ballot },
        Message::Decided { view: next.clone() },
        Message::Stale { view: next.clone() },
        Message::Suspects { at, number: u64::MAX, silent },
        Message::Leaving { at },
        Message::Newcomer { at, member: member(4) },
        Message::Repeat { at },
        Message::Older { at, view: next },
    ];
    for message in messages {
        let bytes = postcard::to_stdvec(&message).unwrap();
        assert!(bytes.len() <= Message::most_bytes(3), "{message:?}: {}", bytes.len());
        assert_eq!(postcard::from_bytes::<Message>(&bytes).unwrap(), message);
        let text = serde_json::to_string(&message).unwrap();
        assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message);
        for short in 0..bytes.len() {
            assert!(postcard::from_bytes::<Message>(&bytes[..short]).is_err(), "{message:?} cut at {short}");
        }
    }
    // A list whose length field exceeds the message is an error.
    let empty = Message::Suspects { at, number: 1, silent: BTreeSet::new() };
    let mut bytes = postcard::to_stdvec(&empty).unwrap();
    bytes.pop();
    bytes.extend([0xff, 0xff, 0xff, 0xff, 0x0f]);
    assert!(postcard::from_bytes::<Message>(&bytes).is_err());
}

#[test]
fn the_largest_message_fits_its_bound() {
    let longest =
        |n: u32| Member { id: MemberId([0xff; 32]), slot: u32::MAX, joined: u64::MAX - u64::from(n) };
    let view = View {
        epoch: u64::MAX,
        incarnation: u64::MAX,
        members: (0..View::MOST_MEMBERS as u32).map(longest).collect(),
        tie_breaker: MemberId([0xff; 32]),
        ..first(1)
    };
    let ballot = Ballot { number: u64::MAX, proposer: view.tie_breaker };
    let accepted = Some(Accepted { ballot, view: view.clone() });
    let promised = Message::Promised { at: view.id(), ballot, accepted };
    let bytes = postcard::to_stdvec(&promised).unwrap().len();
    assert!(bytes <= Message::most_bytes(View::MOST_MEMBERS), "{bytes}");
    assert!(Message::most_bytes(View::MOST_MEMBERS) < 128 << 10);
}
