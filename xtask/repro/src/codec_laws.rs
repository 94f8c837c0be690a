//! Checks laws of codecs: some for every codec that has a name, others for the codecs in a list.

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use farflung::compress::{
    Chunked, Chunks, CodecSpec, CompressError, Compressor, ErrorFeedback, Memoryless, Payload, RoundKey,
    State, parse,
};
use farflung::compress::{Int3, Int8, Natural, Sign, Uint4};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "codec-laws",
    claim: "codecs that are said to be unbiased are unbiased, errors and variances are within their bounds, \
            error feedback loses nothing, unusual inputs and values near the limits of f32 have the \
            documented result, and the number of threads changes no byte",
    source: "Alistarh 2017, Wen 2017, Stich 2018, Horvath 2019, Karimireddy 2019; the codecs' documentation",
    seed: 3,
    run,
};

const UNBIASED: [&str; 13] = [
    "int8-sr:64",
    "int4-sr:64",
    "int3-sr:64",
    "int2-sr:64",
    "uint8-sr:64",
    "uint4-sr:64",
    "uint3-sr:64",
    "uint2-sr:64",
    "qsgd8:64",
    "qsgd4:64",
    "qsgd2:64",
    "natural",
    "unbiased:4/none",
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let draws = if options.quick { 20_000 } else { 100_000 };
    for name in UNBIASED {
        let beyond = worst_bias(name, draws, report.seed())?;
        report.row(
            &format!("{name}: bias over {draws} draws, in standard errors"),
            beyond,
            "",
            Threshold::AtMost(4.0),
        )?;
    }
    for (name, block, bound) in BOUNDS {
        let worst = worst_error(name, block, bound, report.seed())?;
        report.row(
            &format!("{name}: largest error relative to its bound"),
            worst,
            "",
            Threshold::AtMost(1.0),
        )?;
    }
    for (name, bound) in MEAN_SQUARES {
        let share = mean_square(name, draws, report.seed())? / bound;
        report.row(
            &format!("{name}: mean square error relative to its bound"),
            share,
            "",
            Threshold::AtMost(1.0),
        )?;
    }
    let all = names();
    let (mut telescope, mut odd, mut beyond) = (0.0_f64, 0, 0);
    let compositions =
        ["unbiased:10", "dct:8/int4", "dct:64/none", "rolling:2/dct:8/int4", "topk:0.3/uint8:7"];
    let edged = if options.quick { 100 } else { 2000 };
    for name in all.iter().map(String::as_str).chain(compositions) {
        beyond += edges(name, edged, report.seed()).with_context(|| name.to_owned())?;
    }
    for name in &all {
        telescope = telescope.max(telescoping(name).with_context(|| name.clone())?);
        odd += odd_inputs(name).with_context(|| name.clone())?;
    }
    report.row("codecs", all.len() as f64, "", Threshold::None)?;
    report.row(
        "error feedback: largest difference of the sums, relative to the allowed rounding of f32",
        telescope,
        "",
        Threshold::AtMost(1.0),
    )?;
    report.row(
        "unusual inputs with a result other than the documented one",
        f64::from(odd),
        "",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "finite vectors near the limits of f32 that are neither decoded nor rejected with an element's index",
        f64::from(beyond),
        "",
        Threshold::AtMost(0.0),
    )?;
    let seed = report.seed();
    let differ = threads(&Int8::default(), seed)?
        + threads(&Int3::stochastic(5000)?, seed)?
        + threads(&Uint4::default(), seed)?
        + threads(&Sign::default(), seed)?
        + threads(&Natural::new(), seed)?
        + composed_threads("topk:0.01/int4:128+ef", seed)?
        + composed_threads("topk:64of4096", seed)?
        + composed_threads("dct:64/topk:32of4096", seed)?;
    report.row(
        "payloads that differ between 1, 2, 3 and 7 threads",
        f64::from(differ),
        "",
        Threshold::AtMost(0.0),
    )
}

