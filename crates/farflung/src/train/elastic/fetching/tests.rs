//! Fetches from members that answer after given times. Some of them send wrong chunks or never answer.

use farflung_comm::{Question, Service};

use super::super::blobs::OfferedBlobs;
use super::*;
use crate::train::fault::{Fault, FaultyValue};

const FAULT: Fault = Fault { rank: 0, step: 1, value: FaultyValue::Chunk, element: 0, bit: 0 };

/// Bytes of a chunk of a small blob.
const CHUNK: usize = 16 << 10;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
}

fn ask(blobs: &mut OfferedBlobs, item: BlobRequest) -> Vec<u8> {
    let asked = Question { from: Rank(9), at: Nanos(0), bytes: item.to_bytes() };
    blobs.receive(asked).pop().unwrap().bytes
}

fn wanted(label: Label, holders: &[u32]) -> Wanted {
    Wanted { label, holders: holders.iter().copied().map(Rank).collect() }
}

/// Fetches from donors. Donor `n` needs `millis[n]` milliseconds for each answer, one after another; with
/// `None` it never answers. Returns the time of the whole fetch in milliseconds.
fn run(
    fetching: &mut Fetching<'_>,
    offered: &mut [OfferedBlobs],
    millis: &[Option<u64>],
) -> Result<u64, NoHolder> {
    let mut free = vec![Nanos::ZERO; millis.len()];
    let mut coming: Vec<(Nanos, usize, Vec<u8>)> = Vec::new();
    let mut now = Nanos::ZERO;
    while !fetching.is_done() {
        let mut asks = true;
        while std::mem::take(&mut asks) {
            for (donor, blobs) in offered.iter_mut().enumerate() {
                let Some(item) = fetching.next(Rank(donor as u32), now) else { continue };
                asks = true;
                let Some(millis) = millis[donor] else { continue };
                let bytes = ask(blobs, item);
                free[donor] = free[donor].max(now).saturating_add(Nanos::from_millis(millis));
                coming.push((free[donor], donor, bytes));
            }
        }
        coming.sort_by_key(|(at, donor, _)| std::cmp::Reverse((*at, *donor)));
        let step = now.saturating_add(Nanos::from_millis(100));
        match coming.last() {
            Some((at, ..)) if *at <= step => {
                let (at, donor, bytes) = coming.pop().unwrap();
                now = at;
                fetching.arrived(Rank(donor as u32), &bytes, now)?;
            }
            _ => now = step,
        }
        assert!(now < Nanos::from_millis(1_000_000), "it does not end");
    }
    Ok(now.0 / 1_000_000)
}

fn offered(count: usize, bytes: &[u8]) -> (Vec<OfferedBlobs>, Label) {
    let mut offered: Vec<OfferedBlobs> = (0..count).map(|_| OfferedBlobs::default()).collect();
    let labels: Vec<Label> = offered.iter_mut().map(|blobs| blobs.put(bytes.to_vec())).collect();
    (offered, labels[0])
}

#[test]
fn donors_give_by_their_rates() {
    let all = bytes(120 * CHUNK + 5);
    for millis in [[10, 10, 10], [10, 20, 40], [7, 100, 100], [10, 1000, 1000]] {
        let (mut offered, label) = offered(3, &all);
        let mut store = ChunkStore::default();
        let mut fetching = Fetching::new(vec![wanted(label, &[0, 1, 2])], &mut store);
        let took = run(&mut fetching, &mut offered, &millis.map(Some)).unwrap() as f64;
        let ideal = 122.0 / millis.iter().map(|&ms| 1.0 / ms as f64).sum::<f64>();
        assert!(took < 1.1 * ideal + 10.0, "{millis:?}: {took} ms, {ideal} at best");
        assert_eq!(store.take(&label), Some(all.clone()), "{millis:?}");
    }
}

#[test]
fn what_a_donor_leaves_undone_another_does() {
    let all = bytes(40 * CHUNK);
    let (mut offered, label) = offered(3, &all);
    let mut store = ChunkStore::default();
    let mut fetching = Fetching::new(vec![wanted(label, &[0, 1, 2])], &mut store);
    let took = run(&mut fetching, &mut offered, &[Some(10), None, Some(10)]).unwrap();
    assert_eq!(fetching.gave(), 2);
    assert_eq!(store.take(&label), Some(all));
    assert!(took < 2000, "{took} ms");
    // A slow donor sends the rest alone if the others stop.
    let all = bytes(40 * CHUNK);
    let (mut offered, label) = self::offered(2, &all);
    let mut fetching = Fetching::new(vec![wanted(label, &[0, 1])], &mut store);
    run(&mut fetching, &mut offered, &[Some(300), None]).unwrap();
    assert_eq!(store.take(&label), Some(all));
}

