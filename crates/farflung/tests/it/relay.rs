//! The simulated bad link, as a library and on the command line: bytes are forwarded unchanged, and the link
//! can be cut and corrupted. Its speed is measured by a bench.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::Duration;

use farflung::base::{Bandwidth, Nanos};
use farflung::relay::{Carries, LinkEmulator};

/// Starts a server that sends back all received bytes; returns its address.
fn echo() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut all = Vec::new();
                stream.read_to_end(&mut all).unwrap();
                // The other side may have closed the stream.
                let _ = stream.write_all(&all);
            });
        }
    });
    address
}

fn there_and_back(address: impl std::net::ToSocketAddrs, data: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(data).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    back
}

#[test]
fn streams_come_through_in_order_and_whole() {
    let mut relay = LinkEmulator::new("127.0.0.1:0", echo());
    relay.rate = "400mbit".parse().unwrap();
    (relay.delay, relay.jitter) = (Nanos::from_millis(2), Nanos::from_millis(3));
    (relay.loss, relay.retransmit) = (20_000, Nanos::from_millis(5));
    let relaying = relay.start().unwrap();
    let data: Vec<u8> = (0..1_000_003_u32).map(|i| (i % 251) as u8).collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| assert!(there_and_back(relaying.address(), &data) == data));
        }
    });
    assert_eq!(relaying.carried().map(|bytes| bytes.0), [2_000_006; 2]);
    // Flips one bit, once.
    relaying.corrupt();
    let spoilt = there_and_back(relaying.address(), &data[..1000]);
    let bits: u32 = spoilt.iter().zip(&data).map(|(a, b)| (a ^ b).count_ones()).sum();
    assert_eq!((spoilt.len(), bits), (1000, 1));
    assert!(there_and_back(relaying.address(), &data) == data);
}

#[test]
fn over_a_cut_link_nothing_comes_until_it_is_joined() {
    let relaying = LinkEmulator::new("127.0.0.1:0", echo()).start().unwrap();
    let mut stream = TcpStream::connect(relaying.address()).unwrap();
    relaying.cut(true);
    stream.write_all(b"hello").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
    let mut back = [0; 5];
    assert!(stream.read(&mut back).is_err(), "it came through");
    relaying.cut(false);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"hello");
    drop(relaying);
    assert_eq!(stream.read(&mut back).unwrap_or(0), 0);
}

#[test]
fn datagrams_come_to_whom_they_belong_and_are_lost_as_told() {
    let far = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut relay = LinkEmulator::new("127.0.0.1:0", far.local_addr().unwrap().to_string());
    (relay.carries, relay.rate) = (Carries::Udp, Bandwidth::UNLIMITED);
    let lossless = relay.start().unwrap();
    far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let clients = [(); 2].map(|()| {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(lossless.address()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket
    });
    let mut buffer = [0; 64];
    for (i, client) in clients.iter().enumerate() {
        client.send(&[i as u8; 9]).unwrap();
        let (n, from) = far.recv_from(&mut buffer).unwrap();
        assert_eq!(buffer[..n], [i as u8; 9]);
        far.send_to(&[10 + i as u8], from).unwrap();
    }
    for (i, client) in clients.iter().enumerate() {
        let n = client.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..n], [10 + i as u8]);
    }
    drop(lossless);
    relay.loss = 500_000;
    let half = relay.start().unwrap();
    clients[0].connect(half.address()).unwrap();
    far.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    for i in 0..200_u8 {
        clients[0].send(&[i]).unwrap();
        std::thread::sleep(Duration::from_micros(200));
    }
    let mut got = Vec::new();
    while far.recv(&mut buffer).is_ok() {
        got.push(buffer[0]);
    }
    assert!((50..150).contains(&got.len()) && got.is_sorted(), "{got:?}");
}

#[test]
fn a_rank_whose_list_names_the_relay_reaches_its_peer_through_it() {
    let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let [first, second] = [free(), free()];
    let farflung = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let mut relay = farflung()
        .args(["net", "relay", "--listen", "127.0.0.1:0", "--delay", "1ms", "--rate", "1gbit", "--to"])
        .arg(first.to_string())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(relay.stdout.take().unwrap());
    let mut at = String::new();
    said.read_line(&mut at).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let list = |name: &str, first: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, format!("peers = [\"{first}\", \"{second}\"]")).unwrap();
        path
    };
    let ranks = [list("0.toml", &first.to_string()), list("1.toml", at.trim())];
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            farflung()
                .args(["net", "bench", "--max", "100000", "--iterations", "2", "--json", "--peers"])
                .arg(&ranks[rank])
                .args(["--rank", &rank.to_string()])
                .spawn()
                .unwrap()
        })
        .collect();
    for (rank, process) in ranks.into_iter().enumerate() {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), if rank == 0 { 4 } else { 0 });
    }
    let stopped = Command::new("kill").args(["-INT", &relay.id().to_string()]).status().unwrap();
    assert!(stopped.success());
    let mut carried = String::new();
    said.read_line(&mut carried).unwrap();
    assert!(carried.ends_with(" back\n") && !carried.starts_with("0B"), "{carried}");
    assert!(relay.wait().unwrap().success());
    let wrong = farflung().args(["net", "relay", "--listen", "x", "--to", "127.0.0.1:1"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(1), "{wrong:?}");
}
