//! Connections with TLS: collectives give the same bits as without, and processes that do not belong to the job
//! are refused with the reason while the others continue.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use farflung_base::PeerId;
use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
use farflung_comm::tcp::{self, Config, Store, StoreHost};
use farflung_comm::{CommError, Communicator, DownReason, PeerEvent, ReduceOp, Refusal, Transport};

const SECRET: &[u8] = b"an old pond, a frog jumps in\n";

fn identity(number: u8) -> Identity {
    Identity::from_seed([number; 32])
}

fn by_secret(number: u8) -> Security {
    Security::by_secret(&identity(number), &JoinSecret::from_text(SECRET).unwrap())
}

fn ticket(host: &Identity, secret: &JoinSecret, expiry: u64) -> Ticket {
    let addresses = vec!["127.0.0.1:1".to_owned()];
    Ticket { addresses, host: host.public(), secret: secret.until(expiry), expiry }
}

fn free() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn config(rank: u32, size: u32, master: &str, security: &Security) -> Config {
    let mut config = Config::new(rank, size, master);
    config.deadline = Duration::from_secs(20);
    config.security = security.clone();
    config
}

/// Returns values that differ between ranks and between nearby elements.
fn values(rank: u32, length: usize) -> Vec<f32> {
    (0..length).map(|i| ((i * 31 + rank as usize * 7919) % 10007) as f32 / 97.0 - 50.0).collect()
}

/// Returns the results of all-reduces of several lengths on all ranks.
fn reduced(comms: Vec<Communicator>) -> Vec<Vec<Vec<u32>>> {
    let ranks = comms.into_iter().map(|comm| {
        thread::spawn(move || {
            let mut all = Vec::new();
            for length in [1, 1000, 70_000, 1_500_000] {
                let mut x = values(comm.rank().0, length);
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                all.push(x.iter().map(|v| v.to_bits()).collect());
            }
            comm.barrier().unwrap();
            all
        })
    });
    ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn joined(configs: Vec<Config>) -> Vec<Communicator> {
    let joining: Vec<_> =
        configs.into_iter().map(|config| thread::spawn(move || tcp::join(&config))).collect();
    joining.into_iter().map(|rank| Communicator::new(rank.join().unwrap().unwrap())).collect()
}

#[test]
fn encrypted_collectives_have_the_bits_of_clear_ones() {
    let secret = JoinSecret::generate().unwrap();
    let host = identity(1);
    let expiry = unix_seconds() + 60;
    let with_ticket = |rank: u8| match rank {
        0 => Security::by_secret(&host, &secret),
        rank => Security::by_ticket(&identity(rank + 1), &ticket(&host, &secret, expiry)),
    };
    for (size, streams) in [(2, 1), (3, 3)] {
        let job = |security: &dyn Fn(u8) -> Security| {
            let master = free();
            let configs = (0..size).map(|rank| {
                let mut config = config(rank, size, &master, &security(rank as u8));
                config.streams = streams;
                config
            });
            reduced(joined(configs.collect()))
        };
        let clear = job(&|_| Security::unencrypted());
        assert_eq!(clear[0], clear[1]);
        assert!(job(&by_secret) == clear, "{size} ranks with a secret");
        assert!(job(&with_ticket) == clear, "{size} ranks with a ticket");
    }
}

#[test]
fn ranks_that_know_their_addresses_need_no_host() {
    let peers: Vec<String> = (0..3).map(|_| free()).collect();
    let configs = (0..3).map(|rank| {
        let mut config = Config::with_peers(rank, peers.clone());
        config.security = by_secret(rank as u8);
        config
    });
    let all = reduced(joined(configs.collect()));
    assert!(all[0] == all[1] && all[1] == all[2]);
}

/// Checks that rank 0 with `host` refuses rank 1 with `stranger`, and then accepts one with `member`; returns
/// the error of `stranger`.
fn refused(host: &Security, stranger: &Security, member: &Security) -> CommError {
    let master = free();
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| tcp::join(&config(0, 2, &master, host)).unwrap());
        let error = tcp::join(&config(1, 2, &master, stranger)).unwrap_err();
        let rank_1 = tcp::join(&config(1, 2, &master, member)).unwrap();
        let rank_0 = rank_0.join().unwrap();
        assert_eq!((rank_0.size(), rank_1.size()), (2, 2));
        error
    })
}

fn reason(error: &CommError) -> Option<Refusal> {
    match error {
        CommError::Refused { reason, .. } | CommError::Unproven { reason, .. } => Some(*reason),
        _ => None,
    }
}

