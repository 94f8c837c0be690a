//! Feeds mutated frames, greetings, control messages, handshakes and tickets to the code that reads them.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::Result;
use farflung::base::{Nanos, PeerId, Philox, Rank};
use farflung::comm::secure::{Identity, JoinSecret, Security, Ticket};
use farflung::comm::tcp::{Config, MAX_UNREAD_BYTES, join};
use farflung::comm::{Communicator, Control, HEADER_BYTES, Inbox, Message, Parsed, Pool, parse};

use crate::allocations::counted;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::mutate::mutate;

pub(crate) const BENCH: Bench = Bench {
    name: "hostile-frames",
    claim: "no mutated frame, greeting, length or control message makes its reader panic, or allocate more \
            than the received bytes justify; the memory for a peer that floods stays within its bound",
    source: "the streams in crates/comm/tests/corpus, written after the README's WIRE section, mutated by a \
             seeded driver",
    seed: 0x05ee_d0f1,
    run,
};

const CORPUS: [(&str, &[u8]); 11] = [
    ("data", include_bytes!("../../../crates/comm/tests/corpus/data.bin")),
    ("links", include_bytes!("../../../crates/comm/tests/corpus/credit_abort_suspect_bye.bin")),
    ("hello", include_bytes!("../../../crates/comm/tests/corpus/hello.bin")),
    ("table", include_bytes!("../../../crates/comm/tests/corpus/table.bin")),
    ("welcome", include_bytes!("../../../crates/comm/tests/corpus/welcome.bin")),
    ("refuse", include_bytes!("../../../crates/comm/tests/corpus/refuse.bin")),
    ("prove", include_bytes!("../../../crates/comm/tests/corpus/prove.bin")),
    ("missing", include_bytes!("../../../crates/comm/tests/corpus/missing.bin")),
    ("near", include_bytes!("../../../crates/comm/tests/corpus/near.bin")),
    ("requests", include_bytes!("../../../crates/comm/tests/corpus/store_requests.bin")),
    ("answers", include_bytes!("../../../crates/comm/tests/corpus/store_answers.bin")),
];

/// Largest number of bytes that reading may allocate for each byte received. The worst case is a growing list
/// of the shortest elements: 16 bytes for a text, twice that for the spare capacity of a vector, and twice that
/// for the smaller vectors before it.
const BYTES_PER_BYTE: usize = 64;

/// Results of reading a number of inputs.
#[derive(Debug, Default, PartialEq)]
struct Tally {
    inputs: u64,
    frames: u64,
    control: u64,
    refused: u64,
    /// The largest ratio of bytes allocated while reading to the allowed number.
    greed: f64,
}

/// Writes the right checksum into the first frame, since an attacker can compute it too. With `length` it also
/// states a length that fits.
fn seal(bytes: &mut [u8], length: bool) {
    let Some((head, body)) = bytes.split_first_chunk_mut::<HEADER_BYTES>() else { return };
    if length {
        head[24..28].copy_from_slice(&(body.len() as u32).to_le_bytes());
    }
    let claimed = u32::from_le_bytes([head[24], head[25], head[26], head[27]]) as usize;
    let Some(payload) = body.get(..claimed) else { return };
    let mut crc = crc32fast::Hasher::new();
    crc.update(&head[..28]);
    crc.update(payload);
    head[28..].copy_from_slice(&crc.finalize().to_le_bytes());
}

/// Writes the `case`-th input into `bytes`.
fn input(rng: &Philox, case: u64, bytes: &mut Vec<u8>) {
    let [which, times, ..] = rng.block(4 * case);
    bytes.clear();
    bytes.extend_from_slice(CORPUS[which as usize % CORPUS.len()].1);
    let mut chance = 0;
    for i in 0..=u64::from(times % 3) {
        chance = mutate(bytes, rng, 4 * case + 1 + i);
    }
    match chance % 4 {
        0 => {}
        1 => seal(bytes, true),
        _ => seal(bytes, false),
    }
}