/// Values on which a bound on an element's error depends.
struct Element {
    magnitude: f64,
    /// Largest magnitude of its block; `span` is the largest element minus the smallest.
    largest: f64,
    span: f64,
}

type Bound = fn(&Element) -> f64;

/// Names of codecs, their block sizes, and bounds on an element's error. They are those of the codecs'
/// documentation or tighter; that of `natural` follows from its rule of rounding.
const BOUNDS: [(&str, usize, Bound); 21] = [
    ("f16", 1, |e| (e.magnitude / 2048.0).max(2_f64.powi(-25)).max(e.magnitude - 65504.0)),
    ("bf16", 1, |e| (e.magnitude / 256.0).max(2_f64.powi(-134))),
    ("int8:128", 128, |e| 0.504 * e.largest / 127.0),
    ("int4:128", 128, |e| 0.504 * e.largest / 7.0),
    ("int3:128", 128, |e| 0.504 * e.largest / 3.0),
    ("int2:128", 128, |e| 0.504 * e.largest),
    ("int8-sr:128", 128, |e| 1.008 * e.largest / 127.0),
    ("int4-sr:128", 128, |e| 1.008 * e.largest / 7.0),
    ("int3-sr:128", 128, |e| 1.008 * e.largest / 3.0),
    ("int2-sr:128", 128, |e| 1.008 * e.largest),
    ("uint8:128", 128, |e| 0.504 * e.span / 255.0 + rounding(e)),
    ("uint4:128", 128, |e| 0.504 * e.span / 15.0 + rounding(e)),
    ("uint3:128", 128, |e| 0.504 * e.span / 7.0 + rounding(e)),
    ("uint2:128", 128, |e| 0.504 * e.span / 3.0 + rounding(e)),
    ("uint8-sr:128", 128, |e| 1.008 * e.span / 255.0 + rounding(e)),
    ("uint4-sr:128", 128, |e| 1.008 * e.span / 15.0 + rounding(e)),
    // Half of the smallest number of the format, times a scale that is a little larger than the block's largest
    // magnitude over the format's largest number.
    ("e4m3:128", 128, |e| (e.magnitude / 16.0).max(1.008 * e.largest / 448.0 / 1024.0)),
    ("e5m2:128", 128, |e| (e.magnitude / 8.0).max(1.008 * e.largest / 57344.0 / 131_072.0)),
    ("e3m0:128", 128, |e| (e.magnitude / 3.0).max(1.008 * e.largest / 128.0) + rounding(e)),
    ("natural", 4096, |e| e.magnitude),
    ("minmax8:128", 128, |e| 0.51 * (e.span + 1e-7).max(e.largest / 16384.0) / 255.0 + rounding(e)),
];

/// Returns the rounding error of a sum of numbers as large as the block's largest.
fn rounding(element: &Element) -> f64 {
    element.largest * 2_f64.powi(-23)
}

/// Codecs of 64 elements, and the largest allowed mean square of their errors over that of the elements: the
/// variance of unbiased codecs, or the part that a selection does not keep.
const MEAN_SQUARES: [(&str, f64); 6] = [
    // min(d / q^2, sqrt(d) / q) for blocks of 64, times the factor that a scale of eight bits adds.
    ("qsgd8:64", 64.0 / 127.0 / 127.0 * 1.016),
    ("qsgd4:64", 8.0 / 7.0 * 1.016),
    ("qsgd2:64", 8.0 * 1.016),
    ("natural", 1.0 / 8.0),
    ("topk:16", 0.75),
    ("rolling:4", 0.750_001),
];

