//! Tests of a region's server and a world server, message by message: no change that workers sent is lost.

use super::*;
use crate::sync::server::DelayedNesterov;

fn asked(from: u32, kind: u8, message: &[u8]) -> Question {
    Question { from: Rank(from), at: Nanos(1), bytes: tagged(kind, message) }
}

fn push(change: f32) -> Vec<u8> {
    ToServer::Push { step: 1, weight: 1.0, change: vec![change] }.to_bytes()
}

/// Returns a node with a region of ranks 0 and 1 whose world server is at rank 2.
fn region(every: u64, mixing: f64) -> Node {
    let rule = Box::new(DelayedNesterov::new(1, 1.0, 0.0, 2));
    let region = Region::new(vec![0.0], rule, vec![Rank(0), Rank(1)], Rank(2));
    Node::new(Rank(0), 3, Some(region.sends(every, 1.0, 1).merges(mixing)), None)
}

/// Returns the change that a region's server sends to the world among some answers.
fn sent(answers: &[Answer]) -> Option<f32> {
    let answer = answers.iter().find(|answer| answer.asks && answer.to == Rank(2))?;
    match ToServer::from_bytes(answer.bytes.strip_prefix(&[REGION])?, 1)? {
        ToServer::Push { change, .. } => Some(change[0]),
        _ => None,
    }
}

#[test]
fn what_arrives_while_a_message_travels_is_part_of_the_next() {
    let mut node = region(2, 0.75);
    let mut all = Vec::new();
    let moved = |model: f32| FromServer::Moved { pushes: 1, model: vec![model] }.to_bytes();
    // The changes sum up to 31. The world's answers arrive between the changes of the next message.
    for (i, change) in [1.0, 2.0, 4.0, 8.0, 16.0].into_iter().enumerate() {
        let answers = node.receive(asked(i as u32 % 2, WORKER, &push(change)));
        assert_eq!(answers[0].to, Rank(i as u32 % 2));
        all.extend(sent(&answers));
        if i % 2 == 0 && i > 0 {
            assert_eq!(node.receive(asked(2, WORLD, &moved(100.0))), []);
        }
    }
    assert_eq!(all, [1.5, 6.0]);
    let model = node.region.as_ref().unwrap().server.model[0];
    // Moves of -1.5 and -2, merged with the world, then of -4 and -8, merged again.
    let wanted = 0.75 * (0.75 * (-1.5 - 2.0) + 25.0 - 4.0 - 8.0) + 25.0;
    assert!((model - wanted).abs() < 1e-5, "{model}, {wanted}");
    // The rest is sent at the end.
    let meet = ToServer::Synchronise { wants: SyncRequest::End }.to_bytes();
    assert_eq!(node.receive(asked(0, WORKER, &meet)), []);
    let answers = node.receive(asked(1, WORKER, &meet));
    all.extend(sent(&answers));
    assert_eq!(answers.len(), 2);
    assert!((all.iter().sum::<f32>() - 31.0 / 2.0).abs() < 1e-6, "{all:?}");
}

#[test]
fn a_meeting_in_between_sends_nothing() {
    let mut node = region(2, 0.75);
    node.receive(asked(0, WORKER, &push(1.0)));
    let meet = ToServer::Synchronise { wants: SyncRequest::All }.to_bytes();
    node.receive(asked(0, WORKER, &meet));
    let answers = node.receive(asked(1, WORKER, &meet));
    assert_eq!(sent(&answers), None);
    assert_eq!(answers, [Answer::to_service(Rank(2), tagged(REGION, &meet))]);
    // The world's answer goes to both members, with the region's states: model, pending, number of changes.
    let met = FromServer::Synchronised { pushes: 7, values: vec![9.0] }.to_bytes();
    let answers = node.receive(asked(2, WORLD, &met));
    let wanted = FromServer::Synchronised { pushes: 7, values: vec![9.0, -0.5, 0.5, 1.0] };
    assert_eq!(answers, [0, 1].map(|to| Answer::new(Rank(to), wanted.to_bytes())));
    // A second answer of the world is not passed on.
    assert_eq!(node.receive(asked(2, WORLD, &met)), []);
}

#[test]
fn messages_on_one_rank_do_not_leave_it() {
    let rule = || Box::new(DelayedNesterov::new(1, 1.0, 0.0, 1));
    let region = Region::new(vec![0.0], rule(), vec![Rank(0)], Rank(0)).sends(1, 1.0, 1).merges(0.0);
    let world = World::new(vec![0.0], rule(), vec![Rank(0)], None);
    let mut node = Node::new(Rank(0), 1, Some(region), Some(world));
    let bytes = [&forward(Rank(0))[..], &push(2.0)].concat();
    let answers = node.receive(Question { from: Rank(0), at: Nanos(1), bytes });
    let moved = FromServer::Moved { pushes: 1, model: vec![-2.0] };
    assert_eq!(answers, [Answer::new(Rank(0), moved.to_bytes())]);
    let world = node.world.as_ref().unwrap();
    assert_eq!((world.server.model[0], world.server.pushes), (-2.0, 1));
}

#[test]
fn what_is_no_message_changes_nothing() {
    let mut node = region(1, 0.5);
    let refused = |to| vec![Answer::new(Rank(to), FromServer::Refused.to_bytes())];
    let long = ToServer::Push { step: 1, weight: 1.0, change: vec![1.0; 9] }.to_bytes();
    let forwarded = [&forward(Rank(1))[..], &push(2.0)].concat();
    let far = [&forward(Rank(7))[..], &push(2.0)].concat();
    for (from, bytes) in [
        (1, vec![]),
        (1, vec![9]),
        (1, vec![WORKER]),
        (1, tagged(WORKER, &long)),
        // From a rank that is not a member.
        (2, tagged(WORKER, &push(1.0))),
        // Only the rank's own worker can have messages passed on, and only to ranks that exist.
        (1, forwarded),
        (0, far),
        (0, vec![FORWARD, 1]),
        // There is no world server on this rank, and rank 1 is not the world server.
        (1, tagged(REGION, &push(1.0))),
        (1, tagged(WORLD, &FromServer::Moved { pushes: 1, model: vec![5.0] }.to_bytes())),
    ] {
        assert_eq!(node.receive(Question { from: Rank(from), at: Nanos(1), bytes }), refused(from));
    }
    // If the world's answer has another length, the members get an error.
    let long = FromServer::Moved { pushes: 1, model: vec![1.0; 9] }.to_bytes();
    assert_eq!(node.receive(asked(2, WORLD, &long)), [refused(0), refused(1)].concat());
    let region = node.region.unwrap();
    assert_eq!((region.server.model[0].to_bits(), region.server.pushes), (0, 0));
    assert_eq!(region.pending, [0.0]);
}
