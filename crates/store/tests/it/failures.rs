//! Stores whose disk fails, fills up, or loses what was not flushed.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use farflung_store::{Arrays, BLOCK, LateArrays, Layout, Medium, Store, StoreError, Stream, checksum};

const PIECES: usize = 5;
const ARRAYS: usize = 3;
/// Arrays that are read; the last one is written only.
const READS: usize = 2;

/// What a medium does with one of its operations.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Fails(ErrorKind),
    /// Half of the bytes are written, and the next write fails.
    Short,
    /// The process is killed within the write: this share of its bytes is on the disk, and nothing later.
    Killed(usize),
}

#[derive(Debug, Default)]
struct State {
    disk: Vec<u8>,
    /// Writes since the last flush, by block.
    cached: Vec<(usize, Vec<u8>)>,
    /// Writes and flushes so far.
    done: usize,
    fault: Option<(usize, Fault)>,
    dead: bool,
}

/// A disk in memory. Its operations are counted, and one of them may fail.
#[derive(Debug, Default, Clone)]
struct Faulty(Arc<Mutex<State>>);

impl Faulty {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Returns a copy of the disk, with the writes that no flush has followed yet.
    fn copy(&self) -> Self {
        let disk = self.state().disk.clone();
        Self(Arc::new(Mutex::new(State { disk, ..State::default() })))
    }

    /// Returns a disk after power was lost: of the writes since the last flush, only some blocks arrived.
    fn after_power_loss(&self, seed: u64) -> Self {
        let state = self.state();
        let mut disk = state.disk.clone();
        let mut random = seed;
        for (at, before) in state.cached.iter().rev() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if random >> 63 == 1 {
                disk[*at..*at + before.len()].copy_from_slice(before);
            }
        }
        drop(state);
        Self(Arc::new(Mutex::new(State { disk, ..State::default() })))
    }
}

impl Medium for Faulty {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        let state = self.state();
        // Reads are short, too.
        let count = bytes.len().min(3 * BLOCK);
        bytes[..count].copy_from_slice(&state.disk[at as usize..at as usize + count]);
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let mut state = self.state();
        if state.dead {
            return Ok(bytes.len());
        }
        state.done += 1;
        let mut count = bytes.len();
        if let Some((number, fault)) = state.fault
            && state.done == number
        {
            match fault {
                Fault::Fails(kind) => return Err(kind.into()),
                Fault::Short => {
                    count /= 2;
                    state.fault = Some((number + 1, Fault::Fails(ErrorKind::StorageFull)));
                }
                Fault::Killed(share) => {
                    count = count * share / 4;
                    state.dead = true;
                }
            }
        }
        for (number, block) in bytes[..count].chunks(BLOCK).enumerate() {
            let at = at as usize + number * BLOCK;
            let before = state.disk[at..at + block.len()].to_vec();
            state.cached.push((at, before));
            state.disk[at..at + block.len()].copy_from_slice(block);
        }
        Ok(if state.dead { bytes.len() } else { count })
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.dead {
            return Ok(());
        }
        state.done += 1;
        match state.fault {
            Some((number, Fault::Fails(kind))) if state.done == number => return Err(kind.into()),
            Some((number, Fault::Killed(_))) if state.done == number => state.dead = true,
            _ => state.cached.clear(),
        }
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> io::Result<()> {
        self.state().disk.resize(bytes as usize, 0);
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.state().disk.len() as u64)
    }
}

struct Buffer([Vec<u8>; ARRAYS]);

impl Arrays for Buffer {
    fn array(&self, number: usize) -> &[u8] {
        &self.0[number]
    }

    fn array_mut(&mut self, number: usize) -> &mut [u8] {
        &mut self.0[number]
    }
}

fn layout() -> Layout {
    // The last piece is shorter.
    Layout::new([1; 32], ARRAYS, (0..PIECES).map(|piece| if piece < 4 { 2 } else { 1 } * BLOCK as u64), 100)
}

