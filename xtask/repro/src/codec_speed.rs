//! Compares the speed of codecs on one core with that of other libraries and of the memory.

use std::hint::black_box;

use anyhow::Result;
use farflung::compress::{Compressor, Payload, PowerSgd, Protocol, RoundKey, State, parse};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{median, now};
use crate::normal::values;

pub(crate) const BENCH: Bench = Bench {
    name: "codec-speed",
    claim: "on one core, codecs run near the speed of memory, and several times faster than those of \
            PyTorch, numpy and others",
    source: "PyTorch 2.15, numpy 2.4, bitsandbytes, hivemind: compress_bench.py with tuned malloc",
    seed: 5,
    run,
};

/// A codec, the names of the rivals, the factors by which encoding and decoding must be faster than theirs, and
/// whether encoding must be near the memory's speed.
struct Rival {
    name: &'static str,
    theirs: &'static [&'static str],
    encode: Option<f64>,
    decode: Option<f64>,
    near: bool,
}

const fn rival(
    name: &'static str,
    theirs: &'static [&'static str],
    encode: Option<f64>,
    decode: Option<f64>,
    near: bool,
) -> Rival {
    Rival { name, theirs, encode, decode, near }
}

const INT8: &[&str] = &["torch int8 group128", "bnb blockwise 8bit", "hivemind BLOCKWISE_8BIT"];
const INT4: &[&str] = &["torch 4bit group128+pack", "bnb nf4"];
const TOP: &[&str] = &["torch.topk 1%", "torch sampled-threshold 1%", "numpy.argpartition 1%"];

const RIVALS: [Rival; 13] = [
    rival("sign+ef", &["sign 1bit+EF (torch+np.packbits)"], Some(4.0), Some(2.0), true),
    rival("sign", &[], None, None, true),
    rival("int4:128", INT4, Some(5.0), Some(2.0), true),
    rival("int4:128+ef", &[], None, None, true),
    rival("int8:128", INT8, Some(3.0), Some(1.0), true),
    rival("int8:128+ef", &[], None, None, true),
    rival("int8:2048", &["torch.quantize_per_tensor int8"], None, Some(1.0), false),
    rival("topk:0.01", TOP, Some(3.0), Some(1.0), false),
    rival("sampled:0.01", TOP, None, Some(1.0), false),
    rival("bf16", &["torch.to(bfloat16)"], None, Some(1.0), false),
    rival("f16", &["torch.to(float16)", "hivemind FLOAT16"], None, Some(1.0), false),
    rival("meanstd8", &["hivemind UNIFORM_8BIT"], None, Some(1.0), false),
    rival("quantile8", &["hivemind QUANTILE_8BIT"], None, Some(1.0), false),
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (n, rounds) = if options.quick { (1 << 22, 3) } else { (1 << 24, 9) };
    let x = values(n, report.seed());
    let mut memory = Memory { y: x.clone(), reads: Vec::new(), writes: Vec::new() };
    for Rival { name, theirs, encode, decode, near } in RIVALS {
        let mut codec = parse(name)?;
        let (mut payload, mut out) = (Payload::new(), vec![0.0; n]);
        let bytes = 4.0 * n as f64;
        let (mut encoding, mut decoding, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            let key = RoundKey { round, ..RoundKey::default() };
            let start = now();
            codec.compress(&x, key, &mut payload)?;
            let encoded = now();
            codec.decompress(black_box(payload.view()), black_box(&mut out))?;
            let decoded = now();
            codec.commit();
            // Measured in turns with the codec, because other programs on the machine slow both.
            let (read, write) = memory.measure(&x);
            if round > 0 {
                encoding.push((encoded - start).as_secs_f64());
                decoding.push((decoded - encoded).as_secs_f64());
                // Encoding reads x, reads and writes the residual e, and writes the payload.
                let feedback = if name.ends_with("+ef") { 2.0 * bytes * write } else { 0.0 };
                let least = bytes * read + feedback + payload.as_bytes().len() as f64 * write;
                shares.push(least / (encoded - start).as_secs_f64());
            }
        }
        let (encoding, decoding) = (median(encoding), median(decoding));
        let (rate, decoded) = (bytes / encoding / 1e9, bytes / decoding / 1e9);
        report.row(&format!("{name}: encode"), rate, "GB/s", Threshold::None)?;
        report.row(&format!("{name}: decode"), decoded, "GB/s", Threshold::None)?;
        let best = |field| {
            let peer =
                |name: &&str| options.peers.best("compress", &[("name", name), ("malloc", "tuned")], field);
            theirs.iter().filter_map(peer).max_by(f64::total_cmp)
        };
        let mark = |bound: Option<f64>| bound.map_or(Threshold::None, Threshold::AtLeast);
        if !theirs.is_empty() {
            report.ratio(
                &format!("{name}: encode, speed relative to the best of the others"),
                rate,
                best("enc_gbs"),
                mark(encode),
            )?;
            report.ratio(
                &format!("{name}: decode, speed relative to the best of the others"),
                decoded,
                best("dec_gbs"),
                mark(decode),
            )?;
        }
        let bound = if near { Threshold::AtLeast(0.6) } else { Threshold::None };
        report.row(&format!("{name}: encode, speed relative to the memory's"), median(shares), "", bound)?;
    }
    let Memory { reads, writes, .. } = memory;
    report.row("memory: read, one core", 1e-9 / median(reads), "GB/s", Threshold::None)?;
    report.row(
        "memory: read and write a vector in place, one core",
        1e-9 / median(writes),
        "GB/s",
        Threshold::None,
    )?;
    low_rank(report, options, rounds)
}

