//! Tests of this record layer against that of rustls, and of records that are changed in transit.

use std::io::{Cursor, IoSlice, IoSliceMut, Read as _, Write as _};
use std::sync::Arc;

use farflung_base::Philox;
use rustls::crypto::{CryptoProvider, ring as provider};
use rustls::{ClientConnection, Connection, ServerConnection};

use super::super::identity::Identity;
use super::super::session::Session;
use super::super::session_error::SessionError;
use super::super::tls::{self, Tls};
use super::*;

fn tls_by(number: u8, suite: rustls::SupportedCipherSuite) -> Tls {
    let crypto = CryptoProvider { cipher_suites: vec![suite], ..provider::default_provider() };
    Tls::build(&Identity::from_seed([number; 32]), crypto).unwrap()
}

const SUITES: [rustls::SupportedCipherSuite; 2] = [
    provider::cipher_suite::TLS13_AES_128_GCM_SHA256,
    provider::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
];

/// Carries all pending bytes in both directions. Returns the plain bytes received by `ours`.
fn exchange(ours: &mut Session, theirs: &mut Connection) -> Result<Vec<u8>, SessionError> {
    let mut came = Vec::new();
    loop {
        ours.seal(&[])?;
        let sent = ours.to_send().len();
        let mut rest = Cursor::new(ours.to_send());
        while (rest.position() as usize) < sent {
            theirs.read_tls(&mut rest).unwrap();
            theirs.process_new_packets().unwrap();
        }
        ours.sent(sent);
        let mut bytes = Vec::new();
        while theirs.wants_write() {
            theirs.write_tls(&mut bytes).unwrap();
        }
        if bytes.is_empty() && sent == 0 {
            return Ok(came);
        }
        for part in bytes.chunks(999) {
            ours.receive_buffer()[..part.len()].copy_from_slice(part);
            ours.received(part.len())?;
            came.extend(take(ours)?);
        }
    }
}

/// Returns all plain bytes that can be decrypted now.
fn take(ours: &mut Session) -> Result<Vec<u8>, SessionError> {
    let mut all = Vec::new();
    let mut place = [0; 777];
    loop {
        let count = ours.open(&mut [IoSliceMut::new(&mut place)])?;
        if count == 0 {
            return Ok(all);
        }
        all.extend(&place[..count]);
    }
}

/// Makes an established session whose other end is rustls.
fn with_rustls(is_client: bool, suite: rustls::SupportedCipherSuite) -> (Session, Connection) {
    let (own, other) = (tls_by(1, suite), tls_by(2, suite));
    let (mut ours, mut theirs) = if is_client {
        let theirs = ServerConnection::new(Arc::new(other.server)).unwrap();
        (Session::client(&own, Vec::new()).unwrap(), Connection::from(theirs))
    } else {
        let theirs = ClientConnection::new(Arc::new(other.client), tls::nobody()).unwrap();
        (Session::server(&own).unwrap(), Connection::from(theirs))
    };
    exchange(&mut ours, &mut theirs).unwrap();
    assert!(ours.is_established() && !theirs.is_handshaking());
    assert_eq!(theirs.negotiated_cipher_suite(), Some(suite));
    assert_eq!(ours.peer(), Some(Identity::from_seed([2; 32]).public()));
    ours.trust();
    (ours, theirs)
}

fn walk(mut each: impl FnMut(Session, Connection)) {
    for suite in SUITES {
        for is_client in [true, false] {
            let (ours, theirs) = with_rustls(is_client, suite);
            each(ours, theirs);
        }
    }
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let rng = Philox::new(19, seed);
    (0..count as u64).map(|i| rng.word(i) as u8).collect()
}

/// Sends `sent` in calls with two slices each, and checks that rustls receives it.
fn send(ours: &mut Session, theirs: &mut Connection, sent: &[u8]) {
    let mut at = 0;
    let mut got = vec![0; sent.len()];
    let mut have = 0;
    while at < sent.len() {
        let middle = at + (sent.len() - at) / 3;
        at += ours.seal(&[IoSlice::new(&sent[at..middle]), IoSlice::new(&sent[middle..])]).unwrap();
        let length = ours.to_send().len();
        let mut rest = Cursor::new(ours.to_send());
        while (rest.position() as usize) < length {
            theirs.read_tls(&mut rest).unwrap();
            theirs.process_new_packets().unwrap();
            have += theirs.reader().read(&mut got[have..]).unwrap_or(0);
        }
        ours.sent(length);
    }
    while have < sent.len() {
        have += theirs.reader().read(&mut got[have..]).unwrap();
    }
    assert!(got == sent, "{} bytes", sent.len());
}