fn buffers(count: usize) -> Vec<Buffer> {
    (0..count).map(|_| Buffer([(); ARRAYS].map(|()| vec![0xAA; 2 * BLOCK]))).collect()
}

fn open(medium: &Faulty) -> Result<Store, StoreError> {
    Store::on(Path::new("disk"), layout(), Arc::new(medium.clone()))
}

/// The value of array 0 after some generations. Array 1 adds up array 0.
fn value(piece: usize, generation: u64) -> u8 {
    (generation as u8).wrapping_mul(piece as u8 + 1)
}

/// Writes a generation, and waits for it.
fn write(stream: &mut Stream<Buffer>, generation: u64) -> Result<(), StoreError> {
    start(stream, generation)?;
    stream.wait()
}

/// The last arrays of all pieces.
struct Late(Vec<Vec<u8>>);

impl LateArrays for Late {
    fn fill(&self, piece: usize, array: usize, bytes: &mut [u8]) {
        assert_eq!(array, READS);
        bytes.copy_from_slice(&self.0[piece]);
    }
}

const fn is_late(generation: u64) -> bool {
    generation % 2 == 1
}

/// Writes a generation, as an optimizer does.
fn start(stream: &mut Stream<Buffer>, generation: u64) -> Result<(), StoreError> {
    stream.begin(generation);
    let mut rest = Vec::new();
    for piece in 0..PIECES {
        let mut buffer = stream.take()?;
        let bytes = layout().array_bytes(piece) as usize;
        let [first, second, last] = &mut buffer.0;
        for (at, byte) in first[..bytes].iter_mut().enumerate() {
            *byte = byte.wrapping_add(piece as u8 + 1);
            second[at] = second[at].wrapping_add(*byte);
            last[at] = second[at] ^ 0xFF;
        }
        // The last array is elsewhere in memory, and is written later in every second generation.
        let late = if is_late(generation) { vec![checksum(&last[..bytes])] } else { Vec::new() };
        rest.push(last[..bytes].to_vec());
        stream.give(buffer, &late)?;
    }
    let record = generation.to_string().into_bytes();
    if is_late(generation) { stream.commit_late(record, READS, Late(rest)) } else { stream.commit(record) }
}

/// Checks all values of a generation.
fn check(store: &Store, generation: u64) {
    store.check(generation).unwrap();
    for piece in 0..PIECES {
        let bytes = layout().array_bytes(piece) as usize;
        let mut arrays = [(); ARRAYS].map(|()| vec![0; bytes]);
        for (number, array) in arrays.iter_mut().enumerate() {
            store.read(generation, piece, number, array).unwrap();
        }
        let sum = (1..=generation).fold(0_u8, |sum, step| sum.wrapping_add(value(piece, step)));
        let expected = [value(piece, generation), sum, sum ^ 0xFF];
        for (array, expected) in arrays.iter().zip(expected) {
            assert!(array.iter().all(|&byte| byte == expected), "piece {piece} of {generation}");
        }
    }
}

/// A disk with generations 1 to `count`.
fn with_generations(count: u64) -> Faulty {
    let medium = Faulty::default();
    let mut stream = Stream::new(Arc::new(open(&medium).unwrap()), None, buffers(3), READS);
    (1..=count).for_each(|generation| write(&mut stream, generation).unwrap());
    drop(stream);
    medium
}

fn newest(store: &Store) -> Vec<u64> {
    store.generations().unwrap().iter().map(|generation| generation.number).collect()
}

#[test]
fn generations_follow_each_other_with_any_number_of_buffers() {
    for count in [1, 2, 3, 8] {
        let medium = Faulty::default();
        let store = Arc::new(open(&medium).unwrap());
        assert_eq!(newest(&store), []);
        let mut stream = Stream::new(Arc::clone(&store), None, buffers(count), READS);
        for generation in 1..=6 {
            write(&mut stream, generation).unwrap();
            check(&store, generation);
        }
        let [read, written] = store.moved();
        assert!(read > 0 && written >= 6 * layout().generation_bytes() - 6 * 4096, "{read} {written}");
        drop((stream, store));
        // Another process goes on from there.
        let store = Arc::new(open(&medium.copy()).unwrap());
        let found = store.generations().unwrap();
        assert_eq!(newest(&store), [6, 5]);
        assert_eq!(found[0].record, b"6");
        check(&store, 5);
        let mut stream = Stream::new(Arc::clone(&store), Some(6), buffers(count), READS);
        write(&mut stream, 7).unwrap();
        check(&store, 7);
    }
}

