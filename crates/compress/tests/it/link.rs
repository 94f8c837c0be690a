//! Links: both ends hold the same bits, whatever the order of samples and whichever end crashes.

use farflung_base::Philox;
use farflung_compress::link::{AqSgd, Direct, FileStore, LinkCodec, MemoryStore, Samples, Staged, Store};
use farflung_compress::{
    CompressError, Int4, Int8, Payload, PayloadRef, RoundKey, State, StateMap, StateValue,
};

const LEN: usize = 96;

/// Returns an activation that changes less from epoch to epoch.
fn activation(id: u64, epoch: u64) -> Vec<f32> {
    let (mut x, mut noise) = (vec![0.0; LEN], vec![0.0; LEN]);
    Philox::new(1, id).fill_normal(1.0, &mut x);
    Philox::new(2 + epoch, id).fill_normal(0.5_f32.powi(epoch as i32), &mut noise);
    x.iter().zip(noise).map(|(x, n)| x + n).collect()
}

fn batch(ids: &[u64], epoch: u64) -> Vec<f32> {
    ids.iter().flat_map(|id| activation(*id, epoch)).collect()
}

#[test]
fn both_ends_are_the_same_and_the_error_shrinks_with_the_changes() {
    let dir = tempfile::tempdir().unwrap();
    let store = |name: &str| FileStore::open(&dir.path().join(name), LEN, 20).unwrap();
    let mut sender = AqSgd::new(Int4::new(32).unwrap(), store("a"));
    let mut receiver = AqSgd::new(Int4::new(32).unwrap(), store("b"));
    let (mut payload, mut errors) = (Payload::new(), Vec::new());
    for epoch in 0..10 {
        let mut order: Vec<u64> = (0..20).collect();
        let rng = Philox::new(7, epoch);
        order.sort_by_key(|id| rng.word(*id));
        let mut error = 0.0_f64;
        for ids in order.chunks(3) {
            let x = batch(ids, epoch);
            sender.encode(ids, &x, RoundKey::default(), &mut payload).unwrap();
            let bytes = payload.as_bytes();
            assert!(bytes.len() <= sender.max_payload(ids.len()));
            let full = if epoch == 0 { ids.len() } else { 0 };
            let changes = (ids.len() - full) * (LEN / 2 + 2 * LEN / 32);
            assert_eq!(bytes.len(), 28 + 8 + 4 * ids.len() + full * 2 * LEN + 4 + changes);
            let mut out = vec![0.0; x.len()];
            receiver.decode(ids, PayloadRef::parse(bytes).unwrap(), &mut out).unwrap();
            error += x.iter().zip(&out).map(|(x, o)| f64::from(x - o).powi(2)).sum::<f64>();
        }
        errors.push(error.sqrt());
    }
    assert!(errors[9] < errors[1] / 8.0, "{errors:?}");
    let file = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    assert_eq!(file("a"), file("b"));
    assert_eq!(file("a").len(), 16 + 20 * (4 + 2 * LEN));
}