/// Measures `PowerSGD`, whose cost is matrix products. Our encoder also computes the residual of the previous
/// round, which the rival's does not.
fn low_rank(report: &mut Report<'_>, options: &Options, rounds: u64) -> Result<()> {
    const SIDE: usize = 4096;
    let x = values(SIDE * SIDE, report.seed());
    let (mut method, mut out) = (PowerSgd::new(SIDE, SIDE, 4, report.seed())?, vec![0.0; x.len()]);
    let (mut encoding, mut decoding) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let start = now();
        method.begin(&x)?;
        while let Some(values) = method.outgoing().map(<[f32]>::to_vec) {
            method.incoming(&values)?;
        }
        let encoded = now();
        method.end(black_box(&mut out))?;
        if round > 0 {
            encoding.push((encoded - start).as_secs_f64());
            decoding.push(encoded.elapsed().as_secs_f64());
        }
        method.commit();
    }
    for (what, seconds, field) in [("encode", encoding, "enc_gbs"), ("decode", decoding, "dec_gbs")] {
        let rate = 4e-9 * x.len() as f64 / median(seconds);
        report.row(&format!("PowerSGD rank 4: {what}"), rate, "GB/s", Threshold::None)?;
        let keys = [("name", "PowerSGD rank4 (4096x4096)"), ("malloc", "tuned")];
        let theirs = options.peers.best("compress", &keys, field);
        report.ratio(
            &format!("PowerSGD rank 4: {what}, speed relative to the other implementation"),
            rate,
            theirs,
            Threshold::AtLeast(1.0),
        )?;
    }
    Ok(())
}

/// The memory's speed on one core, in seconds per byte: for reading a vector, and for each byte read or written
/// when a vector is changed in place.
struct Memory {
    y: Vec<f32>,
    reads: Vec<f64>,
    writes: Vec<f64>,
}

impl Memory {
    /// Measures both once more: reads `x`, and changes `y`, which is as long, in place.
    fn measure(&mut self, x: &[f32]) -> (f64, f64) {
        let bytes = size_of_val(x) as f64;
        let start = now();
        // Bits are compared as integers, so that the maximum can be computed with vector instructions.
        let max = x.iter().fold(0, |max: i32, x| max.max(x.to_bits().cast_signed()));
        black_box(max);
        let middle = now();
        for y in &mut self.y {
            *y *= 0.5;
        }
        black_box(&mut self.y);
        let (read, write) =
            ((middle - start).as_secs_f64() / bytes, middle.elapsed().as_secs_f64() / bytes / 2.0);
        self.reads.push(read);
        self.writes.push(write);
        (read, write)
    }
}
