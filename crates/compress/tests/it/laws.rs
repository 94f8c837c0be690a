//! Laws that hold for every codec, checked over a table of all of them.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use crate::table::CODECS;
use farflung_base::Philox;
use farflung_compress::{
    Bf16, Chunked, Chunks, CodecSpec, CompressError, Compressor, Memoryless, Payload, PayloadRef, RoundKey,
    parse,
};
use proptest::prelude::*;

fn memoryless(name: &str) -> Box<dyn Memoryless> {
    name.parse::<CodecSpec>().unwrap().build_memoryless()
}

fn is_selection(name: &str) -> bool {
    ["topk", "sampled", "threshold", "rolling", "permuted", "random", "unbiased", "dct"]
        .iter()
        .any(|s| name.starts_with(s))
}

/// Returns the stated error bound of each element of `x`, or a wider one.
fn bounds(name: &str, x: &[f32]) -> Vec<f64> {
    if is_selection(name) {
        // Elements that are not kept are lost, and the inner codec may lose part of the kept ones. `sparse.rs`
        // checks selections more closely.
        let max = x.iter().fold(0.0_f64, |m, x| m.max(f64::from(x.abs())));
        return vec![2.0 * max; x.len()];
    }
    let relative = |x: &f32, bits: i32| f64::from(x.abs()) * 2_f64.powi(-bits);
    match name {
        "none" => return vec![0.0; x.len()],
        "f16" => {
            let excess = |x: &f32| (f64::from(x.abs()) - 65504.0).max(0.0);
            return x.iter().map(|x| relative(x, 11).max(2_f64.powi(-25)).max(excess(x))).collect();
        }
        "bf16" => return x.iter().map(|x| relative(x, 8).max(2_f64.powi(-134))).collect(),
        _ => {}
    }
    let (method, block) = name.split_once(':').map_or((name, None), |(m, b)| (m, Some(b.parse().unwrap())));
    // The second bound is for values near the largest number, where scales are a little too small.
    let nearest = [0.504, 0.512];
    let random = [1.008, 1.012];
    let (method, steps) = method.strip_suffix("-sr").map_or((method, nearest), |method| (method, random));
    let default = match method {
        "qsgd8" | "qsgd4" | "qsgd2" => 512,
        "natural" | "meanstd2" | "quantile8" => 1 << 16,
        _ => 256,
    };
    let q = |bits: i32| 2_f64.powi(bits) - 1.0;
    let of_block = |x: &[f32]| {
        let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let max = x.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        let (low, high) = x.iter().fold((f64::MAX, f64::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
        let norm = x.iter().map(|x| (x / max.max(1e-300)).powi(2)).sum::<f64>().sqrt() * max;
        let bits = || i32::from(method.as_bytes()[method.len() - 1] - b'0');
        let (span, rounded) = (high - low, max * 2_f64.powi(-22));
        let bound = match &method[..4] {
            "uint" => {
                let q = q(bits());
                // Values beyond `q` times the largest scale are clipped.
                let largest = f32::from_bits((f32::MAX / q as f32).to_bits() & 0xffff_0000);
                let most = q * f64::from(largest);
                (steps[0] * span.min(most) / q).max(span - most) + rounded
            }
            "qsgd" => random[1] * norm / q(bits() - 1),
            "tern" | "sign" => 2.0 * norm,
            // Half a unit in the last place of the block's largest element.
            "e4m3" => max / 16.0,
            "e5m2" => max / 8.0,
            "e3m0" | "natu" => max,
            "minm" => {
                let d = (span + 1e-7).max(max / 16384.0).min(f32::MAX.into());
                0.51 * d / 255.0 + rounded + (span - d).max(0.0)
            }
            "mean" | "quan" => span,
            _ => steps[usize::from(max > 0.996 * f64::from(f32::MAX))] * max / q(bits() - 1),
        };
        vec![bound.max(2_f64.powi(-100)); x.len()]
    };
    x.chunks(block.unwrap_or(default)).flat_map(of_block).collect()
}

fn check_round_trip(name: &str, x: &[f32]) {
    let mut codec = parse(name).unwrap();
    let mut payload = Payload::new();
    let result = codec.compress(x, RoundKey::default(), &mut payload);
    if name.starts_with("dct") && x.iter().any(|x| x.abs() > 1e36) {
        // A transform may overflow; then the vector is rejected: `edge.rs`.
        assert!(matches!(result, Ok(()) | Err(CompressError::Overflow { .. })), "{result:?}");
        return;
    }
    result.unwrap();
    if is_selection(name) {
        assert!(payload.as_bytes().len() <= codec.max_payload(x.len()), "{name}");
    } else {
        assert_eq!(payload.as_bytes().len(), codec.max_payload(x.len()), "{name}");
    }
    let received = PayloadRef::parse(payload.as_bytes()).unwrap();
    assert_eq!(received, payload.view());
    let mut decoded = vec![f32::NAN; x.len()];
    codec.decompress(received, &mut decoded).unwrap();
    for (i, bound) in bounds(name, x).into_iter().enumerate() {
        let error = (f64::from(x[i]) - f64::from(decoded[i])).abs();
        assert!(error <= bound, "{name}: {} became {} at {i}, beyond {bound:e}", x[i], decoded[i]);
    }
}

fn normal(n: usize, std: f32, stream: u64) -> Vec<f32> {
    let mut x = vec![0.0; n];
    Philox::new(11, stream).fill_normal(std, &mut x);
    x
}

#[test]
fn errors_are_within_the_stated_bounds() {
    let tiny = f32::from_bits(1);
    let special = [0.0, -0.0, tiny, -tiny, f32::MIN_POSITIVE, 1.0, -65519.0, 65520.0, f32::MAX, f32::MIN];
    for name in CODECS {
        for n in [0, 1, 2, 7, 31, 255, 256, 257, 2049, 5001] {
            for std in [1.0, 1e-3, 1e-20, 1e-39, 1e30] {
                check_round_trip(name, &normal(n, std, n as u64));
            }
        }
        check_round_trip(name, &special);
        for x in special {
            check_round_trip(name, &[x]);
        }
        check_round_trip(name, &[0.0; 1000]);
        // The mean of these is zero, so a codebook with one occupied bin has only zeros in its table.
        check_round_trip(name, &[f32::MAX, f32::MIN, tiny]);
        check_round_trip(name, &[1.0, -1.0]);
        check_round_trip(name, &[f32::MAX; 1000]);
        check_round_trip(name, &[tiny; 1000]);
    }
}

#[test]
fn zeros_decode_as_zeros_without_a_sign() {
    for name in CODECS {
        let (mut codec, mut payload) = (parse(name).unwrap(), Payload::new());
        codec.compress(&[0.0; 300], RoundKey::default(), &mut payload).unwrap();
        let mut decoded = [1.0_f32; 300];
        codec.decompress(payload.view(), &mut decoded).unwrap();
        assert!(decoded.iter().all(|d| d.to_bits() == 0), "{name}");
    }
}

#[test]
fn what_is_not_finite_is_refused_and_named() {
    for name in CODECS {
        for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for index in [0, 6, 2048, 4099] {
                let mut x = vec![1.0; 4100];
                x[index] = value;
                for name in [name.to_owned(), format!("{name}+ef")] {
                    let (mut codec, mut payload) = (parse(&name).unwrap(), Payload::new());
                    let result = codec.compress(&x, RoundKey::default(), &mut payload);
                    if name == "none" {
                        let mut decoded = vec![0.0; x.len()];
                        codec.decompress(payload.view(), &mut decoded).unwrap();
                        assert_eq!(decoded[index].to_bits(), value.to_bits(), "passed bit by bit");
                        continue;
                    }
                    let Err(CompressError::NonFinite { index: at, value: found }) = result else {
                        unreachable!("{name} took {value}: {result:?}");
                    };
                    assert_eq!((at, found.is_nan()), (index, value.is_nan()), "{name}");
                    assert!(payload.as_bytes().is_empty(), "{name}");
                }
            }
        }
    }
}

/// A codec with the default `compress_residual` instead of its fused one.
#[derive(Debug)]
struct Unfused(Box<dyn Memoryless>);

impl farflung_compress::State for Unfused {}
impl Memoryless for Unfused {}

impl Compressor for Unfused {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        self.0.compress(x, key, out)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        self.0.decompress(p, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        self.0.max_payload(len)
    }
}

#[test]
fn the_fused_residual_is_the_plain_one() {
    for name in CODECS {
        for n in [0, 1, 300, 5001] {
            let (x, e) = (normal(n, 1.0, 1), normal(n, 0.01, 2));
            let (mut fused, mut plain) = (memoryless(name), Unfused(memoryless(name)));
            let (mut a, mut b) = (vec![f32::NAN; n], vec![f32::NAN; n]);
            let (mut p, mut q) = (Payload::new(), Payload::new());
            fused.compress_residual(&x, &e, &mut a, RoundKey::default(), &mut p).unwrap();
            plain.compress_residual(&x, &e, &mut b, RoundKey::default(), &mut q).unwrap();
            assert_eq!(p, q, "{name}");
            assert_eq!(a, b, "{name}");
        }
        let error = memoryless(name).compress_residual(
            &[1.0; 3],
            &[0.0; 2],
            &mut [0.0; 3],
            RoundKey::default(),
            &mut Payload::new(),
        );
        let wanted = CompressError::LengthMismatch { what: "the residual", wanted: 3, found: 2 };
        assert_eq!(error, Err(wanted), "{name}");
    }
}

#[test]
fn the_table_of_the_readme() {
    let readme = include_str!("../../README.md");
    for name in [
        "none",
        "f16",
        "bf16",
        "int8:2048",
        "int8",
        "int8:64",
        "int4:128",
        "int3",
        "int2",
        "uint4:128",
        "sign",
    ] {
        let bytes = parse(name).unwrap().max_payload(1 << 20);
        let digits = bytes.to_string();
        let (front, last) = digits.split_at(digits.len() - 3);
        let grouped = match front.split_at(front.len().saturating_sub(3)) {
            ("", thousands) => format!("{thousands},{last}"),
            (millions, thousands) => format!("{millions},{thousands},{last}"),
        };
        let ratio = format!("{:.2}", f64::from(1 << 22) / bytes as f64);
        let row = readme.lines().find(|line| line.starts_with(&format!("| `{name}` |"))).unwrap();
        assert!(row.contains(&format!("| {grouped} | {ratio} |")), "{row}: {grouped}, {ratio}");
    }
    for name in CODECS {
        assert!(parse(name).unwrap().max_payload(usize::MAX) > usize::MAX / 16, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_finite_vector_round_trips(
        bits in prop::collection::vec(any::<u32>(), 0..600),
        codec in 0..CODECS.len(),
    ) {
        // Infinity and NaN are replaced by 1.
        let x: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).map(|x| if x.is_finite() { x } else { 1.0 }).collect();
        check_round_trip(CODECS[codec], &x);
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(PayloadRef::parse(&bytes).is_err());
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    use farflung_compress::{Int3, Int8, Sign};
    fn check<C: Chunks>(codec: &Chunked<C>) {
        let n = 700_001;
        let (x, e) = (normal(n, 1.0, 1), normal(n, 0.01, 2));
        let run = |threads| {
            let mut codec = codec.clone().threads(threads);
            let (mut p, mut q) = (Payload::new(), Payload::new());
            let (mut next, mut out) = (vec![0.0; n], vec![0.0; n]);
            codec.compress(&x, RoundKey::default(), &mut p).unwrap();
            codec.compress_residual(&x, &e, &mut next, RoundKey::default(), &mut q).unwrap();
            assert!(PayloadRef::parse(q.as_bytes()).is_ok());
            codec.decompress(q.view(), &mut out).unwrap();
            let mut bad = x.clone();
            (bad[3], bad[600_000]) = (f32::NAN, f32::INFINITY);
            let error = codec.compress(&bad, RoundKey::default(), &mut Payload::new());
            assert!(matches!(error, Err(CompressError::NonFinite { index: 3, .. })), "{error:?}");
            (p, q, next, out)
        };
        let alone = run(1);
        for threads in [2, 3, 5] {
            assert!(run(threads) == alone, "{codec:?} on {threads} threads");
        }
    }
    check(&Bf16::new());
    check(&Int8::new(100).unwrap());
    check(&Int3::stochastic(5000).unwrap());
    check(&Sign::default());
}

#[test]
fn any_number_of_threads_selects_and_transforms_alike() {
    let n = 600_001;
    let (mut x, e) = (normal(n, 1.0, 1), normal(n, 0.01, 2));
    // Ties across the boundaries of the threads' parts.
    x.iter_mut().step_by(1000).for_each(|x| *x = 3.0);
    for name in [
        "topk:0.001/int4:64",
        "topk:700",
        "topk:5of1000/f16",
        "sampled:0.01",
        "threshold:2.5",
        "rolling:3/topk:0.01",
        "dct:16/int8",
    ] {
        let run = |threads| {
            let (mut codec, mut p, mut next, mut out) =
                (memoryless(name), Payload::new(), vec![0.0; n], vec![0.0; n]);
            codec.set_threads(threads);
            codec.compress_residual(&x, &e, &mut next, RoundKey::default(), &mut p).unwrap();
            codec.decompress(p.view(), &mut out).unwrap();
            let mut bad = x.clone();
            (bad[3], bad[500_000]) = (f32::NAN, f32::INFINITY);
            let error = codec.compress(&bad, RoundKey::default(), &mut Payload::new());
            assert!(matches!(error, Err(CompressError::NonFinite { index: 3, .. })), "{name}: {error:?}");
            (p, next, out)
        };
        let alone = run(1);
        for threads in [2, 4] {
            assert!(run(threads) == alone, "{name} on {threads} threads");
        }
    }
}

#[test]
fn random_rounding_has_the_value_as_its_mean() {
    // The mean must be within four standard errors over 1e5 draws. Values of one block share a scale, which the
    // first one, the largest, determines.
    let mut x: Vec<f32> = normal(64, 1.0, 3);
    (x[0], x[1]) = (4.0, -4.0);
    for name in
        ["int8-sr:64", "int4-sr:64", "int3-sr:64", "int2-sr:64", "uint4-sr:64", "uint2-sr:64", "qsgd4:64"]
    {
        let (draws, mut codec, mut payload) = (100_000_u64, parse(name).unwrap(), Payload::new());
        let (mut sum, mut squares, mut out) = ([0.0_f64; 64], [0.0_f64; 64], [0.0; 64]);
        for round in 0..draws {
            codec.compress(&x, RoundKey { round, ..RoundKey::default() }, &mut payload).unwrap();
            codec.decompress(payload.view(), &mut out).unwrap();
            for ((sum, square), out) in sum.iter_mut().zip(&mut squares).zip(out) {
                *sum += f64::from(out);
                *square += f64::from(out).powi(2);
            }
        }
        for i in 0..64 {
            let mean = sum[i] / draws as f64;
            let variance = (squares[i] / draws as f64 - mean * mean).max(0.0);
            let error = (variance / draws as f64).sqrt();
            // A value is beyond four standard errors by chance with probability 1 in 16,000, and there are 64
            // values and 7 codecs. The last term is the resolution of the noise, 16 bits.
            let gap = (mean - f64::from(x[i])).abs();
            assert!(gap <= 4.0 * error + 8.0 * 2_f64.powi(-17), "{name}: {i}: {gap:e} {error:e}");
        }
    }
}
