//! Mutated payloads: decoders never panic, never allocate, and what they accept is finite.
#![expect(unsafe_code, reason = "a global allocator that counts is the only way to see every allocation")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use farflung_base::Philox;
use farflung_compress::{CompressError, Compressor, Payload, PayloadRef, RoundKey, parse};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

#[derive(Debug)]
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn seal(bytes: &mut [u8]) {
    if let Some((header, body)) = bytes.split_first_chunk_mut::<28>() {
        let mut crc = crc32fast::Hasher::new();
        crc.update(&header[..24]);
        crc.update(body);
        header[24..].copy_from_slice(&crc.finalize().to_le_bytes());
    }
}

fn mutate(bytes: &mut Vec<u8>, rng: &Philox, case: u64) {
    let [kind, at, with, seals] = rng.block(case);
    let at = at as usize % bytes.len().max(1);
    match kind % 6 {
        0 => bytes[at] ^= 1 << (with % 8),
        1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][with as usize % 5],
        2 => bytes.truncate(at),
        3 => bytes.extend_from_slice(&with.to_le_bytes()[..=at % 4]),
        // A whole field: a word of the header, or a scale.
        4 => {
            let at = at & !3;
            for (b, w) in bytes[at..].iter_mut().zip(with.to_le_bytes()) {
                *b = w;
            }
        }
        _ => bytes[at..].fill(with as u8),
    }
    // A forger can compute checksums, and states a length that fits.
    if seals % 4 != 0 {
        if seals % 8 > 3 && bytes.len() >= 28 {
            let body = bytes.len() as u64 - 28;
            bytes[16..24].copy_from_slice(&body.to_le_bytes());
        }
        seal(bytes);
    }
}

fn decode(codec: &dyn Compressor, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
    codec.decompress(PayloadRef::parse(bytes)?, out)
}

#[test]
fn mutants() {
    let rng = Philox::new(0x05ee_d0f0, 1);
    let x: Vec<f32> = (0..70).map(|i| (rng.uniform(i) - 0.5) * 3.0).collect();
    for name in [
        "none",
        "f16",
        "bf16",
        "int8:16",
        "int8+ef",
        "int4:16",
        "int3:16",
        "uint2:10",
        "sign:9",
        "topk:0.1",
        "topk:0.5/int4:8",
        "topk:3of20/f16",
        "rolling:3/sign:4",
        "permuted:4x2/topk:0.4/int8:4",
        "random:2",
    ] {
        let mut codec = parse(name).unwrap();
        let mut payload = Payload::new();
        codec.compress(&x, RoundKey::default(), &mut payload).unwrap();
        let (mut out, mut bytes) = (vec![0.0; x.len()], Vec::with_capacity(2 * payload.as_bytes().len()));
        let (mut accepted, mut past_the_header) = (0, 0);
        for case in 0..20_000 {
            bytes.clear();
            bytes.extend_from_slice(payload.as_bytes());
            mutate(&mut bytes, &rng, 1000 + case);
            let before = ALLOCATIONS.with(Cell::get);
            let result = decode(&*codec, &bytes, &mut out);
            assert_eq!(ALLOCATIONS.with(Cell::get), before, "{name}, case {case}");
            past_the_header += usize::from(PayloadRef::parse(&bytes).is_ok());
            if result.is_ok() {
                accepted += 1;
                assert!(name == "none" || out.iter().all(|v| v.is_finite()), "{name}, case {case}");
            }
        }
        // The driver reaches the decoders, and some mutants are other valid payloads.
        assert!(past_the_header > 5_000 && accepted > 500, "{name}: {past_the_header}, {accepted}");
        assert!(accepted < 16_000, "{name}: {accepted}");
    }
}

#[test]
fn nothing_is_allocated_after_the_first_round() {
    let x = vec![0.25; 5000];
    for name in [
        "none",
        "f16",
        "bf16",
        "int8",
        "none+ef",
        "f16+ef",
        "bf16+ef",
        "int8+ef",
        "int3-sr+ef",
        "uint4+ef",
        "sign+ef",
    ] {
        let (mut codec, mut payload, mut out) = (parse(name).unwrap(), Payload::new(), vec![0.0; 5000]);
        let mut round = || {
            codec.compress(&x, RoundKey::default(), &mut payload).unwrap();
            codec.decompress(payload.view(), &mut out).unwrap();
            codec.commit();
        };
        round();
        round();
        let before = ALLOCATIONS.with(Cell::get);
        round();
        assert_eq!(ALLOCATIONS.with(Cell::get), before, "{name}");
    }
}