#[test]
#[cfg(feature = "mmap")]
#[expect(unsafe_code, reason = "nobody else has the files while they are mapped")]
fn a_mapped_file_is_the_same_file() {
    use farflung_compress::link::MappedStore;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // SAFETY: the directory belongs to this test, and the file is accessed in no other way while a store is
    // open.
    let map = |name: &str| unsafe { MappedStore::open(&path(name), LEN, 3) };
    let link = |store: Box<dyn Store>| AqSgd::new(Int4::new(32).unwrap(), store);
    let plain = |name: &str| Box::new(FileStore::open(&path(name), LEN, 3).unwrap());
    let (mut payload, mut out) = (Payload::new(), vec![0.0; 2 * LEN]);
    for epoch in 0..4 {
        // The ends take turns in mapping their file.
        let mapped = |name| Box::new(map(name).unwrap());
        let (mut sender, mut receiver) = if epoch % 2 == 0 {
            (link(plain("a")), link(mapped("b")))
        } else {
            (link(mapped("a")), link(plain("b")))
        };
        sender.encode(&[2, 0], &batch(&[2, 0], epoch), RoundKey::default(), &mut payload).unwrap();
        receiver.decode(&[2, 0], payload.view(), &mut out).unwrap();
        let full = if epoch == 0 { 2 } else { 0 };
        assert_eq!(
            payload.view().body().len(),
            8 + 8 + full * 2 * LEN + 4 + (2 - full) * (LEN / 2 + 2 * LEN / 32)
        );
        drop((sender, receiver));
        assert_eq!(std::fs::read(path("a")).unwrap(), std::fs::read(path("b")).unwrap());
    }
    let mut store = map("a").unwrap();
    let mut held = vec![0; 2 * LEN];
    assert_ne!(store.read(2, &mut held).unwrap(), 0);
    assert_eq!(store.read(1, &mut held).unwrap(), 0);
    store.forget(2).unwrap();
    assert_eq!(store.read(2, &mut held).unwrap(), 0);
    assert!(store.read(3, &mut held).is_err());
    drop(store);
    // A slot that was half written counts as empty.
    let mut bytes = std::fs::read(path("a")).unwrap();
    bytes[16 + 4 + 50] ^= 1;
    std::fs::write(path("a"), bytes).unwrap();
    assert_eq!(map("a").unwrap().read(0, &mut held).unwrap(), 0);
    // SAFETY: as above.
    assert!(unsafe { MappedStore::open(&path("a"), LEN + 1, 3) }.is_err());
}

#[test]
fn few_bits_are_the_same_at_both_ends_and_their_loss_is_sent_too() {
    let dir = tempfile::tempdir().unwrap();
    let x = batch(&[0, 1, 2], 9);
    let norm = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    for (name, samples, bytes, allowed) in [
        ("int8", Samples::int8(LEN), LEN + 2 * LEN.div_ceil(64), 0.001),
        ("int4", Samples::int4(LEN), LEN / 2 + 2 * LEN.div_ceil(64), 0.01),
    ] {
        assert_eq!(samples.bytes(), bytes);
        let path = |end: &str| dir.path().join(format!("{name}-{end}"));
        let open =
            |end: &str| AqSgd::new(Int4::new(32).unwrap(), FileStore::open(&path(end), samples, 3).unwrap());
        let (mut sender, mut receiver) = (open("a"), open("b"));
        let (mut payload, mut out) = (Payload::new(), vec![0.0; x.len()]);
        for round in 0..4 {
            sender.encode(&[0, 1, 2], &x, RoundKey::default(), &mut payload).unwrap();
            receiver.decode(&[0, 1, 2], payload.view(), &mut out).unwrap();
            let lost = x.iter().zip(&out).map(|(x, o)| f64::from(x - o).powi(2)).sum::<f64>().sqrt();
            assert!(lost < allowed * norm, "{name}, {round}: {}", lost / norm);
        }
        let file = |end: &str| std::fs::read(path(end)).unwrap();
        assert_eq!(file("a"), file("b"));
        assert_eq!(file("a").len(), 16 + 3 * (4 + bytes));
        // Ends with different storage formats cannot decode each other's payloads or open each other's files.
        let mut other = AqSgd::new(Int4::new(32).unwrap(), MemoryStore::new(LEN));
        let error = other.decode(&[0, 1, 2], payload.view(), &mut out).unwrap_err();
        assert!(matches!(error, CompressError::Parameter { wanted: 0, .. }), "{error}");
        assert!(FileStore::open(&path("a"), LEN, 3).is_err());
    }
}

