//! Feeds mutated payloads to every decoder.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use farflung::compress::link::{AqSgd, LinkCodec, MemoryStore};
use farflung::compress::mutate::{mutate, reseal};
use farflung::compress::{CompressError, Compressor, Int8, Payload, PayloadRef, RoundKey, parse};

use crate::allocations::counted;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "hostile-payloads",
    claim: "no mutated payload makes a decoder panic, write outside of its output, allocate above its bound, \
            or accept an index out of range",
    source: "crates/compress/tests/corpus: a payload of 40 values for each decoder, mutated by a seeded driver",
    seed: 0x05ee_d0f0,
    run,
};

/// Number of values in the vectors of the corpus.
const LEN: usize = 40;

/// Results of decoding mutated payloads.
#[derive(Debug, Default)]
struct Outcome {
    total: u64,
    /// Payloads whose header was accepted.
    reached: u64,
    accepted: u64,
    /// Payloads that were accepted with a value that is not finite. No encoder of the codec writes such values.
    not_finite: u64,
    /// The largest ratio of bytes allocated by one call to the allowed number.
    allocated: f64,
    /// Calls that wrote before or after the output.
    outside: u64,
    /// Calls in which the decoder panicked.
    panics: u64,
}

impl Outcome {
    fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.reached += other.reached;
        self.accepted += other.accepted;
        self.not_finite += other.not_finite;
        self.allocated = self.allocated.max(other.allocated);
        self.outside += other.outside;
        self.panics += other.panics;
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let cases = if options.quick { 100_000 } else { 10_000_000 };
    let seed = report.seed();
    let mut files = std::fs::read_dir(corpus())?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<PathBuf>>>()
        .context("failed to list the corpus")?;
    files.sort_unstable();
    ensure!(!files.is_empty(), "the corpus is empty");
    let decoders = files.len() + 1;
    let mut jobs = files.clone();
    jobs.push(PathBuf::new());
    let jobs = Mutex::new(jobs);
    let work = || -> Result<Outcome> {
        let mut sum = Outcome::default();
        loop {
            let Some(job) = jobs.lock().ok().and_then(|mut jobs| jobs.pop()) else { return Ok(sum) };
            let outcome =
                if job.as_os_str().is_empty() { link(cases, seed)? } else { file(&job, cases, seed)? };
            sum.add(&outcome);
        }
    };
    let all = std::thread::scope(|scope| -> Result<Outcome> {
        let other = scope.spawn(work);
        let mut sum = work()?;
        sum.add(&other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        Ok(sum)
    })?;
    let total = all.total as f64;
    report.row(
        "decoders, each with its payloads of the corpus",
        decoders as f64,
        "",
        Threshold::AtLeast(30.0),
    )?;
    report.row("payloads per decoder", total / decoders as f64, "", Threshold::AtLeast(cases as f64))?;
    report.row("panics", all.panics as f64, "", Threshold::AtMost(0.0))?;
    report.row(
        "share of payloads that reached a decoder",
        all.reached as f64 / total,
        "",
        Threshold::AtLeast(0.3),
    )?;
    report.row(
        "share of payloads accepted as another valid payload",
        all.accepted as f64 / total,
        "",
        Threshold::None,
    )?;
    report.row(
        "payloads accepted with a value that is not finite",
        all.not_finite as f64,
        "",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "payloads for which a decoder wrote outside of the output",
        all.outside as f64,
        "",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "largest allocation by a decoder, relative to max_payload",
        all.allocated,
        "",
        Threshold::AtMost(1.0),
    )?;
    let (forged, taken) = out_of_range(&files)?;
    report.row("payloads with an index out of range", f64::from(forged), "", Threshold::AtLeast(100.0))?;
    report.row(
        "payloads with an index out of range that were accepted",
        f64::from(taken),
        "",
        Threshold::AtMost(0.0),
    )
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/compress/tests/corpus")
}

/// Returns the name and the codec of a file of the corpus, and its bytes.
fn open(path: &Path) -> Result<(String, Box<dyn Compressor>, Vec<u8>)> {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).context("a file of the corpus has no name")?;
    let name = stem.replace('=', ":").replace(',', "/");
    let codec = parse(name.split_once('@').map_or(&*name, |(name, _)| name))?;
    Ok((name, codec, std::fs::read(path)?))
}