/// Returns the largest ratio of an element's error to its bound, over vectors of many magnitudes.
fn worst_error(name: &str, block: usize, bound: Bound, seed: u64) -> Result<f64> {
    let n = 1 << 16;
    let (mut codec, mut payload, mut x, mut out) = (parse(name)?, Payload::new(), vec![0.0; n], vec![0.0; n]);
    let mut worst = 0.0_f64;
    for (stream, size) in [1e-20, 1e-6, 1e-3, 1.0, 3e4, 1e30].into_iter().enumerate() {
        Philox::new(seed, stream as u64).fill_normal(size, &mut x);
        // Some elements are much larger or smaller than the others.
        x.iter_mut().step_by(97).for_each(|x| *x *= 30.0);
        x.iter_mut().step_by(11).for_each(|x| *x *= 1e-5);
        codec.compress(&x, RoundKey { seed, ..RoundKey::default() }, &mut payload)?;
        codec.decompress(payload.view(), &mut out)?;
        for (x, out) in x.chunks(block).zip(out.chunks(block)) {
            let wide = || x.iter().map(|x| f64::from(*x));
            let largest = wide().map(f64::abs).fold(0.0, f64::max);
            let span = wide().fold(f64::MIN, f64::max) - wide().fold(f64::MAX, f64::min);
            for (x, out) in wide().zip(out) {
                let allowed = bound(&Element { magnitude: x.abs(), largest, span });
                let error = (x - f64::from(*out)).abs();
                worst = worst.max(if error == 0.0 { 0.0 } else { error / allowed });
            }
        }
    }
    Ok(worst)
}

/// Returns the mean square of the errors of 64 normal elements over `draws` rounds, divided by that of the
/// elements.
fn mean_square(name: &str, draws: u64, seed: u64) -> Result<f64> {
    let mut x = [0.0; 64];
    Philox::new(seed, 1).fill_normal(1.0, &mut x);
    let (mut codec, mut payload, mut out) = (parse(name)?, Payload::new(), [0.0; 64]);
    let (mut lost, norm) = (0.0, x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>());
    for round in 0..draws {
        codec.compress(&x, RoundKey { seed, round, ..RoundKey::default() }, &mut payload)?;
        codec.decompress(payload.view(), &mut out)?;
        lost += x.iter().zip(out).map(|(x, out)| f64::from(x - out).powi(2)).sum::<f64>();
    }
    Ok(lost / draws as f64 / norm)
}

/// Returns an example of each codec name in the help text, with values filled in.
pub(crate) fn names() -> Vec<String> {
    let values =
        [("AMOUNT", "0.1"), ("KEPTofCHUNK", "5of40"), ("VALUE", "0.5"), ("STRIDE", "4"), ("SIDE", "8")];
    let example = |name: &String| {
        let name = values.iter().fold(name.clone(), |name, (what, value)| name.replace(what, value));
        name.replace("[:BLOCK]", "").replace("[xMULTIPLE]", "x2").replace("[/...]", "/int4:32")
    };
    farflung::compress::names().iter().map(example).collect()
}

/// Returns the largest bias of a codec over 64 elements, in standard errors: the distance between the mean of
/// `draws` decoded values and the true value, less what the 16-bit resolution of the codec's noise can explain.
fn worst_bias(name: &str, draws: u64, seed: u64) -> Result<f64> {
    let mut x = [0.0; 64];
    Philox::new(seed, 1).fill_normal(1.0, &mut x);
    let (mut codec, mut payload, mut out) = (parse(name)?, Payload::new(), [0.0; 64]);
    let (mut sum, mut squares) = ([0.0_f64; 64], [0.0_f64; 64]);
    for round in 0..draws {
        codec.compress(&x, RoundKey { seed, round, ..RoundKey::default() }, &mut payload)?;
        codec.decompress(payload.view(), &mut out)?;
        for ((sum, square), out) in sum.iter_mut().zip(&mut squares).zip(out) {
            *sum += f64::from(out);
            *square += f64::from(out).powi(2);
        }
    }
    let of = |i: usize| {
        let mean = sum[i] / draws as f64;
        let error = ((squares[i] / draws as f64 - mean * mean).max(0.0) / draws as f64).sqrt();
        // The codecs' random offsets have a resolution of 16 bits.
        let gap = ((mean - f64::from(x[i])).abs() - 8.0 * 2_f64.powi(-17)).max(0.0);
        if gap > 0.0 { gap / error } else { 0.0 }
    };
    Ok((0..64).map(of).fold(0.0, f64::max))
}

