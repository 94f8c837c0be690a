//! Simulated runs are recorded and replayed bit for bit; if a replay differs, the error tells where.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;
use std::thread;

use farflung_base::{AccessLink, Bandwidth, Nanos, PeerId, Philox, Rank, Topology};
use farflung_comm::simulated::{Faults, LinkNoise, Reached, Recorder, Recording, Simulated, record};
use farflung_comm::{CommError, Communicator, ReduceOp, WireError};

/// Runs a few collectives of three ranks under faults; rank 1 adds `spoilt` to one of its values in the third.
fn program((ranks, recorder): (Vec<Arc<Simulated>>, Recorder), spoilt: f32, nap: u64) -> Recording {
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|transport| {
            thread::spawn(move || {
                let comm = Communicator::new(transport).with_deadline(Nanos::from_millis(400));
                let me = u64::from(comm.rank().0);
                let mut x = vec![me as f32 + 0.1; 5_000];
                for round in 0..6 {
                    comm.advance(Nanos::from_micros(300 * (me + round)));
                    thread::sleep(std::time::Duration::from_micros(
                        Philox::new(nap, me).below(round, 1 + 400 * nap),
                    ));
                    if me == 1 && round == 2 {
                        x[17] += spoilt;
                    }
                    if comm.all_reduce(&mut x, ReduceOp::Mean).is_err() {
                        break;
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    recorder.finish()
}

fn network() -> (Topology, Faults) {
    let weather = LinkNoise {
        seed: 3,
        jitter: Nanos::from_millis(2),
        loss: 100_000,
        retransmit: Nanos::from_millis(9),
    };
    let faults = Faults::new().weather(weather).at(Nanos::from_millis(190)).crash(PeerId(2));
    let mut topology = Topology::uniform(3, "20mbit,4ms".parse().unwrap());
    let line = AccessLink { up: Bandwidth(30_000_000), down: Bandwidth(90_000_000) };
    topology.set_region(&[Rank(0), Rank(1)], line);
    (topology, faults)
}

#[test]
fn a_replay_is_the_run_bit_for_bit_whatever_the_threads_do() {
    let (topology, faults) = network();
    let recording = program(record(&topology, &faults), 0.0, 0);
    assert!(recording.events().iter().any(|h| h.what == Reached::Crash && h.to == 2));
    assert!(recording.events().len() > 50, "{}", recording.events().len());
    let file = recording.encode();
    let read = Recording::decode(&file).unwrap();
    assert!(read.events() == recording.events() && read.encode() == file);
    let uplink = |topology: &Topology| (topology.access_link(Rank(2)), topology.link(Rank(2), Rank(0)));
    assert_eq!(uplink(read.topology()), uplink(&topology));
    assert_eq!(read.topology(), &topology);
    for nap in 0..4 {
        let again = program(read.replay(), 0.0, nap);
        read.compare(&again).unwrap();
        assert!(again.encode() == file);
    }
}

#[test]
fn where_a_run_leaves_the_recording_is_told() {
    let (topology, faults) = network();
    let recording = program(record(&topology, &faults), 0.0, 0);
    let error = recording.compare(&program(recording.replay(), 1e-3, 0)).unwrap_err();
    let CommError::Diverged { after, recorded: Some(was), seen: Some(is) } = &error else {
        unreachable!("{error}")
    };
    assert_eq!((*after > 10, was.from, was.time), (true, 1, is.time), "{error}");
    assert!(error.to_string().contains("from peer 1 for collective 2"), "{error}");
    // A run that ends earlier than the recording.
    let calm = program(record(&topology, &Faults::new()), 0.0, 0);
    let error = calm.compare(&program(
        record(&topology, &Faults::new().at(Nanos::from_millis(5)).crash(PeerId(0))),
        0.0,
        0,
    ));
    assert!(matches!(error, Err(CommError::Diverged { .. })));
}

#[test]
fn a_spoilt_file_is_refused() {
    let (topology, faults) = network();
    let file = program(record(&topology, &faults), 0.0, 0).encode();
    let with = |at: usize, value: u8| {
        let mut bytes = file.clone();
        bytes[at] = value;
        Recording::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(0, 0), WireError::Magic);
    assert_eq!(with(4, 9), WireError::Version { want: 2, got: 9 });
    assert_eq!(with(40, 77), WireError::Checksum);
    let rng = Philox::new(5, 5);
    for case in 0..20_000 {
        let [at, with, cut, _] = rng.block(case);
        let mut bytes = file[..400.min(file.len())].to_vec();
        bytes[9 + at as usize % 390] = with as u8;
        bytes.truncate(9 + cut as usize % 800);
        let crc = crc(&bytes[9..]).to_le_bytes();
        bytes[5..9].copy_from_slice(&crc);
        // The result may be an error, but must not be a panic.
        let _ = Recording::decode(&bytes);
    }
}

fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, &b| {
        (0..8).fold(crc ^ u32::from(b), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 })
    })
}