#[test]
fn generations_follow_each_other_without_waiting() {
    for count in [1, 2, 3, 8] {
        let medium = Faulty::default();
        let store = Arc::new(open(&medium).unwrap());
        let mut stream = Stream::new(Arc::clone(&store), None, buffers(count), READS);
        for generation in 1..=20 {
            start(&mut stream, generation).unwrap();
        }
        stream.wait().unwrap();
        assert_eq!(newest(&store), [20, 19]);
        check(&store, 20);
    }
}

#[test]
fn commits_are_awaited_while_the_next_generation_is_read() {
    let medium = Faulty::default();
    let store = Arc::new(open(&medium).unwrap());
    let mut stream = Stream::new(Arc::clone(&store), None, buffers(2), READS);
    write(&mut stream, 1).unwrap();
    stream.begin(2);
    stream.begin(2);
    stream.wait().unwrap();
    assert_eq!(newest(&store), [1]);
    write(&mut stream, 2).unwrap();
    check(&store, 2);
}

#[test]
fn a_failure_at_any_write_or_flush_leaves_the_last_generation() {
    let kinds = [ErrorKind::StorageFull, ErrorKind::Other].map(Fault::Fails);
    // Those of a generation: a header and its arrays, a flush, the record, a flush.
    let operations = PIECES * (1 + ARRAYS) + 3;
    for fault in kinds.into_iter().chain([Fault::Short]) {
        for number in 1..=operations {
            if fault == Fault::Short && [operations - 2, operations].contains(&number) {
                // A flush writes nothing.
                continue;
            }
            let medium = with_generations(2);
            let store = Arc::new(open(&medium).unwrap());
            let done = medium.state().done;
            medium.state().fault = Some((done + number, fault));
            let mut stream = Stream::new(Arc::clone(&store), Some(2), buffers(2), READS);
            let error = write(&mut stream, 3).unwrap_err();
            let StoreError::Io { action, bytes, .. } = &error else { panic!("{error}") };
            let flush = *action == "flush" && *bytes == 0;
            assert!(flush || *action == "write" && *bytes > 0, "{error}");
            assert!(error.to_string().contains("disk"), "{error}");
            // Nothing more is done.
            assert!(stream.wait().is_err() && stream.take().is_err());
            drop(stream);
            // If only the last flush fails, or the second half of its block, the record is there.
            let whole = number == operations || (fault, number) == (Fault::Short, operations - 1);
            let last = if whole { 3 } else { 2 };
            assert_eq!(newest(&store)[0], last, "{fault:?} at {number}");
            check(&store, 2);
            // The run goes on once the disk is well.
            medium.state().fault = None;
            let mut stream = Stream::new(Arc::clone(&store), Some(2), buffers(2), READS);
            write(&mut stream, 3).unwrap();
            check(&store, 3);
        }
    }
}

#[test]
fn a_process_killed_at_any_write_resumes_from_a_whole_generation() {
    for number in 1..=PIECES * (1 + ARRAYS) + 3 {
        for share in 0..=4 {
            let medium = with_generations(2);
            let store = Arc::new(open(&medium).unwrap());
            let done = medium.state().done;
            medium.state().fault = Some((done + number, Fault::Killed(share)));
            let mut stream = Stream::new(Arc::clone(&store), Some(2), buffers(3), READS);
            write(&mut stream, 3).unwrap();
            drop(stream);
            let store = open(&medium.copy()).unwrap();
            let whole = newest(&store);
            assert!([2, 3].contains(&whole[0]), "{whole:?}");
            for &generation in &whole {
                check(&store, generation);
            }
        }
    }
}

