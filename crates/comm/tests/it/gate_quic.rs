//! Networks that grow over QUIC, alone or beside TCP: members join through a relay, one is lost, another joins,
//! and every sum has the bits of threads in one process.

#![cfg(feature = "iroh")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::{memory_cluster, on_ranks};
use farflung_base::{Nanos, PeerId, Rank};
use farflung_comm::quic::{Relay, RelayConfig, Socket, SocketConfig};
use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
use farflung_comm::tcp::{GateConfig, GrowingNetwork};
use farflung_comm::{CommError, Communicator, ReduceOp, Refusal, Transport};

/// Networks over which a member connects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    Tcp,
    Quic,
    /// TCP where it reaches the other member, QUIC elsewhere.
    Both,
    /// QUIC over the relay alone.
    Relay,
}

/// A run that members join.
struct Job {
    secret: JoinSecret,
    /// Expiry of all tickets. It is the same for all, because a member can check only the secret of its own
    /// ticket.
    expiry: u64,
    host: Identity,
    relay: Relay,
}

impl Job {
    fn new() -> Self {
        let relay = Relay::start(&RelayConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
        let (secret, host) = (JoinSecret::generate().unwrap(), Identity::generate().unwrap());
        Self { secret, expiry: unix_seconds() + 600, host, relay }
    }

    fn config(&self, security: Security, over: Over) -> GateConfig {
        let mut config = GateConfig::new("127.0.0.1:0", "night", security.clone());
        config.deadline = Duration::from_secs(20);
        if over == Over::Tcp {
            return config;
        }
        let mut socket = SocketConfig::new(security);
        socket.relays = vec![self.relay.url()];
        socket.listen = Some("127.0.0.1:0".to_owned());
        socket.direct = over != Over::Relay;
        socket.patience = Duration::from_secs(3);
        config.over_quic(&Socket::open(&socket).unwrap(), over == Over::Both)
    }

    fn found(&self, over: Over) -> GrowingNetwork {
        GrowingNetwork::found(&self.config(Security::by_secret(&self.host, &self.secret), over)).unwrap()
    }

    /// Joins through a member, with a ticket of the host that has this member's addresses.
    fn join(&self, member: &GrowingNetwork, over: Over) -> Result<GrowingNetwork, CommError> {
        let (expiry, own) = (self.expiry, member.own());
        let addresses: Vec<String> = own.address.split(',').map(str::to_owned).collect();
        let host = own.key.unwrap();
        let ticket = Ticket { addresses, host, secret: self.secret.until(expiry), expiry };
        // Encodes the ticket as a word and parses it, as when people pass it on.
        let ticket: Ticket = ticket.word().unwrap().parse().unwrap();
        let security = Security::by_ticket(&Identity::generate().unwrap(), &ticket);
        GrowingNetwork::ask(&self.config(security, over), &[ticket.addresses.join(",")])?.join()
    }
}

fn peer(gate: &GrowingNetwork) -> PeerId {
    gate.transport().me()
}

fn wait_for(gates: &[&GrowingNetwork]) {
    for gate in gates {
        while gates.iter().any(|other| {
            peer(other) != peer(gate) && gate.connected().iter().all(|known| known.peer != peer(other))
        }) {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Values whose sum depends on the order of additions.
fn values(rank: usize) -> Vec<f32> {
    (0..50_000).map(|i| ((i * 31 + rank * 7) % 1013) as f32 / (rank as f32 + 0.37)).collect()
}

fn summed(comm: &Communicator) -> Vec<u32> {
    let mut x = values(comm.rank().index());
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    x.iter().map(|v| v.to_bits()).collect()
}

/// Returns the sums of this number of threads in one process.
fn expected(ranks: usize) -> Vec<u32> {
    on_ranks(memory_cluster(ranks), |comm| summed(&comm)).swap_remove(0)
}

/// Sums over the members several times and compares the bits.
fn sums(gates: &[&GrowingNetwork], context: u64) {
    wait_for(gates);
    let members: Vec<PeerId> = gates.iter().map(|gate| peer(gate)).collect();
    let want = expected(gates.len());
    thread::scope(|scope| {
        for gate in gates {
            let (members, want) = (&members, &want);
            scope.spawn(move || {
                let transport: Arc<dyn Transport> = gate.transport();
                let comm = Communicator::of_members(transport, members, context).unwrap();
                for _ in 0..5 {
                    assert!(summed(&comm.clone().with_deadline(Nanos::from_millis(20_000))) == *want);
                }
            });
        }
    });
}

/// One member founds the network, two join, the first leaves, and another joins.
fn grows(over: Over, relayed: bool) {
    let job = Job::new();
    let first = job.found(over);
    let second = job.join(&first, over).unwrap();
    sums(&[&first, &second], 1);
    // The third asks the second; the first is not asked.
    let third = job.join(&second, over).unwrap();
    sums(&[&first, &second, &third], 2);
    let over_relay = || second.second_network_path(peer(&third)).is_none_or(|path| path.starts_with("http"));
    if relayed {
        assert!(over_relay(), "{:?}", second.second_network_path(peer(&third)));
    }
    // Where a direct path exists, it is found within seconds, while sums go on.
    for context in (100..).take_while(|_| !relayed && over_relay()) {
        assert!(context < 200, "{:?}", second.second_network_path(peer(&third)));
        sums(&[&first, &second, &third], context);
        thread::sleep(Duration::from_millis(100));
    }
    drop(first);
    let fourth = job.join(&second, over).unwrap();
    sums(&[&third, &fourth, &second], 3);
    assert!(!relayed || job.relay.carried() > 1_000_000, "{} bytes over the relay", job.relay.carried());
}

#[test]
fn a_network_grows_over_quic_and_the_first_may_leave() {
    grows(Over::Quic, false);
}

#[test]
fn a_network_grows_over_a_relay_alone() {
    grows(Over::Relay, true);
}

#[test]
fn two_members_meet_over_tcp_and_a_third_over_quic() {
    let job = Job::new();
    let first = job.found(Over::Both);
    let second = job.join(&first, Over::Both).unwrap();
    let third = job.join(&first, Over::Quic).unwrap();
    sums(&[&first, &second, &third], 1);
    let path = |from: &GrowingNetwork, to: &GrowingNetwork| from.second_network_path(peer(to));
    assert_eq!((path(&first, &second), path(&second, &first)), (None, None));
    for (from, to) in [(&first, &third), (&second, &third), (&third, &first), (&third, &second)] {
        let path = path(from, to).expect("connected over QUIC");
        assert!(from.transport().path(peer(to)).unwrap().packets > 0, "{path}");
    }
    // A member without QUIC reaches those that listen over TCP, and not the third.
    let fourth = job.join(&second, Over::Tcp).unwrap();
    sums(&[&first, &second, &fourth], 2);
    assert!(fourth.connected().iter().all(|known| known.peer != peer(&third)));
    sums(&[&third, &second, &first], 3);
}

#[test]
fn a_communicator_shrinks_and_admits_over_both_in_place() {
    let job = Job::new();
    let first = job.found(Over::Both);
    let second = job.join(&first, Over::Both).unwrap();
    let third = job.join(&first, Over::Quic).unwrap();
    let fourth = job.join(&first, Over::Quic).unwrap();
    wait_for(&[&first, &second, &third, &fourth]);
    let members = [&first, &second, &third].map(peer);
    let newcomer = peer(&fourth);
    let limit = Nanos::from_millis(8_000);
    thread::scope(|scope| {
        scope.spawn(|| {
            let transport: Arc<dyn Transport> = fourth.transport();
            let comm = Communicator::wait_for_admission(&transport, Nanos::from_millis(60_000)).unwrap();
            assert_eq!((comm.rank(), comm.size()), (Rank(2), 3));
            assert!(summed(&comm) == expected(3));
        });
        for gate in [&first, &second] {
            let members = &members;
            scope.spawn(move || {
                let transport: Arc<dyn Transport> = gate.transport();
                let comm = Communicator::of_members(transport, members, 1).unwrap().with_deadline(limit);
                assert!(summed(&comm) == expected(3));
                // The third member is gone.
                comm.barrier().unwrap_err();
                let comm = comm.shrink().unwrap();
                assert_eq!(comm.size(), 2);
                let comm = comm.with_deadline(Nanos::from_millis(20_000)).admit(&[newcomer]).unwrap();
                assert!(summed(&comm) == expected(3));
            });
        }
        let transport: Arc<dyn Transport> = third.transport();
        let comm = Communicator::of_members(transport, &members, 1).unwrap();
        assert!(summed(&comm) == expected(3));
        drop(comm);
        drop(third);
    });
}

#[test]
fn strangers_are_refused_with_the_reason() {
    let job = Job::new();
    let first = job.found(Over::Quic);
    let stranger = Job { secret: JoinSecret::generate().unwrap(), ..Job::new() };
    let error = stranger.join(&first, Over::Quic).unwrap_err();
    assert!(matches!(error, CommError::Refused { reason: Refusal::Secret, .. }), "{error}");
    let second = job.join(&first, Over::Quic).unwrap();
    sums(&[&first, &second], 1);
    let open = |security| Socket::open(&SocketConfig::new(security)).unwrap_err().to_string();
    assert!(open(Security::unencrypted()).contains("a ticket or a secret"));
}