/// Reads inputs into an inbox, as the reader of a socket does.
fn storm(seed: u64, cases: std::ops::Range<u64>) -> Tally {
    let (rng, pool) = (Philox::new(seed, 1), Pool::new());
    let (mut inbox, peer) = (Inbox::new(3), PeerId(1));
    let mut tally = Tally::default();
    let mut bytes = Vec::new();
    for case in cases {
        input(&rng, case, &mut bytes);
        tally.inputs += 1;
        let mut rest = &bytes[..];
        loop {
            let (parsed, count) = counted(|| parse(rest));
            let greed = count.total as f64 / (BYTES_PER_BYTE * rest.len().max(1)) as f64;
            tally.greed = tally.greed.max(greed);
            let Ok(Parsed::Whole(message, length)) = parsed else {
                tally.refused += u64::from(parsed.is_err());
                break;
            };
            tally.frames += 1;
            match message {
                Message::Data { tag, check, payload } => {
                    let mut frame = pool.lease(payload.len());
                    frame.bytes_mut().copy_from_slice(payload);
                    frame.check = check;
                    inbox.deliver(peer, tag, frame);
                }
                Message::Control(_) => tally.control += 1,
                _ => {}
            }
            rest = &rest[length..];
        }
        // A socket whose peer has this many unread bytes is not read any more. This starts again with an empty
        // inbox.
        if inbox.unread_bytes(peer) >= MAX_UNREAD_BYTES {
            inbox = Inbox::new(3);
        }
    }
    tally
}

/// Returns the largest number of bytes that an inbox holds for a peer that sends frames of `len` bytes on every
/// channel, each with another context in its tag.
fn flood(len: usize, frames: u64) -> usize {
    let mut streams = Vec::new();
    for channel in 0..4_u8 {
        let mut bytes = CORPUS[0].1[..HEADER_BYTES].to_vec();
        bytes.resize(HEADER_BYTES + len, 7);
        bytes[6] = channel;
        streams.push(bytes);
    }
    let ((), count) = counted(|| {
        let (inbox, pool, peer) = (Inbox::new(3), Pool::new(), PeerId(1));
        for number in 0..frames {
            if inbox.unread_bytes(peer) >= MAX_UNREAD_BYTES {
                break;
            }
            for stream in &mut streams {
                stream[8..16].copy_from_slice(&number.to_le_bytes());
                seal(stream, true);
                if let Ok(Parsed::Whole(Message::Data { tag, payload, .. }, _)) = parse(stream) {
                    let mut frame = pool.lease(payload.len());
                    frame.bytes_mut().copy_from_slice(payload);
                    inbox.deliver(peer, tag, frame);
                }
            }
        }
    });
    count.peak
}

/// Runs a job of two in which strangers send mutated data to the first rank, and the second rank does so after
/// a valid greeting. Returns true if the first rank admitted the second and ended in time, with an error or a
/// message.
fn session(rng: &Philox, case: u64) -> Result<bool> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let master = std::thread::spawn(move || {
        let mut config = Config::new(0, 2, format!("127.0.0.1:{port}"));
        config.deadline = Duration::from_secs(10);
        let comm = Communicator::new(join(&config)?).with_deadline(Nanos::from_millis(300));
        // Both a message and an error are fine.
        let _ = comm.recv(Rank(1), 9);
        Ok::<_, farflung::comm::CommError>(())
    });
    let connect = || {
        let mut tries = 0;
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => return Ok(stream),
                Err(error) if tries == 2_000 => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
            tries += 1;
        }
    };
    let mut bytes = Vec::new();
    for stranger in 0..4 {
        input(rng, 16 * case + stranger, &mut bytes);
        // The rank may already have closed the connection.
        let _ = connect()?.write_all(&bytes);
    }
    let mut second = connect()?;
    let hello = Control::Hello {
        rank: 1,
        world_size: 2,
        job: "farflung",
        listen: "127.0.0.1:1",
        epoch: 0,
        key: &[],
        digest: &[],
    }
    .encode();
    let mut greeting = CORPUS[2].1[..HEADER_BYTES].to_vec();
    greeting.extend(hello);
    seal(&mut greeting, true);
    second.write_all(&greeting)?;
    for i in 4..8 {
        input(rng, 16 * case + i, &mut bytes);
        let _ = second.write_all(&bytes);
    }
    let _ = second.shutdown(Shutdown::Write);
    Ok(matches!(master.join(), Ok(Ok(()))))
}