#[test]
fn rustls_opens_what_is_sealed_here_and_the_other_way_round() {
    walk(|mut ours, mut theirs| {
        for (seed, count) in
            [1, 2, 31, 32, 1000, PLAIN - 1, PLAIN, PLAIN + 1, 300_000].into_iter().enumerate()
        {
            let sent = bytes(count, seed as u64);
            send(&mut ours, &mut theirs, &sent);
            let mut came = Vec::new();
            for part in sent.chunks(50_000) {
                theirs.writer().write_all(part).unwrap();
                came.extend(exchange(&mut ours, &mut theirs).unwrap());
            }
            assert!(came == sent, "{count} bytes");
        }
        assert!(!ours.has_more());
        theirs.send_close_notify();
        assert_eq!(exchange(&mut ours, &mut theirs), Ok(Vec::new()));
        assert!(ours.has_ended());
    });
}

#[test]
fn keys_are_replaced_from_either_side() {
    walk(|mut ours, mut theirs| {
        ours.limit_records(3);
        for round in 0..4 {
            let sent = bytes(200_000, round);
            send(&mut ours, &mut theirs, &sent);
            // This also requests that this side replaces its key.
            theirs.refresh_traffic_keys().unwrap();
            theirs.writer().write_all(&sent[..40_000]).unwrap();
            assert!(exchange(&mut ours, &mut theirs).unwrap() == sent[..40_000]);
        }
    });
}

fn pair() -> (Session, Session) {
    let mut client = Session::client(&tls_by(1, SUITES[0]), Vec::new()).unwrap();
    let mut server = Session::server(&tls_by(2, SUITES[0])).unwrap();
    for _ in 0..3 {
        client.seal(&[]).unwrap();
        carry(&mut client, &mut server);
        server.seal(&[]).unwrap();
        carry(&mut server, &mut client);
    }
    client.trust();
    server.trust();
    assert!(client.is_established() && server.is_established());
    (client, server)
}

fn carry(from: &mut Session, to: &mut Session) {
    let count = from.to_send().len();
    to.receive_buffer()[..count].copy_from_slice(from.to_send());
    from.sent(count);
    to.received(count).unwrap();
    take(to).unwrap();
}

/// Returns one encrypted record with these bytes.
fn sealed(from: &mut Session, plain: &[u8]) -> Vec<u8> {
    assert_eq!(from.seal(&[IoSlice::new(plain)]), Ok(plain.len()));
    let record = from.to_send().to_vec();
    from.sent(record.len());
    record
}

fn hear(to: &mut Session, record: &[u8]) -> Result<Vec<u8>, SessionError> {
    to.receive_buffer()[..record.len()].copy_from_slice(record);
    to.received(record.len())?;
    take(to)
}

#[test]
fn what_is_changed_repeated_or_left_out_is_foreign_and_the_session_stays_broken() {
    let (mut client, mut server) = pair();
    let record = sealed(&mut client, b"some bytes");
    assert_eq!((record.len(), record.len() % RECORD_ALIGNMENT), (RECORD_ALIGNMENT, 0));
    for at in 0..record.len() {
        let (mut client, mut server) = pair();
        let mut record = sealed(&mut client, b"some bytes");
        record[at] ^= 1;
        // If the changed byte makes the record longer, the server waits for the rest.
        let is_longer = record[3..5] > sealed(&mut client, b"some bytes")[3..5];
        match hear(&mut server, &record) {
            Ok(came) => assert!(is_longer && came.is_empty(), "byte {at}"),
            Err(SessionError::Foreign) => {
                // The server sends one alert with the reason, and accepts nothing afterwards.
                let alert = server.to_send().to_vec();
                assert!(matches!(hear(&mut client, &alert), Err(SessionError::Alert(_))), "byte {at}");
                let next = sealed(&mut client, b"more");
                assert_eq!(hear(&mut server, &next), Err(SessionError::Foreign));
                assert_eq!(server.to_send().len(), alert.len());
            }
            Err(error) => assert!(at == 0 || at == 3, "byte {at}: {error}"),
        }
    }
    assert_eq!(hear(&mut server, &record), Ok(b"some bytes".to_vec()));
    assert_eq!(hear(&mut server, &record), Err(SessionError::Foreign));
    let (mut client, mut server) = pair();
    let _lost = sealed(&mut client, b"first");
    let second = sealed(&mut client, b"second");
    assert_eq!(hear(&mut server, &second), Err(SessionError::Foreign));
}