#[test]
fn whoever_does_not_belong_is_turned_away_by_name() {
    let host = by_secret(1);
    let other = Security::by_secret(&identity(2), &JoinSecret::generate().unwrap());
    let error = refused(&host, &other, &by_secret(2));
    assert_eq!(reason(&error), Some(Refusal::Secret), "{error}");
    assert!(error.to_string().contains("belongs to another run"), "{error}");
    assert_eq!(host.refused().counts()["wrong secret"], 1);

    // The stranger does not use encryption, but the host does.
    let error = refused(&host, &Security::unencrypted(), &by_secret(2));
    assert_eq!(reason(&error), Some(Refusal::EncryptionMismatch), "{error}");
    assert!(error.to_string().contains("--insecure"), "{error}");

    // The stranger uses encryption, but the host does not.
    let clear = Security::unencrypted();
    let error = refused(&clear, &by_secret(2), &Security::unencrypted());
    assert!(error.to_string().contains("not encrypted"), "{error}");
    assert_eq!(clear.refused().counts()["not encrypted"], 1);

    // The stranger has the secret, but its key is not in the list.
    let picky = by_secret(1).allowing([identity(2).public()]);
    let error = refused(&picky, &by_secret(3), &by_secret(2));
    assert_eq!(reason(&error), Some(Refusal::Key), "{error}");
    assert_eq!(picky.refused().counts()["stranger's key"], 1);
}

#[test]
fn tickets_hold_for_one_host_one_secret_and_some_time() {
    let (host, secret) = (identity(1), JoinSecret::generate().unwrap());
    let soon = unix_seconds() + 60;
    let of = |ticket: &Ticket| Security::by_ticket(&identity(2), ticket);
    let good = of(&ticket(&host, &secret, soon));
    let by_host = Security::by_secret(&host, &secret);

    let error = refused(&by_host, &of(&ticket(&host, &secret, soon - 4000)), &good);
    assert!(matches!(reason(&error), Some(Refusal::Expired { .. })), "{error}");
    assert!(
        error.to_string().contains("65 min ago") && error.to_string().contains("farflung ticket"),
        "{error}"
    );

    // A changed expiry is detected.
    let moved = Ticket { expiry: soon + 1, ..ticket(&host, &secret, soon) };
    assert_eq!(reason(&refused(&by_host, &of(&moved), &good)), Some(Refusal::Secret));

    // The ticket was made from the secret that was valid before the rotation.
    let fresh = JoinSecret::generate().unwrap();
    let by_fresh = |number| Security::by_secret(&identity(number), &fresh);
    let error = refused(&Security::by_secret(&host, &fresh), &good, &by_fresh(3));
    assert_eq!(reason(&error), Some(Refusal::Secret), "{error}");

    // The process that answers has another key than the host.
    let impostor = Security::by_secret(&identity(9), &secret);
    let error = refused(&impostor, &good, &Security::by_secret(&identity(3), &secret));
    assert!(matches!(error, CommError::Unproven { reason: Refusal::Key, .. }), "{error}");
}

/// Runs a proxy to an address, which keeps all bytes that pass and may change them.
fn relay(to: SocketAddr, change: fn(usize, &mut [u8])) -> (SocketAddr, Arc<Mutex<[Vec<u8>; 2]>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let kept = Arc::new(Mutex::new([Vec::new(), Vec::new()]));
    let all = Arc::clone(&kept);
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let Ok(server) = TcpStream::connect(to) else { continue };
            let ends = [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)];
            for (way, (mut from, mut to)) in ends.into_iter().enumerate() {
                let all = Arc::clone(&all);
                thread::spawn(move || {
                    let mut buffer = vec![0; 65536];
                    while let Ok(count @ 1..) = from.read(&mut buffer) {
                        let so_far = all.lock().unwrap()[way].len();
                        all.lock().unwrap()[way].extend(&buffer[..count]);
                        change(so_far, &mut buffer[..count]);
                        if to.write_all(&buffer[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (at, kept)
}

fn contains(bytes: &[u8], what: &[u8]) -> bool {
    bytes.windows(what.len()).any(|window| window == what)
}

#[test]
fn nothing_is_readable_on_the_way_and_a_replay_is_refused() {
    let (master, security) = (free(), by_secret(1));
    let (at, kept) = relay(master.parse().unwrap(), |_, _| {});
    let run = |security: &Security| {
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| tcp::join(&config(0, 2, &master, security)).unwrap());
            let rank_1 = tcp::join(&config(1, 2, &at.to_string(), security)).unwrap();
            let ranks = [Communicator::new(rank_0.join().unwrap()), Communicator::new(rank_1)];
            let [a, b] = ranks;
            scope.spawn(move || b.send(farflung_base::Rank(0), 3, b"gradients of a frog").unwrap());
            assert_eq!(a.recv(farflung_base::Rank(1), 3).unwrap(), b"gradients of a frog");
        });
    };
    // Control: without encryption, these bytes are found.
    run(&Security::unencrypted());
    let clear = std::mem::take(&mut *kept.lock().unwrap());
    assert!(contains(&clear[0], b"FFLC") && contains(&clear[0], b"gradients of a frog"));

    run(&security);
    let sealed = std::mem::take(&mut *kept.lock().unwrap());
    for way in &sealed {
        assert!(way.len() > 500);
        assert!(!contains(way, b"FFLC") && !contains(way, b"frog") && !contains(way, b"farflung\0"));
    }
    // Replays all bytes to the next job with the same secret and key; then a true rank joins.
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| tcp::join(&config(0, 2, &master, &security)).unwrap());
        let mut stranger = loop {
            if let Ok(stream) = TcpStream::connect(&master) {
                break stream;
            }
        };
        stranger.write_all(&sealed[0]).unwrap();
        stranger.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        let mut answer = Vec::new();
        // The connection may end by a reset too.
        let _ = stranger.read_to_end(&mut answer);
        tcp::join(&config(1, 2, &master, &security)).unwrap();
        rank_0.join().unwrap();
    });
    assert_eq!(security.refused().counts()["replayed or changed"], 1, "{:?}", security.refused().counts());
}

