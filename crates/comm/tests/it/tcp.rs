//! Faults that only sockets have: ports in use, connections and invalid bytes from strangers, and peers that
//! vanish.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(clippy::float_cmp, reason = "these sums are exact")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::{free_port, on_ranks, tcp_at};
use farflung_base::{Nanos, PeerId, Philox, Rank};
use farflung_comm::tcp::{Config, join};
use farflung_comm::{
    CommError, Communicator, Control, DownReason, HEADER_BYTES, Message, Parsed, PeerEvent, ReduceOp,
    Refusal, Transport, VERSION, WireError, parse,
};

fn config(rank: u32, size: u32, port: u16) -> Config {
    let mut config = Config::new(rank, size, format!("127.0.0.1:{port}"));
    config.deadline = Duration::from_secs(10);
    config
}

#[test]
fn ipv6_works_where_the_machine_has_it() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let sums = on_ranks(tcp_at(3, &format!("[::1]:{}", free_port()), 1), |comm| {
        let mut x = [1.0_f32, comm.rank().0 as f32];
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        x
    });
    assert_eq!(sums, [[3.0, 3.0]; 3]);
}

/// Time limit of ranks of which two meet, and others never come. It must be long enough for the two to meet on
/// a busy machine.
const WAITS_FOR_THE_OTHER: Duration = Duration::from_secs(3);

#[test]
fn the_missing_are_named_to_everyone() {
    let port = free_port();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = [0, 2]
            .map(|rank| {
                let mut config = config(rank, 4, port);
                config.deadline = WAITS_FOR_THE_OTHER;
                scope.spawn(move || join(&config).unwrap_err())
            })
            .into_iter()
            .collect();
        for thread in waiting {
            let error = thread.join().unwrap();
            let CommError::Missing { ranks, .. } = &error else { unreachable!("{error}") };
            assert_eq!(ranks, &[Rank(1), Rank(3)]);
            assert!(error.to_string().contains("rank 1, rank 3"), "{error}");
        }
    });
    let mut alone = config(1, 2, free_port());
    alone.deadline = Duration::from_millis(200);
    assert!(matches!(join(&alone).unwrap_err(), CommError::Missing { ranks, .. } if ranks == [Rank(0)]));
}

/// Returns addresses that were free a moment ago.
fn peers(n: usize) -> Vec<String> {
    let held: Vec<_> = (0..n).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    held.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect()
}