/// Returns two record layers with fixed keys, each of which decrypts what the other encrypts.
fn halves() -> (Records, Records) {
    let (mut ours, _) = pair();
    let (mut other, _) = pair();
    let (mut a, mut b) = (ours.take_records(), other.take_records());
    let half = |byte| {
        let key = UnboundKey::new(&AES_128_GCM, &[byte; 16]).unwrap();
        DirectionKey { key: LessSafeKey::new(key), iv: [byte; NONCE_LEN], next: 0 }
    };
    (a.tx, b.rx) = (half(1), half(1));
    (a.rx, b.tx) = (half(2), half(2));
    (a, b)
}

#[test]
fn messages_that_may_not_come_are_named() {
    let whole = |kind: u8, message: &[u8]| {
        let (mut a, mut b) = halves();
        let mut room = vec![0; 2 * RECORD];
        let used = a.seal_message(&mut room, kind, message).unwrap();
        assert_eq!(Records::whole(&room[..used]), Ok(Some(used)));
        assert_eq!(Records::whole(&room[..used - 1]), Ok(None));
        b.open(&mut room[..used]).map(|opened| opened == RecordContent::Done)
    };
    assert_eq!(whole(HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 1]), Ok(true));
    assert_eq!(whole(HANDSHAKE, &[NEW_TICKET, 0, 0, 0]), Ok(true));
    assert_eq!(whole(ALERT, &[1, 90]), Ok(true));
    assert_eq!(whole(ALERT, &[2, 20]), Err(SessionError::Alert("BadRecordMac".to_owned())));
    for (kind, message) in [
        (HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 2][..]),
        (HANDSHAKE, &[KEY_UPDATE, 0, 0, 1]),
        (HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 0, KEY_UPDATE]),
        (HANDSHAKE, &[1, 0, 0, 0]),
        (HANDSHAKE, &[]),
        (ALERT, &[2]),
        (20, &[1]),
        (77, &[1, 2, 3]),
        (0, &[0, 0]),
    ] {
        assert!(matches!(whole(kind, message), Err(SessionError::Malformed(_))), "{kind} {message:?}");
    }
    // The largest length that RFC 8446 allows, and one more.
    assert!(Records::whole(&[DATA, 3, 3, 0x41, 0]).is_ok_and(|whole| whole.is_none()));
    assert!(matches!(Records::whole(&[DATA, 3, 3, 0x41, 1]), Err(SessionError::Malformed(_))));
    for (plain, is_good) in [(MOST_PLAIN, true), (MOST_PLAIN + 1, false)] {
        let (mut a, mut b) = halves();
        let mut room = vec![1; 2 * RECORD];
        let used = a.finish(&mut room, DATA, plain).unwrap();
        assert_eq!(b.open(&mut room[..used]).is_ok(), is_good, "{plain}");
    }
}

#[test]
fn strange_bytes_after_the_handshake_do_not_panic() {
    let rng = Philox::new(19, 4);
    let (_, mut b) = halves();
    for i in 0..2000 {
        let mut strange = bytes(rng.word(4 * i) as usize % 700, i);
        if let [kind, _, _, high, low, ..] = &mut strange[..] {
            (*kind, *high, *low) = (DATA, (rng.word(4 * i + 1) % 3) as u8, rng.word(4 * i + 2) as u8);
        }
        if let Ok(Some(whole)) = Records::whole(&strange) {
            assert_eq!(b.open(&mut strange[..whole]), Err(SessionError::Foreign));
        }
    }
}
