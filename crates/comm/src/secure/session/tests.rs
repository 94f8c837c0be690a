//! Tests of sessions against each other, against rustls, and against peers that send invalid data.

use std::io::Cursor;

use super::super::identity::Identity;
use super::*;

fn tls(number: u8) -> tls::Tls {
    tls::Tls::new(&Identity::from_seed([number; 32]))
}

/// Carries the pending encrypted bytes from one session to the other. Returns their number.
fn carry(from: &mut Session, to: &mut Session) -> Result<usize, SessionError> {
    let count = from.to_send().len().min(to.receive_buffer().len());
    to.receive_buffer()[..count].copy_from_slice(&from.to_send()[..count]);
    from.sent(count);
    to.received(count)?;
    Ok(count)
}

fn pair() -> (Session, Session) {
    let (mut client, mut server) =
        (Session::client(&tls(1), Vec::new()).unwrap(), Session::server(&tls(2)).unwrap());
    for _ in 0..3 {
        assert_eq!((client.seal(&[]), server.seal(&[])), (Ok(0), Ok(0)));
        carry(&mut client, &mut server).unwrap();
        assert_eq!(server.seal(&[]), Ok(0));
        carry(&mut server, &mut client).unwrap();
    }
    assert!(client.is_established() && server.is_established());
    (client, server)
}

#[test]
fn both_sides_know_each_others_key_and_share_an_exporter() {
    let (client, server) = pair();
    assert_eq!(client.peer(), Some(Identity::from_seed([2; 32]).public()));
    assert_eq!(server.peer(), Some(Identity::from_seed([1; 32]).public()));
    assert_eq!(client.exporter(), server.exporter());
    assert_ne!(client.exporter(), pair().0.exporter());
}

#[test]
fn the_exporter_is_the_one_of_rustls() {
    let mut client = Session::client(&tls(1), Vec::new()).unwrap();
    let mut server = rustls::ServerConnection::new(Arc::new(tls(2).server)).unwrap();
    while !client.is_established() || server.is_handshaking() {
        client.seal(&[]).unwrap();
        let count = client.to_send().len();
        if count > 0 {
            server.read_tls(&mut Cursor::new(client.to_send())).unwrap();
            server.process_new_packets().unwrap();
            client.sent(count);
        }
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        client.receive_buffer()[..bytes.len()].copy_from_slice(&bytes);
        client.received(bytes.len()).unwrap();
    }
    let theirs = server.export_keying_material([0; 32], LABEL.as_bytes(), Some(&[])).unwrap();
    assert_eq!(client.exporter(), Some(&theirs));
}

#[test]
fn bytes_come_through_in_any_portions() {
    let (mut client, mut server) = pair();
    server.trust();
    let sent: Vec<u8> = (0..700_000_u32).map(|i| (i % 251) as u8).collect();
    let rng = farflung_base::Philox::new(19, 2);
    let mut portion = (0..).map(|i| 1 + rng.word(i) as usize % 50_000);
    let (mut at, mut got) = (0, Vec::<u8>::new());
    while got.len() < sent.len() {
        let end = (at + portion.next().unwrap()).min(sent.len());
        let middle = (at + portion.next().unwrap() % 40).min(end);
        let slices = [IoSlice::new(&sent[at..middle]), IoSlice::new(&[]), IoSlice::new(&sent[middle..end])];
        at += client.seal(&slices).unwrap();
        carry(&mut client, &mut server).unwrap();
        let (mut first, mut second) =
            (vec![0; portion.next().unwrap() % 100], vec![0; portion.next().unwrap()]);
        let count = server.open(&mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)]).unwrap();
        let whole = [first, second].concat();
        got.extend(&whole[..count]);
    }
    assert!(got == sent);
}