#[test]
fn ranks_that_know_all_addresses_need_no_master() {
    let all = peers(4);
    let sums = std::thread::scope(|scope| {
        let joins: Vec<_> = (0..4)
            .map(|rank| {
                let config = Config::with_peers(rank, all.clone());
                scope.spawn(move || {
                    let comm = Communicator::new(join(&config).unwrap());
                    let mut x = [f64::from(rank)];
                    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    x[0]
                })
            })
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(sums, [6.0; 4]);

    let all = peers(4);
    std::thread::scope(|scope| {
        let waiting = [0, 2].map(|rank| {
            let mut config = Config::with_peers(rank, all.clone());
            config.deadline = WAITS_FOR_THE_OTHER;
            scope.spawn(move || join(&config).unwrap_err())
        });
        for thread in waiting {
            let error = thread.join().unwrap();
            let CommError::Missing { ranks, .. } = &error else { unreachable!("{error}") };
            assert_eq!(ranks, &[Rank(1), Rank(3)]);
        }
    });
    let mut short = Config::with_peers(0, all);
    short.peers.pop();
    assert!(matches!(join(&short).unwrap_err(), CommError::Argument { what: "number of peers", .. }));
}

#[test]
fn a_port_in_use_and_a_bad_address_are_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = join(&config(0, 1, port)).unwrap_err();
    assert!(matches!(error, CommError::Io { what: "listen at", .. }), "{error}");
    assert!(error.to_string().contains(&port.to_string()), "{error}");
    let error = join(&Config::new(0, 1, "nonsense")).unwrap_err();
    assert!(matches!(error, CommError::Io { what: "master address", .. }), "{error}");
    let error = join(&config(3, 2, port)).unwrap_err();
    assert!(
        matches!(
            error,
            CommError::Argument { what: "rank (must be below the world size)", got: 3, want: 2, .. }
        ),
        "{error}"
    );
}

#[test]
fn the_wrong_ones_are_refused_and_the_job_goes_on() {
    let port = free_port();
    std::thread::scope(|scope| {
        let master = scope.spawn(move || join(&config(0, 2, port)).unwrap());
        let wrong_size = join(&config(1, 3, port)).unwrap_err();
        let want = Refusal::WorldSize { want: 2, got: 3 };
        assert!(matches!(wrong_size, CommError::Refused { reason, .. } if reason == want), "{wrong_size}");
        let mut other = config(1, 2, port);
        "another".clone_into(&mut other.job);
        let wrong_job = join(&other).unwrap_err();
        assert!(matches!(wrong_job, CommError::Refused { reason: Refusal::Job, .. }), "{wrong_job}");

        // A greeting of another version is answered with the reason.
        let mut old = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut header = [0; HEADER_BYTES];
        header[..6].copy_from_slice(&[b'F', b'F', b'L', b'C', VERSION + 1, 4]);
        old.write_all(&header).unwrap();
        let mut answer = Vec::new();
        old.read_to_end(&mut answer).unwrap();
        let want = Control::Refuse(Refusal::Version { want: VERSION, got: VERSION + 1 });
        let length = answer.len();
        assert_eq!(parse(&answer), Ok(Parsed::Whole(Message::Control(want), length)));

        // A silent connection and random bytes, some behind a valid beginning of a header, do not delay the
        // ranks.
        let silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let rng = Philox::new(3, 3);
        for i in 0..50 {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let mut bytes: Vec<u8> = (0..100).map(|j| rng.word(100 * i + j) as u8).collect();
            if i % 2 == 0 {
                bytes[..6].copy_from_slice(&[b'F', b'F', b'L', b'C', VERSION, 4]);
            }
            if i % 4 == 0 {
                bytes[6] = 0;
                bytes[24..28].copy_from_slice(&[64, 0, 0, 0]);
            }
            stream.write_all(&bytes).unwrap();
        }
        let right = join(&config(1, 2, port)).unwrap();
        let master = master.join().unwrap();
        drop(silent);
        assert_eq!((master.size(), right.size()), (2, 2));
        assert_eq!(master.events(), [PeerEvent::Up(PeerId(1))]);
    });
}

/// Joins as rank 1, then sends raw bytes.
fn impostor(port: u16, bytes: &[u8]) -> TcpStream {
    let mut stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let hello = Control::Hello {
        rank: 1,
        world_size: 2,
        job: "farflung",
        listen: "1.2.3.4:5",
        epoch: 0,
        key: &[],
        digest: &[],
    };
    stream.write_all(&message(4, &hello.encode())).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// Encodes a frame by the specification in the README.
fn message(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = [0_u8; HEADER_BYTES];
    header[..6].copy_from_slice(&[b'F', b'F', b'L', b'C', VERSION, kind]);
    header[6] = 1;
    header[24..28].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    let whole = [&header[..28], payload].concat();
    let crc = !whole.iter().fold(!0_u32, |crc, &b| {
        (0..8).fold(crc ^ u32::from(b), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 })
    });
    [&whole[..28], &crc.to_le_bytes(), payload].concat()
}

#[test]
fn hostile_frames_end_the_peer_and_nothing_else() {
    let data = message(1, &[0; 8]);
    let with = |at: usize, value: u8| {
        let mut bytes = data.clone();
        bytes[at] = value;
        bytes
    };
    let cases = [
        (with(0, 0), WireError::Magic),
        (with(4, 9), WireError::Version { want: VERSION, got: 9 }),
        (with(5, 99), WireError::Kind(99)),
        (with(5, 4), WireError::Checksum),
        (message(4, b"hello again"), WireError::Malformed("control message")),
        (with(6, 7), WireError::Channel(7)),
        (with(27, 0x7F), WireError::Length { max: 262_144, got: 0x7F00_0008 }),
        (with(HEADER_BYTES + 3, 1), WireError::Checksum),
    ];
    for (bytes, want) in cases {
        let port = free_port();
        std::thread::scope(|scope| {
            let master = scope.spawn(move || {
                let comm = Communicator::new(join(&config(0, 2, port)).unwrap());
                comm.with_deadline(Nanos::from_millis(5_000)).barrier().unwrap_err()
            });
            let _stream = impostor(port, &bytes);
            let error = master.join().unwrap();
            let CommError::PeerDown { peer, reason: DownReason::Protocol(got), .. } = &error else {
                unreachable!("{error}")
            };
            assert_eq!((*peer, got), (PeerId(1), &want));
        });
    }
}

#[test]
fn a_flood_is_not_read_beyond_the_bound() {
    let port = free_port();
    std::thread::scope(|scope| {
        let master = scope.spawn(move || {
            let comm = Communicator::new(join(&config(0, 2, port)).unwrap());
            // Waits for another message while the peer sends frames that no operation receives.
            let error = comm.clone().with_deadline(Nanos::from_millis(600)).recv(Rank(1), 5).unwrap_err();
            assert!(matches!(error, CommError::Deadline { peer: PeerId(1), .. }), "{error}");
            comm.stats().received.payload.0 as usize
        });
        let mut stream = impostor(port, &[]);
        stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let frame = message(1, &vec![0; 262_144]);
        let mut sent = 0;
        while stream.write_all(&frame).is_ok() && sent < 1_000 {
            sent += 1;
        }
        assert!(sent < 400, "{sent} frames of a flood were taken");
        let held = master.join().unwrap();
        assert!(held <= farflung_comm::tcp::MAX_UNREAD_BYTES + 16 * 262_144, "{held}");
    });
}

#[test]
fn a_peer_that_dies_in_the_middle_fails_the_others_and_is_named() {
    let errors = on_ranks(tcp_at(4, &format!("127.0.0.1:{}", free_port()), 1), |comm| {
        let start = comm.now();
        let pending = comm.start_all_reduce(vec![1.0_f32; 8 << 20], ReduceOp::Sum);
        if comm.rank().0 == 2 {
            std::thread::sleep(Duration::from_millis(5));
            drop(pending);
            return None;
        }
        let error = pending.wait().unwrap_err();
        Some((error, comm.now() - start))
    });
    for (error, took) in errors.iter().flatten() {
        assert_eq!(error.peer(), Some(PeerId(2)), "{error}");
        assert!(*took < Nanos::from_millis(5_000), "{took}");
    }
    assert_eq!(errors.iter().flatten().count(), 3);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures real overlap")]
fn a_started_all_reduce_goes_on_while_nobody_waits() {
    let overlapped = on_ranks(tcp_at(2, &format!("127.0.0.1:{}", free_port()), 1), |comm| {
        let pending = comm.start_all_reduce(vec![1.0_f32; 4 << 20], ReduceOp::Sum);
        // The sleep stands for a computation that leaves the cores free.
        std::thread::sleep(Duration::from_millis(1_500));
        let start = Instant::now();
        let x = pending.wait().unwrap();
        assert!(x.iter().all(|&v| v == 2.0));
        start.elapsed()
    });
    assert!(overlapped.iter().all(|left| *left < Duration::from_millis(100)), "{overlapped:?}");
}

#[test]
fn two_threads_of_a_rank_may_wait_at_once() {
    on_ranks(tcp_at(2, &format!("127.0.0.1:{}", free_port()), 1), |comm| {
        let halves = [comm.split(0, 0).unwrap(), comm.split(0, 0).unwrap()];
        std::thread::scope(|scope| {
            for half in &halves {
                scope.spawn(move || {
                    for _ in 0..200 {
                        let mut x = vec![1.0_f64; 1000];
                        half.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        assert!(x.iter().all(|&v| v == 2.0));
                    }
                });
            }
        });
    });
}

#[test]
fn the_number_of_streams_is_bounded_and_the_same_on_all_ranks() {
    for streams in [0, 17] {
        let mut config = config(0, 2, 0);
        config.streams = streams;
        let error = join(&config).unwrap_err();
        assert!(
            matches!(error, CommError::Argument { what: "number of streams (from 1 to the maximum)", .. }),
            "{error}"
        );
    }
    let port = free_port();
    let disagreeing = |(rank, streams): (u32, usize)| {
        let mut config = config(rank, 2, port);
        (config.streams, config.deadline) = (streams, Duration::from_millis(500));
        let comm = Communicator::new(join(&config)?).with_deadline(Nanos::from_millis(500));
        comm.barrier()
    };
    let errors: Vec<_> = std::thread::scope(|scope| {
        let threads = [(0, 2), (1, 1)].map(|place| scope.spawn(move || disagreeing(place)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(errors.iter().all(Result::is_err), "{errors:?}");
}

/// Opens many more silent connections than the listener keeps waiting.
#[test]
fn connections_that_say_nothing_keep_no_rank_out() {
    let port = free_port();
    std::thread::scope(|scope| {
        let master = scope.spawn(move || join(&config(0, 3, port)));
        let mut idle = Vec::new();
        while idle.len() < 400 {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => idle.push(stream),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        let ranks = [1, 2].map(|rank| scope.spawn(move || join(&config(rank, 3, port))));
        let others = ranks.map(|rank| rank.join().unwrap().unwrap());
        let master = master.join().unwrap().unwrap();
        assert!(others.iter().all(|rank| rank.size() == 3) && master.size() == 3);
        drop(idle);
    });
}

/// A rank that dies while others are still missing, and is started again, replaces its dead process.
#[test]
fn a_rank_that_comes_again_takes_its_own_place() {
    let port = free_port();
    std::thread::scope(|scope| {
        let master = scope.spawn(move || join(&config(0, 3, port)));
        let mut dead = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        let greet = Control::Hello {
            rank: 1,
            world_size: 3,
            job: "farflung",
            listen: "127.0.0.1:9",
            epoch: 0,
            key: &[],
            digest: &[],
        };
        dead.write_all(&message(4, &greet.encode())).unwrap();
        // It has joined now: another process that claims rank 1 is refused.
        let taken = loop {
            match join(&config(1, 3, port)).unwrap_err() {
                CommError::Refused { reason, .. } => break reason,
                CommError::Io { .. } => {}
                other => unreachable!("{other}"),
            }
        };
        assert_eq!(taken, Refusal::Taken(1));
        drop(dead);
        let ranks = [1, 2].map(|rank| scope.spawn(move || join(&config(rank, 3, port))));
        let others = ranks.map(|rank| rank.join().unwrap().unwrap());
        let master = master.join().unwrap().unwrap();
        assert!(others.iter().all(|rank| rank.size() == 3) && master.size() == 3);
    });
}