#[test]
fn what_is_held_in_memory_is_saved_and_loaded() {
    let end = || AqSgd::new(Int8::new(32).unwrap(), MemoryStore::new(Samples::int4(LEN)));
    let (mut sender, mut receiver) = (end(), end());
    let (mut payload, mut out) = (Payload::new(), vec![0.0; 2 * LEN]);
    for epoch in 0..2 {
        sender.encode(&[3, 70], &batch(&[3, 70], epoch), RoundKey::default(), &mut payload).unwrap();
        receiver.decode(&[3, 70], payload.view(), &mut out).unwrap();
    }
    let mut map = StateMap::new();
    receiver.save("link.", &mut map).unwrap();
    assert_eq!(map.keys().collect::<Vec<_>>(), ["link.3", "link.70"]);
    map.insert("other".to_owned(), StateValue::F32(vec![1.0].into()));
    let mut again = end();
    again.load("link.", &mut map).unwrap();
    assert_eq!(map.len(), 1);
    sender.encode(&[70, 3], &batch(&[70, 3], 2), RoundKey::default(), &mut payload).unwrap();
    again.decode(&[70, 3], payload.view(), &mut out).unwrap();
    // A change of a sample without a copy gives a `CacheMiss`.
    again.reset();
    let error = again.decode(&[70, 3], payload.view(), &mut out).unwrap_err();
    assert!(matches!(error, CompressError::CacheMiss { id: 70, found: 0, .. }), "{error}");
    let mut short = StateMap::new();
    short.insert("5".to_owned(), StateValue::Bytes(vec![0; 7].into()));
    let error = again.load("", &mut short).unwrap_err();
    assert!(matches!(error, CompressError::LengthMismatch { found: 7, .. }), "{error}");
}

#[test]
fn a_crash_between_writing_and_sending_is_found_and_mended() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sender");
    let open = || AqSgd::new(Int8::new(32).unwrap(), FileStore::open(&path, LEN, 4).unwrap());
    let mut receiver = AqSgd::new(Int8::new(32).unwrap(), MemoryStore::new(LEN));
    let (mut payload, mut out) = (Payload::new(), vec![0.0; LEN]);
    let mut sender = open();
    for epoch in 0..2 {
        sender.encode(&[1], &activation(1, epoch), RoundKey::default(), &mut payload).unwrap();
        receiver.decode(&[1], payload.view(), &mut out).unwrap();
    }
    // The sender writes to its store and crashes before it sends.
    sender.encode(&[1], &activation(1, 2), RoundKey::default(), &mut payload).unwrap();
    drop(sender);
    let mut sender = open();
    sender.encode(&[1], &activation(1, 3), RoundKey::default(), &mut payload).unwrap();
    let before = out.clone();
    let error = receiver.decode(&[1], payload.view(), &mut out).unwrap_err();
    assert!(matches!(error, CompressError::CacheMiss { id: 1, .. }), "{error}");
    assert_eq!(out, before);
    sender.forget(&[1]).unwrap();
    sender.encode(&[1], &activation(1, 3), RoundKey::default(), &mut payload).unwrap();
    receiver.decode(&[1], payload.view(), &mut out).unwrap();
    // A slot that was half written: the sample counts as missing, and is sent in full.
    drop(sender);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[16 + (4 + 2 * LEN) + 50] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut sender = open();
    sender.encode(&[1], &activation(1, 4), RoundKey::default(), &mut payload).unwrap();
    assert_eq!(payload.view().body().len(), 8 + 4 + 2 * LEN + 4);
    receiver.decode(&[1], payload.view(), &mut out).unwrap();
    assert!(FileStore::open(&path, LEN + 1, 4).is_err());
    assert!(sender.encode(&[9], &activation(9, 0), RoundKey::default(), &mut payload).is_err());
}