/// Returns the largest gap of an element, after 20 rounds, between the sum of the inputs and the sum of decoded
/// values plus the residual. It is divided by the rounding error that 20 rounds may have. The codec `unbiased`
/// is not measured and gives 0.
fn telescoping(name: &str) -> Result<f64> {
    if name.starts_with("unbiased") {
        return Ok(0.0);
    }
    let mut codec = ErrorFeedback::new(name.parse::<CodecSpec>()?.build_memoryless());
    let n = 600;
    let (mut given, mut decoded, mut largest) = (vec![0.0_f64; n], vec![0.0_f64; n], 0.0_f64);
    let (mut payload, mut x, mut out) = (Payload::new(), vec![0.0; n], vec![0.0; n]);
    for round in 0..20 {
        Philox::new(9, round).fill_normal(1.0, &mut x);
        codec.compress(&x, RoundKey { round, ..RoundKey::default() }, &mut payload)?;
        codec.decompress(payload.view(), &mut out)?;
        codec.commit();
        for i in 0..n {
            given[i] += f64::from(x[i]);
            decoded[i] += f64::from(out[i]);
            largest = largest.max(f64::from(codec.residual()[i].abs() + out[i].abs() + x[i].abs()));
        }
    }
    let allowed = 20.0 * 2.0 * largest * 2_f64.powi(-24);
    let gap = |i: usize| (given[i] - decoded[i] - f64::from(codec.residual()[i])).abs() / allowed;
    Ok((0..n).map(gap).fold(0.0, f64::max))
}

/// Counts the unusual inputs with a wrong result. Right results for finite inputs are finite values, at most
/// the promised bytes, and zeros for zeros; for `unbiased` and `dct` also an overflow that names the element.
/// The right result for NaN and infinities is an error that gives the element's index; `none` accepts them.
fn odd_inputs(name: &str) -> Result<u32> {
    let (mut codec, mut payload, mut wrong) = (parse(name)?, Payload::new(), 0);
    let tiny = f32::from_bits(1);
    for x in
        [&[][..], &[0.0; 300], &[1.0], &[tiny; 300], &[-tiny], &[f32::MAX; 300], &[f32::MAX, f32::MIN, tiny]]
    {
        let mut out = vec![f32::NAN; x.len()];
        let finite = codec.compress(x, RoundKey::default(), &mut payload);
        // Only unbiased masks and transforms can make the largest numbers overflow.
        if let Err(CompressError::Overflow { index, value, .. }) = finite
            && (name.starts_with("unbiased") || name.starts_with("dct"))
        {
            wrong += u32::from(x[index].to_bits() != value.to_bits());
            continue;
        }
        finite?;
        codec.decompress(payload.view(), &mut out)?;
        let small = payload.as_bytes().len() <= codec.max_payload(x.len());
        let zeros = x.iter().any(|x| *x != 0.0) || out.iter().all(|o| o.to_bits() == 0);
        wrong += u32::from(!small || !zeros || out.iter().any(|o| !o.is_finite()));
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = [1.0; 300];
        x[77] = bad;
        let result = codec.compress(&x, RoundKey::default(), &mut payload);
        let named = matches!(result, Err(CompressError::NonFinite { index: 77, .. }));
        wrong += u32::from(!named && name != "none");
    }
    Ok(wrong)
}