fn file(path: &Path, cases: u64, seed: u64) -> Result<Outcome> {
    let (name, codec, good) = open(path)?;
    // Plain f32 accepts values that are not finite, and its encoder writes them.
    let exact = name.starts_with("none");
    let bound = codec.max_payload(LEN) as f64;
    Ok(attack(&good, cases, seed, bound, exact, |p, out| codec.decompress(p, out)))
}

/// Attacks the decoder of a link. Of the two samples in the payload, one is a change and one is sent in full.
fn link(cases: u64, seed: u64) -> Result<Outcome> {
    let (mut payload, mut out) = (Payload::new(), [0.0; LEN]);
    let mut x = [0.0; LEN];
    Philox::new(seed, 2).fill_normal(1.0, &mut x);
    let half = LEN / 2;
    let mut sender = AqSgd::new(Int8::new(16)?, MemoryStore::new(half));
    let mut receiver = AqSgd::new(Int8::new(16)?, MemoryStore::new(half));
    sender.encode(&[7], &x[..half], RoundKey::default(), &mut payload)?;
    receiver.decode(&[7], payload.view(), &mut out[..half])?;
    let first = payload.clone();
    sender.encode(&[7, 9], &x, RoundKey::default(), &mut payload)?;
    let bound = sender.max_payload(2) as f64;
    // The first call allocates the link's own buffers.
    receiver.decode(&[7, 9], payload.view(), &mut out)?;
    // An accepted payload changes the stored samples, so they are restored before the next one.
    let mut accepted = true;
    Ok(attack(payload.as_bytes(), cases, seed, bound, false, |p, out| {
        if std::mem::take(&mut accepted) {
            receiver.forget(&[9])?;
            receiver.decode(&[7], first.view(), &mut out[..half])?;
        }
        let result = receiver.decode(&[7, 9], p, out);
        accepted = result.is_ok();
        result
    }))
}

fn attack(
    good: &[u8],
    cases: u64,
    seed: u64,
    bound: f64,
    exact: bool,
    mut decode: impl FnMut(PayloadRef<'_>, &mut [f32]) -> Result<(), CompressError>,
) -> Outcome {
    let rng = Philox::new(seed, 1);
    // The output has a guard value on both sides, to detect writes outside of it.
    let (mut out, mut bytes) = (vec![1.5_f32; LEN + 2], Vec::with_capacity(2 * good.len()));
    let mut outcome = Outcome { total: cases, ..Outcome::default() };
    for case in 0..cases {
        bytes.clear();
        bytes.extend_from_slice(good);
        mutate(&mut bytes, &rng, 1000 + case);
        let Ok(p) = PayloadRef::parse(&bytes) else { continue };
        outcome.reached += 1;
        let inside = &mut out[1..=LEN];
        // Going on after a panic is unwind-safe: only this decoder uses its state again, and the panic is
        // counted.
        let caught = catch_unwind(AssertUnwindSafe(|| counted(|| decode(p, inside))));
        let Ok((result, allocated)) = caught else {
            outcome.panics += 1;
            continue;
        };
        outcome.allocated = outcome.allocated.max(allocated.total as f64 / bound);
        if result.is_ok() {
            outcome.accepted += 1;
            outcome.not_finite += u64::from(!exact && inside.iter().any(|v| !v.is_finite()));
        }
        let guards = [out[0], out[LEN + 1]].map(f32::to_bits);
        outcome.outside += u64::from(guards != [1.5_f32.to_bits(); 2]);
    }
    outcome
}

/// Forges selections whose last index is after the end of the vector. Returns their number, and how many were
/// accepted.
fn out_of_range(files: &[PathBuf]) -> Result<(u32, u32)> {
    let (mut forged, mut taken) = (0, 0);
    for path in files {
        let (name, codec, good) = open(path)?;
        if !name.starts_with("topk") || name.contains('+') {
            continue;
        }
        let mut out = [0.0; LEN];
        codec.decompress(PayloadRef::parse(&good)?, &mut out)?;
        let last = out.iter().rposition(|v| *v != 0.0).context("the payload keeps no element")?;
        for count in 1..=last {
            let mut bytes = good.clone();
            bytes[8..16].copy_from_slice(&(count as u64).to_le_bytes());
            reseal(&mut bytes);
            forged += 1;
            taken += u32::from(codec.decompress(PayloadRef::parse(&bytes)?, &mut out[..count]).is_ok());
        }
    }
    Ok((forged, taken))
}