fn with_secret(number: u8) -> Result<Security> {
    let secret = JoinSecret::from_text(b"a secret of this bench alone")?;
    Ok(Security::by_secret(&Identity::from_seed([number; 32]), &secret))
}

/// Parses mutated tickets. Returns how many were accepted, and the largest ratio of bytes allocated to the
/// ticket's length.
fn tickets(seed: u64, cases: u64) -> Result<(u64, f64)> {
    let rng = Philox::new(seed, 3);
    let ticket = Ticket {
        addresses: vec!["203.0.113.5:29500".to_owned(), "[fd00::1]:29500".to_owned()],
        host: Identity::from_seed([1; 32]).public(),
        secret: JoinSecret::new([2; 32]),
        expiry: 1 << 31,
    };
    let good = ticket.word()?;
    let (mut read, mut greed) = (0, 0.0_f64);
    for case in 0..cases {
        let mut bytes = good.clone().into_bytes();
        for i in 0..=case % 3 {
            mutate(&mut bytes, &rng, 4 * case + i);
        }
        let text = String::from_utf8_lossy(&bytes);
        let (parsed, count) = counted(|| text.parse::<Ticket>());
        greed = greed.max(count.total as f64 / text.len().max(64) as f64);
        // Upper case and surrounding spaces give the same ticket.
        let same = text.trim().eq_ignore_ascii_case(&good);
        anyhow::ensure!(parsed.is_ok() <= same, "a mutated ticket was accepted: {text}");
        read += u64::from(parsed.is_ok());
    }
    Ok((read, greed))
}

/// Returns the first bytes that a rank sends to a job with a secret.
fn client_hello() -> Result<Vec<u8>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut config = Config::new(1, 2, listener.local_addr()?.to_string());
    config.deadline = Duration::from_millis(300);
    config.security = with_secret(2)?;
    let rank = std::thread::spawn(move || join(&config).err());
    let mut stream = listener.accept()?.0;
    let mut bytes = vec![0; 4096];
    let count = stream.read(&mut bytes)?;
    bytes.truncate(count);
    drop((stream, listener));
    // The rank fails, because the other side has closed the connection.
    let _ = rank.join();
    Ok(bytes)
}