/// Counts wrong results over `draws` vectors with very large numbers, each encoded without and with a residual.
/// A right result is an error that gives an element's index, or finite decoded values and a finite residual.
fn edges(name: &str, draws: u64, seed: u64) -> Result<u32> {
    let (mut codec, mut payload, mut wrong) = (parse(name)?, Payload::new(), 0);
    let mut with_residual = name.parse::<CodecSpec>()?.build_memoryless();
    for round in 0..draws {
        let (x, e) = (edge(300, seed, 2 * round), edge(300, seed, 2 * round + 1));
        let key = RoundKey { seed, round, ..RoundKey::default() };
        let (mut out, mut lost) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
        wrong += match codec.compress(&x, key, &mut payload) {
            Ok(()) => {
                let read = codec.decompress(payload.view(), &mut out);
                u32::from(read.is_err() || out.iter().any(|out| !out.is_finite()))
            }
            Err(CompressError::Overflow { index, value, .. }) => {
                u32::from(x.get(index).map(|x| x.to_bits()) != Some(value.to_bits()))
            }
            Err(_) => 1,
        };
        if name.starts_with("unbiased") {
            continue;
        }
        wrong += match with_residual.compress_residual(&x, &e, &mut lost, key, &mut payload) {
            Ok(()) => {
                let read = codec.decompress(payload.view(), &mut out);
                u32::from(read.is_err() || out.iter().chain(&lost).any(|value| !value.is_finite()))
            }
            Err(CompressError::Overflow { index, value, .. } | CompressError::NonFinite { index, value }) => {
                let sum = x.get(index).zip(e.get(index)).map(|(x, e)| (x + e).to_bits());
                u32::from(sum != Some(value.to_bits()))
            }
            Err(_) => 1,
        };
    }
    Ok(wrong)
}

/// Returns `len` elements: a random share are the largest numbers, some are nearly as large, and some are
/// small, subnormal or zero.
fn edge(len: usize, seed: u64, stream: u64) -> Vec<f32> {
    let rng = Philox::new(seed, stream);
    let [kinds, first, signs, _] = rng.block(u64::MAX);
    let element = |i: u64| {
        let [kind, bits, sign, _] = rng.block(i);
        let magnitude = match (first + kind % (1 + kinds % 8)) % 8 {
            0 | 1 => f32::MAX,
            2 => f32::from_bits(f32::MAX.to_bits() - (bits >> 12)),
            3 => 1e38,
            4 => f32::from_bits(bits % f32::INFINITY.to_bits()),
            5 => 1.0,
            6 => f32::from_bits(bits >> 9),
            _ => 0.0,
        };
        if sign.is_multiple_of(1 + signs % 3) { magnitude } else { -magnitude }
    };
    (0..len as u64).map(element).collect()
}

/// Returns for how many of 2, 3 and 7 threads the payload, the residual or the decoded values differ from those
/// of one thread.
fn threads<C: Chunks>(codec: &Chunked<C>, seed: u64) -> Result<u32> {
    let n = 1_000_003;
    let (x, e) = (crate::normal::values(n, seed), crate::normal::values(n, seed + 1));
    let run = |threads: usize| {
        let (mut codec, mut payload, mut next) =
            (codec.clone().threads(threads), Payload::new(), vec![0.0; n]);
        codec.compress_residual(&x, &e, &mut next, RoundKey::default(), &mut payload)?;
        let mut out = vec![0.0; n];
        codec.decompress(payload.view(), &mut out)?;
        ensure!(out.iter().all(|o| o.is_finite()), "a decoded value is not finite");
        Ok((payload, next, out))
    };
    let alone = run(1)?;
    let mut differ = 0;
    for threads in [2, 3, 7] {
        differ += u32::from(run(threads)? != alone);
    }
    Ok(differ)
}

/// Does the same as [`threads`] for a codec given by its name, but compares payloads alone.
fn composed_threads(name: &str, seed: u64) -> Result<u32> {
    let x = crate::normal::values(1_000_003, seed);
    let run = |threads| {
        let (mut codec, mut payload) = (parse(name)?, Payload::new());
        codec.set_threads(threads);
        codec.compress(&x, RoundKey::default(), &mut payload)?;
        anyhow::Ok(payload)
    };
    let alone = run(1)?;
    let mut differ = 0;
    for threads in [2, 3, 7] {
        differ += u32::from(run(threads)? != alone);
    }
    Ok(differ)
}
