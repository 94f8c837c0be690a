//! Corrupted payloads: decoders never panic, never allocate more than their bound, and output only finite
//! values, except that plain f32 passes every bit pattern.
#![cfg(all(feature = "lz4", feature = "zstd"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]
#![expect(unsafe_code, reason = "a global allocator that counts is the only way to see every allocation")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

use farflung_base::Philox;
use farflung_compress::mutate::reseal;
use farflung_compress::{
    Amount, CompressError, Compressor, F32, IndexCoding, Payload, PayloadRef, RoundKey, Select, Sparse,
    mutate, parse,
};

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

#[derive(Debug)]
struct Counting;

// SAFETY: every call is forwarded to the system's allocator unchanged; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.with(|n| n.set(n.get() + layout.size()));
        // SAFETY: the caller guarantees what the system's allocator requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees what the system's allocator requires.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn decode(codec: &dyn Compressor, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
    codec.decompress(PayloadRef::parse(bytes)?, out)
}

/// Returns forty values, most of them small.
fn values() -> Vec<f32> {
    let rng = Philox::new(0x05ee_d0f0, 1);
    (0..40).map(|i| (rng.uniform(i) - 0.5) * if i % 3 == 0 { 3.0 } else { 0.01 }).collect()
}

/// Codec names with a payload in the corpus, small enough to read. The part after `@` names the coding of
/// indices. Payloads for a lossless stage hold only zeros, so that they are packed.
const CORPUS: [&str; 36] = [
    "none",
    "f16",
    "bf16",
    "int8:16",
    "int4:16",
    "int3:16",
    "int2:16",
    "uint8:16",
    "uint4:16",
    "uint3:16",
    "uint2:16",
    "sign:9",
    "e4m3:16",
    "e5m2:16",
    "e3m0:16",
    "minmax8:16",
    "natural",
    "meanstd8:40",
    "meanstd2:16",
    "quantile4:16",
    "topk:0.1",
    "topk:0.3@fixed",
    "topk:0.3@bitmask",
    "topk:0.3@varint",
    "topk:0.3@rice",
    "topk:0.5/int4:8",
    "topk:3of20/f16",
    "rolling:3/sign:4",
    "permuted:4x2/topk:0.4/int4:8",
    "random:2",
    "unbiased:3/bf16",
    "dct:4/int8:16",
    "dct:6/topk:9of36/sign:5",
    "none+zstd",
    "int8:16+lz4",
    "topk:1.0/int8:16+zstd",
];

fn encode(name: &str) -> Vec<u8> {
    let x = if name.contains("+zstd") || name.contains("+lz4") { vec![0.0; 40] } else { values() };
    let mut payload = Payload::new();
    match name.split_once('@') {
        None => parse(name).unwrap().compress(&x, RoundKey::default(), &mut payload).unwrap(),
        Some((_, coding)) => {
            let coding = match coding {
                "fixed" => IndexCoding::Fixed(9),
                "bitmask" => IndexCoding::Bitmask,
                "varint" => IndexCoding::Varint,
                _ => IndexCoding::Rice,
            };
            let top = Sparse::new(Select::Largest(Amount::millionths(300_000)), F32::new()).unwrap();
            top.indices(coding).compress(&x, RoundKey::default(), &mut payload).unwrap();
        }
    }
    payload.into_bytes()
}

fn decoder(name: &str) -> Box<dyn Compressor> {
    parse(name.split_once('@').map_or(name, |(name, _)| name)).unwrap()
}

/// Returns the path of a payload in the corpus: the codec's name with two characters replaced.
fn corpus(name: &str) -> PathBuf {
    let file = name.replace(':', "=").replace('/', ",");
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(format!("{file}.ffcz"))
}

#[test]
fn the_corpus_is_what_is_written_today() {
    let files = std::fs::read_dir(corpus("").parent().unwrap()).unwrap().count();
    for name in CORPUS {
        let (path, today) = (corpus(name), encode(name));
        if !path.exists() {
            std::fs::write(&path, &today).unwrap();
            unreachable!("{} was missing and is written now: look at it, and keep it", path.display());
        }
        let kept = std::fs::read(path).unwrap();
        let (mut a, mut b) = ([0.0; 40], [0.0; 40]);
        decode(&*decoder(name), &kept, &mut a).unwrap();
        decode(&*decoder(name), &today, &mut b).unwrap();
        assert_eq!(a.map(f32::to_bits), b.map(f32::to_bits), "{name}");
        // The bytes written by a packer may change with its library's version.
        assert!(kept == today || name.contains("+zstd") || name.contains("+lz4"), "{name}");
    }
    assert_eq!(files, CORPUS.len(), "a file of the corpus is nobody's");
}

#[test]
fn mutants() {
    let rng = Philox::new(0x05ee_d0f0, 1);
    for name in CORPUS {
        let (codec, good) = (decoder(name), encode(name));
        let (mut out, mut bytes) = ([0.0; 40], Vec::with_capacity(2 * good.len()));
        let bound = codec.max_payload(out.len());
        let (mut accepted, mut past_the_header) = (0, 0);
        for case in 0..10_000 {
            bytes.clear();
            bytes.extend_from_slice(&good);
            mutate(&mut bytes, &rng, 1000 + case);
            let before = ALLOCATED.with(Cell::get);
            let result = decode(&*codec, &bytes, &mut out);
            let allocated = ALLOCATED.with(Cell::get) - before;
            // Only packed payloads need memory for decoding.
            let most = if name.contains("+zstd") || name.contains("+lz4") { bound } else { 0 };
            assert!(allocated <= most, "{name}, case {case}: {allocated} bytes");
            past_the_header += usize::from(PayloadRef::parse(&bytes).is_ok());
            if result.is_ok() {
                accepted += 1;
                let finite = out.iter().all(|v| v.is_finite());
                assert!(finite || name.starts_with("none"), "{name}, case {case}");
            }
        }
        // Enough mutants get past the header, and some of them are other valid payloads.
        assert!(past_the_header > 2_500 && accepted > 30, "{name}: {past_the_header}, {accepted}");
        assert!(accepted < 8_000, "{name}: {accepted}");
    }
}

#[test]
fn an_index_out_of_range_is_refused_in_every_coding() {
    for name in CORPUS.into_iter().filter(|name| name.starts_with("topk") && !name.contains('+')) {
        let good = encode(name);
        let last = {
            let mut out = [0.0; 40];
            decode(&*decoder(name), &good, &mut out).unwrap();
            out.iter().rposition(|v| *v != 0.0).unwrap()
        };
        // The same indices, in vectors that end before the last of them.
        for count in 1..=last {
            let mut bytes = good.clone();
            bytes[8..16].copy_from_slice(&(count as u64).to_le_bytes());
            reseal(&mut bytes);
            let mut out = vec![0.0; count];
            assert!(decode(&*decoder(name), &bytes, &mut out).is_err(), "{name}: {count} of {last}");
        }
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
        "topk:0.01/f16+ef",
        "topk:64of500+ef",
        "rolling:3/topk:0.1/int4+ef",
        "dct:8/int8+ef",
    ] {
        let (mut codec, mut payload, mut out) = (parse(name).unwrap(), Payload::new(), vec![0.0; 5000]);
        let mut round = || {
            codec.compress(&x, RoundKey::default(), &mut payload).unwrap();
            codec.decompress(payload.view(), &mut out).unwrap();
            codec.commit();
        };
        round();
        round();
        let before = ALLOCATED.with(Cell::get);
        round();
        assert_eq!(ALLOCATED.with(Cell::get), before, "{name}");
    }
}
