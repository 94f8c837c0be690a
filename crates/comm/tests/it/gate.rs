//! Networks that grow while they are used: newcomers ask any member and connect to all; existing connections
//! are not touched.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use farflung_base::{Nanos, PeerId, Rank};
use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
use farflung_comm::tcp::{GateConfig, GrowingNetwork, SharedMemory};
use farflung_comm::{CommError, Communicator, FRAME_BYTES, ReduceOp, Refusal, Transport};

use crate::common::free_port;

fn config(security: &Security) -> GateConfig {
    let mut config = GateConfig::new("127.0.0.1:0", "night", security.clone());
    config.deadline = Duration::from_secs(10);
    config
}

fn ask(gate: &GrowingNetwork, security: &Security) -> Result<farflung_comm::tcp::MemberList, CommError> {
    GrowingNetwork::ask(&config(security), &[gate.address().to_owned()])
}

fn peer(gate: &GrowingNetwork) -> PeerId {
    gate.transport().me()
}

/// Sums 1.0 over the members; returns the result of each.
fn sums(gates: &[&GrowingNetwork], context: u64) -> Vec<f32> {
    let members: Vec<PeerId> = gates.iter().map(|gate| peer(gate)).collect();
    let sum = |gate: &GrowingNetwork| {
        let transport: Arc<dyn Transport> = gate.transport();
        let comm = Communicator::of_members(transport, &members, context).unwrap();
        let mut x = vec![1.0_f32; 100_000];
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert!(x.iter().all(|v| v.to_bits() == x[0].to_bits()));
        x[0]
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = gates.iter().map(|gate| scope.spawn(|| sum(gate))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn wait_for(gate: &GrowingNetwork, count: usize) {
    while gate.connected().len() < count {
        thread::sleep(Duration::from_millis(2));
    }
}

fn grows(host: &Security, others: &[Security; 3]) {
    let first = GrowingNetwork::found(&config(host)).unwrap();
    first.set_welcome(b"come in".to_vec()).unwrap();
    assert_eq!(sums(&[&first], 1), [1.0]);
    let asked = ask(&first, &others[0]).unwrap();
    assert_eq!((asked.welcome.as_slice(), asked.members().len()), (&b"come in"[..], 1));
    let second = asked.join().unwrap();
    wait_for(&first, 1);
    assert_eq!(sums(&[&first, &second], 2), [2.0; 2]);
    // A third process joins while the two are working. It asks the second member, since any member can be
    // asked. The first member leaves after this.
    let third = thread::scope(|scope| {
        let coming = scope.spawn(|| ask(&second, &others[1]).unwrap().join().unwrap());
        for context in 3..40 {
            assert_eq!(sums(&[&first, &second], context), [2.0; 2]);
        }
        coming.join().unwrap()
    });
    wait_for(&first, 2);
    wait_for(&second, 2);
    assert_eq!(sums(&[&first, &third, &second], 50), [3.0; 3]);
    drop(first);
    // Until the others notice that the first process has left, they may still list it. The fourth process skips
    // it.
    let fourth = ask(&second, &others[2]).unwrap().join().unwrap();
    wait_for(&second, 3);
    wait_for(&third, 3);
    assert_eq!(sums(&[&third, &fourth, &second], 51), [3.0; 3]);
}

#[test]
fn a_network_grows_while_it_is_used_and_the_first_may_leave() {
    let clear = Security::unencrypted;
    grows(&clear(), &[clear(), clear(), clear()]);
}

/// What a peer sent before it went is still received, until the peer is forgotten.
#[test]
fn frames_of_a_peer_that_has_gone_are_kept_until_it_is_forgotten() {
    let clear = Security::unencrypted();
    let mut shares = config(&clear);
    shares.shared_memory = SharedMemory::WherePossible;
    let first = GrowingNetwork::found(&shares).unwrap();
    let asked = GrowingNetwork::ask(&shares, &[first.address().to_owned()]).unwrap();
    let second = asked.join().unwrap();
    wait_for(&first, 1);
    let (gone, members) = (peer(&second), [peer(&first), peer(&second)]);
    let of = |gate: &GrowingNetwork| {
        let transport: Arc<dyn Transport> = gate.transport();
        Communicator::of_members(transport, &members, 1).unwrap()
    };
    let (receiver, sender) = (of(&first), of(&second));
    // Both sides have moved to shared memory by then, if the machine has it.
    for number in 0..100 {
        sender.send(Rank(0), 9, &[number]).unwrap();
        assert_eq!(receiver.recv(Rank(1), 9).unwrap(), [number]);
    }
    // Nothing is forgotten of a peer that is there.
    sender.send(Rank(0), 1, b"here").unwrap();
    sender.send(Rank(0), 2, &vec![7; 100_000]).unwrap();
    sender.send(Rank(0), 3, b"never received").unwrap();
    sender.send(Rank(0), 4, b"last").unwrap();
    assert_eq!(receiver.recv(Rank(1), 4).unwrap(), b"last");
    first.transport().forget(gone);
    assert_eq!(receiver.recv(Rank(1), 1).unwrap(), b"here");
    drop((sender, second));
    // Sockets are read while an operation waits.
    let brief = receiver.clone().with_deadline(Nanos::from_millis(5));
    while !first.connected().is_empty() {
        assert!(brief.recv(Rank(1), 8).is_err());
    }
    assert_eq!(receiver.recv(Rank(1), 2).unwrap(), vec![7; 100_000]);
    first.transport().forget(gone);
    let error = receiver.recv(Rank(1), 3).unwrap_err();
    assert!(matches!(error, CommError::PeerDown { peer, .. } if peer == gone), "{error}");
    // Its number is not used again, so nothing is sent to another peer in its place.
    assert!(matches!(receiver.send(Rank(1), 5, b"x"), Err(CommError::PeerDown { .. })));
}

fn identity(number: u8) -> Identity {
    Identity::from_seed([number; 32])
}

fn ticket(host: &Identity, secret: &JoinSecret, expiry: u64) -> Ticket {
    let addresses = vec!["127.0.0.1:1".to_owned()];
    Ticket { addresses, host: host.public(), secret: secret.until(expiry), expiry }
}

#[test]
fn whoever_has_the_ticket_is_let_in_by_any_member() {
    let secret = JoinSecret::from_text(b"an old pond, a frog jumps in").unwrap();
    let ticket = ticket(&identity(1), &secret, unix_seconds() + 3600);
    // A ticket has the key of the member that is asked. So processes that ask another member use the same
    // ticket with that member's key.
    let by_ticket = |number: u8, host: u8| {
        let ticket = Ticket { host: identity(host).public(), ..ticket.clone() };
        Security::by_ticket(&identity(number), &ticket)
    };
    grows(&Security::by_secret(&identity(1), &secret), &[by_ticket(2, 1), by_ticket(3, 2), by_ticket(4, 2)]);
}

#[test]
fn strangers_are_refused_by_name_and_the_members_go_on() {
    let secret = JoinSecret::from_text(b"an old pond, a frog jumps in").unwrap();
    let host = Security::by_secret(&identity(1), &secret);
    let first = GrowingNetwork::found(&config(&host)).unwrap();
    let refused = |security: &Security| match ask(&first, security).unwrap_err() {
        CommError::Refused { reason, .. } | CommError::Unproven { reason, .. } => reason,
        other => unreachable!("{other}"),
    };
    let wrong = JoinSecret::from_text(b"a frog that nobody has seen").unwrap();
    let until = unix_seconds() + 3600;
    assert_eq!(
        refused(&Security::by_ticket(&identity(2), &ticket(&identity(1), &wrong, until))),
        Refusal::Secret
    );
    let old = ticket(&identity(1), &secret, unix_seconds() - 60);
    assert!(matches!(refused(&Security::by_ticket(&identity(2), &old)), Refusal::Expired { .. }));
    let elsewhere = ticket(&identity(9), &secret, until);
    assert_eq!(refused(&Security::by_ticket(&identity(2), &elsewhere)), Refusal::Key);
    assert_eq!(refused(&Security::unencrypted()), Refusal::EncryptionMismatch);
    let security = Security::by_ticket(&identity(2), &ticket(&identity(1), &secret, until));
    let mut other_job = config(&security);
    other_job.job = "day".to_owned();
    let error = GrowingNetwork::ask(&other_job, &[first.address().to_owned()]).unwrap_err();
    assert!(matches!(error, CommError::Refused { reason: Refusal::Job, .. }), "{error}");
    let mut fewer = config(&security);
    fewer.slots = 1000;
    let error = GrowingNetwork::ask(&fewer, &[first.address().to_owned()]).unwrap().join().unwrap_err();
    assert!(matches!(
        error,
        CommError::Refused { reason: Refusal::WorldSize { want: 16_384, got: 1000 }, .. }
    ));
    let second = ask(&first, &security).unwrap().join().unwrap();
    wait_for(&first, 1);
    assert_eq!(sums(&[&first, &second], 1), [2.0; 2]);
    assert_eq!(first.connected()[0].key, Some(identity(2).public()));
}

#[test]
fn nobody_has_a_number_twice_and_a_full_network_says_so() {
    let clear = Security::unencrypted();
    let small = || {
        let mut small = config(&clear);
        small.slots = 3;
        small
    };
    let first = GrowingNetwork::found(&small()).unwrap();
    let join = || GrowingNetwork::ask(&small(), &[first.address().to_owned()]).unwrap().join();
    let second = join().unwrap();
    let third = join().unwrap();
    assert_eq!(peer(&second).0 + peer(&third).0, 3);
    drop((second, third));
    let error = join().unwrap_err();
    assert!(
        matches!(
            error,
            CommError::Argument { what: "number of members (no free number was found)", want: 3, .. }
        ),
        "{error}"
    );
}

/// Before, the answer was empty, and the process waited for one until its deadline.
#[test]
fn a_list_of_members_longer_than_a_frame_is_a_refusal_that_says_so() {
    let clear = Security::unencrypted();
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let mut long = config(&clear);
    long.listen.clone_from(&listen);
    // As long as the addresses of some thousand members.
    long.advertise = Some("a".repeat(FRAME_BYTES / 2));
    let first = GrowingNetwork::found(&long).unwrap();
    let asks = || GrowingNetwork::ask(&config(&clear), std::slice::from_ref(&listen));
    first.set_welcome(vec![0; FRAME_BYTES / 4]).unwrap();
    assert_eq!(asks().unwrap().members().len(), 1);
    first.set_welcome(vec![0; FRAME_BYTES / 2]).unwrap();
    let error = asks().unwrap_err();
    let CommError::Refused { reason: Refusal::ListTooLong { members: 1, bytes }, .. } = error else {
        panic!("{error}")
    };
    assert!(bytes > FRAME_BYTES as u64);
    assert!(error.to_string().contains("262144"), "{error}");
}

#[test]
fn two_that_come_at_the_same_time_meet() {
    let clear = Security::unencrypted();
    for _ in 0..4 {
        let first = GrowingNetwork::found(&config(&clear)).unwrap();
        // All three newcomers ask for the members before any of them connects.
        let asked: Vec<_> = (0..3).map(|_| ask(&first, &clear).unwrap()).collect();
        let come: Vec<GrowingNetwork> = asked.into_iter().map(|asked| asked.join().unwrap()).collect();
        thread::scope(|scope| {
            for gate in &come {
                scope.spawn(|| gate.meet_others(&config(&clear)).unwrap());
            }
        });
        let others = |gate: &GrowingNetwork| {
            come.iter().filter(|other| peer(other) != peer(gate)).map(peer).collect::<Vec<_>>()
        };
        for gate in &come {
            while !others(gate).iter().all(|&other| gate.connected().iter().any(|c| c.peer == other)) {
                thread::sleep(Duration::from_millis(2));
            }
        }
        let members: Vec<&GrowingNetwork> = come.iter().collect();
        assert_eq!(sums(&members, 7), [3.0; 3]);
    }
}

/// A process leaves, and joins again at its old address. The other members still list that address, and may not
/// notice at once that the process has left.
#[test]
fn one_comes_anew_at_the_address_that_it_had() {
    let security = Security::unencrypted();
    let first = GrowingNetwork::found(&config(&security)).unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut own = config(&security);
    own.listen = free;
    let before = GrowingNetwork::ask(&own, &[first.address().to_owned()]).unwrap().join().unwrap();
    wait_for(&first, 1);
    let asked = before.ask_again(&own).unwrap();
    assert_eq!(asked.members().len(), 2, "{:?}", asked.members());
    let (old, address) = (peer(&before), before.address().to_owned());
    drop(before);
    let again = asked.join().unwrap();
    assert_eq!(again.address(), address);
    assert_ne!(peer(&again), old);
    assert_eq!(sums(&[&first, &again], 7), [2.0; 2]);
    again.meet_others(&own).unwrap();
}

/// A message to a peer that is not connected yet waits for it, and is not lost.
#[test]
fn a_member_that_begins_before_another_is_connected_waits_for_it() {
    let security = Security::unencrypted();
    // With two slots, the other process can only draw number 1.
    let mut two = config(&security);
    two.slots = 2;
    let first = GrowingNetwork::found(&two).unwrap();
    let sum = |gate: &GrowingNetwork| {
        let members = [PeerId(0), PeerId(1)];
        let comm = Communicator::of_members(gate.transport(), &members, 1).unwrap();
        let mut x = vec![1.0_f32; 100_000];
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert!(x.iter().all(|v| v.to_bits() == 2.0_f32.to_bits()));
    };
    thread::scope(|scope| {
        scope.spawn(|| sum(&first));
        thread::sleep(Duration::from_millis(100));
        sum(&GrowingNetwork::ask(&two, &[first.address().to_owned()]).unwrap().join().unwrap());
    });
}
