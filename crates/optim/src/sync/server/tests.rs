//! Servers compared with plain sums: workers that are ahead, late, or send invalid messages.

use super::*;

fn push(server: &mut Server, from: u32, at: u64, step: u64, change: f32) -> Vec<(u32, FromServer)> {
    let bytes = ToServer::Push { step, weight: 1.0, change: vec![change] }.to_bytes();
    tell(server, from, at, bytes)
}

fn tell(server: &mut Server, from: u32, at: u64, bytes: Vec<u8>) -> Vec<(u32, FromServer)> {
    let answers = server.receive(Question { from: Rank(from), at: Nanos(at), bytes });
    answers.into_iter().map(|a| (a.to.0, FromServer::from_bytes(&a.bytes).unwrap())).collect()
}

fn moved(to: u32, pushes: u64, model: f32) -> (u32, FromServer) {
    (to, FromServer::Moved { pushes, model: vec![model] })
}

#[test]
fn who_is_too_far_ahead_is_told_when_the_slowest_has_come() {
    let sgd = DelayedNesterov::new(1, 1.0, 0.0, 2);
    let mut server = Server::new(vec![0.0], Box::new(sgd), 2, Some(1));
    assert_eq!(push(&mut server, 0, 1, 1, 2.0), [moved(0, 1, -1.0)]);
    assert_eq!(push(&mut server, 1, 2, 1, 2.0), [moved(1, 1, -2.0)]);
    // One step ahead is within the bound, two are not.
    assert_eq!(push(&mut server, 0, 3, 2, 2.0), [moved(0, 2, -3.0)]);
    assert_eq!(push(&mut server, 0, 4, 3, 2.0), []);
    assert_eq!(push(&mut server, 1, 5, 2, 4.0), [moved(0, 3, -6.0), moved(1, 2, -6.0)]);
    assert_eq!(push(&mut server, 0, 6, 4, 2.0), []);
    // In a synchronisation the bound on how far a worker is ahead does not apply.
    let meet = ToServer::Synchronise { wants: SyncRequest::Model }.to_bytes();
    assert_eq!(tell(&mut server, 0, 7, meet.clone()), []);
    let met = |to| (to, FromServer::Synchronised { pushes: 6, values: vec![-7.0] });
    assert_eq!(tell(&mut server, 1, 8, meet), [moved(0, 4, -7.0), met(0), met(1)]);
}

#[test]
fn late_changes_are_told_apart_from_those_that_were_merged() {
    let quorum = Quorum { least: 2, grace: Nanos(10) };
    let rule = QuorumMean::new(1, (1.0, 0.0), quorum, 3);
    let mut server = Server::new(vec![0.0], Box::new(rule), 3, None);
    assert_eq!(push(&mut server, 0, 1, 1, 1.0), []);
    assert_eq!(push(&mut server, 1, 2, 1, 3.0), []);
    // The first worker's second change arrives after the grace time: the model that is sent to this worker
    // includes only its first change.
    assert_eq!(push(&mut server, 0, 20, 2, 5.0), [moved(0, 1, -2.0), moved(1, 1, -2.0)]);
    let meet = ToServer::Synchronise { wants: SyncRequest::All }.to_bytes();
    for worker in [0, 1] {
        assert_eq!(tell(&mut server, worker, 21, meet.clone()), []);
    }
    let all = tell(&mut server, 2, 22, meet);
    assert_eq!(all[0], moved(0, 2, -7.0));
    // The answer contains the momentum after the model.
    assert_eq!(all[3], (2, FromServer::Synchronised { pushes: 3, values: vec![-7.0, 5.0] }));
}

#[test]
fn what_is_no_message_changes_nothing() {
    let sgd = DelayedNesterov::new(1, 1.0, 0.0, 2);
    let mut server = Server::new(vec![0.5], Box::new(sgd), 2, None);
    let long = ToServer::Push { step: 1, weight: 1.0, change: vec![1.0; 9] }.to_bytes();
    for bytes in [vec![], vec![7], long] {
        assert_eq!(tell(&mut server, 1, 1, bytes), [(1, FromServer::Refused)]);
    }
    assert_eq!((server.model[0].to_bits(), server.pushes), (0.5_f32.to_bits(), 0));
}
