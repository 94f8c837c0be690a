//! Tests of connections over QUIC: streams by tag, relays, admission by key, rates by peer and in all, figures
//! of a path, and peers that vanish.

#![cfg(feature = "iroh")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::disallowed_methods, reason = "how long a loss takes to be noticed is real time")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::on_ranks;
use crate::common::quic::Job;
use farflung_base::{Bandwidth, Nanos, PeerId, Rank};
use farflung_comm::quic::{IDLE_TIMEOUT, Relay, RelayConfig, Socket};
use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket};
use farflung_comm::tcp::{Pace, Tcp};
use farflung_comm::{
    CommError, Communicator, DownReason, FRAME_BYTES, ReduceOp, Refusal, Source, Tag, Transport, VERSION,
    WINDOW,
};

fn transports(ends: &[Arc<Tcp>]) -> crate::common::Cluster {
    ends.iter().map(|end| Arc::clone(end) as Arc<dyn Transport>).collect()
}

fn together(job: &Job) -> Vec<Arc<Tcp>> {
    job.join(|_| {}).into_iter().map(Result::unwrap).collect()
}

fn relay() -> Relay {
    Relay::start(&RelayConfig::new("127.0.0.1:0".parse().unwrap())).unwrap()
}

/// Sums over all ranks this number of times.
fn sums(comm: &Communicator, times: usize) {
    for i in 0..times {
        let mut x = vec![comm.rank().0 as f32 + i as f32; 10_000];
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        let n = comm.size();
        let sum = (n * i + n * (n - 1) / 2) as f32;
        assert!(x.iter().all(|v| v.to_bits() == sum.to_bits()));
    }
}

#[test]
fn each_tag_has_a_stream_and_a_full_one_holds_up_no_other() {
    let ends = together(&Job::new(2));
    let limit = Nanos::from_millis(10_000);
    let frame = |end: &Arc<Tcp>, number: u32| {
        let mut frame = end.lease(FRAME_BYTES);
        frame.bytes_mut().fill(number as u8);
        frame
    };
    let (sender, receiver) = (&ends[0], &ends[1]);
    let before_streams = sender.second_network_streams(PeerId(1));
    // Sends more frames than the flow-control windows of one tag allow.
    let full = |i| sender.send(PeerId(1), Tag::user(5, 1), frame(sender, i), limit);
    let sent = std::sync::atomic::AtomicU32::new(0);
    let all = 4 * WINDOW as u32;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..all {
                full(i).wait().unwrap();
                sent.fetch_add(1, Ordering::SeqCst);
            }
        });
        // Waits until no more frames leave.
        let mut before = 0;
        while sent.load(Ordering::SeqCst) > before || before == 0 {
            before = sent.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(300));
        }
        assert!(before >= WINDOW as u32 && before < all, "{before} frames in a window");
        for number in 2..12 {
            sender.send(PeerId(1), Tag::user(5, number), frame(sender, number), limit).wait().unwrap();
            let (_, got) =
                receiver.recv(Source::Peer(PeerId(0)), Tag::user(5, number), limit).wait().unwrap();
            assert!(got.bytes().iter().all(|&b| b == number as u8));
        }
        // The rendezvous has used tags of its own.
        assert_eq!(sender.second_network_streams(PeerId(1)) - before_streams, 11);
        for i in 0..all {
            let (_, got) = receiver.recv(Source::Peer(PeerId(0)), Tag::user(5, 1), limit).wait().unwrap();
            assert_eq!(got.bytes()[0], i as u8, "out of order");
        }
    });
}