#[test]
fn channels_have_their_own_scales() {
    // Channel c is 10^c times as large. With one scale for each channel, all keep their precision.
    let (channels, positions) = (4, 24);
    let mut x = vec![0.0; LEN];
    Philox::new(3, 3).fill_normal(1.0, &mut x);
    let sizes = [1.0_f32, 10.0, 100.0, 1000.0];
    x.iter_mut().enumerate().for_each(|(i, x)| *x *= sizes[i % channels]);
    let mut link = Direct::per_channel(Int4::new(positions).unwrap(), LEN, channels).unwrap();
    let (mut payload, mut out) = (Payload::new(), vec![0.0; LEN]);
    link.encode(&[0], &x, RoundKey::default(), &mut payload).unwrap();
    assert_eq!(payload.as_bytes().len(), 28 + 4 + 4 * (2 + 12));
    link.decode(&[0], payload.view(), &mut out).unwrap();
    for (i, (x, out)) in x.iter().zip(&out).enumerate() {
        assert!((x - out).abs() <= 0.3 * sizes[i % channels], "{i}: {x} {out}");
    }
    assert!(Direct::per_channel(Int8::default(), LEN, 5).is_err());
    // The expected size for a boundary: one sample of 128 x 128 in four bits.
    let mut link = Direct::per_channel(Int4::new(128).unwrap(), 128 * 128, 128).unwrap();
    link.encode(&[0], &vec![1.0; 128 * 128], RoundKey::default(), &mut payload).unwrap();
    assert_eq!(payload.view().body().len(), 4 + 8448);
}