#[test]
fn what_is_changed_on_the_way_ends_the_link_by_name() {
    let (master, security) = (free(), by_secret(1));
    // Flips one bit that rank 1 sends after the handshake and the greetings.
    let (at, _) = relay(master.parse().unwrap(), |so_far, bytes| {
        if (so_far..so_far + bytes.len()).contains(&20_000) {
            bytes[20_000 - so_far] ^= 1;
        }
    });
    thread::scope(|scope| {
        let rank_1 = scope.spawn(|| {
            let comm = Communicator::new(tcp::join(&config(1, 2, &at.to_string(), &security)).unwrap());
            let _ = comm.send(farflung_base::Rank(0), 1, &vec![7; 100_000]);
            let _ = comm.recv(farflung_base::Rank(0), 2);
        });
        let rank_0 = tcp::join(&config(0, 2, &master, &security)).unwrap();
        let comm = Communicator::new(Arc::clone(&rank_0) as Arc<dyn Transport>);
        let error = comm.recv(farflung_base::Rank(1), 1).unwrap_err();
        assert!(error.to_string().contains("does not belong to this session"), "{error}");
        let events = rank_0.events();
        let broken =
            |event: &PeerEvent| matches!(event, PeerEvent::Down(PeerId(1), DownReason::SessionFailed(_)));
        assert!(events.iter().any(broken), "{events:?}");
        drop((comm, rank_0));
        rank_1.join().unwrap();
    });
}

#[test]
fn stores_prove_themselves_too() {
    let security = by_secret(1);
    let host = StoreHost::bind("127.0.0.1:0", "night", &security).unwrap();
    let address = host.address().to_string();
    let connect = |security: &Security| Store::connect(&address, "night", security, Duration::from_secs(20));
    let wrong = Security::by_secret(&identity(2), &JoinSecret::generate().unwrap());
    let error = connect(&wrong).unwrap_err();
    assert_eq!(reason(&error), Some(Refusal::Secret), "{error}");
    assert_eq!(reason(&connect(&Security::unencrypted()).unwrap_err()), Some(Refusal::EncryptionMismatch));
    // A silent connection does not delay other connections.
    let _silent = TcpStream::connect(&address).unwrap();
    let store = connect(&by_secret(2)).unwrap();
    let value: Vec<u8> = (0..200_000).map(|i| (i % 251) as u8).collect();
    store.put("value", &value).unwrap();
    assert_eq!(connect(&by_secret(3)).unwrap().wait(&["value"]).unwrap(), [value]);

    assert_eq!(security.refused().counts()["wrong secret"], 1);
}

#[test]
fn a_job_with_pauses_goes_on_for_some_time() {
    let master = free();
    let configs = (0..3).map(|rank| config(rank, 3, &master, &by_secret(1)));
    let ranks = joined(configs.collect()).into_iter().map(|comm| {
        thread::spawn(move || {
            for step in 0..200_u64 {
                let mut x: Vec<f32> = (0..50_000_u64).map(|i| ((i + step) % 1000) as f32).collect();
                comm.all_reduce(&mut x, ReduceOp::Sum)
                    .map_err(|e| format!("{} step {step}: {e}", comm.rank()))?;
                let right = |(i, v): (u64, &f32)| v.to_bits() == (3.0 * ((i + step) % 1000) as f32).to_bits();
                assert!((0..).zip(&x).all(right), "step {step}");
                let mut ends = [f32::from(u8::from(step == 199))];
                comm.all_reduce(&mut ends, ReduceOp::Max)
                    .map_err(|e| format!("{} step {step}: {e}", comm.rank()))?;
                assert_eq!(ends[0] > 0.0, step == 199);
                thread::sleep(Duration::from_millis(step % 7));
            }
            comm.barrier().map_err(|e| e.to_string())
        })
    });
    let ended: Vec<_> = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
}