#[test]
fn a_wrong_chunk_is_taken_from_another_donor() {
    let all = bytes(9 * CHUNK);
    let (mut offered, label) = offered(2, &all);
    let mut store = ChunkStore::default();
    offered[0].fault = Some(FAULT);
    let mut fetching = Fetching::new(vec![wanted(label, &[0, 1])], &mut store);
    run(&mut fetching, &mut offered, &[Some(10), Some(10)]).unwrap();
    assert_eq!(fetching.donors(), [Rank(1)]);
    assert_eq!(store.take(&label), Some(all));
    // If the only donor sends a wrong chunk, the fetch fails.
    let (mut offered, label) = self::offered(1, &bytes(3));
    offered[0].fault = Some(FAULT);
    let mut fetching = Fetching::new(vec![wanted(label, &[0])], &mut store);
    assert_eq!(run(&mut fetching, &mut offered, &[Some(10)]), Err(NoHolder));
    assert_eq!(store.take(&label), None);
}

#[test]
fn one_that_does_not_have_a_blob_any_more_is_passed_over() {
    let all = bytes(5 * CHUNK);
    let (mut offered, label) = offered(2, &all);
    offered[0] = OfferedBlobs::default();
    let mut store = ChunkStore::default();
    let mut fetching = Fetching::new(vec![wanted(label, &[0, 1])], &mut store);
    run(&mut fetching, &mut offered, &[Some(10), Some(10)]).unwrap();
    assert_eq!(store.take(&label), Some(all));
    let (mut offered, label) = self::offered(1, &bytes(3));
    offered[0] = OfferedBlobs::default();
    let mut fetching = Fetching::new(vec![wanted(label, &[0])], &mut store);
    assert_eq!(run(&mut fetching, &mut offered, &[Some(10)]), Err(NoHolder));
}

#[test]
fn a_fetch_that_was_broken_off_goes_on() {
    let all = bytes(20 * CHUNK);
    let (mut offered, label) = offered(1, &all);
    let mut store = ChunkStore::default();
    let mut fetching = Fetching::new(vec![wanted(label, &[0])], &mut store);
    for _ in 0..8 {
        let item = fetching.next(Rank(0), Nanos(0)).unwrap();
        let bytes = ask(&mut offered[0], item);
        fetching.arrived(Rank(0), &bytes, Nanos(1)).unwrap();
    }
    let mut fetching = Fetching::new(vec![wanted(label, &[0])], &mut store);
    // The list of hashes and seven chunks have been received.
    assert_eq!(fetching.missing, 13);
    run(&mut fetching, &mut offered, &[Some(1)]).unwrap();
    assert_eq!(store.take(&label), Some(all));
}

#[test]
fn hostile_answers_change_nothing() {
    let all = bytes(3 * CHUNK);
    let (mut offered, label) = offered(1, &all);
    for answer in [Vec::new(), vec![0xFF; 90], vec![1, 1, 0, 0]] {
        let mut store = ChunkStore::default();
        let mut fetching = Fetching::new(vec![wanted(label, &[0])], &mut store);
        fetching.next(Rank(0), Nanos(0)).unwrap();
        assert_eq!(fetching.arrived(Rank(0), &answer, Nanos(1)), Err(NoHolder));
        // An answer from a rank that is not a donor is ignored.
        assert_eq!(fetching.arrived(Rank(5), &answer, Nanos(1)), Ok(()));
    }
    // A list of hashes that does not fit the blob's length, which is impossibly large.
    let mut store = ChunkStore::default();
    let huge = Label { root: label.root, len: u64::MAX };
    let mut fetching = Fetching::new(vec![wanted(huge, &[0])], &mut store);
    let item = fetching.next(Rank(0), Nanos(0)).unwrap();
    assert_eq!(item, BlobRequest::Hashes { root: label.root });
    let bytes = ask(&mut offered[0], item);
    assert_eq!(fetching.arrived(Rank(0), &bytes, Nanos(1)), Err(NoHolder));
}

/// A late item may have been asked of two donors: the second answer arrives in the next fetch.
#[test]
fn an_answer_to_an_earlier_fetch_is_told_apart() {
    let (mut first, label) = offered(1, &bytes(3 * CHUNK));
    let (mut second, next) = offered(1, &bytes(5 * CHUNK));
    let mut store = ChunkStore::default();
    let mut fetching = Fetching::new(vec![wanted(next, &[0])], &mut store);
    let asked = fetching.next(Rank(0), Nanos::ZERO).unwrap();
    let late = ask(&mut first[0], BlobRequest::Hashes { root: label.root });
    assert!(!fetching.is_asked(Rank(0), &late));
    let answer = ask(&mut second[0], asked);
    assert!(fetching.is_asked(Rank(0), &answer) && fetching.is_asked(Rank(0), b"no answer"));
    fetching.arrived(Rank(0), &answer, Nanos::ZERO).unwrap();
}