/// Runs a job of two with a secret, to which strangers send mutated handshakes. Returns true if the second rank
/// could join.
fn handshakes(rng: &Philox, case: u64, hello: &[u8]) -> Result<bool> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let config = |rank| -> Result<Config> {
        let mut config = Config::new(rank, 2, format!("127.0.0.1:{port}"));
        config.deadline = Duration::from_secs(10);
        config.security = with_secret(rank as u8 + 1)?;
        Ok(config)
    };
    let first = config(0)?;
    let host = std::thread::spawn(move || join(&first).map(drop));
    let mut bytes = Vec::new();
    for stranger in 0..8 {
        bytes.clear();
        bytes.extend_from_slice(hello);
        for i in 0..=stranger % 3 {
            mutate(&mut bytes, rng, 64 * case + 4 * stranger + i);
        }
        let mut tries = 0;
        while let Err(error) = TcpStream::connect(("127.0.0.1", port)).and_then(|mut s| s.write_all(&bytes)) {
            // A closed connection counts as an answer. A refused connection means that the host does not listen
            // yet.
            if error.kind() != std::io::ErrorKind::ConnectionRefused || tries == 2_000 {
                break;
            }
            tries += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let came = join(&config(1)?).is_ok();
    Ok(came && matches!(host.join(), Ok(Ok(()))))
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (cases, sessions) = if options.quick { (500_000, 40) } else { (10_000_000, 400) };
    let half = cases / 2;
    let seed = report.seed();
    let halves = std::thread::scope(|scope| {
        let other = scope.spawn(move || storm(seed, half..cases));
        Ok::<_, anyhow::Error>([
            storm(seed, 0..half),
            other.join().map_err(|_| anyhow::anyhow!("a reader panicked"))?,
        ])
    })?;
    let sum = |field: fn(&Tally) -> u64| halves.iter().map(field).sum::<u64>() as f64;
    let inputs = sum(|t| t.inputs);
    report.row("inputs", inputs, "", Threshold::AtLeast(cases as f64))?;
    report.row("accepted frames per input", sum(|t| t.frames) / inputs, "", Threshold::AtLeast(0.3))?;
    report.row("control messages among the accepted frames", sum(|t| t.control), "", Threshold::None)?;
    report.row("share of inputs that were rejected", sum(|t| t.refused) / inputs, "", Threshold::None)?;
    let greed = halves.iter().map(|t| t.greed).fold(0.0, f64::max);
    report.row(
        "largest allocation, relative to 64 bytes per received byte",
        greed,
        "",
        Threshold::AtMost(1.0),
    )?;
    for len in [0, 1, 4096] {
        let peak = flood(len, 1 << 20) as f64 / MAX_UNREAD_BYTES as f64;
        report.row(
            &format!("bytes held in a flood of frames of {len} bytes, relative to the bound"),
            peak,
            "",
            Threshold::AtMost(1.5),
        )?;
    }
    let rng = Philox::new(report.seed(), 2);
    let mut bad = 0;
    for case in 0..sessions {
        bad += u32::from(!session(&rng, case)?);
    }
    report.row(
        "jobs over sockets with strangers and a malicious rank",
        sessions as f64,
        "",
        Threshold::None,
    )?;
    report.row(
        "jobs over sockets that did not admit their second rank or did not end in time",
        f64::from(bad),
        "",
        Threshold::AtMost(0.0),
    )?;
    let (read, greed) = tickets(report.seed(), cases / 20)?;
    report.row("mutated tickets", (cases / 20) as f64, "", Threshold::None)?;
    report.row(
        "mutated tickets that were accepted: equal to the original but for case",
        read as f64,
        "",
        Threshold::None,
    )?;
    report.row("bytes allocated per byte of a ticket", greed, "", Threshold::AtMost(8.0))?;
    let hello = client_hello()?;
    let (rng, mut bad) = (Philox::new(report.seed(), 4), 0);
    for case in 0..sessions {
        bad += u32::from(!handshakes(&rng, case, &hello)?);
    }
    report.row("encrypted jobs to which strangers connect", sessions as f64, "", Threshold::None)?;
    report.row("encrypted jobs whose second rank could not join", f64::from(bad), "", Threshold::AtMost(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_whole_and_says_what_we_would_say() {
        for (name, bytes) in CORPUS {
            let mut rest = bytes;
            while !rest.is_empty() {
                let Ok(Parsed::Whole(message, length)) = parse(rest) else {
                    unreachable!("{name}: {:?}", parse(rest))
                };
                if let Message::Control(control) = message {
                    assert_eq!(control.encode(), rest[HEADER_BYTES..length], "{name}: {control:?}");
                }
                rest = &rest[length..];
            }
        }
    }

    #[test]
    fn a_short_storm_and_a_session() {
        let tally = storm(7, 0..20_000);
        assert_eq!(tally.inputs, 20_000);
        assert!(tally.greed <= 1.0 && tally.frames > 6_000 && tally.control > 2_000, "{tally:?}");
        assert_eq!(storm(7, 0..20_000), tally);
        assert!(flood(0, 1 << 20) < 3 * MAX_UNREAD_BYTES / 2);
        assert!(session(&Philox::new(7, 2), 0).unwrap());
        assert!(tickets(7, 3_000).unwrap().1 < 8.0);
        assert!(handshakes(&Philox::new(7, 4), 0, &client_hello().unwrap()).unwrap());
    }
}