#[test]
fn frames_keep_their_order_where_streams_are_ended_and_opened_again() {
    let ends = together(&Job::new(2));
    let limit = Nanos::from_millis(10_000);
    // Uses more tags than there are streams that stay open, in many rounds; no frame is taken before the end.
    let (tags, rounds) = (150_u32, 20_u8);
    for round in 0..rounds {
        // One more tag, for which an idle stream must be closed.
        for number in (0..tags).chain([1000 + u32::from(round)]) {
            let mut frame = ends[0].lease(9);
            frame.bytes_mut().fill(round);
            ends[0].send(PeerId(1), Tag::user(5, number), frame, limit).wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let opened = ends[0].second_network_streams(PeerId(1));
    assert!(opened > 2 * u64::from(tags), "{opened}");
    for number in 0..tags {
        for round in 0..rounds {
            let from = Source::Peer(PeerId(0));
            let (_, got) = ends[1].recv(from, Tag::user(5, number), limit).wait().unwrap();
            assert_eq!(got.bytes(), [round; 9], "tag {number}");
        }
    }
}

#[test]
fn peers_that_only_meet_at_a_relay_get_the_bits_of_all_others() {
    let relay = relay();
    let url = relay.url();
    let mut job = Job::new(3);
    job.ticket.addresses = vec![url.clone()];
    let ends: Vec<_> =
        job.join(|config| config.socket.direct = false).into_iter().map(Result::unwrap).collect();
    on_ranks(transports(&ends), |comm| sums(&comm, 20));
    assert_eq!(ends[0].second_network_path(PeerId(1)), Some(url));
    // Each rank sends at least one buffer of 40 KB for each of the 20 sums.
    assert!(relay.carried() > 3 * 20 * 40_000, "{}", relay.carried());
}

#[test]
fn peers_that_meet_at_a_relay_go_over_to_a_direct_path() {
    let relay = relay();
    let mut job = Job::new(2);
    job.ticket.addresses = vec![relay.url()];
    let ends: Vec<_> = job.join(|_| {}).into_iter().map(Result::unwrap).collect();
    let start = Instant::now();
    while ends[0].second_network_path(PeerId(1)).is_none_or(|path| path.starts_with("http")) {
        on_ranks(transports(&ends), |comm| sums(&comm, 1));
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", ends[0].second_network_path(PeerId(1)));
    }
    drop(relay);
    on_ranks(transports(&ends), |comm| sums(&comm, 5));
}

#[test]
fn a_relay_that_dies_and_comes_back_loses_nothing() {
    let first = relay();
    let address = first.address();
    let mut job = Job::new(2);
    job.ticket.addresses = vec![first.url()];
    let ends: Vec<_> =
        job.join(|config| config.socket.direct = false).into_iter().map(Result::unwrap).collect();
    let kept = std::sync::Mutex::new(Some(first));
    on_ranks(transports(&ends), |comm| {
        let comm = comm.with_deadline(Nanos::from_millis(60_000));
        sums(&comm, 3);
        if comm.rank().0 == 0 {
            drop(kept.lock().unwrap().take());
            std::thread::sleep(Duration::from_secs(2));
            let again = Relay::start(&RelayConfig::new(address)).unwrap();
            *kept.lock().unwrap() = Some(again);
        }
        sums(&comm, 3);
    });
    assert!(kept.lock().unwrap().as_ref().unwrap().carried() > 0);
}

#[test]
fn a_relay_serves_the_keys_of_its_list_alone() {
    let mut job = Job::new(2);
    let mut config = RelayConfig::new("127.0.0.1:0".parse().unwrap());
    config.allow = Some([job.identities[0].public()].into());
    let relay = Relay::start(&config).unwrap();
    job.ticket.addresses = vec![relay.url()];
    let joined = job.join(|config| {
        config.socket.direct = false;
        config.deadline = Duration::from_secs(3);
    });
    for error in joined.into_iter().map(Result::unwrap_err) {
        assert!(matches!(error, CommError::Missing { .. }), "{error}");
    }
}

/// 5 MB per second.
const RATE: Bandwidth = Bandwidth(40_000_000);
const BYTES: usize = 2_000_000;

#[test]
fn a_rate_in_all_is_shared_by_peers_and_one_to_each_is_not() {
    for (pace, sent) in
        [(Pace { each: RATE, ..Pace::default() }, BYTES), (Pace { all: RATE, ..Pace::default() }, 2 * BYTES)]
    {
        let ends: Vec<_> =
            Job::new(3).join(|config| config.pace = pace).into_iter().map(Result::unwrap).collect();
        on_ranks(transports(&ends), |comm| {
            comm.barrier().unwrap();
            let start = comm.now();
            if comm.rank() == Rank(0) {
                // Each peer gets messages of two tags, which share the peer's rate.
                let parts = [(1, 1), (2, 1), (1, 2), (2, 2)];
                let parts = parts.map(|(to, tag)| comm.start_send(Rank(to), tag, vec![7; BYTES / 2]));
                for part in parts {
                    part.wait().unwrap();
                }
            } else {
                for tag in [1, 2] {
                    assert!(comm.recv(Rank(0), tag).unwrap() == vec![7; BYTES / 2]);
                }
            }
            comm.barrier().unwrap();
            let time = comm.now().saturating_sub(start).as_secs_f64();
            // After a pause, the bytes of 10 ms may be sent at once.
            let least = sent as f64 * 8.0 / RATE.0 as f64 - 0.011;
            assert!((least..2.0 * least + 0.5).contains(&time), "{time} s, at least {least} s");
        });
    }
    let mut slow = Job::new(2).config(0);
    slow.pace = Pace { all: Bandwidth(100), ..Pace::default() };
    let error = slow.join().unwrap_err();
    assert!(
        matches!(error, CommError::Argument { what: "rate in bits per second (minimum)", got: 100, .. }),
        "{error}"
    );
}

#[test]
fn paths_tell_round_trips_and_packets_and_what_waits_for_the_rate() {
    const SLOW: Bandwidth = Bandwidth(8_000_000);
    let pace = Pace { all: SLOW, ..Pace::default() };
    let ends: Vec<_> =
        Job::new(2).join(|config| config.pace = pace).into_iter().map(Result::unwrap).collect();
    on_ranks(transports(&ends), |comm| {
        let path = || comm.transport().path(PeerId(1 - comm.rank().0)).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == Rank(0) {
            let before = path().queued_for;
            // Takes 200 ms at the rate limit.
            let sent = comm.start_send(Rank(1), 1, vec![7; 200_000]);
            let queued = path().queued.0;
            assert!((100_000..=201_000).contains(&queued), "{queued}");
            sent.wait().unwrap();
            comm.recv(Rank(1), 2).unwrap();
            let after = path();
            let waited = after.queued_for.saturating_sub(before);
            assert!(after.queued.0 == 0 && waited >= Nanos::from_millis(150), "{after:?}");
            // Packets on the loopback have at most 64 KiB, and seldom more than 1500 bytes.
            assert!(after.packets >= 200_000 / 65_536, "{after:?}");
        } else {
            assert_eq!(comm.recv(Rank(0), 1).unwrap().len(), 200_000);
            comm.send(Rank(0), 2, &[1]).unwrap();
        }
        let (last, least) = (path().round_trip.unwrap(), path().least_round_trip.unwrap());
        assert!(least <= last && last < Nanos::from_millis(5_000), "{last} {least}");
        assert_eq!(comm.transport().path(PeerId(comm.rank().0)), None);
        comm.barrier().unwrap();
    });
}

/// Starts all ranks. Returns their sockets and endpoints, in order of ranks.
fn with_sockets(job: &Job, patience: Duration) -> (Vec<Arc<Socket>>, Vec<Arc<Tcp>>) {
    let mut configs: Vec<_> = (0..job.identities.len() as u32).map(|rank| job.config(rank)).collect();
    for config in &mut configs {
        config.socket.patience = patience;
    }
    let sockets: Vec<_> = configs.iter().map(|config| config.open().unwrap()).collect();
    let ends = std::thread::scope(|scope| {
        let joins: Vec<_> = configs
            .iter()
            .zip(&sockets)
            .map(|(config, socket)| scope.spawn(|| config.join_by(socket).unwrap()))
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    });
    (sockets, ends)
}

#[test]
fn a_peer_that_vanishes_is_lost_after_the_patience() {
    let (sockets, ends) = with_sockets(&Job::new(2), Duration::from_secs(6));
    let comm = Communicator::new(Arc::clone(&ends[0]) as Arc<dyn Transport>);
    let waits = comm.start_recv(Rank(1), 1);
    // Its port stays open, so that it could be a process that is cut off or frozen.
    sockets[1].vanish();
    let start = Instant::now();
    let error = waits.wait().unwrap_err();
    let reason = DownReason::Broken(std::io::ErrorKind::TimedOut);
    assert!(
        matches!(&error, CommError::PeerDown { peer: PeerId(1), reason: r, .. } if *r == reason),
        "{error}"
    );
    assert!((4..14).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
}

#[test]
fn a_peer_whose_process_has_ended_is_lost_before_the_patience() {
    let (mut sockets, mut ends) = with_sockets(&Job::new(3), IDLE_TIMEOUT);
    let comm = Communicator::new(Arc::clone(&ends[0]) as Arc<dyn Transport>);
    let waits = comm.start_recv(Rank(2), 1);
    // As if it was killed: it says nothing, and its port is closed.
    sockets[2].vanish();
    drop((ends.pop(), sockets.pop()));
    let error = waits.wait().unwrap_err();
    let reason = DownReason::Broken(std::io::ErrorKind::ConnectionRefused);
    assert!(
        matches!(&error, CommError::PeerDown { peer: PeerId(2), reason: r, .. } if *r == reason),
        "{error}"
    );
    // The others are silent for as long, and stay.
    let (limit, tag) = (Nanos::from_millis(10_000), Tag::user(5, 1));
    ends[1].send(PeerId(0), tag, ends[1].lease(1), limit).wait().unwrap();
    ends[0].recv(Source::Peer(PeerId(1)), tag, limit).wait().unwrap();
}

#[test]
fn who_does_not_belong_here_is_turned_away_with_the_reason_and_the_others_meet() {
    let job = Job::new(2);
    let refusal = |error: CommError| match error {
        CommError::Refused { reason, .. } => reason,
        other => panic!("{other}"),
    };
    let strangers = || {
        let stranger = Identity::generate().unwrap();
        let join = |secret: JoinSecret, expiry, job_name: &str, rank| {
            let ticket = Ticket { secret, expiry, ..job.ticket.clone() };
            let mut config = job.config(1);
            config.rank = rank;
            config.world_size = config.world_size.max(rank + 1);
            config.socket.security = Security::by_ticket(&stranger, &ticket);
            job_name.clone_into(&mut config.job);
            config.join().unwrap_err()
        };
        let good = || job.ticket.secret.clone();
        let forged = join(JoinSecret::generate().unwrap(), job.ticket.expiry, "farflung", 1);
        assert_eq!(refusal(forged), Refusal::Secret);
        assert_eq!(refusal(join(good(), job.ticket.expiry + 1, "farflung", 1)), Refusal::Secret);
        let old = join(job.secret.until(1000), 1000, "farflung", 1);
        assert!(old.to_string().contains("expired"), "{old}");
        assert_eq!(refusal(join(good(), job.ticket.expiry, "another", 1)), Refusal::Job);
        let larger = join(good(), job.ticket.expiry, "farflung", 2);
        assert_eq!(refusal(larger), Refusal::WorldSize { want: 2, got: 3 });
        // The host has another key than the ranks expect.
        let mut config = job.config(1);
        let host = stranger.public();
        config.socket.security =
            Security::by_ticket(&job.identities[1], &Ticket { host, ..job.ticket.clone() });
        config.deadline = Duration::from_secs(1);
        assert!(matches!(config.join(), Err(CommError::Missing { .. })));
    };
    std::thread::scope(|scope| {
        let host = scope.spawn(|| {
            let config = job.config(0);
            let joined = config.join().unwrap();
            (joined, config.socket.security.refused().counts())
        });
        strangers();
        let guest = job.config(1).join().unwrap();
        let (host, refused) = host.join().unwrap();
        assert_eq!(
            (refused.get("wrong secret"), refused.get("expired ticket"), refused.get("another job")),
            (Some(&2), Some(&1), Some(&1)),
            "{refused:?}"
        );
        on_ranks(transports(&[host, guest]), |comm| sums(&comm, 2));
    });
}

/// Sends bytes as a stranger, over a new connection, and returns the answer.
async fn strange(endpoint: &::iroh::Endpoint, host: &::iroh::EndpointAddr, bytes: &[u8]) -> Vec<u8> {
    let connection = loop {
        // The host may not listen yet.
        match endpoint.connect(host.clone(), b"farflung/1").await {
            Ok(connection) => break connection,
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(bytes).await.unwrap();
    recv.read_to_end(10_000).await.unwrap_or_default()
}

#[test]
fn a_stranger_that_speaks_another_protocol_is_refused_and_holds_up_nobody() {
    let job = Job::new(2);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    std::thread::scope(|scope| {
        let host = scope.spawn(|| {
            let config = job.config(0);
            (config.join().unwrap(), config.socket.security.refused().counts())
        });
        let (endpoint, silent) = runtime.block_on(async {
            let builder = ::iroh::Endpoint::builder(::iroh::endpoint::presets::Minimal);
            let endpoint = builder.relay_mode(::iroh::endpoint::RelayMode::Disabled).bind().await.unwrap();
            let key = ::iroh::PublicKey::from_bytes(job.identities[0].public().bytes()).unwrap();
            let host = ::iroh::EndpointAddr::new(key).with_ip_addr(job.ticket.addresses[0].parse().unwrap());
            // Sends a frame of version 250.
            let mut other = [0; 32];
            other[..5].copy_from_slice(b"FFLC\xfa");
            let answer = strange(&endpoint, &host, &other).await;
            assert!(answer.ends_with(&[3, 4, VERSION, 250]), "no refusal by version: {answer:?}");
            assert!(strange(&endpoint, &host, &[7; 4000]).await.is_empty());
            // Sends a frame that claims to be longer than a greeting may be.
            let mut long = [0; 32];
            long[..6].copy_from_slice(&[b'F', b'F', b'L', b'C', VERSION, 4]);
            long[25] = 0xff;
            assert!(strange(&endpoint, &host, &long).await.is_empty());
            // Opens a connection that stays silent.
            let silent = endpoint.connect(host.clone(), b"farflung/1").await.unwrap();
            (endpoint, silent)
        });
        let start = Instant::now();
        let guest = job.config(1).join().unwrap();
        let (host, refused) = host.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert_eq!((refused.get("another version"), refused.get("garbage")), (Some(&1), Some(&2)));
        on_ranks(transports(&[host, guest]), |comm| sums(&comm, 2));
        runtime.block_on(async {
            drop(silent);
            endpoint.close().await;
        });
    });
}

#[test]
fn a_member_that_is_shut_out_by_the_list_does_not_join() {
    let job = Job::new(2);
    let joined = job.join(|config| {
        // The guest ends at once when it is refused, and the host by its limit.
        config.deadline = Duration::from_secs(if config.rank == 0 { 3 } else { 60 });
        if config.rank == 0 {
            config.socket.security =
                config.socket.security.clone().allowing([Identity::generate().unwrap().public()]);
        }
    });
    let [host, guest] = joined.try_into().unwrap();
    assert!(matches!(host, Err(CommError::Missing { .. })));
    assert!(matches!(guest, Err(CommError::Refused { reason: Refusal::Key, .. })));
}

#[test]
fn what_cannot_work_says_what_to_do() {
    let job = Job::new(2);
    let mut config = job.config(1);
    config.socket.security = Security::by_secret(&job.identities[1], &job.secret);
    let text = config.join().unwrap_err().to_string();
    assert!(text.contains("a ticket"), "{text}");
    config.socket.security = Security::unencrypted();
    assert!(config.join().unwrap_err().to_string().contains("a ticket"));
    let mut config = job.config(1);
    config.socket.relays = vec!["10.0.0.1:3340".to_owned()];
    let text = config.join().unwrap_err().to_string();
    assert!(text.contains("http://host:port"), "{text}");
    let mut config = job.config(1);
    config.deadline = Duration::from_millis(500);
    let text = config.join().unwrap_err().to_string();
    assert!(text.contains("still missing: rank 0"), "{text}");
    // The port of rank 0 is in use.
    let _taken = std::net::UdpSocket::bind(&job.ticket.addresses[0]).unwrap();
    let text = job.config(0).join().unwrap_err().to_string();
    assert!(text.contains(&job.ticket.addresses[0]), "{text}");
    let alone = Job::new(1).config(0).join().unwrap();
    on_ranks(transports(&[alone]), |comm| sums(&comm, 1));
}