#[test]
fn after_power_is_lost_the_newest_generation_is_whole() {
    let mut damaged = 0;
    for number in 1..=PIECES * (1 + ARRAYS) + 3 {
        for seed in 0..8 {
            let medium = with_generations(2);
            let store = Arc::new(open(&medium).unwrap());
            let done = medium.state().done;
            medium.state().fault = Some((done + number, Fault::Killed(4)));
            let mut stream = Stream::new(Arc::clone(&store), Some(2), buffers(3), READS);
            write(&mut stream, 3).unwrap();
            drop(stream);
            let store = open(&medium.after_power_loss(seed * 7919 + number as u64)).unwrap();
            let whole = newest(&store);
            assert!([2, 3].contains(&whole[0]), "{whole:?}");
            check(&store, whole[0]);
            // An older one may have newer arrays under its headers, which a full check finds.
            let older = whole.get(1).map(|&older| store.check(older));
            damaged += u32::from(matches!(older, Some(Err(StoreError::Damaged { .. }))));
        }
    }
    assert!(damaged > 0, "some headers are older than their arrays");
}

#[test]
fn generations_are_forgotten_when_work_goes_on_from_an_older_one() {
    let medium = with_generations(3);
    let store = Arc::new(open(&medium).unwrap());
    store.keep_only(Some(2)).unwrap();
    assert_eq!(newest(&store), [2]);
    check(&store, 2);
    store.keep_only(None).unwrap();
    assert_eq!(newest(&store), []);
    // Any number may come next.
    let mut stream = Stream::new(Arc::clone(&store), None, buffers(2), READS);
    write(&mut stream, 1).unwrap();
    check(&store, 1);
}

/// Arrays whose reading panics.
struct Panics;

impl LateArrays for Panics {
    fn fill(&self, _: usize, _: usize, _: &mut [u8]) {
        panic!("a test's arrays cannot be read");
    }
}

#[test]
fn nobody_waits_for_a_thread_that_panicked() {
    let medium = with_generations(2);
    let store = Arc::new(open(&medium).unwrap());
    let mut stream = Stream::new(Arc::clone(&store), Some(2), buffers(2), READS);
    stream.begin(3);
    for _ in 0..PIECES {
        let piece = stream.take().unwrap();
        stream.give(piece, &[0]).unwrap();
    }
    stream.commit_late(Vec::new(), READS, Panics).unwrap();
    assert!(matches!(stream.wait(), Err(StoreError::Stopped { .. })));
    drop(stream);
    assert_eq!(newest(&store), [2]);
}

#[test]
fn damage_is_found_where_it_is_read() {
    let medium = with_generations(2);
    let store = Arc::new(open(&medium).unwrap());
    let at = medium.state().disk.len() - BLOCK * (1 + 3 + 1 + 3);
    // In the last piece, whose two slots end the file: generation 2 comes first.
    medium.state().disk[at + BLOCK + 7] ^= 1;
    assert_eq!(newest(&store), [2, 1]);
    assert!(matches!(store.check(2), Err(StoreError::Damaged { generation: 2, piece: 4, .. })));
    store.check(1).unwrap();
    // The newest generation must be whole; a damaged record is none.
    medium.state().disk[at + 3] ^= 1;
    assert!(matches!(store.generations(), Err(StoreError::Damaged { generation: 2, piece: 4, .. })));
    medium.state().disk[at + 3] ^= 1;
    medium.state().disk[2 * BLOCK + 70] ^= 1;
    assert_eq!(newest(&store), [2]);
    medium.state().disk[2 * BLOCK + 70] ^= 1;
    let mut stream = Stream::new(Arc::clone(&store), Some(2), buffers(2), READS);
    assert!(matches!(write(&mut stream, 3), Err(StoreError::Damaged { piece: 4, .. })));
    drop(stream);
    assert_eq!(newest(&store), [2]);
}