#[test]
fn a_stranger_may_say_little_and_nothing_panics() {
    let hello = {
        let mut client = Session::client(&tls(1), Vec::new()).unwrap();
        client.seal(&[]).unwrap();
        client.to_send().to_vec()
    };
    let hear = |bytes: &[u8]| {
        let mut server = Session::server(&tls(2)).unwrap();
        let mut rest = bytes;
        loop {
            let count = rest.len().min(server.receive_buffer().len()).min(700);
            if count == 0 {
                return Err(SessionError::TooMuch(MAX_UNPROVEN_BYTES));
            }
            server.receive_buffer()[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            server.received(count)?;
            let mut place = [0; 64];
            server.open(&mut [IoSliceMut::new(&mut place)])?;
            if rest.is_empty() {
                return Ok(server.total_received);
            }
        }
    };
    assert_eq!(hear(&hello), Ok(hello.len()));
    assert_eq!(hear(b"FFLC\x04"), Err(SessionError::NotEncrypted));
    assert_eq!(hear(b"GET / HTTP/1.1\r\n"), Err(SessionError::NotTls));
    // The beginning of a record of the largest length, whose end is beyond the limit.
    let long = [&[0x16, 3, 1, 0x40, 0][..], &[1; 5000]].concat();
    assert_eq!(hear(&long), Err(SessionError::TooMuch(MAX_UNPROVEN_BYTES)));
    let rng = farflung_base::Philox::new(19, 3);
    for i in 0..3000 {
        let mut bytes = hello.clone();
        for j in 0..=(i % 4) {
            let word = rng.word(8 * i + j);
            let at = word as usize % bytes.len();
            bytes[at] = (word >> 16) as u8;
        }
        bytes.truncate(rng.word(8 * i + 7) as usize % (2 * bytes.len()));
        // Whatever bytes a stranger sends, the session does not panic, and accepts fewer than the limit.
        assert!(hear(&bytes).is_ok_and(|heard| heard < MAX_UNPROVEN_BYTES) || hear(&bytes).is_err());
    }
}

#[test]
fn much_may_come_right_behind_the_proof() {
    let (mut client, mut server) = pair();
    server.trust();
    let sent = vec![7; 60_000];
    assert_eq!(server.seal(&[IoSlice::new(&sent)]), Ok(sent.len()));
    // As many bytes as fit arrive at once. The first of them stand for the proof of the join secret.
    assert!(carry(&mut server, &mut client).unwrap() <= MAX_UNPROVEN_BYTES);
    let mut got = vec![0; 64];
    while client.open(&mut [IoSliceMut::new(&mut got)]).unwrap() == 0 {
        // A full record is longer than the limit that holds before the proof. A real proof is in a short
        // record.
        client.trust();
        carry(&mut server, &mut client).unwrap();
    }
    assert!(got.iter().all(|&byte| byte == 7));
}

#[test]
fn the_proof_may_come_with_the_end_of_the_handshake() {
    let (mut client, mut server) =
        (Session::client(&tls(1), Vec::new()).unwrap(), Session::server(&tls(2)).unwrap());
    client.seal(&[]).unwrap();
    carry(&mut client, &mut server).unwrap();
    server.seal(&[]).unwrap();
    carry(&mut server, &mut client).unwrap();
    client.seal(&[]).unwrap();
    assert!(client.is_established() && !server.is_established());
    let mut all = client.to_send().to_vec();
    client.sent(all.len());
    client.seal(&[IoSlice::new(b"proof")]).unwrap();
    all.extend(client.to_send());
    server.receive_buffer()[..all.len()].copy_from_slice(&all);
    server.received(all.len()).unwrap();
    let mut got = [0; 5];
    assert_eq!(server.open(&mut [IoSliceMut::new(&mut got)]), Ok(5));
    assert_eq!(&got, b"proof");
    assert_eq!(server.peer(), Some(Identity::from_seed([1; 32]).public()));
    assert_eq!(server.exporter(), client.exporter());
    // The record layer continues after the records that rustls has decrypted.
    server.trust();
    client.sent(client.to_send().len());
    client.seal(&[IoSlice::new(b"more.")]).unwrap();
    carry(&mut client, &mut server).unwrap();
    assert_eq!(server.open(&mut [IoSliceMut::new(&mut got)]), Ok(5));
    assert_eq!(&got, b"more.");
}
