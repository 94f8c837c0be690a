//! The store: values that one process puts are found by others, missing ranks are named, and invalid requests
//! only end their sender's connection.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use farflung_base::{Philox, Rank};
use farflung_comm::secure::Security;
use farflung_comm::tcp::{Store, StoreHost, VALUE_BYTES};
use farflung_comm::{CommError, Control, Refusal};

const JOB: &str = "night";

fn host() -> (StoreHost, String) {
    let host = StoreHost::bind("127.0.0.1:0", JOB, &Security::unencrypted()).unwrap();
    let address = host.address().to_string();
    (host, address)
}

fn client(address: &str, millis: u64) -> Store {
    Store::connect(address, JOB, &Security::unencrypted(), Duration::from_millis(millis)).unwrap()
}

#[test]
fn values_numbers_and_firsts() {
    let (_host, address) = host();
    let (a, b) = (client(&address, 5_000), client(&address, 5_000));
    assert_eq!(b.get("k").unwrap(), None);
    a.put("k", b"one").unwrap();
    assert_eq!(b.get("k").unwrap().unwrap(), b"one");
    a.put("k", b"").unwrap();
    assert_eq!(b.get("k").unwrap().unwrap(), b"");
    assert!(!b.put_new("k", b"two").unwrap());
    assert!(b.put_new("new", b"two").unwrap());
    assert_eq!([a.add("n", 5).unwrap(), b.add("n", -7).unwrap(), a.add("n", 0).unwrap()], [5, -2, -2]);
    assert_eq!(a.get("n").unwrap().unwrap(), (-2_i64).to_le_bytes());
    let error = a.add("new", 1).unwrap_err();
    assert!(matches!(&error, CommError::Denied { op: "add", key } if key == "new"), "{error}");
    // The request is rejected before it is sent, so the client can be used further.
    assert!(matches!(a.put("long", &vec![0; VALUE_BYTES]), Err(CommError::Argument { .. })));
    let long = vec![7; VALUE_BYTES - 10];
    a.put("long", &long).unwrap();
    a.put("longer", &long).unwrap();
    assert_eq!(b.wait(&["long", "k", "longer"]).unwrap(), [&long[..], b"", &long]);
}

#[test]
fn everyone_adds_and_nothing_is_lost() {
    let (_host, address) = host();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let store = client(&address, 5_000);
                for _ in 0..50 {
                    store.add("sum", 1).unwrap();
                }
            });
        }
    });
    assert_eq!(client(&address, 5_000).add("sum", 0).unwrap(), 400);
}

#[test]
fn gather_waits_for_all_and_names_the_missing() {
    let (_host, address) = host();
    let gather = |name, rank: u32, size, millis| {
        client(&address, millis).gather(name, Rank(rank), size, &[rank as u8; 3])
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|rank| scope.spawn(move || gather("all", rank, 4, 5_000))).collect();
        for thread in all {
            assert_eq!(thread.join().unwrap().unwrap(), [[0; 3], [1; 3], [2; 3], [3; 3]]);
        }
        let some: Vec<_> = [0, 2].map(|rank| scope.spawn(move || gather("some", rank, 4, 200))).into();
        for thread in some {
            let error = thread.join().unwrap().unwrap_err();
            let CommError::Missing { ranks, .. } = &error else { unreachable!("{error}") };
            assert_eq!(ranks, &[Rank(1), Rank(3)]);
        }
    });
    let error = client(&address, 100).wait(&["some/0", "nowhere"]).unwrap_err();
    assert!(matches!(&error, CommError::Absent { keys, .. } if keys == &["nowhere"]), "{error}");
}

#[test]
fn other_jobs_and_nonsense_are_turned_away() {
    let (host, address) = host();
    let refused =
        Store::connect(&address, "day", &Security::unencrypted(), Duration::from_secs(5)).unwrap_err();
    assert!(matches!(refused, CommError::Refused { reason: Refusal::Job, .. }), "{refused}");
    let rng = Philox::new(4, 4);
    for i in 0..50 {
        let mut stream = TcpStream::connect(&address).unwrap();
        let bytes: Vec<u8> = (0..64).map(|j| rng.word(64 * i + j) as u8).collect();
        stream.write_all(&bytes).unwrap();
        let mut answer = Vec::new();
        // The connection may end with or without an error.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
    let store = client(&address, 5_000);
    store.put("k", &Control::Denied.encode()).unwrap();
    assert_eq!(store.get("k").unwrap().unwrap(), Control::Denied.encode());
    drop(host);
    assert!(matches!(store.get("k"), Err(CommError::Io { .. })));
    let nobody =
        Store::connect(&address, JOB, &Security::unencrypted(), Duration::from_millis(100)).unwrap_err();
    assert!(matches!(nobody, CommError::Io { .. }), "{nobody}");
}