#[test]
fn hostile_changes_are_refused() {
    let end = || AqSgd::new(Int8::new(32).unwrap(), MemoryStore::new(LEN));
    let (mut sender, mut receiver) = (end(), end());
    let (mut payload, mut out) = (Payload::new(), vec![0.0; 2 * LEN]);
    for epoch in 0..2 {
        sender.encode(&[0, 1], &batch(&[0, 1], epoch), RoundKey::default(), &mut payload).unwrap();
        if epoch == 0 {
            receiver.decode(&[0, 1], payload.view(), &mut out).unwrap();
        }
    }
    let rng = Philox::new(4, 4);
    let mut refused = 0;
    for case in 0..5000 {
        let mut bytes = payload.as_bytes().to_vec();
        let [at, with, ..] = rng.block(case);
        let at = 28 + at as usize % (bytes.len() - 28);
        bytes[at] = with as u8;
        let mut crc = crc32fast::Hasher::new();
        crc.update(&bytes[..24]);
        crc.update(&bytes[28..]);
        let crc = crc.finalize();
        bytes[24..28].copy_from_slice(&crc.to_le_bytes());
        let mut receiver = AqSgd::new(Int8::new(32).unwrap(), receiver.store().clone());
        match receiver.decode(&[0, 1], PayloadRef::parse(&bytes).unwrap(), &mut out) {
            Ok(()) => assert!(out.iter().all(|v| v.is_finite())),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 100, "{refused}");
    assert!(receiver.decode(&[0], payload.view(), &mut out).is_err());
    receiver.decode(&[0, 1], payload.view(), &mut out).unwrap();
}

/// Both ends roll back a step and repeat it. Payloads and stored samples equal those of ends that never began
/// the step.
#[test]
fn a_step_that_is_given_up_leaves_no_trace() {
    let end = || AqSgd::new(Int4::new(32).unwrap(), Staged::new(MemoryStore::new(LEN)));
    let (mut sender, mut receiver, mut straight) = (end(), end(), end());
    let (mut payload, mut other, mut out) = (Payload::new(), Payload::new(), vec![0.0; 2 * LEN]);
    for epoch in 0..4 {
        let x = batch(&[4, 9], epoch);
        if epoch > 0 {
            let given_up = batch(&[4, 9], epoch + 100);
            sender.encode(&[4, 9], &given_up, RoundKey::default(), &mut payload).unwrap();
            let saved = sender.save("", &mut StateMap::new()).unwrap_err();
            assert_eq!(saved, CompressError::Uncommitted);
            receiver.decode(&[4, 9], payload.view(), &mut out).unwrap();
            sender.rollback();
            receiver.rollback();
        }
        sender.encode(&[4, 9], &x, RoundKey::default(), &mut payload).unwrap();
        straight.encode(&[4, 9], &x, RoundKey::default(), &mut other).unwrap();
        assert_eq!(payload.as_bytes(), other.as_bytes());
        receiver.decode(&[4, 9], payload.view(), &mut out).unwrap();
        [&mut sender, &mut receiver, &mut straight].into_iter().for_each(State::commit);
        let sums = sender.checksums(&[4, 9, 11]).unwrap();
        assert_eq!(sums, receiver.checksums(&[4, 9, 11]).unwrap());
        assert!(sums[0] != 0 && sums[1] != 0 && sums[2] == 0);
    }
}

/// The sender crashed after its commit and before the receiver's. The ends compare checksums, drop the samples
/// that differ, and continue.
#[test]
fn ends_that_compare_what_they_hold_never_miss() {
    let dir = tempfile::tempdir().unwrap();
    let open = |name: &str| -> Box<dyn LinkCodec> {
        let store = FileStore::open(&dir.path().join(name), LEN, 8).unwrap();
        Box::new(AqSgd::new(Int4::new(32).unwrap(), Staged::new(store)))
    };
    let (mut sender, mut receiver) = (open("a"), open("b"));
    let (mut payload, mut out) = (Payload::new(), vec![0.0; 3 * LEN]);
    let all: Vec<u64> = (0..8).collect();
    let ids = [1, 5, 6];
    sender.encode(&ids, &batch(&ids, 0), RoundKey::default(), &mut payload).unwrap();
    receiver.decode(&ids, payload.view(), &mut out).unwrap();
    sender.commit();
    receiver.commit();
    sender.encode(&[5, 2], &batch(&[5, 2], 1), RoundKey::default(), &mut payload).unwrap();
    sender.commit();
    drop(sender);

    let mut sender = open("a");
    let (here, there) = (sender.checksums(&all).unwrap(), receiver.checksums(&all).unwrap());
    let differ: Vec<u64> = all.iter().copied().filter(|&i| here[i as usize] != there[i as usize]).collect();
    assert_eq!(differ, [2, 5]);
    for end in [&mut sender, &mut receiver] {
        end.forget(&differ).unwrap();
        end.commit();
    }
    let ids = [5, 1, 2];
    sender.encode(&ids, &batch(&ids, 2), RoundKey::default(), &mut payload).unwrap();
    receiver.decode(&ids, payload.view(), &mut out).unwrap();
    assert_eq!(sender.checksums(&all).unwrap(), receiver.checksums(&all).unwrap());
}

/// The disk is full at a commit: the next call returns the error, and no write is lost.
#[test]
fn a_commit_that_fails_is_told_and_can_be_repeated() {
    /// A store whose writes fail while the flag is set.
    #[derive(Debug)]
    struct Disk(MemoryStore, std::sync::Arc<std::sync::atomic::AtomicBool>);

    impl State for Disk {}

    impl Store for Disk {
        fn samples(&self) -> Samples {
            self.0.samples()
        }
        fn read(&mut self, id: u64, out: &mut [u8]) -> Result<u32, CompressError> {
            self.0.read(id, out)
        }
        fn write(&mut self, id: u64, bytes: &[u8]) -> Result<(), CompressError> {
            if self.1.load(std::sync::atomic::Ordering::Relaxed) {
                let kind = std::io::ErrorKind::StorageFull;
                return Err(CompressError::Store { action: "write", kind, why: kind.to_string() });
            }
            self.0.write(id, bytes)
        }
        fn forget(&mut self, id: u64) -> Result<(), CompressError> {
            self.0.forget(id)
        }
    }

    let full = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let mut store = Staged::new(Disk(MemoryStore::new(2), full.clone()));
    let mut held = [0; 4];
    store.write(3, &[7; 4]).unwrap();
    store.commit();
    assert!(matches!(store.read(3, &mut held), Err(CompressError::Store { .. })));
    full.store(false, std::sync::atomic::Ordering::Relaxed);
    store.commit();
    assert!(store.read(3, &mut held).unwrap() != 0);
    assert_eq!(held, [7; 4]);
}
